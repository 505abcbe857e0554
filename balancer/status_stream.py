"""The status stream: what operators see, and then each change of it, to any number of them.

What is different is found out once for all, a few times a second and only while somebody listens.
An observer that does not read costs its connection and a number.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from balancer.balancer import Balancer
from balancer.board import Board, Event, State
from balancer.exchange import Changes
from balancer.http import ClosingStream, paced
from common.faults import fault

log = logging.getLogger(__name__)

KEEP_ALIVE = 3.0
"""Seconds between comments on an idle stream."""

LIFETIME = 600.0
"""Seconds that one stream may last: one that is never read is not kept for ever."""

SHORTEST_PAUSE = 0.5
"""Seconds between two looks at least, however much happens; what happens after a quiet time is seen at
once.
"""

LONGEST_PAUSE = 1.0
"""Seconds between two looks at most: what grows with each token is no news by itself."""

NO_CACHE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class StatusStream:
    def __init__(self, balancer: Balancer, state: Callable[[], State]) -> None:
        self._balancer = balancer
        self._state = state
        self._board = Board()
        self._epoch = uuid.uuid4().hex[:12]
        """Another balancer's numbers mean nothing here."""
        self._looked = -math.inf
        """When, by the loop's clock."""
        self._observers = 0
        self._looking: asyncio.Task[None] | None = None
        self._news = Changes()

    async def overview(self, _request: Request) -> Response:
        now = asyncio.get_running_loop().time()
        if now - self._looked > SHORTEST_PAUSE:
            self._update()
        event = self._board.since(None)
        assert event is not None
        return Response(event.text, media_type="application/json")

    async def events(self, request: Request) -> Response:
        seen = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
        number = self._number(seen or "")
        return ClosingStream(paced(self._events(number)), "text/event-stream", NO_CACHE)

    def _number(self, seen: str) -> int | None:
        """That the observer has seen of this stream; None: nothing."""
        epoch, _, number = seen.partition("-")
        is_number = number.isascii() and number.isdigit() and len(number) < 16
        return int(number) if epoch == self._epoch and is_number else None

    async def _events(self, number: int | None) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        end = loop.time() + LIFETIME
        self._observers += 1
        try:
            while not self._balancer.closed.is_set() and loop.time() < end:
                self._keep_looking()
                count = self._news.count
                event = self._board.since(number)
                if event is not None:
                    number = event.number
                    yield self._told(event)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE):
                        await self._news.after(count)
                    continue
                yield b": keep-alive\n\n"
        finally:
            self._leave()

    def _told(self, event: Event) -> bytes:
        head = f"id: {self._epoch}-{event.number}\nevent: {event.name}\ndata: ".encode()
        return head + event.text + b"\n\n"

    def _keep_looking(self) -> None:
        """As long as somebody listens."""
        looking = self._looking
        if looking is not None and looking.done():
            self._looking = None
            log.error("fault=%s in the status stream", fault(looking.exception() or TimeoutError()))
        if self._looking is None:
            self._update()
            self._looking = asyncio.create_task(self._look())

    def _leave(self) -> None:
        self._observers -= 1
        if self._looking is not None and not self._observers:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        changes = self._balancer.changes
        while True:
            count = changes.count
            self._update()
            await asyncio.sleep(SHORTEST_PAUSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_PAUSE - SHORTEST_PAUSE):
                    await changes.after(count)

    def _update(self) -> None:
        self._looked = asyncio.get_running_loop().time()
        if self._board.update(self._state()):
            self._news.notify()
