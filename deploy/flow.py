"""How a stream is held back for a slow client, through Serve's proxy.

Serve takes whatever an application sends and keeps what the client does not read, without bound. So
what stands before its proxy tells the replica, by messages among those of the client, how many bytes
the connection has taken; and here, in the replica, ``send`` waits while too many are on their way.
"""

import asyncio
import logging

from ray.exceptions import RayError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

FLOW = "x-headrace-flow"
"""A header, never seen by clients. Of a request: what was taken will be told. Of an answer: it is from
the balancer, and not from Serve.
"""

TAKEN = "headrace.taken"
"""The type of a message, with ``bytes``."""

LEFT = "headrace.left"
"""The type of another: the client of a request over HTTP has gone."""

STEP = 256 * 2**10
"""Bytes after which it is sent."""

WINDOW = 2**20
"""Bytes of one answer that may be on their way."""

MOST_UNREAD = 64 * 2**20
"""Bytes of one client that the application may not have read yet; a body is smaller than that. It cannot
be held back, since what it has taken is told by the same way.
"""

NO_STATUS = 1005
"""Of a websocket that was closed without a word."""


def size(message: Message) -> int:
    """Counted alike on both sides; of a text in characters, which is near enough."""
    return len(message.get("body") or message.get("bytes") or message.get("text") or "")


def begins(message: Message) -> bool:
    return message["type"] in {"http.response.start", "websocket.accept"}


class HeldBack:
    """Stands before the balancer's application, in the replica."""

    def __init__(self, app: ASGIApp, *, window: int = WINDOW) -> None:
        self._app = app
        self._window = window

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if FLOW not in Headers(raw=list(scope.get("headers", ()))):
            await self._app(scope, receive, send)
            return
        flow = _Flow(scope, receive, send, self._window)
        reading = asyncio.create_task(flow.read())
        try:
            await self._app(scope, flow.receive, flow.send)
        finally:
            reading.cancel()


class _Flow:
    def __init__(self, scope: Scope, receive: Receive, send: Send, window: int) -> None:
        self._is_http = scope["type"] == "http"
        self._receive = receive
        self._send = send
        self._window = window
        self._on_the_way = 0
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._unread = 0
        """Bytes in it."""
        self._farewell: Message | None = None
        self._changed = asyncio.Event()

    async def read(self) -> None:
        """Until the client has gone."""
        while self._farewell is None:
            message = await self._next()
            if message["type"] == TAKEN:
                self._on_the_way -= message["bytes"]
            else:
                if message["type"] == LEFT:
                    message = self._disconnect()
                self._unread += size(message)
                if self._unread > MOST_UNREAD:
                    log.warning("a client sends more than is read, and is given up")
                    message = self._disconnect()
                self._inbox.put_nowait(message)
                if message["type"] in {"http.disconnect", "websocket.disconnect"}:
                    self._farewell = message
            self._changed.set()

    async def _next(self) -> Message:
        try:
            return await self._receive()
        except RayError as error:
            log.info("Serve's proxy has gone, and its clients with it: %s", type(error).__name__)
            return self._disconnect()

    def _disconnect(self) -> Message:
        kind = "http.disconnect" if self._is_http else "websocket.disconnect"
        return {"type": kind, "code": NO_STATUS}

    async def receive(self) -> Message:
        if self._farewell is not None and self._inbox.empty():
            return self._farewell
        message = await self._inbox.get()
        self._unread -= size(message)
        return message

    async def send(self, message: Message) -> None:
        """Return when there is room for the next one."""
        if begins(message):
            message.setdefault("headers", [])
            MutableHeaders(scope=message)[FLOW] = "1"
        await self._send(message)
        self._on_the_way += size(message)
        while self._on_the_way > self._window and self._farewell is None:
            self._changed.clear()
            await self._changed.wait()
