from balancer.rollout import GiveTurn, Rollout
from common.ids import AgentId

A, B, C = AgentId("a"), AgentId("b"), AgentId("c")


def says(
    rollout: Rollout,
    agent_id: AgentId,
    *,
    awaits: bool = False,
    swapping: bool = False,
    leaving: bool = False,
    taken: int = 0,
    applied: int = 0,
) -> list[GiveTurn]:
    return rollout.report(
        agent_id,
        awaits_turn=awaits,
        is_swapping=swapping,
        is_leaving=leaving,
        turn_taken=taken,
        applied=applied,
    )


def test_agents_change_one_after_another() -> None:
    rollout = Rollout()

    assert says(rollout, A, awaits=True) == [GiveTurn(A, 1)]
    assert says(rollout, B, awaits=True) == []
    assert says(rollout, A, awaits=True) == []  # it was sent before the turn came
    assert says(rollout, A, swapping=True) == []
    assert says(rollout, A, taken=1) == [GiveTurn(B, 2)]
    assert says(rollout, B, taken=2) == []


def test_an_agent_that_had_no_use_for_its_turn_passes_it_on() -> None:
    rollout = Rollout()
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)

    assert says(rollout, A, taken=1) == [GiveTurn(B, 2)]


def test_a_turn_that_is_over_may_be_followed_by_another_one() -> None:
    rollout = Rollout()
    says(rollout, A, awaits=True)

    assert says(rollout, A, awaits=True, taken=1) == [GiveTurn(A, 2)]


def test_nobody_begins_while_an_agent_is_changing_that_came_back() -> None:
    rollout = Rollout()
    says(rollout, A, swapping=True)

    assert says(rollout, B, awaits=True) == []
    assert says(rollout, A) == [GiveTurn(B, 1)]


def test_an_agent_lost_while_it_waited_holds_nobody_up() -> None:
    rollout = Rollout()
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)

    assert rollout.leave(B) == []
    assert says(rollout, C, awaits=True) == []
    assert says(rollout, A, taken=1) == [GiveTurn(C, 2)]


def test_a_model_that_kills_an_agent_does_not_get_the_others_too() -> None:
    rollout = Rollout()
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)
    says(rollout, A, swapping=True)

    assert rollout.leave(A) == []
    assert rollout.halted_by == A
    assert says(rollout, B, awaits=True) == []
    assert says(rollout, C, awaits=True) == []
    assert rollout.restart(2) == [GiveTurn(B, 2)]
    assert rollout.halted_by is None


def test_an_agent_that_comes_back_was_not_killed() -> None:
    rollout = Rollout()
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)
    rollout.leave(A)

    assert says(rollout, A, swapping=True) == []
    assert says(rollout, A) == [GiveTurn(B, 2)]


def test_a_model_that_works_elsewhere_did_not_kill_the_lost_agent() -> None:
    rollout = Rollout()
    rollout.restart(1)
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)
    assert says(rollout, A, taken=1, applied=1) == [GiveTurn(B, 2)]
    says(rollout, C, awaits=True)

    assert rollout.leave(B) == [GiveTurn(C, 3)]
    assert rollout.halted_by is None


def test_a_lost_agents_heir_shows_that_the_model_works() -> None:
    rollout = Rollout()
    rollout.restart(1)
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)
    rollout.leave(A)
    assert says(rollout, C) == []  # still loading

    assert says(rollout, C, applied=1) == [GiveTurn(B, 2)]


def test_what_was_applied_before_says_nothing_of_a_newer_wish() -> None:
    rollout = Rollout()
    rollout.restart(1)
    says(rollout, A, applied=1)
    says(rollout, B, applied=1)
    rollout.restart(2)
    says(rollout, A, awaits=True, applied=1)
    says(rollout, B, awaits=True, applied=1)

    rollout.leave(A)

    assert rollout.halted_by == A


def test_an_agent_that_was_asked_to_go_holds_nobody_up() -> None:
    rollout = Rollout()
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)
    says(rollout, A, awaits=True, leaving=True)

    assert rollout.leave(A) == [GiveTurn(B, 2)]
    assert says(rollout, C, awaits=True, leaving=True) == []
    assert says(rollout, B, taken=2) == []


def test_only_the_balancer_that_leads_gives_turns() -> None:
    rollout = Rollout()
    assert rollout.lead(False) == []

    assert says(rollout, A, awaits=True) == []
    assert rollout.restart(1) == []
    assert rollout.lead(True) == [GiveTurn(A, 1)]
    assert rollout.lead(True) == []


def test_a_new_leader_waits_for_the_agent_that_changes() -> None:
    rollout = Rollout()
    rollout.lead(False)
    says(rollout, A, swapping=True)
    says(rollout, B, awaits=True)

    assert rollout.lead(True) == []
    assert says(rollout, A) == [GiveTurn(B, 1)]


def test_a_turn_that_was_given_before_it_led_no_more_is_waited_for() -> None:
    rollout = Rollout()
    says(rollout, A, awaits=True)
    says(rollout, B, awaits=True)
    rollout.lead(False)

    assert rollout.lead(True) == []
    rollout.lead(False)
    assert says(rollout, A, taken=1) == []
    assert rollout.lead(True) == [GiveTurn(B, 2)]


def test_who_does_not_lead_knows_whose_loss_has_halted_the_change() -> None:
    rollout = Rollout()
    rollout.lead(False)
    says(rollout, A, swapping=True)
    says(rollout, B, awaits=True)
    rollout.leave(A)

    assert rollout.lead(True) == []
    assert rollout.halted_by == A
