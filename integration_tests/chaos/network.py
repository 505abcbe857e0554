"""A piece of bad network: a TCP port that passes on to another one, until it is told to cut, to hold
one direction back (so that a link is half open), or to be late.

Held back is only what is connected at that moment, as by a box in between that has lost its state: who
dials anew gets through. What is held back is neither lost nor read: after some kilobytes its sender
feels it.
"""

import asyncio
import enum
import random
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

CHUNK = 16 * 2**10
MOST_CHUNKS = 4
"""That wait in each direction of a connection."""

HOST = "127.0.0.1"


class Direction(enum.Enum):
    UP = enum.auto()
    """From who dialled in."""
    DOWN = enum.auto()


@dataclass(slots=True, eq=False)
class _Connection:
    ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    gates: dict[Direction, asyncio.Event] = field(default_factory=dict[Direction, asyncio.Event])

    def abort(self) -> None:
        for end in self.ends:
            end.transport.abort()


class Passage:
    def __init__(self, target: int, chance: random.Random) -> None:
        """``target``: the port that it leads to, on this machine. ``chance``: of how late each
        chunk is.
        """
        self._target = target
        self._chance = chance
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._latest = 0.0
        self.port = 0

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["Passage"]:
        server = await asyncio.start_server(self._accept, HOST, self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def cut(self) -> None:
        """Reset all that is connected."""
        for connection in self._connections:
            connection.abort()

    @contextmanager
    def closed(self) -> Generator[None]:
        """Cut, and who dials is cut off at once."""
        self._closed = True
        self.cut()
        try:
            yield
        finally:
            self._closed = False

    @contextmanager
    def held(self, direction: Direction) -> Generator[None]:
        """Of what is connected now nothing gets through this way."""
        held = tuple(self._connections)
        for connection in held:
            connection.gates[direction].clear()
        try:
            yield
        finally:
            for connection in held:
                connection.gates[direction].set()

    @contextmanager
    def late(self, latest: float) -> Generator[None]:
        """Each chunk comes up to so many seconds later, in order."""
        self._latest = latest
        try:
            yield
        finally:
            self._latest = 0.0

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection((writer, far_writer))
        for direction in Direction:
            connection.gates[direction] = asyncio.Event()
            connection.gates[direction].set()
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, far_writer, connection.gates[Direction.UP]))
                group.create_task(
                    self._pass_on(far_reader, writer, connection.gates[Direction.DOWN])
                )
        except* OSError:
            pass
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        """Until the sender has closed, and the receiver has learnt it. Raises ``OSError`` if one of
        them was reset.
        """
        due: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(MOST_CHUNKS)
        loop = asyncio.get_running_loop()

        async def take() -> None:
            data: bytes | None = b"something"
            while data:
                try:
                    data = await reader.read(CHUNK)
                except OSError:
                    data = None  # a reset travels behind what was sent before, and as late
                await due.put((loop.time() + self._latest * self._chance.random(), data))

        async def give() -> None:
            while True:
                at, data = await due.get()
                await asyncio.sleep(at - loop.time())
                await gate.wait()
                if data is None:
                    raise ConnectionResetError
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(give())
