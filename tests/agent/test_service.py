"""The agent as a whole, over a real socket, with the balancer's part played by the test."""

import asyncio
import struct
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, NoReturn

import pytest
from answers import text_of
from engines import HeldEngine, HeldVision, HeldVocabulary
from msgspec.structs import replace
from websockets.asyncio.server import Server, ServerConnection, serve

from agent import step_watch
from agent.engine import Engine
from agent.host import Models
from agent.link import GivenUpError, LinkRefusedError
from agent.model_files import ModelFileError
from agent.service import Agent, StalledError
from agent.swap import ModelSwap, Setup
from common.errors import ErrorCode, ModelError, ProjectorError, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    GIVEN_UP,
    IMAGE_MARKER,
    PROTOCOL,
    REFUSED,
    Busy,
    Cancel,
    ChatMessage,
    Conversation,
    Described,
    Detokenize,
    Detokenized,
    Document,
    DocumentTooLong,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Join,
    Pooling,
    RawPrompt,
    SetState,
    Status,
    Step,
    Swap,
    ToAgent,
    ToBalancer,
    TokenGenerated,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Usage,
    decode_to_balancer,
    encode,
)
from common.models import (
    AgentDesiredState,
    AgentIssue,
    Application,
    Download,
    EngineChoices,
    HuggingFaceModel,
    IssueKind,
    LocalModel,
    ModelReference,
    NoModel,
    UrlModel,
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
            if isinstance(status, Status) and condition(status):
                return

    async def description(self) -> Described:
        while True:
            frame = await self.frame()
            if isinstance(frame, Described):
                return frame

    async def ready(self) -> None:
        """Have it load the model that the tests know."""
        await self.send(wanted())
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
                text += text_of(event)


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


HELD = LocalModel("/models/held.gguf")
OTHER = LocalModel("/models/other.gguf")


def wanted(model: ModelReference = HELD, *, number: int = 1, **more: Any) -> SetState:
    return SetState(number, AgentDesiredState(model=model, **more))


class PlayedModels:
    """Where the test says what each path holds: an engine, or why there is none."""

    def __init__(self, **engines: Engine | Exception) -> None:
        self.engines: dict[str, Engine | Exception] = dict(engines)
        self.loads: list[str] = []
        self.checks = False
        """True: what cannot be loaded is found out beforehand."""
        self.fetches = False
        """True: what is looked for comes slowly, and never."""

    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        /,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> str:
        assert isinstance(reference, LocalModel)
        if self.fetches:
            progress(Download("slow.gguf", 1, 2))
            stop.wait()
            progress(Download("slow.gguf", 2, 2))
        if reference.path not in self.engines:
            issue = AgentIssue(
                IssueKind.MODEL_FILE_DOES_NOT_EXIST, reference.path, "it is not here"
            )
            raise ModelFileError(issue, is_final=True)
        return reference.path

    def check(self, setup: Setup, /) -> None:
        engine = self.engines[setup.model_path]
        if self.checks and isinstance(engine, Exception):
            raise engine

    def load(self, setup: Setup, /) -> Engine:
        self.loads.append(setup.model_path)
        engine = self.engines[setup.model_path]
        if isinstance(engine, Exception):
            raise engine
        return engine


class RunningAgent:
    def __init__(self, url: str, models: Models, *, longest_drain: float = 100.0) -> None:
        self.agent = Agent(
            balancer=url,
            name="one",
            labels=("gpu",),
            models=models,
            swap=ModelSwap(own=EngineChoices(slots=2), pinned=None, longest_drain=longest_drain),
        )
        self.task = asyncio.create_task(self.agent.run())

    async def ended(self) -> None:
        """Raises what ``run`` raises."""
        async with asyncio.timeout(10):
            await self.task


@pytest.fixture
def models(engine: HeldEngine) -> PlayedModels:
    return PlayedModels(**{HELD.path: engine})


@pytest.fixture
async def running(
    balancer: PlayedBalancer, engine: HeldEngine, models: PlayedModels
) -> AsyncGenerator[RunningAgent]:
    running = RunningAgent(await balancer.start(), models)
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
    await link.send(ask(R1, "abc"))
    await link.status(lambda status: status.slots_processing == 1)

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


async def test_a_model_without_a_template_is_an_issue(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    engine.chat_template = None
    link = await balancer.link()

    await link.send(wanted())
    status = await link.status(lambda status: status.slots_total > 0)
    assert [issue.kind for issue in status.issues] == [IssueKind.UNABLE_TO_FIND_CHAT_TEMPLATE]

    await link.send(wanted(chat_template="{{ messages }}"))
    status = await link.status(lambda status: status.uses_chat_template_override)
    assert status.issues == ()

    await link.send(wanted(embeddings_only=True))
    status = await link.status(lambda status: not status.uses_chat_template_override)
    assert status.issues == ()


async def test_a_template_that_does_not_compile_leaves_the_old_one_in_use(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.send(wanted(chat_template="{{ messages }}"))
    await link.status(lambda status: status.uses_chat_template_override)

    await link.send(wanted(chat_template="{% for"))
    status = await link.status(lambda status: status.application is Application.STUCK)

    (issue,) = status.issues
    assert issue.kind is IssueKind.CHAT_TEMPLATE_DOES_NOT_COMPILE
    assert issue.template == "{% for"
    assert (status.slots_total, status.uses_chat_template_override) == (2, True)


async def test_what_is_loaded_is_described_over_every_link(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    first = await balancer.link()
    assert await first.description() == Described(None, None)
    await first.send(wanted(chat_template="{{ messages }}"))
    described = Described({"general.architecture": "echo"}, "{{ messages }}", 32)
    assert await first.description() == described

    first.socket.transport.abort()

    assert await (await balancer.link()).description() == described


async def test_what_runs_past_the_drain_is_given_back_to_go_on_elsewhere(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1, "abc"))
    await link.status(lambda status: status.slots_processing == 1)

    draining = asyncio.create_task(running.agent.drain(timeout=0))
    await link.status(lambda status: status.leaving)
    engine.open()

    text, end = await link.outcome(R1)
    assert "abc".startswith(text)
    assert end == Busy(R1)
    await draining
    await running.ended()


async def test_a_swap_waits_for_what_runs_only_so_long_and_then_gives_it_back(
    balancer: PlayedBalancer, engine: HeldEngine, models: PlayedModels
) -> None:
    running = RunningAgent(await balancer.start(), models, longest_drain=0)
    other = HeldEngine()
    models.engines[OTHER.path] = other
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1, "abc"))
    await link.status(lambda status: status.slots_processing == 1)

    await link.send(wanted(OTHER, number=2))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))
    await link.status(lambda status: status.swapping)
    engine.open()

    assert (await link.outcome(R1))[1] == Busy(R1)
    assert (await link.status(lambda status: status.turn_taken == 1)).model_path == OTHER.path
    running.agent.stop()
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


async def test_a_model_is_swapped_in_turn_when_nothing_runs(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    models: PlayedModels,
) -> None:
    other = HeldEngine(slots=3, context=64)
    other.open()
    models.engines[OTHER.path] = other
    link = await balancer.link()
    await link.ready()
    await link.send(ask(R1, "abc"))
    await link.status(lambda status: status.slots_processing == 1)

    await link.send(wanted(OTHER, number=2))
    status = await link.status(lambda status: status.awaits_turn)
    assert (status.draining, status.model_path, status.applied) == (False, HELD.path, 0)
    await link.send(Swap(7), ask(R2))
    assert await link.event() == Busy(R2)
    status = await link.status(lambda status: status.swapping)
    assert status.draining
    engine.open()
    assert (await link.outcome(R1))[0] == "abc"
    status = await link.status(lambda status: status.turn_taken == 7)

    assert (status.slots_total, status.draining, status.swapping) == (3, False, False)
    assert (status.model_path, status.application) == (OTHER.path, Application.APPLIED)
    assert status.applied == 2
    await link.send(ask(R3, "xyz"))
    assert (await link.outcome(R3))[0] == "xyz"
    assert models.loads == [HELD.path, OTHER.path]


async def test_a_model_that_cannot_be_loaded_leaves_the_old_one_serving_and_says_why(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    models: PlayedModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.swap.PAUSE_IN_TURN", 0.0)
    models.engines[OTHER.path] = ModelError("no memory for it")
    engine.open()
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(OTHER))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))
    status = await link.status(lambda status: status.turn_taken == 1)

    (issue,) = status.issues
    assert (issue.kind, issue.detail) == (IssueKind.MODEL_CANNOT_BE_LOADED, "no memory for it")
    assert (status.application, status.slots_total) == (Application.STUCK, 2)
    assert models.loads == [HELD.path, OTHER.path, OTHER.path, HELD.path]
    await link.send(ask(R1, "abc"))
    assert (await link.outcome(R1))[0] == "abc"


async def test_whatever_a_load_ends_with_leaves_the_old_model_serving(
    balancer: PlayedBalancer,
    running: RunningAgent,
    models: PlayedModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.swap.PAUSE_IN_TURN", 0.0)
    models.engines[OTHER.path] = UnicodeError("not what anybody expected")
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(OTHER))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))

    status = await link.status(lambda status: status.turn_taken == 1)
    assert (status.application, status.slots_total) == (Application.STUCK, 2)


async def test_whatever_a_search_ends_with_leaves_the_old_model_serving(
    balancer: PlayedBalancer, running: RunningAgent, models: PlayedModels
) -> None:
    models.engines[OTHER.path] = UnicodeError("not what anybody expected")
    models.checks = True
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(OTHER))

    status = await link.status(lambda status: status.application is Application.RETRYING)
    assert [issue.detail for issue in status.issues] == ["not what anybody expected"]
    assert status.slots_total == 2


async def test_a_file_that_is_missing_is_told_while_the_old_model_serves(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(LocalModel("/models/nope.gguf")))

    status = await link.status(lambda status: status.application is Application.STUCK)
    assert [issue.kind for issue in status.issues] == [IssueKind.MODEL_FILE_DOES_NOT_EXIST]
    assert status.slots_total == 2


async def test_a_newer_wish_ends_a_download_and_hides_it(
    balancer: PlayedBalancer, running: RunningAgent, models: PlayedModels
) -> None:
    models.fetches = True
    link = await balancer.link()
    await link.send(wanted(LocalModel("/models/slow.gguf")))
    status = await link.status(lambda status: status.download is not None)
    assert status.download == Download("slow.gguf", 1, 2)

    models.fetches = False
    await link.send(wanted())

    status = await link.status(lambda status: status.slots_total > 0)
    assert (status.download, status.issues) == (None, ())


async def test_no_model_may_be_wanted(balancer: PlayedBalancer, running: RunningAgent) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(NoModel()))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))

    status = await link.status(lambda status: status.turn_taken == 1)
    assert (status.slots_total, status.model_path) == (0, None)
    assert status.application is Application.APPLIED


@pytest.mark.parametrize(
    "frame",
    [
        ask(R1),
        Tokenize(request_id=R1, prompt=RawPrompt("ab"), adds_beginning=False),
    ],
)
async def test_a_swap_waits_for_prompts_that_are_still_prepared_for_nobody(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    models: PlayedModels,
    frame: Generate | Tokenize,
) -> None:
    """Their threads use the model's vocabulary, which must not be freed under them."""
    vocabulary = HeldVocabulary()
    engine.vocabulary = vocabulary
    models.engines[OTHER.path] = HeldEngine(slots=2)
    link = await balancer.link()
    await link.ready()
    await link.send(frame)
    await asyncio.to_thread(vocabulary.is_used.wait, 10)

    await link.send(Cancel(R1), wanted(OTHER))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))
    await link.status(lambda status: status.swapping)
    assert models.loads == [HELD.path]

    vocabulary.may_go_on.set()
    await link.status(lambda status: status.turn_taken == 1)
    assert models.loads == [HELD.path, OTHER.path]


async def test_texts_that_nobody_waits_for_are_not_tokenized(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    """Else all that comes later would wait behind what others have left."""
    vocabulary = HeldVocabulary()
    engine.vocabulary = vocabulary
    link = await balancer.link()
    await link.ready()
    texts = [
        Tokenize(request_id=RequestId(f"t{n}"), prompt=RawPrompt(str(n)), adds_beginning=False)
        for n in range(20)
    ]
    await link.send(*texts)
    await link.send(*(Cancel(text.request_id) for text in texts))
    await link.send(Tokenize(request_id=R1, prompt=RawPrompt("last"), adds_beginning=False))

    await asyncio.to_thread(vocabulary.is_used.wait, 10)
    await link.send(Generate(request_id=R2, prompt=TokenPrompt((TokenId(1),)), max_tokens=1))
    await link.status(lambda status: status.slots_processing == 1)  # it has read all that
    vocabulary.may_go_on.set()
    event = await link.event()

    assert isinstance(event, Tokenized)
    assert event.request_id == R1
    assert len(vocabulary.texts) <= 2 + 1, "more than what the threads had begun"


# Images

PIXEL = (  # a BMP of one white pixel
    b"BM" + struct.pack("<IHHI", 58, 0, 0, 54)
    + struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 24, 0, 4, 0, 0, 0, 0)
    + b"\xff\xff\xff\x00"
)  # fmt: skip


def ask_about_images(request_id: RequestId, count: int = 1, data: bytes = PIXEL) -> Generate:
    message = ChatMessage("user", "a" + IMAGE_MARKER * count + "b")
    conversation = Conversation((message,), images=(data,) * count)
    return Generate(request_id=request_id, prompt=conversation, max_tokens=100)


@pytest.fixture
def vision(engine: HeldEngine) -> Generator[HeldVision]:
    engine.vision = vision = HeldVision()
    engine.open()
    yield vision
    vision.may_go_on.set()


async def test_a_request_with_images_is_answered(
    balancer: PlayedBalancer, running: RunningAgent, vision: HeldVision
) -> None:
    link = await balancer.link()
    await link.ready()
    vision.may_go_on.set()

    await link.send(ask_about_images(R1, 2))

    usage = Usage(10, 0, 2, input_image_tokens=8)
    assert await link.outcome(R1) == ("ab", Finished(R1, FinishReason.STOP, usage))


async def test_texts_do_not_wait_for_images(
    balancer: PlayedBalancer, running: RunningAgent, models: PlayedModels, vision: HeldVision
) -> None:
    models.engines[HELD.path] = engine = HeldEngine(slots=3)
    engine.vision = vision
    engine.open()
    link = await balancer.link()
    await link.ready()
    await link.send(ask_about_images(R1), ask_about_images(R2))
    await asyncio.to_thread(vision.is_used.wait, 10)

    await link.send(ask(R3))

    async with asyncio.timeout(10):
        assert (await link.outcome(R3))[0] == "ab"


async def test_a_request_cancelled_while_its_image_is_encoded_ends_at_once_and_spares_the_rest(
    balancer: PlayedBalancer, running: RunningAgent, vision: HeldVision
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.send(ask_about_images(R1, 3))
    await asyncio.to_thread(vision.is_used.wait, 10)

    await link.send(Cancel(R1))

    assert await link.event() == Finished(R1, FinishReason.CANCELLED, Usage())
    vision.may_go_on.set()
    await link.send(ask_about_images(R2))
    assert (await link.outcome(R2))[0] == "ab"
    assert vision.encoded == 2, "one of the first request, one of the second"


async def test_an_image_that_cannot_be_read_is_its_requests_error(
    balancer: PlayedBalancer, running: RunningAgent, vision: HeldVision
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask_about_images(R1, data=b"no image"))

    failed = await link.event()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.figures) == (ErrorCode.IMAGE_DECODING_FAILED, {})


async def test_an_error_is_told_with_its_figures(
    balancer: PlayedBalancer,
    running: RunningAgent,
    vision: HeldVision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {"image_tokens": 4, "n_batch": 3}

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RequestError(ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE, "4 are more than 3", figures)

    monkeypatch.setattr(vision, "read", refuse)
    link = await balancer.link()
    await link.ready()

    await link.send(ask_about_images(R1))

    expected = Failed(R1, ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE, "4 are more than 3", figures)
    assert await link.event() == expected


async def test_a_projector_that_cannot_be_loaded_leaves_the_old_model_serving_and_says_why(
    balancer: PlayedBalancer,
    running: RunningAgent,
    models: PlayedModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.swap.PAUSE_IN_TURN", 0.0)
    link = await balancer.link()
    await link.ready()
    models.engines[OTHER.path] = ProjectorError("it is for another model")
    models.engines["/p.gguf"] = ModelError("a projector is no model")

    await link.send(wanted(OTHER, multimodal_projection=LocalModel("/p.gguf")))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))

    status = await link.status(lambda status: status.turn_taken == 1)
    (issue,) = status.issues
    assert issue.kind is IssueKind.MULTIMODAL_PROJECTION_CANNOT_BE_LOADED
    assert (issue.model_path, issue.detail) == ("/p.gguf", "it is for another model")
    assert (status.application, status.slots_total) == (Application.STUCK, 2)
    assert status.model_path == HELD.path


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
    running = RunningAgent(url, models)
    port = int(url.rpartition(":")[2])

    async with serve(balancer._serve, "127.0.0.1", port):  # pyright: ignore[reportPrivateUsage]
        link = await balancer.link()
        await link.ready()
        running.agent.stop()
        await running.ended()
