"""The dispatcher's decisions, one per test. What must hold whatever happens: see the machine."""

import pytest

from balancer.buffer import Buffer
from balancer.dispatcher import (
    LONGEST_START,
    LONGEST_SWAP,
    MOST_LOSSES,
    MOST_MOVES,
    Abandon,
    Dispatch,
    Dispatcher,
    Effect,
    Reject,
    Rejection,
)
from balancer.terms import Priority, Terms
from common.ids import AgentId, RequestId

A, B, C = (AgentId(name) for name in "abc")
R1, R2, R3, R4 = (RequestId(f"r{n}") for n in (1, 2, 3, 4))


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(Buffer(capacity=2, patience=10.0))


def join(
    dispatcher: Dispatcher, agent_id: AgentId, *, slots: int, fingerprint: str = ""
) -> list[Effect]:
    dispatcher.join(agent_id)
    return dispatcher.report(agent_id, slots=slots, fingerprint=fingerprint, now=0)


def test_sends_a_request_to_a_free_slot_at_once(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)

    assert dispatcher.submit(R1, now=0) == [Dispatch(R1, A)]


def test_sends_nothing_to_an_agent_that_has_not_loaded_its_model(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=0)

    assert dispatcher.submit(R1, now=0) == []
    assert dispatcher.report(A, slots=1, now=0) == [Dispatch(R1, A)]


def test_holds_requests_in_order_until_a_slot_is_free(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)

    assert dispatcher.submit(R2, now=0) == []
    assert dispatcher.submit(R3, now=0) == []
    assert dispatcher.finish(R1) == [Dispatch(R2, A)]
    assert dispatcher.finish(R2) == [Dispatch(R3, A)]


def test_prefers_the_agent_with_the_smaller_part_of_its_slots_bound(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1)
    join(dispatcher, B, slots=4)

    agents = [dispatcher.submit(r, now=0)[0] for r in (R1, R2, R3)]

    assert agents == [Dispatch(R1, A), Dispatch(R2, B), Dispatch(R3, B)]


def test_rejects_at_once_when_the_buffer_is_full(dispatcher: Dispatcher) -> None:
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, now=0)

    assert dispatcher.submit(R3, now=0) == [Reject(R3, Rejection.BUFFER_FULL)]


def test_a_waiting_request_times_out(dispatcher: Dispatcher) -> None:
    dispatcher.submit(R1, now=1)
    assert dispatcher.next_deadline == 11

    assert dispatcher.expire(now=10.9) == []
    assert dispatcher.expire(now=11) == [Reject(R1, Rejection.BUFFER_TIMEOUT)]
    assert dispatcher.next_deadline is None


def test_a_cancelled_waiting_request_never_reaches_an_agent(dispatcher: Dispatcher) -> None:
    dispatcher.submit(R1, now=0)

    assert dispatcher.cancel(R1) == []
    assert dispatcher.buffered == 0
    assert join(dispatcher, A, slots=1) == []


def test_the_slot_of_a_cancelled_request_stays_bound_until_the_agent_says_so(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, now=0)

    assert dispatcher.cancel(R1) == [Abandon(R1, A)]
    assert dispatcher.cancel(R1) == []
    assert dispatcher.finish(R1) == [Dispatch(R2, A)]


def test_a_refused_request_goes_back_to_the_head_and_the_agent_is_left_alone(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=2)
    dispatcher.submit(R1, now=0)

    assert dispatcher.refuse(R1, now=0.0) == []
    assert dispatcher.submit(R2, now=1) == []
    assert dispatcher.report(A, slots=2, now=0) == [Dispatch(R1, A), Dispatch(R2, A)]


def test_a_refused_request_keeps_its_deadline(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)
    dispatcher.refuse(R1, now=0.0)

    assert dispatcher.next_deadline == 10


def test_a_refused_request_goes_to_another_agent_at_once(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    join(dispatcher, B, slots=1)
    dispatcher.submit(R1, now=0)

    assert dispatcher.refuse(R1, now=0.0) == [Dispatch(R1, B)]


def test_an_agent_that_refused_is_asked_again_once_it_has_finished_something(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=2)
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, now=0)
    dispatcher.refuse(R2, now=0.0)

    assert dispatcher.finish(R1) == [Dispatch(R2, A)]


def test_what_an_agent_gives_back_goes_on_with_new_patience_where_it_can(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1, fingerprint="one")
    dispatcher.submit(R1, now=0)
    dispatcher.start(R1)

    assert dispatcher.refuse(R1, now=50) == []
    assert dispatcher.next_deadline == 60
    assert join(dispatcher, B, slots=1, fingerprint="one") == [Dispatch(R1, B)]


def test_what_has_begun_goes_on_only_with_the_same_model(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1, fingerprint="one")
    dispatcher.submit(R1, now=0)
    dispatcher.start(R1)
    dispatcher.leave(A, now=0)

    assert join(dispatcher, B, slots=1, fingerprint="other") == []
    assert dispatcher.submit(R2, now=0) == [Dispatch(R2, B)]  # it does not wait behind R1
    assert join(dispatcher, C, slots=1, fingerprint="one") == [Dispatch(R1, C)]


def test_what_has_begun_and_finds_no_agent_in_time_says_that_its_agent_was_lost(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1, fingerprint="one")
    dispatcher.submit(R1, now=0)
    dispatcher.start(R1)

    assert dispatcher.leave(A, now=5) == []
    assert dispatcher.expire(now=15) == [Reject(R1, Rejection.AGENT_LOST)]


def test_an_agent_that_leaves_in_order_is_no_loss(dispatcher: Dispatcher) -> None:
    dispatcher.submit(R1, now=0)
    for n in range(MOST_LOSSES + 1):
        agent_id = AgentId(f"a{n}")
        assert join(dispatcher, agent_id, slots=1, fingerprint="one") == [Dispatch(R1, agent_id)]
        dispatcher.start(R1)
        assert dispatcher.leave(agent_id, in_order=True, now=0) == []


def test_a_request_that_gets_further_with_each_agent_is_not_what_kills_them(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.submit(R1, now=0)
    for n in range(MOST_MOVES):
        assert join(dispatcher, AgentId(f"a{n}"), slots=1, fingerprint="one")
        dispatcher.start(R1)
        assert dispatcher.leave(AgentId(f"a{n}"), now=0) == []

    assert join(dispatcher, B, slots=1, fingerprint="one") == [Dispatch(R1, B)]
    assert dispatcher.leave(B, now=0) == [Reject(R1, Rejection.AGENT_LOST)]  # not for ever


def test_a_request_that_had_begun_and_then_kills_agent_after_agent_is_given_up(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1, fingerprint="one")
    dispatcher.submit(R1, now=0)
    dispatcher.start(R1)
    assert dispatcher.leave(A, now=0) == []
    for n in range(1, MOST_LOSSES):
        assert join(dispatcher, AgentId(f"a{n}"), slots=1, fingerprint="one")
        assert dispatcher.leave(AgentId(f"a{n}"), now=0) == []

    assert join(dispatcher, B, slots=1, fingerprint="one") == [Dispatch(R1, B)]
    assert dispatcher.leave(B, now=0) == [Reject(R1, Rejection.AGENT_LOST)]


def test_a_draining_agent_gets_nothing_new(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=2)
    dispatcher.submit(R1, now=0)
    dispatcher.report(A, slots=2, draining=True, now=0)

    assert dispatcher.submit(R2, now=0) == []
    assert dispatcher.finish(R1) == []


def test_what_a_lost_agent_had_not_begun_is_dispatched_again_in_order(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=2)
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, now=0)
    dispatcher.submit(R3, now=0)

    assert dispatcher.leave(A, now=60) == []
    assert dispatcher.next_deadline == 10  # of R3; the others have new patience
    assert join(dispatcher, B, slots=3) == [Dispatch(R1, B), Dispatch(R2, B), Dispatch(R3, B)]


def test_what_a_lost_agent_had_begun_is_rejected_if_it_cannot_be_told_who_could_go_on(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=2)
    dispatcher.submit(R1, now=0)
    dispatcher.start(R1)

    assert dispatcher.leave(A, now=0) == [Reject(R1, Rejection.AGENT_LOST)]
    assert dispatcher.finish(R1) == []


def test_a_request_that_loses_agent_after_agent_is_given_up(dispatcher: Dispatcher) -> None:
    dispatcher.submit(R1, now=0)
    for n in range(MOST_LOSSES):
        assert join(dispatcher, AgentId(f"a{n}"), slots=1)
        assert dispatcher.leave(AgentId(f"a{n}"), now=0) == []

    assert join(dispatcher, B, slots=1) == [Dispatch(R1, B)]
    assert dispatcher.leave(B, now=0) == [Reject(R1, Rejection.AGENT_LOST)]


def test_what_nobody_waits_for_is_not_dispatched_again(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)
    dispatcher.cancel(R1)

    assert dispatcher.leave(A, now=0) == []
    assert dispatcher.buffered == 0


def test_a_full_buffer_takes_back_what_was_accepted_before(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    for request_id in (R1, R2, R3):
        dispatcher.submit(request_id, now=0)

    assert dispatcher.leave(A, now=0) == []
    assert dispatcher.buffered == 3
    assert dispatcher.submit(R4, now=0) == [Reject(R4, Rejection.BUFFER_FULL)]


def test_an_agent_that_shrinks_finishes_what_it_has_first(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=2)
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, now=0)
    dispatcher.report(A, slots=1, now=0)
    dispatcher.submit(R3, now=0)

    assert dispatcher.finish(R1) == []
    assert dispatcher.finish(R2) == [Dispatch(R3, A)]


def test_says_whom_a_request_is_bound_to(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)

    assert dispatcher.serves(A, R1)
    assert not dispatcher.serves(B, R1)
    assert not dispatcher.serves(A, R2)
    assert dispatcher.bound(A) == 1


def test_a_higher_class_goes_first_and_each_in_its_order() -> None:
    dispatcher = Dispatcher(Buffer(capacity=4, patience=10.0))
    dispatcher.submit(R1, Terms(priority=Priority.LOW), now=0)
    dispatcher.submit(R2, now=0)
    dispatcher.submit(R3, Terms(priority=Priority.HIGH), now=0)
    dispatcher.submit(R4, Terms(priority=Priority.HIGH), now=0)

    effects = join(dispatcher, A, slots=4)

    assert effects == [Dispatch(r, A) for r in (R3, R4, R2, R1)]


def test_a_request_for_a_model_waits_for_an_agent_that_serves_it(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=2)
    dispatcher.join(B)

    assert dispatcher.submit(R1, Terms("special"), now=0) == []
    assert dispatcher.submit(R2, now=0) == [Dispatch(R2, A)]  # it does not wait behind R1
    effects = dispatcher.report(B, slots=1, models=frozenset({"special"}), now=0)
    assert effects == [Dispatch(R1, B)]


def test_a_deadline_of_its_own_takes_the_place_of_patience(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, Terms(deadline=50.0), now=0)

    dispatcher.leave(A, now=20)  # and is not counted anew

    assert dispatcher.next_deadline == 50


def swap(dispatcher: Dispatcher, agent_id: AgentId, *, now: float) -> None:
    dispatcher.report(agent_id, slots=0, draining=True, swapping=True, now=now)


def test_nobody_loses_patience_while_the_only_agent_changes_its_model(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, now=0)
    swap(dispatcher, A, now=5)
    dispatcher.finish(R1)
    dispatcher.submit(R3, now=100)

    assert dispatcher.expire(now=5 + LONGEST_SWAP - 1) == []
    assert dispatcher.report(A, slots=1, now=5 + LONGEST_SWAP - 1) == [Dispatch(R2, A)]
    assert dispatcher.next_deadline == 5 + LONGEST_SWAP - 1 + 10


def test_a_swap_that_takes_for_ever_is_not_waited_for(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    swap(dispatcher, A, now=0)
    dispatcher.submit(R1, now=1)

    assert dispatcher.next_deadline == LONGEST_SWAP
    assert dispatcher.expire(now=LONGEST_SWAP) == [Reject(R1, Rejection.BUFFER_TIMEOUT)]


def test_nobody_loses_patience_while_one_of_several_agents_changes_its_model(
    dispatcher: Dispatcher,
) -> None:
    """The others may be full of long streams."""
    join(dispatcher, A, slots=1)
    join(dispatcher, B, slots=1)
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, now=0)
    swap(dispatcher, A, now=0)
    dispatcher.submit(R3, now=0)

    assert dispatcher.next_deadline == LONGEST_SWAP


def test_the_patience_of_who_waits_for_a_model_begins_when_it_is_not_expected_any_more(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.submit(R1, Terms(model="one"), now=0)
    dispatcher.expect(frozenset({"one"}), now=1)
    dispatcher.submit(R2, Terms(model="one"), now=2)
    assert dispatcher.next_deadline == 1 + LONGEST_START

    dispatcher.expect(frozenset(), now=50)

    assert dispatcher.next_deadline == 50 + 10


def test_nobody_waits_for_ever_for_agents_that_are_expected_and_do_not_come(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.submit(R1, now=0)
    for now in range(0, int(LONGEST_START), 9):
        dispatcher.expect(frozenset({None}) if now % 2 else frozenset(), now=now)
    dispatcher.expect(frozenset({None}), now=LONGEST_START)

    assert dispatcher.next_deadline == LONGEST_START + 10


def test_who_has_more_patience_than_a_start_may_take_keeps_it() -> None:
    dispatcher = Dispatcher(Buffer(capacity=2, patience=3 * LONGEST_START))
    dispatcher.expect(frozenset({None}), now=0)

    dispatcher.submit(R1, now=0)

    assert dispatcher.next_deadline == 3 * LONGEST_START


def test_who_waits_for_another_model_or_for_none_is_not_held_by_one_that_is_expected(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.expect(frozenset({"one"}), now=0)
    dispatcher.submit(R1, Terms(model="two"), now=0)
    dispatcher.submit(R2, now=0)

    assert dispatcher.waiting == {"two": 1, None: 1}
    timeout = Rejection.BUFFER_TIMEOUT
    assert dispatcher.expire(now=10) == [Reject(R1, timeout), Reject(R2, timeout)]
    dispatcher.submit(R3, Terms(model="one"), now=10)
    assert dispatcher.next_deadline == 10 + LONGEST_START


def test_a_deadline_of_its_own_holds_also_while_models_are_changed(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)
    dispatcher.submit(R2, Terms(deadline=20.0), now=0)
    swap(dispatcher, A, now=1)

    assert dispatcher.next_deadline == 20


def test_an_agent_lost_while_it_changes_its_model_is_not_waited_for(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1)
    swap(dispatcher, A, now=0)
    dispatcher.submit(R1, now=1)

    dispatcher.leave(A, now=7)

    assert dispatcher.next_deadline == 17


def test_who_came_first_goes_first_whichever_agent_lets_go_of_it_first() -> None:
    dispatcher = Dispatcher(Buffer(capacity=4, patience=10.0))
    join(dispatcher, A, slots=1)
    join(dispatcher, B, slots=1)
    for request_id in (R1, R2, R3):
        dispatcher.submit(request_id, now=0)

    assert dispatcher.refuse(R1, now=0) == []
    assert dispatcher.leave(B, now=0) == []
    assert join(dispatcher, C, slots=3) == [Dispatch(R1, C), Dispatch(R2, C), Dispatch(R3, C)]


def test_a_request_refused_by_an_agent_that_changes_its_model_waits_for_it(
    dispatcher: Dispatcher,
) -> None:
    join(dispatcher, A, slots=1)
    dispatcher.submit(R1, now=0)
    swap(dispatcher, A, now=9)

    dispatcher.refuse(R1, now=0.0)

    assert dispatcher.next_deadline == 9 + LONGEST_SWAP


# What operators are told


def test_a_choice_says_among_how_many_agents_it_was(dispatcher: Dispatcher) -> None:
    join(dispatcher, A, slots=1)
    join(dispatcher, B, slots=4)

    choices = [
        str(effect.choice)
        for r in (R1, R2)
        for effect in dispatcher.submit(r, now=0)
        if isinstance(effect, Dispatch)
    ]

    assert choices == [
        "the least busy of 2 agents with a free slot for it: 0 of its 1 slots were taken",
        "the only agent with a free slot for it: 0 of its 4 slots were taken",
    ]


def test_an_obstacle_counts_who_could_have_served(dispatcher: Dispatcher) -> None:
    obstacles = [str(dispatcher.obstacle(None))]
    for agent_id in (A, B):
        join(dispatcher, agent_id, slots=2)
    obstacles.append(str(dispatcher.obstacle("other")))
    for request_id in (R1, R2, R3, RequestId("r4")):
        dispatcher.submit(request_id, now=0)
    obstacles.append(str(dispatcher.obstacle(None)))
    dispatcher.report(A, slots=2, draining=True, now=0)
    obstacles.append(str(dispatcher.obstacle(None)))

    assert obstacles == [
        "there is no agent",
        "none of 2 agents serves its model now",
        "4 slots of 2 agents, all taken",
        "2 slots of 1 agent, all taken; 1 more agent drained, or changing the model",
    ]
