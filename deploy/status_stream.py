"""Follows a balancer's status stream, again and again: it ends by itself after some minutes, and with
the balancer.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

import httpx
import msgspec

from deploy.management import Management
from deploy.overview import OverviewError, StatusEvent, StatusView

SILENCE = 10.0
"""Seconds without even a comment, of which there is one every 3 s, until the stream is lost."""

FIRST_PAUSE, LONGEST_PAUSE = 0.3, 5.0
"""Seconds until it is tried again."""

LOOK_INTERVAL = 1.0

_data = msgspec.json.Decoder(dict[str, dict[str, object]])


class Lost(msgspec.Struct, frozen=True):
    """The stream has broken; it is tried again."""

    reason: str


class EventReader:
    """Server-sent events, as the bytes come. Only ``\\n`` ends a line: what JSON may hold does not."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._fields: dict[bytes, bytes] = {}

    def read(self, data: bytes) -> Iterator[StatusEvent]:
        """The events that are complete with it. Raises ``OverviewError``."""
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line:
                name, _, value = line.partition(b":")
                self._fields[bytes(name)] = bytes(
                    value.removeprefix(b" ")
                )  # without a name: a comment
                continue
            told, self._fields = self._fields, {}
            if b"data" in told:
                yield _event(told)


def _event(told: dict[bytes, bytes]) -> StatusEvent:
    try:
        data = _data.decode(told[b"data"])
    except msgspec.DecodeError as error:
        raise OverviewError(f"the status stream cannot be read: {error}") from error
    return StatusEvent(told.get(b"id", b"").decode(), told.get(b"event", b"").decode(), data)


async def follow(balancer: Management) -> AsyncGenerator[StatusEvent | Lost]:
    """Without an end. The first event is a snapshot; what comes after a loss goes on from there, or
    begins with one. Raises ``HeadraceError`` if the balancer refuses, or if it has never answered.
    """
    last_id = ""
    pause = FIRST_PAUSE
    while True:
        try:
            async with aclosing(_once(balancer, last_id)) as events:
                async for event in events:
                    last_id, pause = event.id, FIRST_PAUSE
                    yield event
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            # Serve's proxy says 404 or 503 while a balancer is started anew.
            if not last_id or (status < 500 and status != 404):
                raise balancer.place.refusal(status, error.response.text) from error
            yield Lost(f"HTTP {status}")
        except httpx.HTTPError as error:
            if not last_id:
                raise balancer.place.silence(error) from error
            yield Lost(str(error) or type(error).__name__)
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))
        pause = min(2 * pause, LONGEST_PAUSE)


async def _once(balancer: Management, last_id: str) -> AsyncGenerator[StatusEvent]:
    """Until the stream ends. Raises ``httpx.HTTPError``."""
    headers = {"last-event-id": last_id} if last_id else {}
    timeout = httpx.Timeout(SILENCE)
    reader = EventReader()
    async with balancer.client.stream(
        "GET", "/api/v1/events", headers=headers, timeout=timeout
    ) as response:
        if not response.is_success:
            await response.aread()
            response.raise_for_status()
        async for data in response.aiter_bytes():
            for event in reader.read(data):
                yield event


async def views(balancer: Management, *, lost: Callable[[str], None]) -> AsyncGenerator[StatusView]:
    """The same view again and again: after each event, and once a second. ``lost`` is told when the stream
    breaks. Raises ``HeadraceError``.
    """
    view = StatusView()
    async with aclosing(follow(balancer)) as events:
        event = await anext(events)
        coming: asyncio.Future[StatusEvent | Lost] | None = None
        try:
            while True:
                match event:
                    case Lost(reason):
                        lost(reason)
                    case StatusEvent():
                        view.apply(event)
                    case None:
                        pass
                yield view
                coming = coming or asyncio.ensure_future(anext(events))
                await asyncio.wait({coming}, timeout=LOOK_INTERVAL)
                event, coming = (coming.result(), None) if coming.done() else (None, coming)
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
