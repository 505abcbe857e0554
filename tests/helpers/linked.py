"""An agent as a whole, over a real socket, with the balancer's part played by the test."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from answers import text_of
from websockets.asyncio.server import Server, ServerConnection, serve

from agent.engine import Engine
from agent.host import Models
from agent.link import NO_CREDENTIALS, Credentials
from agent.model_files import ModelFileError
from agent.service import Agent
from agent.swap import ModelSwap, Setup
from common.ids import RequestId
from common.messages import (
    Described,
    Event,
    Generate,
    Join,
    RawPrompt,
    SetState,
    Status,
    Step,
    ToAgent,
    ToBalancer,
    TokenGenerated,
    Tokenize,
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
    ModelReference,
    UrlModel,
)

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))


def ask(request_id: RequestId, text: str = "ab") -> Generate:
    return Generate(request_id=request_id, prompt=RawPrompt(text), max_tokens=100)


def to_tokenize(request_id: RequestId, text: str = "ab") -> Tokenize:
    return Tokenize(request_id=request_id, prompt=RawPrompt(text), adds_beginning=False)


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

    async def begin(self, request: Generate) -> None:
        """Ask, and read on until it has the one slot that is taken."""
        await self.send(request)
        await self.status(lambda status: status.slots_processing == 1)

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
            frame = await self.frame()
            if not isinstance(frame, Step):
                continue
            for event in frame.events:
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
        return self.url

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"ws://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, socket: ServerConnection) -> None:
        self._links.put_nowait(PlayedLink(socket))
        await socket.wait_closed()

    @property
    def is_deserted(self) -> bool:
        """No agent has made a link that the test has not seen."""
        return self._links.empty()

    async def link(self) -> PlayedLink:
        """The next link that an agent makes."""
        async with asyncio.timeout(10):
            return await self._links.get()


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

    def load(self, setup: Setup, warms_up: Callable[[], None], /) -> Engine:
        self.loads.append(setup.model_path)
        engine = self.engines[setup.model_path]
        if isinstance(engine, Exception):
            raise engine
        warms_up()
        return engine


class RunningAgent:
    def __init__(
        self,
        *urls: str,
        models: Models,
        longest_drain: float = 100.0,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self.agent = Agent(
            balancers=urls,
            name="one",
            labels=("gpu",),
            models=models,
            swap=ModelSwap(own=EngineChoices(slots=2), pinned=None, longest_drain=longest_drain),
            credentials=credentials,
        )
        self.task = asyncio.create_task(self.agent.run())

    async def ended(self) -> None:
        """Raises what ``run`` raises."""
        async with asyncio.timeout(10):
            await self.task
