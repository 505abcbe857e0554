"""An application under a real server."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from certificates import Signed
from starlette.types import ASGIApp


@asynccontextmanager
async def serving(app: ASGIApp, certificate: Signed | None = None) -> AsyncGenerator[int]:
    """Its port. ``certificate``: to speak TLS with."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        log_level="error",
        lifespan="off",
        ws="websockets-sansio",
        timeout_graceful_shutdown=2,
        ssl_certfile=None if certificate is None else certificate.certificate,
        ssl_keyfile=None if certificate is None else certificate.key,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
