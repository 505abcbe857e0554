"""What stands before Ray Serve's own HTTP proxy.

Serve lets any client set the timeout of its request, or switch off the watch for its own
disconnect, by two headers. Here the client may not: a request has the time it needs, and one
whose client has gone is cancelled. And Serve gives each answer an id of its own; where the balancer
has given it one already, under which it is found in the logs, that one stands.
"""

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.http_protocol import bound_uvicorn

SERVE_HEADERS = {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}

REQUEST_ID = "x-request-id"


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


def middlewares() -> list[Middleware]:
    """Named by the environment variable ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. Serve calls it
    in the proxy's process, before it starts uvicorn.
    """
    bound_uvicorn()
    return [Middleware(OwnHeaders)]
