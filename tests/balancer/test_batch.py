"""Several requests that a client waits for together, with the agents' part played by the test."""

import asyncio

import pytest
from played import Play, metric

from balancer.balancer import Balancer
from balancer.batch import Batch
from balancer.exchange import Told
from balancer.terms import ANY, Priority, Terms
from common.errors import ErrorCode
from common.ids import RequestId
from common.messages import (
    Failed,
    Finished,
    FinishReason,
    Generate,
    RawPrompt,
    TokenGenerated,
    encode,
)

A, B, C, D = (RequestId(name) for name in "abcd")


def batch(balancer: Balancer, *ids: RequestId, at_once: int, terms: Terms = ANY) -> Batch:
    frames = {
        request_id: encode(Generate(request_id=request_id, prompt=RawPrompt("Hi"), max_tokens=5))
        for request_id in ids
    }
    return Batch(balancer, frames, terms, at_once=at_once)


async def read(some: Batch) -> Told:
    async with asyncio.timeout(10):
        return await anext(some)


async def read_all(some: Batch) -> list[Told]:
    async with asyncio.timeout(10):
        return [told async for told in some]


async def test_all_of_its_events_come_through_it_until_the_last_ends(
    balancer: Balancer, play: Play
) -> None:
    agent = play("one", slots=2)
    both = batch(balancer, A, B, at_once=2)
    assert (both.name, both.is_empty, both.is_over) == (A, True, False)
    assert [(await agent.asked()).request_id for _ in range(2)] == [A, B]

    agent.say_token(B, "b")
    agent.say_token(A, "a")
    agent.finish(B)
    agent.finish(A)

    assert not both.is_empty
    told = await read_all(both)
    assert [(type(each.event), each.event.request_id) for each in told] == [
        (TokenGenerated, B),
        (TokenGenerated, A),
        (Finished, B),
        (Finished, A),
    ]
    assert {each.generated_by for each in told} == {"one"}
    assert [each.timing is not None for each in told] == [False, False, True, True]
    assert (both.is_empty, both.is_over) == (True, True)


async def test_only_some_begin_at_once_and_the_others_as_those_end(
    balancer: Balancer, play: Play
) -> None:
    agent = play(slots=4)
    four = batch(balancer, A, B, C, D, at_once=2)
    assert [(await agent.asked()).request_id for _ in range(2)] == [A, B]
    assert agent.frames.empty()

    agent.say_token(B, "b")
    await read(four)
    assert agent.frames.empty(), "nothing has ended"

    agent.finish(B)
    await read(four)
    assert (await agent.asked()).request_id == C
    agent.finish(A)
    agent.finish(C)
    await read(four)
    assert (await agent.asked()).request_id == D
    assert not four.is_over
    await read(four)
    assert agent.frames.empty()
    assert not four.is_over

    agent.finish(D)
    await read(four)
    assert four.is_over
    with pytest.raises(StopAsyncIteration):
        await read(four)


async def test_it_leaves_the_buffer_to_others(balancer: Balancer, play: Play) -> None:
    """With room for two: four at once would be one too many."""
    agent = play(slots=1)
    four = batch(balancer, A, B, C, D, at_once=1)
    assert balancer.buffered == 0

    for request_id in (A, B, C, D):
        assert (await agent.asked()).request_id == request_id
        agent.finish(request_id)
        told = await read(four)
        assert isinstance(told.event, Finished)

    assert four.is_over


async def test_a_request_that_fails_makes_room_for_the_next(balancer: Balancer, play: Play) -> None:
    agent = play()
    two = batch(balancer, A, B, at_once=1)
    await agent.asked()

    agent.say(Failed(A, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long"))

    assert isinstance((await read(two)).event, Failed)
    assert (await agent.asked()).request_id == B
    assert not two.is_over


async def test_what_finds_no_room_fails_and_the_others_go_on(balancer: Balancer) -> None:
    four = batch(balancer, A, B, C, D, at_once=4)
    assert balancer.buffered == 2

    refused = [await read(four) for _ in range(2)]

    assert [each.event.request_id for each in refused] == [C, D]
    assert {each.event.code for each in refused if isinstance(each.event, Failed)} == {
        ErrorCode.BUFFER_FULL
    }
    assert not four.is_over


async def test_its_terms_hold_for_each_of_its_requests(balancer: Balancer, play: Play) -> None:
    first = batch(balancer, A, at_once=1)
    urgent = batch(balancer, B, at_once=1, terms=Terms(priority=Priority.HIGH))

    agent = play()

    assert (await agent.asked()).request_id == B
    agent.finish(B)
    assert (await agent.asked()).request_id == A
    for each in (first, urgent):
        each.cancel()


async def test_a_cancel_ends_what_runs_and_what_waits_never_begins(
    balancer: Balancer, play: Play
) -> None:
    agent = play(slots=2)
    four = batch(balancer, A, B, C, D, at_once=3)
    assert [(await agent.asked()).request_id for _ in range(2)] == [A, B]
    assert balancer.buffered == 1

    four.cancel()

    assert four.is_over
    assert balancer.buffered == 0
    assert {await agent.cancelled() for _ in range(2)} == {A, B}
    for request_id in (A, B):
        agent.finish(request_id, FinishReason.CANCELLED)
    assert agent.frames.empty(), "one that waited was begun"
    # Nobody ever learned of D.
    assert metric(balancer, 'headrace_requests_total{outcome="cancelled"}') == 3


async def test_a_cancel_of_what_is_over_is_none(balancer: Balancer, play: Play) -> None:
    agent = play()
    one = batch(balancer, A, at_once=1)
    await agent.asked()
    agent.finish(A)
    await read(one)

    one.cancel()
    one.cancel()

    assert agent.frames.empty()


async def test_a_cancel_of_what_has_ended_unread_is_none(balancer: Balancer, play: Play) -> None:
    agent = play()
    two = batch(balancer, A, B, at_once=1)
    await agent.asked()
    agent.finish(A)

    two.cancel()

    assert two.is_over
    assert agent.frames.empty()


async def test_a_batch_of_nothing_is_over(balancer: Balancer) -> None:
    nothing = batch(balancer, at_once=1)

    assert (nothing.name, nothing.is_over) == ("", True)
    assert await read_all(nothing) == []
    nothing.cancel()
