"""What stands between a client and a server, and may fail: it forwards bytes until it does not."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

ABORTIVE = struct.pack("ii", 1, 0)
"""``SO_LINGER``: closing sends a reset at once, and drops what was not sent."""


def reset(writer: asyncio.StreamWriter | asyncio.BaseTransport) -> None:
    """End the connection as a crash does, not with a polite end of the stream."""
    transport = writer.transport if isinstance(writer, asyncio.StreamWriter) else writer
    raw: socket.socket | None = transport.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTIVE)
    assert isinstance(transport, asyncio.WriteTransport)
    transport.abort()


class Between:
    """A TCP proxy for any number of connections."""

    def __init__(self, port: int, *, idle: float | None = None) -> None:
        """``port``: of the server, on the loopback interface. ``idle``: seconds of silence in both
        directions after which a connection is cut; None: it may be silent for ever.
        """
        self._port = port
        self._idle = idle
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.cuts = 0
        """Connections that were silent for too long."""
        self.carried: dict[int, int] = {}
        """For each connection, how often the server said something."""
        self._changed = asyncio.Event()

    def cut(self) -> None:
        """Close both sides of all connections politely."""
        for writer in self._writers:
            writer.close()

    def freeze(self) -> None:
        """Forward nothing from now on, and close nothing."""
        self._flows.clear()

    def reset(self) -> None:
        for writer in self._writers:
            reset(writer)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this is true of the counts."""
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number = len(self.carried)
        self.carried[number] = 0
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
            ends = {writer, to_server}
            self._writers |= ends
            try:
                async with asyncio.timeout(self._idle) as limit, asyncio.TaskGroup() as group:
                    group.create_task(self._copy(reader, to_server, limit, None))
                    group.create_task(self._copy(from_server, writer, limit, number))
            except TimeoutError:
                self.cuts += 1
                self._changed.set()
            finally:
                self._writers -= ends
                for end in ends:
                    end.close()
                for end in ends:
                    with suppress(OSError):
                        await end.wait_closed()
        except OSError:
            writer.close()
        finally:
            self._tasks.discard(task)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: asyncio.Timeout,
        number: int | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                if self._idle is not None:
                    limit.reschedule(loop.time() + self._idle)
                if number is not None:
                    self.carried[number] += 1
                    self._changed.set()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def stop(self) -> None:
        self._flows.set()
        self.reset()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def between(port: int, *, idle: float | None = None) -> AsyncGenerator[tuple[Between, int]]:
    """The proxy and its port."""
    proxy = Between(port, idle=idle)
    # Those of 500 agents come at once.
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, backlog=1024)
    try:
        yield proxy, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await proxy.stop()
