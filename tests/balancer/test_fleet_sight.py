"""What is known of one agent of a fleet."""

from balancer.fleet_beats import MemberView, SeenAgent
from balancer.fleet_plan import NODE_IS_SLOW, Member
from balancer.fleet_sight import FRESH, UNSEEN, Sight
from common.models import Phase

SERVES = SeenAgent(name="f-1", phase=Phase.READY, phases={Phase.LOAD: 3.0}, slots=4, processing=0)


def started(*, now: float = 0.0) -> Sight:
    return Sight("f-1", now, "f", "g")


def running() -> Sight:
    sight = started()
    sight.run("f", "g", now=2)
    return sight


def member(phase: Phase, slots: int = 0, processing: int = 0) -> Member:
    return Member("f-1", "f", "g", phase, slots, processing)


def test_an_agent_waits_for_a_node_until_its_actor_runs() -> None:
    sight = started()
    assert sight.member(now=1) == member(Phase.NODE)

    sight.run("f", "g", now=2)

    assert sight.member(now=2) == member(Phase.PROCESS)


def test_what_a_balancer_says_of_it_holds_for_a_while() -> None:
    sight = running()
    sight.see(SERVES, now=10)

    assert sight.member(now=10 + FRESH) == member(Phase.READY, 4)


def test_one_that_served_and_is_out_of_sight_must_not_be_stopped() -> None:
    sight = running()
    sight.see(SERVES, now=10)

    assert sight.member(now=10 + UNSEEN) == member(Phase.READY, 4, processing=1)
    assert sight.member(now=10 + UNSEEN + 1) == member(Phase.PROCESS)


def test_one_that_was_found_may_be_serving_until_it_is_seen() -> None:
    sight = Sight("f-1", 0, "f", was_found=True)
    sight.run("f", "g", now=0)
    assert sight.member(now=UNSEEN) == member(Phase.READY, 0, processing=1)

    assert sight.member(now=UNSEEN + 1) == member(Phase.PROCESS)


def test_one_that_was_found_and_does_not_answer_may_be_serving_for_a_while() -> None:
    sight = Sight("f-1", 0, "f", was_found=True)

    assert sight.member(now=UNSEEN) == Member("f-1", "f", "", Phase.READY, processing=1)
    assert sight.member(now=UNSEEN + 1) == Member("f-1", "f", "", Phase.NODE)


def test_one_that_a_balancer_sees_serves_whether_its_actor_answers_or_not() -> None:
    sight = Sight("f-1", 0, "f", was_found=True)
    sight.see(SERVES, now=60)

    assert sight.member(now=61) == Member("f-1", "f", "", Phase.READY, 4)


def test_one_whose_node_is_lost_waits_for_another() -> None:
    sight = running()
    sight.see(SERVES, now=10)

    sight.lose()

    assert sight.member(now=10) == member(Phase.NODE)


def test_one_that_was_asked_to_go_drains_whatever_it_does() -> None:
    sight = running()
    sight.see(SeenAgent(name="f-1", phase=Phase.DRAINING, slots=4, processing=2), now=10)
    sight.is_leaving = True

    assert sight.member(now=10) == member(Phase.DRAINING, 4, 2)


def test_operators_see_how_long_each_phase_took_and_why_there_is_no_node() -> None:
    sight = running()
    sight.see(SERVES, now=10)
    assert sight.view(now=10, why_no_node="full") == MemberView(
        name="f-1", phase=Phase.READY, seconds={Phase.NODE: 2.0, Phase.LOAD: 3.0}
    )

    told = [started().view(now=now, why_no_node="full") for now in (1, NODE_IS_SLOW)]
    assert [(each.phase, each.problem) for each in told] == [
        (Phase.NODE, None),
        (Phase.NODE, "full"),
    ]
