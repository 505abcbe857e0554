"""The agent as a whole, over a real socket, with the balancer's part played by the test."""

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable

import pytest
from engines import HeldEngine
from websockets.asyncio.server import Server, ServerConnection, serve

from agent.engine import Engine
from agent.link import LinkRefusedError
from agent.service import Agent
from common.errors import ErrorCode, ModelError
from common.ids import RequestId
from common.messages import (
    PROTOCOL,
    REFUSED,
    Busy,
    Cancel,
    Document,
    DocumentTooLong,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Issue,
    Join,
    Pooling,
    RawPrompt,
    Status,
    Step,
    ToAgent,
    ToBalancer,
    TokenGenerated,
    Usage,
    decode_to_balancer,
    encode,
)

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))


def ask(request_id: RequestId, text: str = "ab") -> Generate:
    return Generate(request_id=request_id, prompt=RawPrompt(text), max_tokens=100)


class PlayedLink:
    """One link, seen from the balancer: the test sends and reads frames."""

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.over = asyncio.Event()

    async def send(self, *frames: ToAgent) -> None:
        for frame in frames:
            await self.socket.send(encode(frame))

    async def frame(self) -> ToBalancer:
        async with asyncio.timeout(10):
            return decode_to_balancer(await self.socket.recv())

    async def status(self, condition: Callable[[Status], bool]) -> Status:
        """Read on until a status for which this is true."""
        while True:
            frame = await self.frame()
            if isinstance(frame, Join):
                frame = frame.status
            if isinstance(frame, Status) and condition(frame):
                return frame

    async def silent_until(self, condition: Callable[[Status], bool]) -> None:
        """Read on until a status for which this is true; nothing else may come before it."""
        while True:
            frame = await self.frame()
            assert not isinstance(frame, Step)
            status = frame.status if isinstance(frame, Join) else frame
            if condition(status):
                return

    async def ready(self) -> None:
        await self.status(lambda status: status.slots_total > 0)

    async def event(self) -> Event:
        """The next step's event; there must be one only."""
        while True:
            frame = await self.frame()
            if isinstance(frame, Step):
                (event,) = frame.events
                return event

    async def step(self) -> set[RequestId]:
        """The requests that took part in the next step."""
        while True:
            frame = await self.frame()
            if isinstance(frame, Step):
                return {event.request_id for event in frame.events}

    async def ends(self) -> dict[RequestId, Event]:
        """The last events in the next step, by request."""
        while True:
            frame = await self.frame()
            if isinstance(frame, Step):
                last = (e for e in frame.events if not isinstance(e, TokenGenerated))
                return {event.request_id: event for event in last}

    async def outcome(self, request_id: RequestId) -> tuple[str, Event]:
        """Read on to the request's last event: its text, and that event."""
        text = ""
        while True:
            event = await self.event()
            if event.request_id == request_id:
                if not isinstance(event, TokenGenerated):
                    return text, event
                text += event.text


class PlayedBalancer:
    def __init__(self) -> None:
        self._links: asyncio.Queue[PlayedLink] = asyncio.Queue()
        self._server: Server | None = None

    async def start(self) -> str:
        self._server = await serve(self._serve, "127.0.0.1", 0)
        return f"ws://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, socket: ServerConnection) -> None:
        self._links.put_nowait(PlayedLink(socket))
        await socket.wait_closed()

    async def link(self) -> PlayedLink:
        """The next link that an agent makes."""
        async with asyncio.timeout(10):
            return await self._links.get()


@pytest.fixture
async def balancer() -> AsyncGenerator[PlayedBalancer]:
    balancer = PlayedBalancer()
    yield balancer
    await balancer.stop()


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine(slots=2, context=32)


class RunningAgent:
    def __init__(self, url: str, load: Callable[[], Engine]) -> None:
        self.agent = Agent(
            balancer=url, name="one", slots=2, model_path="/models/held.gguf", load=load
        )
        self.task = asyncio.create_task(self.agent.run())

    async def ended(self) -> None:
        """Raises what ``run`` raises."""
        async with asyncio.timeout(10):
            await self.task


@pytest.fixture
async def running(balancer: PlayedBalancer, engine: HeldEngine) -> AsyncGenerator[RunningAgent]:
    running = RunningAgent(await balancer.start(), lambda: engine)
    yield running
    engine.open()
    running.agent.stop()
    await asyncio.wait({running.task})


async def test_an_agent_introduces_itself_and_then_offers_its_slots(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()

    join = await link.frame()

    assert isinstance(join, Join)
    assert (join.protocol, join.name) == (PROTOCOL, "one")
    assert join.status.slots_desired == 2
    status = join.status if join.status.slots_total else await link.status(lambda _: True)
    assert (status.slots_total, status.slots_processing) == (2, 0)


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
        Embedded(R2, "one", 2, struct.pack("<2f", 97.5, 1)),
        DocumentTooLong(R2, "long", 513, 512),
        Finished(R2, FinishReason.STOP, Usage(prompt_tokens=2)),
    ]
    await link.status(lambda status: status.slots_processing == 0)


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
    balancer: PlayedBalancer,
) -> None:
    loading = asyncio.Event()
    asyncio_loop = asyncio.get_running_loop()

    def load() -> Engine:
        asyncio.run_coroutine_threadsafe(loading.wait(), asyncio_loop).result()
        return HeldEngine()

    running = RunningAgent(await balancer.start(), load)
    link = await balancer.link()
    await link.send(ask(R1))

    assert await link.event() == Busy(R1)
    loading.set()
    running.agent.stop()
    await running.ended()


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
    await link.send(ask(R1, "abc"))
    await link.status(lambda status: status.slots_processing == 1)

    draining = asyncio.create_task(running.agent.drain(timeout=10))
    await link.status(lambda status: status.draining)
    await link.send(ask(R2))
    assert await link.event() == Busy(R2)
    engine.open()

    assert (await link.outcome(R1))[0] == "abc"
    await draining
    await running.ended()
    await link.socket.wait_closed()
    assert link.socket.close_code == 1000


async def test_draining_does_not_wait_for_ever(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1))
    await link.status(lambda status: status.slots_processing == 1)

    await running.agent.drain(timeout=0.01)

    engine.open()
    await running.ended()


async def test_a_model_that_cannot_be_loaded_ends_the_agent_with_the_reason(
    balancer: PlayedBalancer,
) -> None:
    def load() -> Engine:
        raise ModelError("it is broken")

    running = RunningAgent(await balancer.start(), load)

    with pytest.raises(ModelError, match="it is broken"):
        await running.ended()


async def test_a_model_without_a_template_is_an_issue(
    balancer: PlayedBalancer, engine: HeldEngine
) -> None:
    engine.chat_template = None
    running = RunningAgent(await balancer.start(), lambda: engine)
    link = await balancer.link()

    status = await link.status(lambda status: status.slots_total > 0)
    running.agent.stop()
    await running.ended()

    assert status.issues == (Issue.UNABLE_TO_FIND_CHAT_TEMPLATE,)


async def test_a_balancer_that_refuses_ends_the_agent(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()

    await link.socket.close(REFUSED, "this balancer speaks protocol 9")

    with pytest.raises(LinkRefusedError, match="protocol 9"):
        await running.ended()


async def test_an_unreadable_frame_makes_a_new_link(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()

    await link.socket.send(b"\xc1")

    await link.socket.wait_closed()
    assert link.socket.close_code == 1003
    await (await balancer.link()).ready()


async def test_an_agent_waits_for_a_balancer_that_is_not_there_yet() -> None:
    balancer = PlayedBalancer()
    url = await balancer.start()
    await balancer.stop()
    engine = HeldEngine()
    running = RunningAgent(url, lambda: engine)
    port = int(url.rpartition(":")[2])

    async with serve(balancer._serve, "127.0.0.1", port):  # pyright: ignore[reportPrivateUsage]
        link = await balancer.link()
        await link.ready()
        running.agent.stop()
        await running.ended()
