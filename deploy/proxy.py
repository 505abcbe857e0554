"""What stands before Ray Serve's own HTTP proxy, in its process.

Serve lets any client set the timeout of its request, or switch off the watch for its own
disconnect, by two headers. Here the client may not: a request has the time it needs, and one
whose client has gone is cancelled. And Serve gives each answer an id of its own; where the balancer
has given it one already, under which it is found in the logs, that one stands.

Where the balancer is gone, or is silent and does not say that it is there, the answer ends here, in
the words of its protocol: Serve would cut it, or let it wait for ever. And a client that does not
read is given up.
"""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from balancer.interrupted import LastWords, last_words, whole_answer
from common.errors import ErrorCode, RequestError
from deploy.flow import FLOW, LEFT, STEP, TAKEN, begins, size
from deploy.http_protocol import bound_uvicorn
from deploy.logs import set_up, told_format

log = logging.getLogger(__name__)

SERVE_HEADERS = {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}

REQUEST_ID = "x-request-id"

SERVES_OWN = "/-/"
"""What paths begin with that Serve answers itself."""

SILENCE = 10.0
"""Seconds without a word in a connection until the balancer is asked whether it is there."""

ANSWER_TIMEOUT = 5.0
"""Seconds that it has to answer."""

SLOW_CLIENT = 30.0
"""Seconds in which a connection must take ``PIECE``."""

PIECE = 64 * 2**10

FAREWELL = 5.0
"""Seconds that the replica has to end what it does for a client that has left."""

SERVICE_RESTART = 1012
TRY_AGAIN = RequestError(
    ErrorCode.BALANCER_LOST, "the balancer was lost, or cannot be reached: send the request again"
)


class OwnHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            headers = [pair for pair in scope["headers"] if pair[0].lower() not in SERVE_HEADERS]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, _with_one_id(send))


def _with_one_id(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            ids = headers.getlist(REQUEST_ID)
            if len(ids) > 1:
                headers[REQUEST_ID] = ids[0]  # Serve puts its own at the end
        await send(message)

    return wrapped


@dataclass(frozen=True, slots=True)
class _Times:
    """In seconds; see the constants."""

    silence: float
    slow_client: float
    farewell: float


class Answered:
    """Sees to it that each answer has an end, and that each client takes it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        silence: float = SILENCE,
        answer_timeout: float = ANSWER_TIMEOUT,
        slow_client: float = SLOW_CLIENT,
        farewell: float = FAREWELL,
    ) -> None:
        """In seconds; see the constants."""
        self._app = app
        self._balancer = _Balancer(app, answer_timeout)
        self._times = _Times(silence, slow_client, farewell)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"} or scope["path"].startswith(SERVES_OWN):
            await self._app(scope, receive, send)
            return
        kind = _Http if scope["type"] == "http" else _WebSocket
        connection = kind(scope, receive, send, self._balancer, self._times)
        await connection.run(self._app)


class _Balancer:
    """Whether it is there: asked by the same way on which clients ask."""

    def __init__(self, app: ASGIApp, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._asking: asyncio.Task[bool] | None = None

    def is_there(self) -> asyncio.Task[bool]:
        """One question for all who want to know."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> bool:
        is_there = False
        body: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            return await asyncio.get_running_loop().create_future()  # it does not leave

        async def send(message: Message) -> None:
            nonlocal is_there
            is_there = is_there or (begins(message) and FLOW in Headers(raw=message["headers"]))

        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/health",
            "raw_path": b"/health",
            "query_string": b"",
            "root_path": "",
            "headers": [(FLOW.encode(), b"1")],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }
        try:
            async with asyncio.timeout(self._timeout):
                await self._app(scope, receive, send)
        except TimeoutError:
            pass
        return is_there


class _Connection(ABC):
    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        balancer: _Balancer,
        times: _Times,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._balancer = balancer
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._spoke = self._loop.time()
        """When the last word came, from whichever side."""
        self._has_begun = False
        self._is_over = False
        """Nothing is left to be said, or nobody to whom."""
        self._is_sending = False
        self._is_given_up = False
        self._next: asyncio.Future[Message] | None = None
        """What comes from the client next."""
        self._taken = 0
        """Bytes of which the replica does not know yet."""
        self._wants_to_tell = self._loop.create_future()
        self._farewell: asyncio.TimerHandle | None = None
        """Ends what the replica does for a client that has left."""

    async def run(self, app: ASGIApp) -> None:
        flow = FLOW.encode()
        headers = [pair for pair in self._scope["headers"] if pair[0].lower() != flow]
        headers.append((flow, b"1"))
        self._watch = self._loop.call_later(self._times.silence, self._look)
        try:
            async with asyncio.timeout(None) as self._limit:
                await app({**self._scope, "headers": headers}, self._receiving, self._sending)
        except TimeoutError:
            if not self._limit.expired():
                raise
        finally:
            self._watch.cancel()
            if self._farewell is not None:
                self._farewell.cancel()
            if self._next is not None:
                self._next.cancel()
        if self._is_given_up:
            _abort(self._send)
        elif not self._is_over:
            log.warning("%s ended without the balancer", self._scope["path"])
            await self._stand_in()

    @abstractmethod
    def _is_from_balancer(self, message: Message) -> bool:
        """Or else from Serve itself."""

    @abstractmethod
    def _see(self, message: Message) -> None:
        """The balancer says this."""

    @abstractmethod
    async def _stand_in(self) -> None:
        """Say the end in the balancer's place."""

    def _look(self) -> None:
        """Is the silence that of a balancer which is there?"""
        quiet = self._loop.time() - self._spoke
        if self._is_sending or quiet < self._times.silence:
            wait = self._times.silence if self._is_sending else self._times.silence - quiet
            self._watch = self._loop.call_later(wait, self._look)
        else:
            self._balancer.is_there().add_done_callback(partial(self._learn, self._spoke))

    def _learn(self, spoke: float, answer: asyncio.Task[bool]) -> None:
        if self._watch.cancelled():
            return
        if answer.cancelled() or answer.result() or self._spoke != spoke or self._is_sending:
            self._watch = self._loop.call_later(self._times.silence, self._look)
        else:
            self._end()

    def _end(self) -> None:
        """Serve cancels what it has asked of the replica, and ``run`` goes on."""
        if not self._watch.cancelled():
            self._limit.reschedule(self._loop.time())

    async def _receiving(self) -> Message:
        """What comes from the client, and between it how much it has taken."""
        if self._farewell is not None:  # that was all
            return await self._loop.create_future()
        if self._next is None:
            self._next = asyncio.ensure_future(self._receive())
        if self._taken < STEP:
            await asyncio.wait({self._next, self._wants_to_tell}, return_when="FIRST_COMPLETED")
        if self._taken >= STEP:
            taken, self._taken = self._taken, 0
            self._wants_to_tell = self._loop.create_future()
            return {"type": TAKEN, "bytes": taken}
        message, self._next = self._next.result(), None
        self._spoke = self._loop.time()
        if message["type"] in {"http.disconnect", "websocket.disconnect"}:
            self._is_over = True
        if message["type"] == "http.disconnect":
            # Serve would cancel what it has asked of the replica, and gRPC then never frees a message
            # that is coming just now. So the replica is told, and ends by itself, or else is cancelled.
            self._farewell = self._loop.call_later(self._times.farewell, self._end)
            return {"type": LEFT}
        return message

    async def _sending(self, message: Message) -> None:
        self._has_begun = self._has_begun or self._is_from_balancer(message)
        if not self._has_begun or self._is_given_up or self._is_over:
            return  # Serve's own words are replaced; and nothing goes to who does not read, or has left
        if begins(message):
            del MutableHeaders(scope=message)[FLOW]
        self._see(message)
        self._is_sending = True
        try:
            for piece in _pieces(message):
                async with asyncio.timeout(self._times.slow_client):
                    await self._send(piece)
        except TimeoutError:
            log.warning("a client of %s does not read and is given up", self._scope["path"])
            self._is_given_up = True
            # Serve must hear of it while it waits for the replica: if a send fails, it forgets the
            # replica's answer without cancelling it, and keeps for ever what it has of it.
            self._loop.call_soon(self._end)
        except OSError:
            # The client has left: the message that says so is received next.
            self._is_over = True
        finally:
            self._is_sending = False
        self._spoke = self._loop.time()
        self._taken += size(message)
        if self._taken >= STEP and not self._wants_to_tell.done():
            self._wants_to_tell.set_result(None)


class _Http(_Connection):
    _words: LastWords | None = None

    def _is_from_balancer(self, message: Message) -> bool:
        return begins(message) and FLOW in Headers(raw=message["headers"])

    def _see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._words = last_words(
                self._scope["path"],
                answer=Headers(raw=message["headers"]),
                user_agent=Headers(scope=self._scope).get("user-agent", ""),
            )
        elif message["type"] == "http.response.body":
            if self._words is not None:
                self._words.see(message.get("body", b""))
            self._is_over = not message.get("more_body", False)

    async def _stand_in(self) -> None:
        if not self._has_begun:
            answer = whole_answer(self._scope["path"], TRY_AGAIN)
            headers = {**answer.headers, "content-length": str(len(answer.body))}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            start = {"type": "http.response.start", "status": answer.status, "headers": raw}
            await self._send(start)
            await self._send({"type": "http.response.body", "body": answer.body})
        elif self._words is not None:
            await self._send({"type": "http.response.body", "body": self._words.end(TRY_AGAIN)})


class _WebSocket(_Connection):
    def _is_from_balancer(self, message: Message) -> bool:
        return message["type"].startswith("websocket.")

    def _see(self, message: Message) -> None:
        ends = message["type"] == "websocket.http.response.body" and not message.get("more_body")
        self._is_over = self._is_over or ends or message["type"] == "websocket.close"

    async def _stand_in(self) -> None:
        if self._has_begun:
            reason = TRY_AGAIN.message
            await self._send({"type": "websocket.close", "code": SERVICE_RESTART, "reason": reason})
            return
        answer = whole_answer(self._scope["path"], TRY_AGAIN)
        raw = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        kind = "websocket.http.response"
        await self._send({"type": f"{kind}.start", "status": answer.status, "headers": raw})
        await self._send({"type": f"{kind}.body", "body": answer.body})


def _pieces(message: Message) -> list[Message]:
    body = cast("bytes", message.get("body", b""))
    if message["type"] != "http.response.body" or len(body) <= PIECE:
        return [message]
    parts = [body[start : start + PIECE] for start in range(0, len(body), PIECE)]
    more = [{**message, "body": part, "more_body": True} for part in parts[:-1]]
    return [*more, {**message, "body": parts[-1]}]


def _abort(send: Send) -> None:
    """Drop the connection with what it has not taken. ASGI has no word for it, and uvicorn would
    wait for the client, so its transport is looked for where it keeps it.
    """
    server = getattr(send, "__self__", None)
    transport = getattr(server, "transport", None)
    if isinstance(transport, asyncio.Transport):
        transport.abort()


def middlewares() -> list[Middleware]:
    """Named by the environment variable ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. Serve calls it
    in the proxy's process, before it starts uvicorn. The last one stands before the others.
    """
    set_up(told_format(os.environ))
    bound_uvicorn()
    return [Middleware(OwnHeaders), Middleware(Answered)]
