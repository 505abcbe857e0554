"""The shell around the dispatcher: who is told what, and what is counted."""

import asyncio
import random

import pytest
from answers import text_of
from msgspec.structs import replace
from played import Play, Until, ask, metric

from balancer.balancer import Balancer
from balancer.exchange import Exchange
from balancer.limits import MOST_UNREAD_EVENTS
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    Busy,
    Detokenize,
    Detokenized,
    Document,
    DocumentFailed,
    DocumentTooLong,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooling,
    TokenGenerated,
    Usage,
    encode,
)

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))


async def outcome(exchange: Exchange) -> Event:
    async with asyncio.timeout(10):
        return [told.event async for told in exchange][-1]


async def test_a_client_reads_what_its_agent_says(balancer: Balancer, play: Play) -> None:
    agent = play("one")
    exchange = ask(balancer, R1)
    assert (await agent.asked()).request_id == R1

    agent.say_token(R1, "a")
    agent.finish(R1)

    told = [each async for each in exchange]
    assert [each.generated_by for each in told] == ["one", "one"]
    assert told[-1].event == Finished(R1, FinishReason.STOP, Usage(5, 0, 2))
    assert metric(balancer, 'headrace_requests_total{outcome="stop"}') == 1
    assert metric(balancer, "headrace_prompt_tokens_total") == 5


async def test_a_slot_goes_to_the_next_as_soon_as_it_is_free(
    balancer: Balancer, play: Play
) -> None:
    agent = play()
    ask(balancer, R1)
    ask(balancer, R2)
    assert balancer.buffered == 1
    assert (await agent.asked()).request_id == R1

    agent.finish(R1)

    assert (await agent.asked()).request_id == R2
    assert balancer.buffered == 0


async def test_a_cancelled_request_is_stopped_at_its_agent(balancer: Balancer, play: Play) -> None:
    agent = play()
    ask(balancer, R1)
    await agent.asked()

    balancer.cancel(R1)

    assert await agent.cancelled() == R1
    assert [view.slots_bound for view in balancer.agents] == [1]
    agent.finish(R1, FinishReason.CANCELLED)
    assert [view.slots_bound for view in balancer.agents] == [0]
    assert metric(balancer, 'headrace_requests_total{outcome="cancelled"}') == 1


async def test_a_refused_request_waits_and_its_client_notices_nothing(
    balancer: Balancer, play: Play
) -> None:
    agent = play()
    exchange = ask(balancer, R1)
    await agent.asked()

    agent.say(Busy(R1))
    assert balancer.buffered == 1
    agent.report(slots=1)
    assert (await agent.asked()).request_id == R1
    agent.finish(R1)

    assert isinstance(await outcome(exchange), Finished)


async def test_a_request_that_had_not_begun_moves_to_another_agent(
    balancer: Balancer, play: Play
) -> None:
    first = play("first")
    exchange = ask(balancer, R1)
    await first.asked()
    second = play("second")

    first.leave()
    assert (await second.asked()).request_id == R1
    second.finish(R1)

    assert isinstance(await outcome(exchange), Finished)
    assert metric(balancer, 'headrace_requeued_total{reason="agent_lost"}') == 1


async def test_an_answer_goes_on_from_another_agent(balancer: Balancer, play: Play) -> None:
    first = play("first", fingerprint="one")
    exchange = ask(balancer, R1)
    asked = await first.asked()
    first.say_token(R1, "a")
    first.say_token(R1, "b")
    second = play("second", fingerprint="one")

    first.leave()
    assert await second.asked() == replace(asked, resumed=(TokenId(1), TokenId(1)))
    second.say_token(R1, "c")
    second.finish(R1)

    told = [each async for each in exchange]
    texts = [text_of(each.event) for each in told if isinstance(each.event, TokenGenerated)]
    assert texts == ["a", "b", "c"]
    assert [each.generated_by for each in told] == ["first", "first", "second", "second"]
    assert metric(balancer, "headrace_resumed_total") == 1
    assert metric(balancer, 'headrace_requests_total{outcome="stop"}') == 1


async def test_what_an_agent_gives_back_goes_on_from_another_one(
    balancer: Balancer, play: Play
) -> None:
    first, second = play("first", fingerprint="one"), play("second", fingerprint="one")
    exchange = ask(balancer, R1)
    await first.asked()
    first.say_token(R1, "a")

    first.say(Busy(R1))
    assert (await second.asked()).resumed == (TokenId(1),)
    second.finish(R1)

    assert isinstance(await outcome(exchange), Finished)
    assert metric(balancer, 'headrace_requeued_total{reason="given_back"}') == 1


async def test_a_batch_goes_on_from_another_agent_with_its_open_documents(
    balancer: Balancer, play: Play
) -> None:
    first = play("first", fingerprint="one")
    batch = Embed(
        request_id=R1,
        documents=tuple(Document(name, name) for name in ("same", "same", "long", "last")),
        pooling=Pooling.MEAN,
    )
    exchange = balancer.submit(R1, encode(batch))
    await first.asked_to_embed()
    first.say(Embedded(R1, "same", 1, bytes(4), tokens=3), DocumentTooLong(R1, "same", 9, 8))

    first.leave()
    second = play("second", fingerprint="one")
    asked = await second.asked_to_embed()
    assert [document.document_id for document in asked.documents] == ["long", "last"]
    second.say(DocumentFailed(R1, "long", "why"), Embedded(R1, "last", 1, bytes(4), tokens=5))
    second.say(Finished(R1, FinishReason.STOP, Usage(prompt_tokens=5)))

    told = [each.event async for each in exchange]
    assert told[-1] == Finished(R1, FinishReason.STOP, Usage(prompt_tokens=8))
    assert len(told) == 5


async def test_an_agent_that_has_come_to_a_stop_is_given_up_and_its_work_moved(
    balancer: Balancer, play: Play, until: Until
) -> None:
    stuck = play("stuck", fingerprint="one")
    exchange = ask(balancer, R1)
    await stuck.asked()
    stuck.say_token(R1, "a")
    well = play("well", fingerprint="one")

    stuck.report(slots=1, step_age=7.0, step_limit=6.0)

    assert (await well.asked()).resumed == (TokenId(1),)
    well.finish(R1)
    assert isinstance(await outcome(exchange), Finished)
    assert [view.name for view in balancer.agents] == ["well"]
    (reason,) = stuck.dropped
    assert "7.0 s" in reason
    assert metric(balancer, "headrace_agents_given_up_total") == 1


async def test_a_request_that_had_begun_ends_with_its_agent(balancer: Balancer, play: Play) -> None:
    agent = play()
    exchange = ask(balancer, R1)
    agent.say_token(R1, "a")

    agent.leave()

    end = await outcome(exchange)
    assert isinstance(end, Failed)
    assert end.code is ErrorCode.AGENT_LOST


async def test_what_a_former_agent_says_of_a_moved_request_is_ignored(
    balancer: Balancer, play: Play
) -> None:
    first, second = play("first"), play("second")
    exchange = ask(balancer, R1)
    await first.asked()
    first.say(Busy(R1))
    await second.asked()

    first.say_token(R1, "wrong")
    first.finish(R1)
    second.say_token(R1, "right")
    second.finish(R1)

    told = [each.generated_by async for each in exchange]
    assert told == ["second", "second"]


async def test_an_agent_that_comes_back_replaces_its_lost_link(
    balancer: Balancer, play: Play
) -> None:
    play("one", slots=3)

    play("one", slots=2)

    assert [view.status.slots_total for view in balancer.agents] == [2]


async def test_a_full_buffer_and_a_lapsed_wait_are_told(play: Play) -> None:
    balancer = Balancer(buffer_capacity=1, patience=0.01)
    waiting, turned_away = ask(balancer, R1), ask(balancer, R2)

    assert await outcome(turned_away) == Failed(
        R2, ErrorCode.BUFFER_FULL, "too many requests are waiting for a slot already"
    )
    assert await outcome(waiting) == Failed(
        R1, ErrorCode.BUFFER_TIMEOUT, "no slot became free in time"
    )


async def test_a_client_that_does_not_read_loses_only_its_own_request(
    balancer: Balancer, play: Play
) -> None:
    agent = play(slots=2)
    slow, other = ask(balancer, R1), ask(balancer, R2)
    await agent.asked()
    await agent.asked()

    for _ in range(MOST_UNREAD_EVENTS + 5):
        agent.say_token(R1, "a")

    assert await agent.cancelled() == R1
    agent.finish(R1, FinishReason.CANCELLED)
    agent.finish(R2)
    end = await outcome(slow)
    assert isinstance(end, Failed)
    assert end.code is ErrorCode.SLOW_CLIENT
    assert isinstance(await outcome(other), Finished)


async def test_only_the_agent_that_was_asked_can_answer_a_consultation(
    balancer: Balancer, play: Play
) -> None:
    asked, other = play("asked"), play("other")
    exchange = balancer.consult(R1, encode(Detokenize(R1, ())), None)

    other.say(Detokenized(R1, "wrong"))
    asked.say_token(R1, "no answer")
    asked.finish(R1)
    asked.say(Detokenized(R1, "right"))

    assert await outcome(exchange) == Detokenized(R1, "right")


async def test_stale_reports_are_ignored(balancer: Balancer, play: Play) -> None:
    agent = play(slots=1)
    old = balancer.agents[0].status
    agent.report(slots=5)

    balancer.report(balancer.agents[0].agent_id, old)

    assert balancer.agents[0].status.slots_total == 5


async def test_no_order_of_reports_and_events_makes_slots_appear_or_vanish(
    balancer: Balancer, play: Play
) -> None:
    """B10: 10,000 steps in which reports are late, repeated or wrong about what runs, and last
    events come twice.
    """
    chance = random.Random(10)
    agent = play(slots=4)
    reports = [balancer.agents[0].status]
    running: list[RequestId] = []
    waiting: list[RequestId] = []
    over: list[RequestId] = []
    for n in range(10_000):
        match chance.choice(["ask", "ask", "finish", "again", "report", "late report", "cancel"]):
            case "ask" if len(waiting) < 2:
                (running if len(running) < 4 else waiting).append(RequestId(f"r{n}"))
                ask(balancer, RequestId(f"r{n}"))
            case "finish" if running:
                over = [*over[-9:], running.pop(chance.randrange(len(running)))]
                running += waiting[:1]
                del waiting[:1]
                agent.finish(over[-1])
            case "again" if over:
                agent.finish(chance.choice(over))
            case "report":
                agent.report(slots=4, slots_processing=chance.randrange(5))
                reports = [*reports[-9:], balancer.agents[0].status]
            case "late report":
                balancer.report(agent.agent_id, chance.choice(reports))
            case "cancel" if waiting:
                balancer.cancel(waiting.pop(chance.randrange(len(waiting))))
            case "cancel" if running:
                balancer.cancel(chance.choice(running))  # its slot is the agent's to free
            case _:
                pass
        assert (balancer.agents[0].slots_bound, balancer.buffered) == (len(running), len(waiting))
    assert metric(balancer, 'headrace_slots_processing{agent="played"}') == len(running)


async def test_closing_tells_everyone_and_stops_the_agents(balancer: Balancer, play: Play) -> None:
    agent = play()
    running, waiting = ask(balancer, R1), ask(balancer, R2)
    await agent.asked()

    balancer.close()

    assert await agent.cancelled() == R1
    late = ask(balancer, R3)
    for exchange in (running, waiting, late):
        end = await outcome(exchange)
        assert isinstance(end, Failed)
        assert end.code is ErrorCode.SHUTTING_DOWN


@pytest.mark.parametrize("name", ["one", None])
async def test_an_agent_that_has_gone_leaves_no_series_behind(
    balancer: Balancer, play: Play, name: str | None
) -> None:
    agent = play(name, slots=3)
    label = name or "unnamed"
    assert metric(balancer, f'headrace_slots{{agent="{label}"}}') == 3

    agent.leave()

    assert f'"{label}"' not in balancer.metrics.text().decode()


async def test_a_new_balancer_waits_for_agents_of_models_that_it_does_not_know() -> None:
    settling = Balancer(buffer_capacity=1, patience=1.0, settling=60.0)
    settling.check_model("of an agent that comes back")

    with pytest.raises(RequestError, match="no agent serves the model"):
        Balancer(buffer_capacity=1, patience=1.0).check_model("of nobody")
