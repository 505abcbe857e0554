"""What the HTTP routes share: bounded bodies and streams that are closed whatever happens."""

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from balancer.interrupted import whole_answer
from balancer.keys import Keys, Role, given_key, key_in_subprotocols
from common.errors import ErrorCode, RequestError

T = TypeVar("T")

Refused = Callable[[RequestError], None]
"""Is told of all that is refused, so that it is counted."""


async def read_body(request: Request) -> bytes:
    """Raises ``LimitError`` as soon as it is too large: see ``gate``."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return bytes(body)


LARGEST_BURST = 2**20
BURST_PAUSE = 0.01


async def paced(lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same, in pieces and with pauses: Serve sends all that waits in one message to its proxy, and
    breaks the answer if that is larger than 4 MiB.
    """
    burst = 0
    async with aclosing(lines):
        async for line in lines:
            for start in range(0, len(line), LARGEST_BURST):
                piece = line[start : start + LARGEST_BURST]
                yield piece
                burst += len(piece)
                if burst >= LARGEST_BURST:
                    burst = 0
                    await asyncio.sleep(BURST_PAUSE)


async def _alone(line: bytes) -> AsyncGenerator[bytes, None]:
    yield line


def json_answer(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(value)
    if len(body) < LARGEST_BURST:
        return Response(body, status, headers, "application/json")
    answer = ClosingStream(paced(_alone(body)), "application/json", headers)
    answer.headers["content-length"] = str(len(body))
    return answer


DENIAL = "websocket.http.response"
"""The extension of ASGI by which a websocket that is refused gets an answer over HTTP."""


class OwnOrigin:
    """Refuses what other web pages make a visitor's browser ask for.

    A browser lets any page open a websocket, or send a body that it calls text, to any address, this
    one too; it only adds where the page came from. Clients that are no browsers say nothing.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], refused: Refused) -> None:
        self._app = app
        self._origins = origins
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"} and not self._is_welcome(Headers(scope=scope)):
            error = RequestError(
                ErrorCode.ORIGIN_NOT_ALLOWED, "this page's origin is not allowed here"
            )
            self._refused(error)
            await turn_away(error, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_welcome(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return True
        # Our own pages. Only of an address: a name may have been made to point here by anybody.
        try:
            page = urlsplit(origin)
            host = page.hostname or ""
        except ValueError:
            return False
        return page.netloc == headers.get("host") and (host == "localhost" or _is_address(host))


async def turn_away(
    error: RequestError,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Answer before any route has, in the words of the protocol that the path stands for. A websocket
    is never opened; where the server cannot send an answer of ours, it sends 403.
    """
    if scope["type"] == "websocket" and DENIAL not in scope.get("extensions", {}):
        await WebSocketClose(1008, error.message)(scope, receive, send)
    else:
        await error_answer(scope["path"], error, headers)(scope, receive, send)


def error_answer(
    path: str, error: RequestError, headers: Mapping[str, str] | None = None
) -> Response:
    told = whole_answer(path, error)
    return Response(told.body, told.status, {**told.headers, **(headers or {})})


INFERENCE = ("/v1/", "/api/v1/continue_from_", "/api/v1/generate_", "/api/v1/inference_socket")
"""What the paths begin with by which models are used."""


def role_of(path: str) -> Role | None:
    """Whose key a route wants, if there are keys; None: nobody's. What is not named here, and what does
    not exist, is for those who manage.
    """
    if path in {"/health", "/panel"} or path.startswith("/panel/"):
        return None
    return Role.INFERENCE if path.startswith(INFERENCE) else Role.MANAGEMENT


class KeyHolders:
    """Refuses all others, each route those who have no key for it."""

    def __init__(self, app: ASGIApp, keys: Keys, refused: Refused) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"http", "websocket"}:
            try:
                self._check(scope)
            except RequestError as error:
                self._refused(error)
                wants = {"www-authenticate": "Bearer"}
                headers = wants if error.code is ErrorCode.UNAUTHORIZED else None
                await turn_away(error, scope, receive, send, headers)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        role = role_of(scope["path"])
        if role is not None:
            headers = Headers(scope=scope)
            key = given_key(
                authorization=headers.get("authorization"), api_key=headers.get("x-api-key")
            )
            if key is None and scope["type"] == "websocket":
                key = key_in_subprotocols(scope.get("subprotocols", ()))
            self._keys.check(key, role)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def unless_gone(request: Request, wanted: Coroutine[Any, Any, T]) -> T:
    """What ``wanted`` returns; it is cancelled if the client goes away meanwhile, and
    ``ClientDisconnect`` raised. The request's body must have been read.
    """
    task = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClosingStream(StreamingResponse):
    """Closes its generator as soon as the client has gone, so that its ``finally`` runs then;
    Starlette leaves that to the garbage collector.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        *,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """``closed``: called at the end, also if the generator has never begun."""
        super().__init__(content, media_type=media_type, headers=headers)
        self._content = content
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is left to be told
        finally:
            self._closed()
            await self._content.aclose()
