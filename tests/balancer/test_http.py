from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Scope

from balancer.http import ClosingStream

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
