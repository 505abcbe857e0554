"""How events reach the one client that waits for them, and how observers learn of changes.

Both are bounded whatever the reader does: a request's events up to a limit, and of the state only
that it changed.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from balancer.limits import MOST_UNREAD_BYTES, MOST_UNREAD_EVENTS, Limit
from common.messages import Embedded, Event, LastEvent


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one request, in seconds of a clock that counts finer than the loop's."""

    arrived: float
    dispatched: float | None
    """To an agent; None: it never was."""
    started: float | None
    """Its first token came; None: none came."""
    ended: float


@dataclass(frozen=True, slots=True)
class Told:
    """What a client learns: an event, and the name of the agent that it came from."""

    generated_by: str | None
    event: Event
    timing: Timing | None = None
    """With the last event."""

    @property
    def is_last(self) -> bool:
        return isinstance(self.event, LastEvent)

    @property
    def size(self) -> int:
        """In bytes, where that matters."""
        return len(self.event.values) if isinstance(self.event, Embedded) else 0


class Exchange:
    """The events of a client's request, from the balancer, ending with the last one.

    If the client asked for several answers, they come through here together, each with its own
    last event.
    """

    def __init__(self, answers: int = 1) -> None:
        self._waiting: deque[Told] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._open = answers
        self._most_waiting = answers * MOST_UNREAD_EVENTS

    @property
    def is_empty(self) -> bool:
        """Is there nothing to read at this moment?"""
        return not self._waiting

    @property
    def limit_reached(self) -> Limit | None:
        """Why no more fits; None: it does."""
        if len(self._waiting) >= self._most_waiting:
            return Limit.UNREAD_EVENTS
        return Limit.UNREAD_BYTES if self._waiting_bytes >= MOST_UNREAD_BYTES else None

    @property
    def is_full(self) -> bool:
        return self.limit_reached is not None

    def put(self, told: Told) -> None:
        """Hand over. The last event always fits; ask ``is_full`` before any other."""
        self._waiting.append(told)
        self._waiting_bytes += told.size
        self._arrived.set()

    def __aiter__(self) -> "Exchange":
        return self

    async def __anext__(self) -> Told:
        if not self._open:
            raise StopAsyncIteration
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        told = self._waiting.popleft()
        self._waiting_bytes -= told.size
        self._open -= told.is_last
        return told


class Changes:
    """A counter to wait on. Many changes between two looks are one: only the latest state counts."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def after(self, count: int) -> int:
        """Return the count as soon as it is greater than ``count``."""
        while self.count <= count:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
        return self.count
