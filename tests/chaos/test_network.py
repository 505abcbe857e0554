"""The piece of bad network does what it says, and nothing else."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from integration_tests.chaos.network import Direction, Passage

HOST = "127.0.0.1"


@dataclass
class Ends:
    passage: Passage
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    dialled: "list[End]"

    async def dial(self) -> tuple["End", "End"]:
        """Who dials, and who was reached."""
        near = await self.try_to_dial()
        return near, End(*await self.accepted.get())

    async def try_to_dial(self) -> "End":
        self.dialled.append(End(*await asyncio.open_connection(HOST, self.passage.port)))
        return self.dialled[-1]


@dataclass
class End:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def say(self, text: bytes) -> None:
        self.writer.write(text)

    async def hear(self, length: int) -> bytes:
        return await self.reader.readexactly(length)


@asynccontextmanager
async def ends() -> AsyncGenerator[Ends]:
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))
        taken.append(writer)

    taken: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(accept, HOST, 0)
    async with server:
        target = server.sockets[0].getsockname()[1]
        async with Passage(target, random.Random(1)).open() as passage:
            network = Ends(passage, accepted, [])
            try:
                yield network
            finally:
                for end in network.dialled:
                    end.writer.transport.abort()
                for writer in taken:
                    writer.transport.abort()


async def test_it_passes_on_both_ways() -> None:
    async with ends() as network:
        near, far = await network.dial()

        near.say(b"up")
        far.say(b"down")

        assert (await far.hear(2), await near.hear(4)) == (b"up", b"down")


async def test_an_end_that_closes_is_seen_by_the_other() -> None:
    async with ends() as network:
        near, far = await network.dial()

        near.say(b"last")
        near.writer.close()

        assert await far.reader.read() == b"last"


async def test_what_is_cut_is_reset_for_both_and_can_be_dialled_again() -> None:
    async with ends() as network:
        near, far = await network.dial()

        network.passage.cut()

        for end in (near, far):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await end.hear(1)
        again, reached = await network.dial()
        again.say(b"on")
        assert await reached.hear(2) == b"on"


async def test_while_it_is_closed_nobody_gets_through() -> None:
    async with ends() as network:
        with network.passage.closed():
            dialled = await network.try_to_dial()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await dialled.hear(1)

        assert network.accepted.empty()
        await network.dial()


async def test_one_direction_is_held_while_the_other_goes_on_and_nothing_is_lost() -> None:
    async with ends() as network:
        near, far = await network.dial()

        with network.passage.held(Direction.UP):
            near.say(b"held")
            far.say(b"down")
            assert await near.hear(4) == b"down"  # by when the other has long been passed on
            new, reached = await network.dial()
            new.say(b"new")
            assert await reached.hear(3) == b"new"
            heard = asyncio.create_task(far.hear(4))
            assert not (await asyncio.wait({heard}, timeout=0.05))[0]

        assert await heard == b"held"


async def test_whoever_sends_into_a_held_direction_feels_it() -> None:
    async with ends() as network:
        near, far = await network.dial()
        hearing = asyncio.create_task(far.hear(2**24))

        with network.passage.held(Direction.UP):
            near.say(b"x" * 2**24)
            draining = asyncio.create_task(near.writer.drain())
            done, _ = await asyncio.wait({draining}, timeout=0.2)

        assert not done
        await draining
        assert len(await hearing) == 2**24


async def test_what_is_late_comes_in_order() -> None:
    async with ends() as network:
        near, far = await network.dial()
        sent = bytes(range(50))

        began = asyncio.get_running_loop().time()
        with network.passage.late(0.1):
            for byte in sent:
                near.say(bytes([byte]))
                await near.writer.drain()
                await asyncio.sleep(0)

            assert await far.hear(len(sent)) == sent
        assert asyncio.get_running_loop().time() - began > 0.01  # by the chance of this seed
