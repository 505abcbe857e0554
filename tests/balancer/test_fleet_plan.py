from dataclasses import replace

import pytest
from fleet_world import FleetWorld, crashes, drained, started, stopped, timed

from balancer.fleet_plan import Drain, Effect, FleetPlan, FleetReport, Member, Reserve
from balancer.fleets import Fleet, Resources
from common.models import Phase

# More agents


def test_the_first_agent_is_started_as_soon_as_somebody_waits() -> None:
    world = FleetWorld(min=0)

    assert world.step() == []
    assert world.step(f=1) == started(1)
    assert world.report == FleetReport(1, 0, 0, 1, 0, "1 agent starting")


def test_as_many_as_there_must_be_are_started_at_once() -> None:
    world = FleetWorld()
    world.want(min=3)

    assert world.step() == [*started(1, 2, 3), Reserve(())]


def test_a_short_rush_starts_nobody() -> None:
    world = FleetWorld(min=1)
    world.add(1, processing=4)

    assert world.run(2, f=3) == []
    world.come(1, processing=3)
    assert world.run(0.5) == []
    world.come(1, processing=4)
    assert world.run(3, f=3) == timed(2, started(2))


def test_what_starts_already_counts() -> None:
    world = FleetWorld(min=1)
    world.add(1, processing=4)
    world.add(2, phase=Phase.LOAD)

    assert world.run(60, f=4) == []
    assert world.run(3, f=5) == timed(2, started(3))


def test_full_agents_want_another_one_before_somebody_waits() -> None:
    world = FleetWorld(min=1)
    world.add(1, processing=4)

    assert world.run(3) == timed(2, started(2))


def test_nearly_full_is_full_when_it_is_said() -> None:
    world = FleetWorld(min=1, grow_at_slot_use=0.75)
    world.add(1, processing=2)

    assert world.run(10) == []
    world.come(1, processing=3)
    assert world.run(3) == timed(2, started(2))


def test_so_many_wait_before_there_are_more_as_was_said() -> None:
    world = FleetWorld(min=1, grow_when_waiting=5)
    world.add(1, processing=4)
    world.add(2, phase=Phase.LOAD)

    assert world.run(30, f=8) == []
    assert world.run(3, f=9) == timed(2, started(3, 4))


def test_free_slots_are_enough_for_those_who_are_about_to_get_them() -> None:
    world = FleetWorld(min=1)
    world.add(1, processing=1)

    assert world.run(30, f=3) == []


def test_a_burst_doubles_them_each_time() -> None:
    world = FleetWorld(max=100)
    world.step()

    decisions = [(time, len(world.members)) for time, _ in world.run(12, f=50)]

    assert [time for time, _ in decisions] == [0, 2, 4, 4, *[6] * 4, *[8] * 5]  # 13 are enough


def test_never_more_than_max() -> None:
    world = FleetWorld(max=3)
    world.add(1, 2, processing=4)

    assert world.run(60, f=90) == timed(2, started(3))


def test_that_max_forbids_more_is_said() -> None:
    world = FleetWorld(max=1)
    world.add(1, processing=4)
    world.step(f=7)

    assert world.report == FleetReport(1, 1, 1, 0, 0, "7 waiting, and max (1) is reached")


def test_who_still_goes_has_its_node_so_that_max_holds_for_all_that_are_there() -> None:
    world = FleetWorld(max=1)
    world.add(1, phase=Phase.DRAINING, processing=1)

    assert world.step(f=1) == []
    assert world.report == FleetReport(1, 1, 0, 0, 1, "others must end first")
    del world.members["f-1"]
    assert world.step(f=1) == started(1)


def test_a_new_agent_gets_the_lowest_name_that_nobody_has() -> None:
    world = FleetWorld(max=8)
    world.want(min=4)
    world.add(1, 4)
    world.add(3, phase=Phase.DRAINING, processing=1)

    assert world.step() == started(2, 5)


def test_before_anything_is_wanted_nobody_is_told_anything() -> None:
    world = FleetWorld()
    world.add(1)

    assert world.run(5, f=9) == []
    assert world.plan.reports() == {}


def test_a_start_that_nothing_is_seen_of_is_tried_again() -> None:
    plan = FleetPlan()
    plan.want({"f": Fleet(min=1)}, {"f": "g1"})

    assert plan.plan({}, [], now=0) == [*started(1), Reserve(())]
    assert plan.plan({}, [], now=29) == []
    assert plan.plan({}, [], now=30) == []  # it has failed
    assert plan.plan({}, [], now=31) == started(1)
    assert "nothing was seen of it" in str(plan.reports()["f"].reason)


# Fewer agents


def test_the_last_agent_goes_when_it_has_been_idle_for_long() -> None:
    world = FleetWorld(idle_time=60)
    world.add(1, processing=1)
    world.step()
    world.come(1)

    assert world.run(90) == timed(60, drained(1))
    assert world.report == FleetReport(0, 0, 0, 0, 0, None)


def test_as_many_stay_as_there_must_be() -> None:
    world = FleetWorld(min=2, idle_time=60)
    world.add(1, 2)

    assert world.run(500) == []


def test_agents_go_one_after_another_the_one_that_has_been_idle_for_longest_first() -> None:
    world = FleetWorld(min=1, idle_time=60)
    world.add(1)
    world.add(2, 3, processing=4)
    world.run(1, f=4)
    world.come(2)
    world.run(1)
    world.come(3)

    assert [effect for _, effect in world.run(90)] == drained(1, 2)


def test_of_agents_that_were_idle_as_long_the_newest_goes() -> None:
    world = FleetWorld(min=1, idle_time=60)
    world.add(1, 2, 3)

    assert world.run(10) == [*timed(0, drained(3)), *timed(2, drained(2))]


def test_while_there_is_load_it_takes_twice_as_long_until_one_goes() -> None:
    world = FleetWorld(min=1, idle_time=60)
    world.add(1, 2, processing=3)
    world.run(1)
    world.come(1, processing=1)
    world.come(2)

    assert world.run(150) == timed(120, drained(2))


def test_to_begin_to_shrink_after_a_growth_takes_longer_than_to_go_on() -> None:
    world = FleetWorld(min=1, idle_time=60)
    world.add(1, 2, processing=4)
    assert world.run(2.5) == timed(2, started(3))
    world.come(1, processing=1)
    world.come(2, 3)

    assert world.run(185) == [*timed(180, drained(3)), *timed(182, drained(2))]


def test_who_was_wanted_again_as_soon_as_it_had_gone_stays_twice_as_long() -> None:
    world = FleetWorld(idle_time=60)
    world.add(1)
    assert world.step() == drained(1)
    assert world.run(0.5, f=1) == timed(0, started(1))
    world.come(1)

    assert world.run(200) == timed(120, drained(1))
    assert world.run(0.5, f=1) == timed(0, started(1))
    world.come(1)
    assert world.run(119) == []


def test_who_was_not_wanted_again_for_long_stays_no_longer_for_it() -> None:
    world = FleetWorld(idle_time=60)
    world.add(1)
    assert world.step() == drained(1)
    world.run(120)
    assert world.run(0.5, f=1) == timed(0, started(1))
    world.come(1)

    assert world.run(200) == timed(60, drained(1))


def test_load_that_comes_and_goes_within_the_idle_time_changes_nothing() -> None:
    world = FleetWorld(min=1, idle_time=60)
    world.add(1, 2, 3, processing=3)
    for _ in range(20):
        world.come(1, 2, 3, processing=3)
        assert world.run(1) == []
        world.come(1, 2, 3)
        assert world.run(55) == []


def test_load_that_is_spread_thin_does_not_keep_them_all() -> None:
    """The dispatcher chooses the agent with least to do: none is idle for long while any load
    comes.
    """
    world = FleetWorld(min=1, idle_time=60)
    world.add(1, 2, 3, 4)
    gone: list[Effect] = []
    for turn in range(300):
        numbers = [int(name[2:]) for name in world.members]
        for number in numbers:
            world.come(number, processing=int(number == numbers[turn % len(numbers)]))
        gone += world.step()

    assert len(gone) == 3
    assert len(world.members) == 1


def test_an_agent_with_requests_is_never_drained_because_there_are_many() -> None:
    world = FleetWorld(min=1, idle_time=10)
    world.add(1, 2, 3, 4, processing=1)

    assert world.run(300) == []


def test_who_waits_for_a_node_that_nobody_needs_any_more_is_stopped() -> None:
    """Else a cluster without room would have a pending agent for ever."""
    world = FleetWorld(idle_time=60)
    world.run(1, f=1)
    assert world.members["f-1"].phase is Phase.NODE

    assert world.run(120) == timed(60, stopped(1))


def test_who_starts_is_not_stopped_because_the_load_is_gone() -> None:
    world = FleetWorld(idle_time=60)
    world.run(1, f=1)
    world.come(1, phase=Phase.DOWNLOAD)

    assert world.run(1000) == []


def test_who_does_not_go_is_told_again() -> None:
    world = FleetWorld(idle_time=60)
    world.add(1)
    members = list(world.members.values())

    said = [world.plan.plan({}, members, now=float(now)) for now in range(25)]

    assert [now for now, effects in enumerate(said) if effects == drained(1)] == [0, 10, 20]


# Max is lowered, fleets go


def test_a_lower_max_takes_who_does_not_serve_then_who_is_idle_then_who_has_least_to_do() -> None:
    world = FleetWorld(min=6, max=6)
    world.add(1, processing=2)
    world.add(2, processing=1)
    world.add(3)
    world.add(4, phase=Phase.LOAD)
    world.add(5, phase=Phase.NODE)
    world.add(6, phase=Phase.PROCESS)
    assert world.step() == []

    world.want(min=4, max=4)
    assert world.step() == stopped(5, 6)
    world.want(min=1, max=1)
    assert world.step() == [*stopped(4), *drained(3, 2)]
    assert world.members["f-2"].phase is Phase.DRAINING  # it finishes
    world.want(max=0)
    assert world.step() == drained(1)
    assert world.run(5, f=3) == []


def test_nobody_goes_in_place_of_one_that_was_not_seen_yet() -> None:
    world = FleetWorld(min=2)
    world.step()
    unseen = world.members.pop("f-2")
    world.want(min=1, max=1)

    assert world.run(20) == []
    world.members["f-2"] = unseen
    assert world.step() == stopped(2)


def test_of_busy_agents_the_one_with_least_to_do_goes() -> None:
    world = FleetWorld(max=2)
    world.add(1, processing=1)
    world.add(2, processing=3)
    world.step()
    world.want(max=1)

    assert world.step() == drained(1)


def test_a_deleted_fleet_finishes_what_runs() -> None:
    world = FleetWorld(min=3, max=3)
    world.add(1, processing=1)
    world.add(2)
    world.add(3, phase=Phase.WARM_UP)
    world.step()
    world.delete()

    assert world.step(f=5) == [*drained(1, 2), *stopped(3)]
    assert world.run(60, f=5) == []
    reason = "there is no such fleet any more: 1 agent still to end"
    assert world.report == FleetReport(0, 1, 0, 0, 1, reason)
    del world.members["f-1"]
    world.step()
    assert world.plan.reports() == {}


def test_a_deleted_fleet_that_is_wanted_again_gets_new_agents() -> None:
    world = FleetWorld(max=3)
    world.add(1, processing=1)
    world.step()
    world.delete()
    world.step()
    world.want(min=1)

    assert world.step() == started(2)


def test_fleets_do_not_disturb_each_other() -> None:
    world = FleetWorld(max=1)
    world.want(fleet="f-2", max=1)
    world.step()

    assert world.step(**{"f": 1, "f-2": 1}) == [*started(1), *started(1, fleet="f-2")]
    world.end(1, fleet="f-2")
    assert world.plan.reports()["f"].reason == "1 agent starting"


# Generations


def test_agents_of_an_old_generation_are_replaced_one_after_another() -> None:
    world = FleetWorld(min=2, max=2)
    world.add(1, 2, processing=1)
    world.step()
    world.want("g2", min=2, max=2)

    assert world.step() == started(3, generation="g2")
    assert world.report.wanted == 2
    assert world.run(20) == []
    assert world.report.reason == (
        "2 agents of an old generation to be replaced: f-3 waits for a node with any room"
    )
    world.come(3, phase=Phase.LOAD)
    assert world.run(20) == []
    world.come(3)
    assert world.step() == drained(2)
    assert world.run(10) == []  # the other one finishes, and has its node until then
    del world.members["f-2"]
    assert world.step() == started(2, generation="g2")
    world.come(2)
    assert world.step() == drained(1)
    del world.members["f-1"]
    assert world.run(10) == []
    assert world.report == FleetReport(2, 2, 2, 0, 0, None)


def test_who_does_not_serve_yet_is_replaced_at_once() -> None:
    world = FleetWorld(min=1)
    world.add(1, phase=Phase.LOAD)
    world.step()
    world.want("g2", min=1)

    assert world.step() == [*stopped(1), *started(2, generation="g2")]


def test_others_that_wait_for_a_node_beside_the_next_generation_are_counted_apart() -> None:
    world = FleetWorld(min=1, resources={"gpus": 1})
    world.add(1, processing=4)
    world.step()
    world.want("g2", min=1, resources={"gpus": 1})
    world.run(10, f=4)

    assert world.report.reason == (
        "1 agent waits for a node with 1 GPU;"
        " 1 agent of an old generation to be replaced: f-2 waits for a node with 1 GPU"
    )


def test_an_idle_agent_makes_room_for_the_next_generation() -> None:
    """As on a machine with one GPU: there is never room for both."""
    world = FleetWorld(min=2, max=2)
    world.add(1, processing=1)
    world.add(2)
    world.step()
    world.want("g2", min=2, max=2)

    assert world.run(31) == [*timed(0, started(3, generation="g2")), *timed(30, drained(2))]
    assert world.run(90) == []  # one only, also when another fleet gets the node
    world.come(3)
    assert world.step() == []
    world.come(1)
    assert world.run(31) == [
        *timed(0, started(2, generation="g2")),
        *timed(30, drained(1)),
    ]


def test_where_nobody_is_idle_who_has_least_to_do_makes_room() -> None:
    world = FleetWorld(max=2)
    world.add(1, processing=1)
    world.add(2, processing=3)
    world.step()
    world.want("g2", max=2)

    # A node that is bought takes minutes, and they serve until then.
    assert world.run(200) == [*timed(0, started(3, generation="g2")), *timed(180, drained(1))]


def test_what_was_replaced_does_not_go_because_the_old_ones_are_busy() -> None:
    world = FleetWorld(max=3)
    world.add(1, 2, 3, processing=1)
    world.step()
    world.want("g2", max=3)
    world.step()
    world.come(4)

    assert world.step() == drained(3)
    assert world.run(60) == []


def test_nobody_makes_room_while_another_one_does() -> None:
    world = FleetWorld(min=1, max=3)
    world.add(1)
    world.add(2, phase=Phase.DRAINING, processing=1)
    world.step()
    world.want("g2", min=1, max=3)

    assert world.run(100) == timed(0, started(3, generation="g2"))
    del world.members["f-2"]
    assert world.run(1) == timed(0, drained(1))


def test_idle_agents_of_an_old_generation_are_no_help_to_those_who_wait() -> None:
    world = FleetWorld(min=3)
    world.add(1, 2, 3)
    world.step()
    world.want("g2", min=3)

    effects = [effect for _, effect in world.run(20, f=5)]

    assert effects == started(4, 5, 6, generation="g2")


def test_a_problem_of_an_old_agent_does_not_keep_the_next_generation_from_coming() -> None:
    world = FleetWorld(min=1)
    world.add(1)
    world.step()
    world.members["f-1"] = replace(world.members["f-1"], slots=0, problem="its file is gone")
    world.want("g2", min=1)

    assert world.step() == started(2, generation="g2")
    world.come(2)
    assert world.step() == drained(1)


def test_a_new_generation_that_has_a_problem_leaves_the_old_one_as_it_is() -> None:
    world = FleetWorld(min=2)
    world.add(1, 2)
    world.step()
    world.want("g2", min=2)
    world.step()
    world.come(3, phase=Phase.LOAD, problem="no such file")

    assert world.run(1000, f=20) == []
    assert world.report.wanted == world.report.ready == 2
    assert world.report.reason == (
        "f-3 cannot serve: no such file;"
        " the new generation does not serve: 2 agents of the old one left as is"
    )
    world.come(3)
    assert world.step()[0] == Drain("f-2")


def test_a_new_generation_that_crashes_again_and_again_leaves_the_old_one_as_it_is() -> None:
    world = FleetWorld(min=2, max=2)
    world.add(1, 2)
    world.step()
    world.want("g2", min=2, max=2)
    starts = crashes(world, 1000)

    assert starts == [0, 1, 3, 7, 15]
    assert sorted(world.members) == ["f-1", "f-2"]
    assert world.report.wanted == world.report.ready == 2
    assert world.report.reason == (
        "crash loop: 5 starts in a row have failed, the last one with: it crashed;"
        " the new generation does not serve: 2 agents of the old one left as is"
    )
    world.want("g3", min=2, max=2)
    assert world.step() == started(3, generation="g3")


def test_the_old_generation_comes_back_when_it_is_wanted_again() -> None:
    world = FleetWorld(min=1)
    world.add(1, processing=1)
    world.step()
    world.want("g2", min=1)
    world.run(1)
    world.want("g1", min=1)

    assert world.step() == stopped(2)
    assert world.step() == []
    assert world.report == FleetReport(1, 1, 1, 0, 0, None)


# Made anew


def test_a_plan_that_is_made_anew_takes_over_who_is_there() -> None:
    world = FleetWorld(min=2)
    world.add(1, processing=4)
    world.add(2, phase=Phase.LOAD)
    world.add(3, phase=Phase.DRAINING, processing=1)
    world.remake()

    assert world.run(60) == [(0, Reserve(()))]
    assert world.report == FleetReport(2, 3, 1, 1, 1, "1 agent starting")


def test_a_plan_that_is_made_anew_drains_nobody_before_it_has_watched_for_the_idle_time() -> None:
    world = FleetWorld(idle_time=60)
    world.add(1, 2)
    world.remake()

    assert world.run(62.5) == [(0, Reserve(())), *timed(60, drained(2)), *timed(62, drained(1))]


def test_a_replacement_goes_on_when_the_plan_is_made_anew() -> None:
    world = FleetWorld(max=1)
    world.add(1, processing=1)
    world.step()
    world.want("g2", max=1)
    world.step()
    world.come(2, phase=Phase.LOAD)
    world.remake()

    assert world.run(20) == [(0, Reserve(()))]
    world.come(2)
    assert world.step() == drained(1)


# Room beforehand


def test_room_is_asked_for_what_is_there_and_what_is_spare() -> None:
    one, other = Resources(gpus=1), Resources(cpus=2)
    world = FleetWorld()
    world.want(resources={"gpus": 1}, max=3, spare_nodes=2)
    world.want(fleet="other", resources={"cpus": 2}, min=1)

    world.step()
    assert world.reserved == Reserve((one, one, other))
    world.step(f=1)
    assert world.reserved == Reserve((one, one, one, other))
    assert world.run(1, f=20) == []
    world.run(20, f=20)
    assert world.reserved == Reserve((one, one, one, other))  # more there will never be
    world.want(resources={"gpus": 1}, max=3)
    assert world.step(f=20) == [Reserve(())]


# Numbers out of bounds


@pytest.mark.parametrize("name", ["f-", "f", "", "nobody-3", "-"])
def test_names_of_nobody_do_no_harm(name: str) -> None:
    world = FleetWorld(min=1)
    world.plan.ended(name, "?", now=0)
    odd = Member("f-x", "f", "g1", Phase.READY, 4)

    assert world.plan.plan({"nobody": 3}, [odd], now=0) == []


def test_what_is_said_has_a_bound() -> None:
    world = FleetWorld(min=1)
    world.step()
    world.end(1, reason="x" * 100_000)
    world.step()

    assert len(str(world.report.reason)) <= 500


def test_an_agent_whose_generation_cannot_be_told_is_left_as_it_is() -> None:
    plan = FleetPlan()
    plan.want({"f": Fleet(max=2)}, {"f": "g1"})
    unknown = Member("f-1", "f", "", Phase.READY, 4, 1)

    assert plan.plan({}, [unknown], now=0) == [Reserve(())]
    assert plan.plan({}, [replace(unknown, generation="g1")], now=1) == []
