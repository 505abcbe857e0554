import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Scope

from balancer import http
from balancer.http import ClosingStream, paced

SCOPE: Scope = {"type": "http", "asgi": {"spec_version": "2.4"}}


async def test_a_stream_is_closed_as_soon_as_its_client_has_gone() -> None:
    closed: list[bool] = []

    async def content() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"more"
        finally:
            closed.append(True)

    async def receive() -> Message:
        raise AssertionError("not asked")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the client has gone")

    response = ClosingStream(content(), media_type="text/plain")

    await response(SCOPE, receive, send)

    assert closed == [True]


async def test_a_fault_of_ours_closes_the_stream_and_is_not_hidden() -> None:
    async def content() -> AsyncGenerator[bytes]:
        yield b"some"
        raise KeyError("ours")

    async def nothing() -> Message:
        raise AssertionError("not asked")

    async def send(_message: Message) -> None:
        pass

    with pytest.raises(KeyError):
        await ClosingStream(content(), media_type="text/plain")(SCOPE, nothing, send)


async def test_a_burst_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LARGEST_BURST", 5)
    monkeypatch.setattr(http, "BURST_PAUSE", 0.0)
    others: list[int] = []

    async def lines() -> AsyncGenerator[bytes]:
        for _ in range(6):
            yield b"12"  # and nothing here lets anybody else have the loop

    async def other() -> None:
        while True:
            others.append(len(got))
            await asyncio.sleep(0)

    got: list[bytes] = []
    async with asyncio.TaskGroup() as group:
        task = group.create_task(other())
        async for line in paced(lines()):
            got.append(line)  # noqa: PERF401 - `other` looks at it meanwhile
        task.cancel()

    assert got == [b"12"] * 6
    assert {3, 6} <= set(others)


async def test_what_is_paced_is_closed_with_it() -> None:
    closed: list[bool] = []

    async def lines() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"more"
        finally:
            closed.append(True)

    stream = paced(lines())
    assert await anext(stream) == b"more"
    await stream.aclose()

    assert closed == [True]
