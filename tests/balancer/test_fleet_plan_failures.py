"""What a fleet does when agents end, cannot serve, or find no node."""

import pytest
from fleet_world import FleetWorld, crashes, drained, started, stopped, timed

from balancer.fleet_plan import FleetReport, Start
from common.models import Phase

# Nothing will come of it


def test_a_fleet_is_stuck_when_its_starts_fail_again_and_again() -> None:
    world = FleetWorld(max=3)
    world.step()
    assert not world.report.is_stuck

    crashes(world, 14, f=1)
    assert not world.report.is_stuck
    crashes(world, 4, f=1)
    assert world.report.is_stuck
    world.run(100, f=1)
    world.come(1, phase=Phase.LOAD)
    world.step(f=1)
    assert world.report.is_stuck
    world.come(1)
    world.step()
    assert not world.report.is_stuck


def test_a_fleet_is_stuck_when_its_only_agent_cannot_serve() -> None:
    world = FleetWorld(min=1)
    world.add(1, phase=Phase.LOAD)
    world.step()
    assert not world.report.is_stuck

    world.come(1, phase=Phase.LOAD, problem="no such file")
    world.step()
    assert world.report.is_stuck
    world.come(1, phase=Phase.LOAD)
    world.step()
    assert not world.report.is_stuck


@pytest.mark.parametrize(
    ("phase", "processing", "problem", "is_stuck"),
    [
        (Phase.READY, 4, None, False),
        (Phase.DRAINING, 4, None, True),
        (Phase.LOAD, 0, None, False),
        (Phase.LOAD, 0, "out of memory", True),
        (Phase.NODE, 0, None, False),
    ],
)
def test_a_fleet_is_not_stuck_while_another_one_serves_or_comes(
    phase: Phase, processing: int, problem: str | None, is_stuck: bool
) -> None:
    world = FleetWorld(min=2)
    world.add(1, phase=Phase.LOAD)
    world.add(2, phase=phase, processing=processing)
    world.come(1, phase=Phase.LOAD, problem="no such file")
    world.come(2, phase=phase, processing=processing, problem=problem)
    world.step()

    assert world.report.is_stuck == is_stuck


def test_a_fleet_is_stuck_when_its_agents_have_waited_for_nodes_for_very_long() -> None:
    world = FleetWorld(max=3)
    world.step()
    world.run(4, f=8)
    world.run(176, f=8)
    assert len(world.members) > 1
    assert not world.report.is_stuck

    world.run(3, f=8)
    assert world.report.is_stuck
    world.come(2, phase=Phase.PROCESS)
    world.step(f=8)
    assert not world.report.is_stuck


def test_a_fleet_is_not_stuck_while_its_old_generation_serves() -> None:
    world = FleetWorld(min=1)
    world.add(1)
    world.step()
    world.want("g2", min=1)
    world.step()
    world.come(2, phase=Phase.LOAD, problem="no such file")
    world.step()
    assert not world.report.is_stuck

    world.come(1, phase=Phase.DRAINING)
    world.step()
    assert world.report.is_stuck


def test_a_fleet_at_rest_is_not_stuck() -> None:
    world = FleetWorld(max=1)
    world.step()
    assert not world.report.is_stuck

    world.add(1, phase=Phase.DRAINING, processing=1)
    world.step()
    assert not world.report.is_stuck
    world.delete()
    world.step()
    assert not world.report.is_stuck


# What goes wrong


def test_starts_that_fail_are_tried_more_and_more_rarely() -> None:
    world = FleetWorld(max=3)
    world.step()

    starts = crashes(world, 300, f=1)

    assert starts == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    reason = "crash loop: 10 starts in a row have failed, the last one with: it crashed"
    assert world.report == FleetReport(1, 0, 0, 0, 0, reason, is_stuck=True)


def test_many_that_fail_together_are_one_failure_then_one_is_tried_at_a_time() -> None:
    world = FleetWorld()
    world.want(min=5)
    world.run(10)
    world.come(1, 2, 3, 4, 5)
    world.run(100)
    world.end(1, 2, 3, 4, 5, reason="its node is gone")

    again = started(1, 2, 3, 4, 5)
    assert world.run(3) == timed(1, again)
    assert world.report.reason == (
        "an agent has ended (its node is gone); 1 s until the next start"
    )
    world.end(1, 2, 3, 4, 5)
    assert world.run(30) == timed(2, started(1))
    world.come(1)
    assert world.step() == started(2, 3, 4, 5)


def test_an_agent_that_serves_for_a_minute_makes_earlier_failures_forgotten() -> None:
    world = FleetWorld(max=2)
    world.add(2, processing=1)  # it serves all the time, and shows nothing
    world.want(min=2)
    world.step()
    for delay in (1, 2, 4):
        world.run(100)
        world.end(1)
        assert world.run(delay) == []
        assert world.step() == started(1)
    world.come(1)
    world.run(59)
    world.end(1)
    assert world.run(8) == []
    assert world.step() == started(1)
    world.come(1)
    world.run(61)
    world.end(1)
    assert world.run(1) == []
    assert world.step() == started(1)


def test_an_agent_that_vanishes_has_failed_too() -> None:
    world = FleetWorld(min=1)
    world.run(1)
    del world.members["f-1"]

    assert world.run(3) == timed(1, started(1))
    assert world.plan.reports()["f"].reason == (
        "an agent has ended (f-1: it is lost); 1 s until the next start"
    )


def test_that_it_ended_may_be_said_after_it_vanished() -> None:
    world = FleetWorld(min=1)
    world.run(1)
    del world.members["f-1"]
    world.step()
    world.plan.ended("f-1", "out of memory", now=world.now)

    assert world.run(3) == timed(0.5, started(1))
    assert "out of memory" in str(world.report.reason)


def test_who_was_asked_to_go_has_not_failed() -> None:
    world = FleetWorld(idle_time=10)
    world.add(1)
    world.step()
    world.plan.ended("f-1", "it ended", now=world.now)

    assert world.step(f=1) == started(1)
    assert world.report.reason == "1 agent starting"


def test_an_ended_agent_that_is_still_listed_is_nobody_and_keeps_its_name() -> None:
    world = FleetWorld(min=1)
    world.add(1)
    world.step()
    world.plan.ended("f-1", "it crashed", now=world.now)

    assert world.run(3) == timed(1, started(2))


def test_an_ended_agent_that_lives_on_counts_again() -> None:
    world = FleetWorld(min=1, max=1)
    world.add(1)
    world.step()
    world.plan.ended("f-1", "it crashed", now=world.now)

    assert world.run(60) == []
    assert world.report.ready == 1


def test_nothing_is_started_beside_an_agent_that_cannot_load_its_model() -> None:
    world = FleetWorld(min=1)
    world.step()
    world.come(1, phase=Phase.LOAD, problem="the file is no model")

    assert world.run(1000, f=50) == []
    assert world.report.reason == "f-1 cannot serve: the file is no model"
    world.come(1, processing=4)
    assert [effect for _, effect in world.run(1, f=46)] == started(2)


def test_where_others_serve_one_that_cannot_does_not_keep_the_fleet_from_growing() -> None:
    world = FleetWorld(min=1)
    world.add(1, processing=4)
    world.add(2, phase=Phase.LOAD)
    world.step(f=4)
    world.come(2, phase=Phase.LOAD, problem="no such file")

    assert world.run(4, f=4) == timed(2, started(3))
    assert world.report == FleetReport(3, 3, 1, 2, 0, "f-2 cannot serve: no such file")


def test_who_cannot_serve_is_none_of_those_that_there_must_be() -> None:
    world = FleetWorld(min=2, max=3)
    world.add(1)
    world.add(2, phase=Phase.LOAD)
    world.step()
    world.come(2, phase=Phase.LOAD, problem="no such file")

    assert world.run(30) == timed(1, started(3))
    world.come(3)
    assert world.step() == stopped(2)


def test_beside_some_that_cannot_serve_one_is_tried_at_a_time_and_never_more_than_max() -> None:
    world = FleetWorld(min=5, max=5)
    world.add(1, processing=4)
    world.step()
    tried = {int(name[2:]) for name in world.members} - {1}
    world.come(*tried, phase=Phase.LOAD, problem="no such file")
    assert tried == {2, 3, 4, 5}
    assert world.run(60, f=50) == []
    assert world.report.reason == "f-2 and 3 agents more cannot serve: no such file"

    world = FleetWorld(max=5)
    world.add(1, processing=4)
    starts: list[float] = []
    for time, _ in ((world.now, world.step(f=50)) for _ in range(200)):
        for member in [*world.members.values()]:
            if member.phase is Phase.NODE:
                starts.append(time)
                world.come(member.number, phase=Phase.LOAD, problem="no such file")

    assert starts == [2, 4, 6.5, 11]


def test_once_one_serves_again_as_many_are_started_as_before() -> None:
    world = FleetWorld(max=8)
    world.add(1, 2, processing=4)
    world.add(3, phase=Phase.LOAD)
    world.step(f=50)
    world.come(3, phase=Phase.LOAD, problem="no such file")
    assert world.run(29, f=50) == timed(1.5, started(4))

    world.come(3, 4, processing=4)

    assert [effect for _, effect in world.run(3, f=50)] == started(5, 6, 7, 8)


def test_who_cannot_serve_for_long_where_others_can_is_tried_anew() -> None:
    world = FleetWorld(min=2, max=2)
    world.add(1)
    world.add(2, phase=Phase.LOAD)
    world.step()
    world.come(2, phase=Phase.LOAD, problem="no such file")

    assert world.run(120) == []
    assert world.step() == stopped(2)
    assert world.step() == started(2)
    world.come(2, phase=Phase.LOAD)
    world.step()
    world.come(2, phase=Phase.LOAD, problem="no such file")
    assert world.run(130) == [*timed(120, stopped(2)), *timed(120.5, started(2))]


def test_who_could_serve_again_meanwhile_stays() -> None:
    world = FleetWorld(min=2, max=2)
    world.add(1)
    world.add(2, phase=Phase.DOWNLOAD)
    world.step()
    for _ in range(5):
        world.come(2, phase=Phase.DOWNLOAD, problem="no answer")
        assert world.run(100) == []
        world.come(2, phase=Phase.DOWNLOAD)
        assert world.run(1) == []


def test_who_cannot_serve_goes_when_nobody_needs_it() -> None:
    world = FleetWorld(idle_time=60)
    world.run(1, f=1)
    world.come(1, phase=Phase.LOAD, problem="no such file")

    assert world.run(1000) == timed(60, stopped(1))
    assert world.step(f=1) == started(1)


def test_of_those_that_do_not_serve_who_cannot_goes_first() -> None:
    world = FleetWorld(min=3, max=3)
    world.add(1, phase=Phase.NODE)
    world.add(2, phase=Phase.LOAD)
    world.add(3, phase=Phase.NODE)
    world.come(2, phase=Phase.LOAD, problem="no such file")
    world.step()
    world.want(min=2, max=2)

    assert world.step() == stopped(2)


def test_starts_that_fail_where_others_serve_are_no_crash_loop() -> None:
    world = FleetWorld(max=3)
    world.add(1, 2, processing=2)
    world.step()
    world.want("g2", max=3)
    world.step()
    world.come(3, processing=2)
    assert world.step() == drained(2)
    del world.members["f-2"]

    starts = crashes(world, 300)

    assert starts == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert world.report.reason == (
        "an agent has ended (it crashed); 60 s until the next start;"
        " 1 agent of an old generation to be replaced"
    )


def test_what_nodes_are_wanted_is_said_in_words() -> None:
    world = FleetWorld(min=2, resources={"gpus": 1, "cpus": 2.5, "labels": {"pool": "big"}})
    world.run(4)
    assert world.report.reason == "2 agents starting"
    world.run(2)

    reason = "2 agents wait for a node with 1 GPU, 2.5 CPUs, the label pool=big"
    assert world.report == FleetReport(2, 2, 0, 2, 0, reason, lacks_node=True)


def test_a_wish_that_no_node_fulfils_changes_nothing_more() -> None:
    world = FleetWorld(min=2, max=8)
    world.step()
    world.come(1, processing=4)

    assert world.run(30, f=20)[0] == (2.0, Start("f-3", "f", "g1"))
    members = sorted(world.members)
    assert world.run(3600, f=40) == []
    assert sorted(world.members) == members
    assert "wait for a node" in str(world.report.reason)


def test_a_burst_shows_the_autoscaler_all_the_nodes_it_needs_before_the_first_one_comes() -> None:
    world = FleetWorld(max=64)
    world.step()
    world.run(29, f=100)

    assert len(world.members) == 25
    assert {member.phase for member in world.members.values()} == {Phase.NODE}
