"""What is bounded, by how much, and how much of it is in use. No I/O here.

Each bound is far above what honest use comes to; whoever is beyond one is told so, and counted under
the bound's name in the metrics. What an operator may change stands in ``Limits``; the other bounds
are constants here.
"""

import enum
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Annotated

from msgspec.structs import replace
from pydantic import Field

from common.errors import ErrorCode, RequestError
from common.messages import MAX_FRAME_BYTES, Generate

LARGEST_BODY = 16 * 2**20
"""Bytes that ``Limits.body_bytes`` may be: what uvicorn takes of a websocket message; and twice that
leaves room in a frame of the agent link.
"""

MOST_KEYS = 50_000
"""Of all objects in a body together."""

UNLIMITED = 2**31 - 1
"""As ``max_tokens``: an answer ends at the context's limit at the latest."""

MOST_CONSULTATIONS = 64
"""At once, of all agents."""

MOST_UNREAD_EVENTS = 1024
"""Events of an answer that one client may leave unread before it is given up."""

MOST_UNREAD_BYTES = 64 * 2**20
"""The same of vectors, of which one event may carry thousands."""

MOST_LINK_FRAMES = 4096
"""Frames that may wait for a slow agent link before it is given up."""


class Limit(enum.StrEnum):
    """What is bounded."""

    # Of one request, message, connection or client
    HEADERS = "headers"
    HEADER_BYTES = "header_bytes"
    BODY_BYTES = "body_bytes"
    BODY_KEYS = "body_keys"
    PROMPT_TOKENS = "prompt_tokens"
    """The context that the desired state says; an agent that has less says so."""
    MAX_TOKENS = "max_tokens"
    DOCUMENTS = "documents"
    FRAME_BYTES = "frame_bytes"
    SOCKET_REQUESTS = "socket_requests"
    UNREAD_EVENTS = "unread_events"
    UNREAD_BYTES = "unread_bytes"
    LINK_FRAMES = "link_frames"
    # Of all together, at one moment
    OPEN_REQUESTS = "open_requests"
    OPEN_BYTES = "open_bytes"
    OPEN_SOCKETS = "open_sockets"
    OBSERVERS = "observers"
    BUFFERED_REQUESTS = "buffered_requests"
    BUFFERED_BYTES = "buffered_bytes"
    CONSULTATIONS = "consultations"
    AGENTS = "agents"


Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Beside the number of requests that may wait, which the buffer is told."""

    headers: Count = 128
    """Of one request; a browser behind two proxies sends 40."""
    header_bytes: Count = 64 * 2**10
    """Of all headers of one request, names and values, with its path."""
    body_bytes: Annotated[int, Field(ge=1, le=LARGEST_BODY)] = 8 * 2**20
    """Of an HTTP body or a websocket message."""
    max_tokens: Count | None = None
    """That one answer may ask for. None: as many as the context holds."""
    documents: Count = 16_384
    """Of one call for embeddings; OpenAI's route takes 2048 at most. Their length all together is
    bounded by that of the body.
    """
    socket_requests: Count = 1024
    """That one websocket may have open at once."""
    open_requests: Count = 4096
    """HTTP requests that are being served at once."""
    open_bytes: Count = 2**30
    """Bytes of their bodies together."""
    open_sockets: Count = 2048
    """Websockets of clients."""
    observers: Count = 256
    """Streams of agents or of the buffer's state: each change of it wakes all of them."""
    buffered_bytes: Count = 256 * 2**20
    """Bytes of the requests that wait for a slot, together."""
    agents: Count = 2048
    """Links of agents."""

    def most(self, limit: Limit) -> int | None:
        """None: as much as there is."""
        return CONSTANTS[limit] if limit in CONSTANTS else getattr(self, limit)


CONSTANTS: Mapping[Limit, int] = {
    Limit.BODY_KEYS: MOST_KEYS,
    Limit.FRAME_BYTES: MAX_FRAME_BYTES,
    Limit.UNREAD_EVENTS: MOST_UNREAD_EVENTS,
    Limit.UNREAD_BYTES: MOST_UNREAD_BYTES,
    Limit.LINK_FRAMES: MOST_LINK_FRAMES,
    Limit.CONSULTATIONS: MOST_CONSULTATIONS,
}

NAMES: Mapping[Limit, str] = {
    Limit.OPEN_REQUESTS: "open requests",
    Limit.OPEN_BYTES: "bytes in the bodies of open requests",
    Limit.OPEN_SOCKETS: "open websockets",
    Limit.OBSERVERS: "open streams of this kind",
    Limit.AGENTS: "agents",
}
"""Of what a ``Tally`` counts, as clients are told."""


class LimitError(RequestError):
    """Beyond a bound."""

    def __init__(
        self, limit: Limit, code: ErrorCode, message: str, *, parameter: str | None = None
    ) -> None:
        """``parameter``: which one of the request is to blame, if it is one."""
        super().__init__(code, message)
        self.limit = str(limit)
        self.parameter = parameter


def limit_answer(frame: Generate, limits: Limits, parameter: str | None = "max_tokens") -> Generate:
    """The same, which asks for no more tokens than one answer may have. Raises ``LimitError`` if its
    client asked for more; one that asked for as many as there can be gets what it may.
    """
    most = limits.max_tokens
    if most is None or frame.max_tokens <= most:
        return frame
    if frame.max_tokens == UNLIMITED:
        return replace(frame, max_tokens=most)
    raise LimitError(
        Limit.MAX_TOKENS,
        ErrorCode.INVALID_REQUEST,
        f"{parameter} is {frame.max_tokens}, the most that is allowed here is {most}",
        parameter=parameter,
    )


def check_documents(documents: Sized, limits: Limits, parameter: str) -> None:
    """Of one call. Raises ``LimitError``."""
    if len(documents) > limits.documents:
        raise LimitError(
            Limit.DOCUMENTS,
            ErrorCode.INVALID_REQUEST,
            f"{parameter} has {len(documents)} documents, {limits.documents} are allowed",
            parameter=parameter,
        )


class Tally:
    """How much is open at this moment of what is bounded in sum."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open = dict.fromkeys(NAMES, 0)

    def used(self, limit: Limit) -> int | None:
        """None: it is not counted here."""
        return self._open.get(limit)

    def acquire(self, limit: Limit, amount: int = 1) -> None:
        """Raises ``LimitError`` if that were too much; else it must be released."""
        self.check(limit, amount)
        self._open[limit] += amount

    def check(self, limit: Limit, amount: int = 1) -> None:
        """Raises ``LimitError`` if it cannot be acquired."""
        most = self._limits.most(limit)
        if most is not None and self._open[limit] + amount > most:
            raise LimitError(
                limit,
                ErrorCode.OVERLOADED,
                f"too many {NAMES[limit]} ({most} at most): try again later",
            )

    def release(self, limit: Limit, amount: int = 1) -> None:
        self._open[limit] -= amount
        assert self._open[limit] >= 0, "released what was not acquired"
