"""What stands before Ray Serve's own HTTP proxy.

Serve lets any client set the timeout of its request, or switch off the watch for its own
disconnect, by two headers. Here the client may not: a request has the time it needs, and one
whose client has gone is cancelled.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

SERVE_HEADERS = {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}


class StripServeHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            headers = [pair for pair in scope["headers"] if pair[0].lower() not in SERVE_HEADERS]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Named by the environment variable ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``."""
    return [Middleware(StripServeHeaders)]
