import asyncio
from collections.abc import AsyncGenerator

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Scope
from starlette.websockets import WebSocketDisconnect

from balancer import http
from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.http import ClosingStream, json_answer, paced
from balancer.keys import Keys

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


async def test_a_large_answer_goes_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve breaks messages that are larger than 4 MiB."""
    monkeypatch.setattr(http, "LARGEST_BURST", 5)
    monkeypatch.setattr(http, "BURST_PAUSE", 0.0)
    sent: list[Message] = []

    async def forever() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    await json_answer(["a text", 5], headers={"x-name": "n"})(SCOPE, forever, send)

    start, *pieces = sent
    body = b"".join(piece.get("body", b"") for piece in pieces)
    assert max(len(piece.get("body", b"")) for piece in pieces) == 5
    assert body == b'["a text",5]'
    assert dict(start["headers"])[b"content-length"] == b"12"
    assert dict(start["headers"])[b"x-name"] == b"n"


# Keys

KEY = {"authorization": "Bearer the-key"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/chat/completions",
        "/v1/unheard-of",
        "/api/v1/continue_from_raw_prompt",
        "/api/v1/continue_from_conversation_history",
        "/api/v1/generate_embedding_batch",
    ],
)
async def test_inference_wants_a_key_where_there_are_keys(balancer: Balancer, path: str) -> None:
    transport = httpx.ASGITransport(create_app(balancer, keys=Keys(["the-key"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        without = await client.post(path)
        wrong = await client.post(path, headers={"authorization": "Bearer the-kez"})
        right = await client.post(path, headers=KEY)

    assert (without.status_code, wrong.status_code) == (401, 401)
    assert without.headers["www-authenticate"] == "Bearer"
    assert right.status_code != 401
    if path.startswith("/v1/"):
        assert without.json()["error"]["code"] == "invalid_api_key"


async def test_other_routes_want_none(balancer: Balancer) -> None:
    transport = httpx.ASGITransport(create_app(balancer, keys=Keys(["the-key"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/api/v1/agents")).status_code == 200


async def test_a_socket_wants_a_key_too(balancer: Balancer) -> None:
    client = TestClient(create_app(balancer, keys=Keys(["the-key"])))

    with (
        pytest.raises(WebSocketDisconnect) as caught,
        client.websocket_connect("/api/v1/inference_socket"),
    ):
        pass
    with client.websocket_connect("/api/v1/inference_socket", headers=KEY):
        pass

    assert caught.value.code == 1008
