"""How an agent dials. What it says then is tested with the agent as a whole."""

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import islice
from pathlib import Path

import pytest
from certificates import make_certificate
from linked import PlayedModels, RunningAgent
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from agent.link import FIRST_DELAY, LONGEST_DELAY, Credentials, LinkRefusedError, delays
from deploy.tls import client_context, pinned_context, server_context


class Door:
    """A balancer's listener that lets nobody in, until it is told."""

    def __init__(self, *refusals: HTTPStatus) -> None:
        self.refusals = list(refusals)
        self.shown: list[str | None] = []
        """What each has shown."""
        self.inside: asyncio.Queue[bytes | str] = asyncio.Queue()
        """The first frames of those who are let in."""

    def answer(self, socket: ServerConnection, request: Request) -> Response | None:
        self.shown.append(request.headers.get("Authorization"))
        return socket.respond(self.refusals.pop(0), "no\n") if self.refusals else None

    async def serve(self, socket: ServerConnection) -> None:
        self.inside.put_nowait(await socket.recv())
        await socket.wait_closed()

    @asynccontextmanager
    async def open(self, tls: ssl.SSLContext | None = None) -> AsyncGenerator[str]:
        async with serve(
            self.serve, "127.0.0.1", 0, process_request=self.answer, ssl=tls
        ) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            yield f"{'ws' if tls is None else 'wss'}://127.0.0.1:{port}"

    async def let_in(self) -> None:
        async with asyncio.timeout(10):
            await self.inside.get()


@asynccontextmanager
async def dialling(url: str, credentials: Credentials) -> AsyncGenerator[RunningAgent]:
    running = RunningAgent(url, models=PlayedModels(), credentials=credentials)
    try:
        yield running
    finally:
        running.agent.stop()
        await asyncio.wait({running.task})


async def test_an_agent_shows_its_key() -> None:
    door = Door()
    async with door.open() as url, dialling(url, Credentials("the-key")):
        await door.let_in()

    assert door.shown == ["Bearer the-key"]


async def test_an_agent_without_a_key_shows_none() -> None:
    door = Door()
    async with door.open() as url, dialling(url, Credentials()):
        await door.let_in()

    assert door.shown == [None]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (HTTPStatus.UNAUTHORIZED, "the balancer wants a key that it knows: HEADRACE_AGENT_KEY"),
        (HTTPStatus.FORBIDDEN, "is the key one for agents?"),
    ],
)
async def test_an_agent_whose_key_is_refused_does_not_try_again(
    status: HTTPStatus, reason: str
) -> None:
    door = Door(status)
    async with door.open() as url, dialling(url, Credentials("the-key")) as running:
        with pytest.raises(LinkRefusedError, match=reason) as caught:
            await running.ended()

    assert len(door.shown) == 1
    assert "the-key" not in str(caught.value)


async def test_an_agent_that_is_told_to_come_again_does_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "agent.link")
    door = Door(HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE)
    async with door.open() as url, dialling(url, Credentials("the-key")):
        await door.let_in()

    assert door.shown == ["Bearer the-key"] * 3
    assert [line.partition(" ")[0] for line in caplog.messages[:2]] == ["no", "linked"]


async def test_an_agent_speaks_tls(tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "own")
    tls = server_context(own.certificate, own.key)
    for trusts in (client_context(own.certificate), pinned_context(own.certificate)):
        door = Door()
        async with door.open(tls) as url, dialling(url, Credentials("the-key", trusts)):
            await door.let_in()


async def test_an_agent_shows_nothing_to_a_balancer_that_it_does_not_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = (make_certificate(tmp_path, name) for name in ("own", "other"))
    tls = server_context(own.certificate, own.key)
    door = Door()
    told = asyncio.Event()
    caplog.set_level("INFO", "agent.link")

    def note(_record: logging.LogRecord) -> bool:
        told.set()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [note])  # it is every test's

    async with (
        door.open(tls) as url,
        dialling(url, Credentials("the-key", client_context(other.certificate))) as running,
    ):
        async with asyncio.timeout(10):
            await told.wait()
        assert not running.task.done()

    assert "certificate verify failed" in caplog.messages[0]
    assert door.shown == []


def test_a_key_is_not_shown_with_its_owner() -> None:
    assert "the-key" not in repr(Credentials("the-key"))


def test_delays_grow_to_a_bound_and_are_spread() -> None:
    waits = list(islice(delays(random.Random(1)), 12))
    others = list(islice(delays(random.Random(2)), 12))

    assert FIRST_DELAY / 2 <= waits[0] <= FIRST_DELAY
    assert all(LONGEST_DELAY / 2 <= wait <= LONGEST_DELAY for wait in waits[6:])
    assert waits != others
