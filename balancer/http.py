"""What the HTTP routes share: bounded bodies and streams that are closed whatever happens."""

from collections.abc import AsyncGenerator, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from common.errors import ErrorCode, RequestError

MAX_BODY_BYTES = 8 * 2**20
"""Of an HTTP body or a websocket message; it must leave room in a frame of the agent link."""


async def read_body(request: Request) -> bytes:
    """Raises ``RequestError`` as soon as it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                ErrorCode.BODY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes"
            )
    return bytes(body)


class ClosingStream(StreamingResponse):
    """Closes its generator as soon as the client has gone, so that its ``finally`` runs then;
    Starlette leaves that to the garbage collector.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(content, media_type=media_type, headers=headers)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is left to be told
        finally:
            await self._content.aclose()
