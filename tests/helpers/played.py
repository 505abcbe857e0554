"""Parts that a test plays itself, and questions that several tests ask."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

from answers import content
from exposition import total

from balancer.balancer import Balancer
from balancer.exchange import Exchange
from balancer.terms import ANY, Terms
from common.ids import AgentId, RequestId, TokenId
from common.messages import (
    PROTOCOL,
    Cancel,
    Described,
    Embed,
    Embedded,
    Event,
    Finished,
    FinishReason,
    Generate,
    Join,
    RawPrompt,
    SetState,
    Status,
    Step,
    Swap,
    ToAgent,
    TokenGenerated,
    Usage,
    decode_to_agent,
    decode_to_balancer,
    encode,
)
from common.models import AgentDesiredState, Application, Phase


class PlayedAgent:
    """An agent whose part the test plays: it reads frames and says what happened."""

    def __init__(
        self,
        balancer: Balancer,
        name: str | None = "played",
        *,
        slots: int = 1,
        labels: tuple[str, ...] = (),
        fleet: str | None = None,
        **more: Any,
    ) -> None:
        """``more``: other fields of its first status."""
        self.agent_id = AgentId(f"id-of-{name}")
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._balancer = balancer
        self.states: list[AgentDesiredState] = []
        """What it was told to run, the newest last."""
        self.dropped: list[str] = []
        """Why its link was ended."""
        self.turns: list[int] = []
        """To change its model."""
        self._version = 0
        join = Join(
            protocol=PROTOCOL,
            agent_id=self.agent_id,
            name=name,
            status=self._status(slots=slots, **more),
            labels=labels,
            fleet=fleet,
        )
        balancer.join(join, self._take, self.dropped.append)

    def _take(self, data: bytes) -> None:
        match decode_to_agent(data):
            case SetState(state=state):
                self.states.append(state)
            case Swap(turn):
                self.turns.append(turn)
            case _:
                self.frames.put_nowait(data)

    def _status(self, *, slots: int, **more: Any) -> Status:
        self._version += 1
        told: dict[str, Any] = {
            "slots_processing": 0,
            "model_path": "/models/played.gguf",
            "model_names": ("played",),
            "application": Application.APPLIED if slots else Application.FRESH,
            "phase": Phase.READY if slots else Phase.LOAD,
        }
        return Status(
            version=self._version,
            slots_desired=slots,
            slots_total=slots,
            **{**told, **more},
        )

    def report(self, *, slots: int, **more: Any) -> None:
        """``more``: other fields of the status."""
        self._balancer.report(self.agent_id, self._status(slots=slots, **more))

    def describe(self, description: Described) -> None:
        self._balancer.described(self.agent_id, description)

    def say(self, *events: Event) -> None:
        """As they travel: encoded and read again."""
        step = decode_to_balancer(encode(Step(events)))
        assert isinstance(step, Step)
        self._balancer.happened(self.agent_id, step.events)

    def say_token(self, request_id: RequestId, text: str) -> None:
        self.say(TokenGenerated(request_id, TokenId(1), content(text)))

    def finish(self, request_id: RequestId, reason: FinishReason = FinishReason.STOP) -> None:
        self.say(Finished(request_id, reason, Usage(5, 0, 2)))

    def leave(self) -> None:
        self._balancer.leave(self.agent_id, "it was lost")

    async def asked(self) -> Generate:
        """The next frame, which must be a request."""
        frame = await self.next_frame()
        assert isinstance(frame, Generate)
        return frame

    async def asked_to_embed(self) -> Embed:
        """The next frame, which must be documents."""
        frame = await self.next_frame()
        assert isinstance(frame, Embed)
        return frame

    def say_vector(self, request_id: RequestId, document_id: str, *vector: float) -> None:
        values = struct.pack(f"<{len(vector)}f", *vector)
        self.say(Embedded(request_id, document_id, len(vector), values))

    async def cancelled(self) -> RequestId:
        """The next frame, which must be a cancel."""
        frame = await self.next_frame()
        assert isinstance(frame, Cancel)
        return frame.request_id

    async def next_frame(self) -> ToAgent:
        async with asyncio.timeout(10):
            return decode_to_agent(await self.frames.get())


def want(balancer: Balancer, **changes: Any) -> None:
    """Change the desired state; ``changes`` may also name inference parameters."""
    stored = balancer.stored
    state = stored.balancer_desired_state
    known = type(state.inference_parameters).model_fields
    parameters = state.inference_parameters.model_copy(
        update={key: value for key, value in changes.items() if key in known}
    )
    rest = {key: value for key, value in changes.items() if key not in known}
    state = state.model_copy(update={**rest, "inference_parameters": parameters})
    balancer.want(stored.model_copy(update={"balancer_desired_state": state}))


class Play(Protocol):
    def __call__(
        self,
        name: str | None = "played",
        *,
        slots: int = 1,
        labels: tuple[str, ...] = (),
        fleet: str | None = None,
        **more: Any,
    ) -> PlayedAgent: ...


def ask(balancer: Balancer, request_id: RequestId, terms: Terms = ANY) -> Exchange:
    """Some request, submitted as the routes do it."""
    frame = Generate(request_id=request_id, prompt=RawPrompt("Hi"), max_tokens=5)
    return balancer.submit(request_id, encode(frame), terms)


class Until(Protocol):
    async def __call__(self, condition: Callable[[], bool], /) -> None: ...


def metric(balancer: Balancer, series: str) -> float:
    """The sum of all series that have these labels, such as ``headrace_requests_total{outcome="stop"}``."""
    return total(balancer.metrics.text().decode(), series)
