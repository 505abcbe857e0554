"""A balancer that says anything, many times and in any order: the agent answers what it took on once,
frees its slots, and goes on.

``HEADRACE_EXAMPLES`` sets how many conversations are held.
"""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from bodies import PATIENT
from engines import HeldEngine
from frames import to_agent
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from websockets.asyncio.server import ServerConnection, serve

from agent.engine import Engine
from agent.model_files import ModelFileError
from agent.service import Agent
from agent.swap import ModelSwap, Setup
from common.ids import RequestId, TokenId
from common.messages import (
    Busy,
    Cancel,
    Detokenize,
    Detokenized,
    Document,
    Drain,
    Embed,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Join,
    LastEvent,
    Pooling,
    RawPrompt,
    SetState,
    Status,
    Step,
    Swap,
    ToAgent,
    Tokenize,
    Tokenized,
    Undrain,
    decode_to_balancer,
    encode,
)
from common.models import (
    AgentDesiredState,
    AgentIssue,
    Download,
    EngineChoices,
    HuggingFaceModel,
    IssueKind,
    LocalModel,
    UrlModel,
)

SLOTS = 2
ECHO = LocalModel("/models/echo.gguf")
WANTED = AgentDesiredState(model=ECHO)
NEWEST = 2**40
"""No balancer names a greater number before the end."""
MARK, LAST = RequestId("mark"), RequestId("last")
REQUESTS = [RequestId(f"r{n}") for n in range(4)]

Asking: TypeAlias = Generate | Embed | Tokenize | Detokenize
ENDS: dict[type[Asking], tuple[type[LastEvent], ...]] = {
    Generate: (Finished, Failed, Busy),
    Embed: (Finished, Failed, Busy),
    Tokenize: (Tokenized, Finished, Failed),
    Detokenize: (Detokenized, Finished, Failed),
}

ids = st.sampled_from(REQUESTS)


def _generate(request_id: RequestId, text: str, most: int) -> Generate:
    return Generate(request_id=request_id, prompt=RawPrompt(text), max_tokens=most)


def _embed(request_id: RequestId, texts: list[str]) -> Embed:
    documents = tuple(Document(str(n), text) for n, text in enumerate(texts))
    return Embed(request_id=request_id, documents=documents, pooling=Pooling.MEAN)


def _detokenize(request_id: RequestId) -> Detokenize:
    return Detokenize(request_id, (TokenId(97),))


def _older(frame: ToAgent) -> ToAgent:
    """So that there can be a wish that is newer than all of them."""
    return replace(frame, number=frame.number % NEWEST) if isinstance(frame, SetState) else frame


def _about(frame: ToAgent, request_id: RequestId) -> ToAgent:
    match frame:
        case SetState() | Swap() | Drain() | Undrain():
            return frame
        case _:
            return replace(frame, request_id=request_id)


plausible: st.SearchStrategy[ToAgent] = st.one_of(
    st.builds(_generate, ids, st.text("ab", max_size=40), st.integers(-1, 40)),
    st.builds(_embed, ids, st.lists(st.text("ab", max_size=9), max_size=3)),
    st.builds(_detokenize, ids),
    st.builds(Cancel, ids),
    st.builds(Swap, st.integers(0, 4)),
    st.just(Drain()),
    st.just(Undrain()),
    st.just(SetState(1, WANTED)),
)
anything = to_agent.map(_older)
absurd: st.SearchStrategy[ToAgent] = st.builds(_about, anything, ids)
conversations = st.lists(st.one_of(plausible, plausible, absurd, anything), max_size=25)


class EchoModels:
    """Only one path holds a model, which computes nothing until it is told to."""

    def __init__(self) -> None:
        self._engines: list[HeldEngine] = []
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        for engine in self._engines:
            engine.open()

    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        /,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> str:
        if reference != ECHO:
            issue = AgentIssue(IssueKind.MODEL_FILE_DOES_NOT_EXIST, "somewhere", "it is not here")
            raise ModelFileError(issue, is_final=True)
        return ECHO.path

    def check(self, setup: Setup, /) -> None:
        pass

    def load(self, setup: Setup, warms_up: Callable[[], None], /) -> Engine:
        engine = HeldEngine(slots=SLOTS, context=64)
        self._engines.append(engine)
        if self._is_open:
            engine.open()
        return engine


class Heard:
    """All that the agent says, over whichever link."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self.status: Status | None = None
        self.events: list[Event] = []
        self._news = asyncio.Event()

    async def serve(self, socket: ServerConnection) -> None:
        self.links.put_nowait(socket)
        async for data in socket:
            match decode_to_balancer(data):
                case Join(status=status) | (Status() as status):
                    self.status = status
                case Step(events):
                    self.events += events
                case _:
                    pass
            self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def is_over(self, request_id: RequestId) -> bool:
        return any(isinstance(e, LastEvent) for e in self.events if e.request_id == request_id)


def asked(frames: Sequence[ToAgent]) -> Counter[RequestId]:
    """How often each request is asked for."""
    return Counter(frame.request_id for frame in frames if isinstance(frame, Asking))


async def hold(frames: Sequence[ToAgent], *, until_all_is_said: bool) -> list[Event]:
    """Say it all; then have it serve, to the end. Returns the events of what was said.

    ``until_all_is_said``: the model computes nothing before.
    """
    heard = Heard()
    models = EchoModels()
    if not until_all_is_said:
        models.open()
    async with serve(heard.serve, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        agent = Agent(
            balancers=[f"ws://127.0.0.1:{port}"],
            name="one",
            models=models,
            swap=ModelSwap(own=EngineChoices(slots=SLOTS), pinned=None),
        )
        task = asyncio.create_task(agent.run())
        try:
            link = await heard.links.get()
            await link.send(encode(SetState(1, WANTED)))
            await heard.until(lambda: heard.status is not None and heard.status.slots_total > 0)
            for frame in frames:
                await link.send(encode(frame))
            await link.send(encode(Detokenize(MARK, ())))
            await heard.until(lambda: heard.is_over(MARK))
            models.open()
            await heard.until(lambda: all(map(heard.is_over, asked(frames))))
            events = await quiet(heard, link)
        finally:
            models.open()
            agent.stop()
            await asyncio.wait({task})
        assert task.exception() is None
    return events


async def quiet(heard: Heard, link: ServerConnection) -> list[Event]:
    """Wait until it serves what it should, and nothing runs; one more request shows it."""
    await link.send(encode(SetState(NEWEST, WANTED)))
    await link.send(encode(Undrain()))

    def serves() -> bool:
        status = heard.status
        if status is not None and status.awaits_turn:
            asyncio.ensure_future(link.send(encode(Swap(2**41))))  # noqa: RUF006
        return (
            status is not None
            and status.applied == NEWEST
            and status.slots_processing == 0
            and status.slots_total == SLOTS
        )

    await heard.until(serves)
    before = len(heard.events)
    await link.send(encode(Generate(request_id=LAST, prompt=RawPrompt("ab"), max_tokens=9)))
    await heard.until(lambda: heard.is_over(LAST))
    last = [event for event in heard.events if event.request_id == LAST]
    assert isinstance(last[-1], Finished)
    assert last[-1].reason is FinishReason.STOP
    return heard.events[:before]


@settings(PATIENT, max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "40")))
@given(conversations, st.booleans())
def test_whatever_a_balancer_says_each_request_ends_and_the_agent_goes_on(
    frames: list[ToAgent], until_all_is_said: bool
) -> None:
    events = asyncio.run(hold(frames, until_all_is_said=until_all_is_said))

    said = asked(frames)
    ends = [event for event in events if isinstance(event, LastEvent)]
    counts = Counter(event.request_id for event in ends if event.request_id != MARK)
    assert counts.keys() == said.keys(), "each has its end"
    assert all(counts[each] <= said[each] for each in said), "and one only"
    for request_id in said:
        # What is said again before its end is nothing new.
        first = next(
            each for each in frames if isinstance(each, Asking) and each.request_id == request_id
        )
        end = next(event for event in ends if event.request_id == request_id)
        assert isinstance(end, ENDS[type(first)]), "the end of something else"
