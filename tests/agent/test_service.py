"""The agent as a whole, over a real socket, with the balancer's part played by the test.

Its models and images have files of their own.
"""

import asyncio
import struct

import pytest
from answers import text_of
from engines import HeldEngine, HeldVocabulary
from linked import (
    HELD,
    R1,
    R2,
    R3,
    PlayedBalancer,
    PlayedModels,
    RunningAgent,
    ask,
    to_tokenize,
    wanted,
)
from msgspec.structs import replace
from websockets.asyncio.server import serve

from agent import step_watch
from agent.link import GivenUpError, LinkRefusedError
from agent.service import StalledError
from common.errors import ErrorCode
from common.ids import RequestId, TokenId
from common.messages import (
    GIVEN_UP,
    PROTOCOL,
    REFUSED,
    Busy,
    Cancel,
    Detokenize,
    Detokenized,
    Document,
    DocumentTooLong,
    Drain,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Join,
    Note,
    Noted,
    Pooling,
    Step,
    TokenGenerated,
    Tokenized,
    Undrain,
    Usage,
)
from common.models import (
    Application,
)


async def test_an_agent_introduces_itself_and_then_offers_its_slots(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()

    join = await link.frame()

    assert isinstance(join, Join)
    assert (join.protocol, join.name) == (PROTOCOL, "one")
    assert join.labels == ("gpu",)
    assert (join.status.slots_desired, join.status.slots_total) == (2, 0)
    assert join.status.application is Application.FRESH
    await link.send(wanted())
    status = await link.status(lambda status: status.slots_total > 0)
    assert (status.slots_total, status.slots_processing) == (2, 0)
    assert status.application is Application.APPLIED
    assert (status.model_path, set(status.model_names)) == (HELD.path, {"held", "held.gguf"})


async def test_documents_take_a_slot_and_are_embedded(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    documents = (Document("one", "ab"), Document("long", "x" * 513))

    await link.send(ask(R1), Embed(request_id=R2, documents=documents, pooling=Pooling.MEAN))
    await link.send(ask(R3))

    assert await link.event() == Busy(R3)
    engine.open()
    told: list[Event] = []
    while not (told and told[-1].request_id == R2 and isinstance(told[-1], Finished)):
        frame = await link.frame()
        if isinstance(frame, Step):
            told += [event for event in frame.events if event.request_id == R2]
    assert told == [
        Embedded(R2, "one", 2, struct.pack("<2f", 97.5, 1), tokens=2),
        DocumentTooLong(R2, "long", 513, 512),
        Finished(R2, FinishReason.STOP, Usage(prompt_tokens=2)),
    ]
    await link.status(lambda status: status.slots_processing == 0)


async def test_what_is_asked_twice_before_its_end_is_nothing_new(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask(R1, "ab"), ask(R1, "cd"), Detokenize(R1, (TokenId(97),)), ask(R2, "ef"))
    await link.send(ask(R3, "gh"))

    assert await link.event() == Busy(R3)
    engine.open()
    told: list[Event] = []
    while len([event for event in told if isinstance(event, Finished)]) < 2:
        frame = await link.frame()
        told += frame.events if isinstance(frame, Step) else ()
    for request_id, text in ((R1, "ab"), (R2, "ef")):
        *tokens, end = (event for event in told if event.request_id == request_id)
        assert "".join(text_of(e) for e in tokens if isinstance(e, TokenGenerated)) == text
        assert isinstance(end, Finished)


async def test_the_status_tells_how_the_scheduler_does(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    engine.open()

    await link.send(ask(R1, "abc"))

    status = await link.status(lambda status: status.figures.cells_cached > 0)
    assert status.figures.prompt_tokens_fed == 3
    assert status.figures.cells_total == 2 * 32
    assert status.figures.decode_rate is not None
    assert status.figures.prefill_rate is not None


async def test_a_pass_that_hangs_is_seen_to_grow_old(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask(R1, "abc"))  # and the engine holds the pass

    first = await link.status(lambda status: status.step_age is not None)
    assert first.step_age is not None
    age = first.step_age
    await link.status(lambda status: status.step_age is not None and status.step_age > age)


async def test_an_agent_whose_model_hangs_ends_at_once_and_says_so(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_watch, "FLOOR", 0.0)  # and passes of this engine take no time
    link = await balancer.link()
    await link.ready()
    assert running.agent.is_healthy
    assert running.agent.serves
    await link.send(ask(R1, "a" * 20))
    engine.allow(3)

    last = await link.status(lambda status: status.draining)

    assert last.step_age is not None
    assert last.step_limit is not None
    assert last.step_age > last.step_limit
    with pytest.raises(StalledError, match="no progress"):
        await running.ended()
    assert not running.agent.is_healthy
    await link.socket.wait_closed()


async def test_a_model_that_is_slow_but_gets_on_is_left_alone(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_watch, "FLOOR", 0.0)
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1, "a" * 20))
    engine.allow(3)

    for _ in range(4):  # one a second
        engine.progress += 1
        await link.status(lambda status: status.step_age is not None)

    assert running.agent.is_healthy


async def test_a_request_is_answered_token_by_token(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask(R1, "hé"))
    engine.open()

    text, end = await link.outcome(R1)
    assert text == "hé"
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP
    await link.status(lambda status: status.slots_processing == 0)


async def test_a_request_beyond_the_slots_is_refused_at_once(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask(R1), ask(R2), ask(R3))

    assert await link.event() == Busy(R3)


async def test_a_request_before_the_model_is_loaded_is_refused(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()

    await link.send(ask(R1))

    assert await link.event() == Busy(R1)


async def test_texts_are_tokenized_while_every_slot_is_taken(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1), ask(R2))
    await link.send(Detokenize(R3, (TokenId(97),)))

    assert await link.event() == Detokenized(R3, "a")


async def test_what_cannot_be_tokenized_is_its_senders_error(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    wrong = Detokenize(R1, (TokenId(1000),))
    await link.send(wrong)
    too_early = await link.event()
    await link.ready()
    await link.send(wrong)
    refused = await link.event()

    assert isinstance(too_early, Failed)
    assert too_early.code is ErrorCode.NO_AGENTS
    assert isinstance(refused, Failed)
    assert refused.code is ErrorCode.INVALID_PROMPT


async def test_a_prompt_that_can_never_fit_is_refused_and_frees_its_slot(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask(R1, "a" * 32))

    event = await link.event()
    assert isinstance(event, Failed)
    assert event.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    await link.status(lambda status: status.slots_processing == 0)


async def test_a_cancelled_request_ends_with_its_usage(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1, "abcdef"))
    engine.allow(1)
    assert isinstance(await link.event(), TokenGenerated)

    await link.send(Cancel(R1), Cancel(RequestId("unknown")), ask(R2, "far too long" * 9))
    ends: dict[RequestId, Event] = {}
    while R2 not in ends:  # its refusal shows that the cancel before it has been read
        ends |= await link.ends()
    engine.open()
    while R1 not in ends:
        ends |= await link.ends()

    end = ends[R1]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.CANCELLED
    assert end.usage.content_tokens <= 2  # a pass may have been under way


async def test_a_cancel_right_behind_its_request_ends_it_too(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask(R1), Cancel(R1))

    event = await link.event()
    assert isinstance(event, Finished)
    assert event.reason is FinishReason.CANCELLED
    await link.status(lambda status: status.slots_processing == 0)


async def test_a_lost_link_cancels_what_came_over_it_and_is_made_again(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    first = await balancer.link()
    await first.ready()
    await first.send(ask(R1, "a long one indeed"), ask(R2, "a long one indeed"))
    begun: set[RequestId] = set()
    while begun != {R1, R2}:
        engine.allow(1)
        begun |= await first.step()

    first.socket.transport.abort()
    second = await balancer.link()
    engine.allow(1)  # the pass that is under way

    # Nothing of the old requests comes over the new link, and their slots are free again.
    await second.silent_until(lambda status: status.slots_processing == 0)
    engine.open()
    await second.send(ask(R1, "xy"))
    assert (await second.outcome(R1))[0] == "xy"


async def test_a_draining_agent_finishes_what_runs_and_takes_nothing_new(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.begin(ask(R1, "abc"))

    draining = asyncio.create_task(running.agent.drain(timeout=10))
    assert (await link.status(lambda status: status.draining)).leaving
    await link.send(ask(R2))
    assert await link.event() == Busy(R2)
    engine.open()

    assert (await link.outcome(R1))[0] == "abc"
    await draining
    await running.ended()
    await link.socket.wait_closed()
    assert link.socket.close_code == 1000


async def test_an_agent_that_an_operator_drains_stays_and_takes_nothing_new(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.begin(ask(R1, "abc"))

    await link.send(Drain(), Drain())
    status = await link.status(lambda status: status.draining)
    assert (status.held, status.leaving, status.slots_total) == (True, False, 2)
    await link.send(ask(R2))
    assert await link.event() == Busy(R2)
    engine.open()
    assert (await link.outcome(R1))[0] == "abc"

    await link.send(Undrain())
    await link.status(lambda status: not status.draining and not status.held)
    await link.send(ask(R3, "xyz"))
    assert (await link.outcome(R3))[0] == "xyz"


async def test_what_an_operator_drained_stays_so_for_every_balancer_and_link(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.send(Drain())
    await link.status(lambda status: status.held)

    await link.socket.close()
    again = await balancer.link()

    assert (await again.status(lambda status: True)).held


async def test_operators_are_told_what_the_scheduler_decides(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    engine.open()
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1, "abc"))

    while not isinstance(frame := await link.frame(), Noted):
        pass

    assert (frame.request_id, frame.note, frame.tokens) == (R1, Note.ADMITTED, 3)


async def test_draining_does_not_wait_for_ever(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.begin(ask(R1))

    await running.agent.drain(timeout=0.01)

    engine.open()
    await running.ended()


async def test_what_runs_past_the_drain_is_given_back_to_go_on_elsewhere(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.begin(ask(R1, "abc"))

    draining = asyncio.create_task(running.agent.drain(timeout=0))
    await link.status(lambda status: status.leaving)
    engine.open()

    text, end = await link.outcome(R1)
    assert "abc".startswith(text)
    assert end == Busy(R1)
    await draining
    await running.ended()


async def test_an_answer_that_another_agent_began_goes_on(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    told = tuple(TokenId(byte) for byte in "hé".encode()[:2])  # half a character is held back

    await link.send(replace(ask(R1, "héll"), resumed=told))
    engine.open()

    text, end = await link.outcome(R1)
    assert text == "éll"
    assert end == Finished(R1, FinishReason.STOP, Usage(5, 0, content_tokens=5))


async def test_a_request_that_is_sent_again_is_not_begun_again(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask(R1, "abc"), ask(R1, "abc"))
    engine.open()

    assert (await link.outcome(R1))[0] == "abc"
    await link.send(ask(R2, "x"))
    assert (await link.outcome(R2))[0] == "x"


async def test_agents_of_one_model_and_template_can_go_on_with_each_others_answers(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()

    assert (await link.status(lambda status: True)).fingerprint == ""
    await link.ready()
    await link.send(wanted(chat_template="{{ messages[0].content }}", number=2))
    other = (await link.status(lambda status: status.applied == 2)).fingerprint
    await link.send(wanted(number=3))
    assert (await link.status(lambda status: status.applied == 3)).fingerprint not in (other, "")


async def test_texts_that_nobody_waits_for_are_not_tokenized(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    """Else all that comes later would wait behind what others have left."""
    engine.vocabulary = vocabulary = HeldVocabulary()
    link = await balancer.link()
    await link.ready()
    try:
        names = [RequestId(f"t{n}") for n in range(20)]
        await link.send(*map(to_tokenize, names))
        await asyncio.to_thread(vocabulary.is_used.wait, 10)
        await link.send(*map(Cancel, names))
        for name in names:
            assert await link.event() == Finished(name, FinishReason.CANCELLED, Usage())
        await link.send(to_tokenize(R1))
    finally:
        vocabulary.may_go_on.set()

    event = await link.event()
    assert isinstance(event, Tokenized)
    assert event.request_id == R1
    assert len(vocabulary.texts) <= 2 + 1, "more than what the threads had begun"


async def test_a_balancer_that_refuses_ends_the_agent(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()

    await link.socket.close(REFUSED, "this balancer speaks protocol 9")

    with pytest.raises(LinkRefusedError, match="protocol 9"):
        await running.ended()


async def test_an_agent_that_is_held_for_dead_ends(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.frame()

    await link.socket.close(GIVEN_UP, "it says nothing")

    with pytest.raises(GivenUpError, match="it says nothing"):
        await running.ended()


async def test_an_unreadable_frame_makes_a_new_link(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()

    await link.socket.send(b"\xc1")

    await link.socket.wait_closed()
    assert link.socket.close_code == 1003
    await (await balancer.link()).ready()


async def test_an_agent_waits_for_a_balancer_that_is_not_there_yet(models: PlayedModels) -> None:
    balancer = PlayedBalancer()
    url = await balancer.start()
    await balancer.stop()
    running = RunningAgent(url, models=models)
    port = int(url.rpartition(":")[2])

    async with serve(balancer._serve, "127.0.0.1", port):  # pyright: ignore[reportPrivateUsage]
        link = await balancer.link()
        await link.ready()
        running.agent.stop()
        await running.ended()
