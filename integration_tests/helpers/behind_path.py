"""What stands before a server and serves it under a path of its own, as reverse proxies do."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self


class BehindPath:
    """One request for each connection, or one websocket. It runs in a thread of its own."""

    def __init__(self, path: str, port: int, *, own_port: int) -> None:
        """``path``: such as ``/prefix``. ``port``: of the server."""
        self._path = path
        self._port = port
        self._own_port = own_port
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._own_port}{self._path}"

    def start(self) -> None:
        self._do(self._start())

    def cut(self) -> None:
        """End all connections and take no more, until it is started again."""
        self._do(self._cut())

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._own_port)

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers.add(to_server)
            to_server.write(self._forwarded(head).encode("latin-1"))
            await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))
            self._writers.discard(to_server)
            to_server.close()
        self._writers.discard(writer)
        writer.close()

    def _forwarded(self, head: str) -> str:
        method, target, rest = head.split(" ", 2)
        assert target.startswith(self._path + "/"), target
        head = f"{method} {target.removeprefix(self._path)} {rest}"
        if "upgrade: websocket" in head.lower():
            return head
        lines = [line for line in head.split("\r\n") if not line.lower().startswith("connection:")]
        lines.insert(1, "Connection: close")
        return "\r\n".join(lines)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
