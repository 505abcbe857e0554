"""The agent's end of a link: dials one balancer, and dials again whenever the link is lost.

What the frames mean is the business of ``agent.service``; here they are only carried. One writer
task owns each socket.
"""

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import CloseCode

from common.errors import HeadraceError
from common.messages import (
    GIVEN_UP,
    MAX_FRAME_BYTES,
    PING_INTERVAL,
    PING_TIMEOUT,
    REFUSED,
    Described,
    Join,
    Noted,
    Status,
    Step,
    ToAgent,
    decode_to_agent,
    encode,
)

log = logging.getLogger(__name__)

OPEN_TIMEOUT = 5.0
FIRST_DELAY = 0.1
LONGEST_DELAY = 1.0

MAX_OUTBOX = 4096
"""Frames that may wait for a slow link before it is given up."""


KEY_REFUSALS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "the balancer wants a key that it knows: HEADRACE_AGENT_KEY or --key-file",
    HTTPStatus.FORBIDDEN: "no agent is let in there with such a key; is it the agents' port, and is "
    "the key one for agents?",
}
"""By the status of the handshake: to try again would not help."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What an agent shows to a balancer, and by what it knows it."""

    key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    """For ``wss://``; None: the system's authorities decide."""

    def options(self, url: str) -> dict[str, Any]:
        """As ``connect`` takes them."""
        options: dict[str, Any] = {}
        if self.key is not None:
            options["additional_headers"] = {"Authorization": f"Bearer {self.key}"}
        if url.startswith("wss:"):
            options["ssl"] = self.tls or ssl.create_default_context()
        return options


NO_CREDENTIALS = Credentials()


class LinkRefusedError(HeadraceError):
    """The balancer will not have this agent; the text says why."""


class GivenUpError(Exception):
    """The balancer says that this agent has come to a stop. A new process may do better."""


class Handler(Protocol):
    """What a link needs to know of the agent."""

    def join(self, link: "Link", /) -> Join:
        """A link has been made: the frame to begin with."""
        ...

    def status(self, link: "Link", /) -> Status: ...

    def description(self) -> Described: ...

    def received(self, link: "Link", frame: ToAgent, /) -> None: ...

    def lost(self, link: "Link", /) -> None:
        """The link is gone, and with it all requests that came over it. It may be made again."""
        ...


def delays(chance: random.Random) -> Iterator[float]:
    """Seconds to wait before each further try: doubling, bounded, and spread by chance so that
    the agents of a restarted balancer do not all come at once.
    """
    delay = FIRST_DELAY
    while True:
        yield delay * chance.uniform(0.5, 1.0)
        delay = min(delay * 2, LONGEST_DELAY)


class Link:
    def __init__(
        self, url: str, handler: Handler, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self._url = url
        self.is_linked = False
        self._handler = handler
        self._options = credentials.options(url)
        self._frames: deque[Step | Status | Noted] = deque()
        self._status_changed = False
        self._description_changed = False
        self._complaint = ""
        """Why there is no link, as the log has it; empty: there is one, or none was tried."""
        self._closing = False
        self._wake = asyncio.Event()

    @property
    def address(self) -> str:
        return self._url

    def send(self, frame: Step | Status | Noted) -> None:
        """Send soon, in order. What is not sent when the link is lost is dropped."""
        self._frames.append(frame)
        self._wake.set()

    def status_changed(self) -> None:
        """Send the newest status soon; several changes at once become one frame."""
        self._status_changed = True
        self._wake.set()

    def description_changed(self) -> None:
        """Send the newest description soon."""
        self._description_changed = True
        self._wake.set()

    def close(self) -> None:
        """Send what is still to be sent and say good-bye; then ``run`` returns.

        If there is no link just now, ``run`` goes on trying: cancel it.
        """
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Keep a link until closed. Raises ``LinkRefusedError`` if the balancer refuses us, and
        ``GivenUpError`` if it takes us for dead.
        """
        chance = random.Random()
        waits = delays(chance)
        while not self._closing:
            try:
                async with connect(
                    self._url,
                    compression=None,
                    max_size=MAX_FRAME_BYTES,
                    open_timeout=OPEN_TIMEOUT,
                    close_timeout=1.0,
                    ping_interval=PING_INTERVAL,
                    ping_timeout=PING_TIMEOUT,
                    proxy=None,
                    **self._options,
                ) as socket:
                    log.info("linked to %s", self._url)
                    self._complaint = ""
                    waits = delays(chance)
                    await self._serve(socket)
            except InvalidURI as error:
                raise LinkRefusedError(str(error)) from error
            except InvalidStatus as error:
                reason = KEY_REFUSALS.get(error.response.status_code)
                if reason is not None:
                    raise LinkRefusedError(f"{self._url}: {reason}") from error
                self._complain(error)
            except (OSError, TimeoutError, InvalidHandshake) as error:
                self._complain(error)
            if not self._closing:
                await asyncio.sleep(next(waits))

    def _complain(self, error: Exception) -> None:
        """Once for each reason, however often it is tried."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.info("no link to %s yet: %s", self._url, error)

    async def _serve(self, socket: ClientConnection) -> None:
        """Carry frames until the link is closed or lost."""
        self._frames.clear()
        self.is_linked = True
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(socket))
                await self._read(socket)
                writer.cancel()
        except* ConnectionClosed:
            pass
        finally:
            self.is_linked = False
            self._handler.lost(self)
        log.info("link to %s ended: %s %s", self._url, socket.close_code, socket.close_reason)
        if socket.close_code == REFUSED:
            raise LinkRefusedError(socket.close_reason or "the balancer refuses this agent")
        if socket.close_code == GIVEN_UP:
            raise GivenUpError(socket.close_reason)

    async def _read(self, socket: ClientConnection) -> None:
        async for data in socket:
            try:
                frame = decode_to_agent(data)
            except msgspec.MsgspecError as error:
                log.warning("the balancer sent a frame that cannot be read: %s", error)
                await socket.close(CloseCode.UNSUPPORTED_DATA, "unreadable frame")
                return
            self._handler.received(self, frame)

    async def _write(self, socket: ClientConnection) -> None:
        await socket.send(encode(self._handler.join(self)))
        self._status_changed = False
        self._description_changed = True
        while True:
            if len(self._frames) > MAX_OUTBOX:
                log.warning("the link to %s is too slow", self._url)
                socket.transport.abort()
                return
            while self._frames:
                await socket.send(encode(self._frames.popleft()))
            if self._description_changed:
                self._description_changed = False
                await socket.send(encode(self._handler.description()))
            if self._status_changed:
                self._status_changed = False
                await socket.send(encode(self._handler.status(self)))
            if self._closing:
                await socket.close()
                return
            await self._wake.wait()
            self._wake.clear()
