"""Who is let in: the bounds that hold for every route, before any of them is asked.

What is beyond a bound is refused in its protocol's words and costs next to nothing. What must answer
whatever happens (health, metrics, the management's questions) is let in always: it answers at once.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from balancer.http import INFERENCE, Refused, turn_away
from balancer.limits import Limit, LimitError, Limits, Tally
from common.errors import ErrorCode, RequestError

TRY_AGAIN_LATER = 1013

BODY_PATIENCE = 30.0
"""Seconds that the next part of a body may take: a request has its place meanwhile."""


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        tally: Tally,
        refused: Refused,
        body_patience: float = BODY_PATIENCE,
    ) -> None:
        self._app = app
        self._body_patience = body_patience
        self._limits = limits
        self._tally = tally
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        try:
            check_head(scope, self._limits)
        except LimitError as error:
            self._refused(error)
            await turn_away(error, scope, receive, send)
            return
        limit = counted_as(scope)
        try:
            if limit is not None:
                self._tally.acquire(limit)
        except LimitError as error:
            self._refused(error)
            if scope["type"] == "websocket":
                await _close_at_once(error.message, receive, send)
            else:
                await turn_away(error, scope, receive, send)
            return
        patience = self._body_patience if scope["type"] == "http" else None
        body = _Body(receive, self._limits, self._tally, patience)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()
            if limit is not None:
                self._tally.release(limit)


def check_head(scope: Scope, limits: Limits) -> None:
    """Raises ``LimitError`` if there is too much of it, or it tells of a body that is too large."""
    headers = scope["headers"]
    if len(headers) > limits.headers:
        raise LimitError(
            Limit.HEADERS,
            ErrorCode.HEADERS_TOO_LARGE,
            f"the request has {len(headers)} headers, {limits.headers} are allowed",
        )
    size = sum(len(name) + len(value) for name, value in headers)
    size += len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b""))
    if size > limits.header_bytes:
        raise LimitError(
            Limit.HEADER_BYTES,
            ErrorCode.HEADERS_TOO_LARGE,
            f"the headers and the path have {size} bytes, {limits.header_bytes} are allowed",
        )
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limits.body_bytes:
            raise _too_large(limits)


def counted_as(scope: Scope) -> Limit | None:
    """Of what this is one more; None: of nothing, since it is over at once."""
    if scope["type"] == "websocket":
        return Limit.OPEN_SOCKETS
    if scope["path"].endswith("/stream") or scope["path"] == "/api/v1/events":
        return Limit.OBSERVERS
    if scope["method"] in {"GET", "HEAD", "OPTIONS"} or not scope["path"].startswith(INFERENCE):
        return None
    return Limit.OPEN_REQUESTS


class _Body:
    """Counts what a client sends until its request is over. As long as it lasts its body is there in
    some form: as bytes, as what they say, as frames for agents.
    """

    def __init__(
        self, receive: Receive, limits: Limits, tally: Tally, patience: float | None
    ) -> None:
        """``patience``: seconds that the next part may take; None: it is no body, but messages."""
        self._receive = receive
        self._patience = patience
        self._limits = limits
        self._tally = tally
        self._size = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """Raises ``RequestError``, which the route tells in its own words."""
        message = await self._next()
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            if self._size + size > self._limits.body_bytes:
                raise _too_large(self._limits)
            self._tally.acquire(Limit.OPEN_BYTES, size)
            self._size += size
        return message

    async def _next(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._patience):
                return await self._receive()
        except TimeoutError as error:
            raise RequestError(
                ErrorCode.BODY_TOO_SLOW,
                f"the body does not come: nothing more of it for {self._patience} s",
            ) from error

    def release(self) -> None:
        self._tally.release(Limit.OPEN_BYTES, self._size)


def _too_large(limits: Limits) -> LimitError:
    return LimitError(
        Limit.BODY_BYTES,
        ErrorCode.BODY_TOO_LARGE,
        f"the body is larger than {limits.body_bytes} bytes",
    )


async def _close_at_once(reason: str, receive: Receive, send: Send) -> None:
    """Only one that was accepted can be told why."""
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})
