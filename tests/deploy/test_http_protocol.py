"""Under a real uvicorn, with bytes that the test writes itself."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from uvicorn.config import HTTP_PROTOCOLS
from websockets.asyncio.client import connect

from deploy.http_protocol import MOST_HEAD_BYTES, BoundedProtocol, bound_uvicorn

GET = b"GET / HTTP/1.1\r\nhost: a\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"


async def size(request: Request) -> Response:
    return PlainTextResponse(f"{len(await request.body())} bytes")


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text(await websocket.receive_text())
    await websocket.close()


@pytest.fixture
def bounds() -> dict[str, float]:
    return {}


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch, bounds: dict[str, float]) -> AsyncGenerator[int]:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])  # to be as it was
    for name, value in bounds.items():
        monkeypatch.setattr(BoundedProtocol, name, value)
    bound_uvicorn()
    routes = [Route("/", size, methods=["GET", "POST"]), WebSocketRoute("/socket", echo)]
    async with serving(Starlette(routes=routes)) as port:
        yield port


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> bytes:
        """One, with its status line."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return head + await self.reader.readexactly(int(length))

    async def rest(self) -> bytes:
        """Until the server closes it."""
        async with asyncio.timeout(10):
            return await self.reader.read()


Dial = Callable[[], Awaitable[Connection]]


@pytest.fixture
async def dial(port: int) -> AsyncGenerator[Dial]:
    opened: list[asyncio.StreamWriter] = []

    async def dial() -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append(writer)
        return Connection(reader, writer)

    yield dial
    for writer in opened:
        writer.close()


def bounded(**bounds: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bounds", [bounds])


async def test_what_is_within_bounds_is_served(dial: Dial) -> None:
    connection = await dial()
    for _ in range(3):  # the same connection again and again
        connection.writer.write(GET + b"x-long: " + b"a" * 60_000 + b"\r\n\r\n")
        assert (await connection.answer()).endswith(b"0 bytes")

    connection.writer.write(POST)
    for _ in range(10):
        connection.writer.write(b"a" * 100_000)
        await connection.writer.drain()
    assert (await connection.answer()).endswith(b"1000000 bytes")


async def test_a_websocket_is_none_of_its_business(port: int) -> None:
    async with connect(f"ws://127.0.0.1:{port}/socket", proxy=None) as websocket:
        await websocket.send("Hi")
        assert await websocket.recv() == "Hi"


@pytest.mark.parametrize("line", [b"x: " + b"a" * 1000, b"x: a\r\n" * 100, b"a" * 1000])
async def test_headers_without_end_are_cut_off(dial: Dial, line: bytes) -> None:
    connection = await dial()
    connection.writer.write(GET)

    async def flood() -> None:
        while True:
            connection.writer.write(line)
            await connection.writer.drain()

    flooding = asyncio.create_task(flood())
    await asyncio.wait({flooding}, timeout=10)

    assert isinstance(flooding.exception(), ConnectionError)


async def test_whose_headers_are_too_long_is_told_so(dial: Dial) -> None:
    connection = await dial()
    connection.writer.write(GET + b"x: " + b"a" * (MOST_HEAD_BYTES + 1))

    answer = await connection.rest()

    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert answer.endswith(b"\r\n\r\nthe headers are too large\n")


@bounded(head_timeout=0.05)
@pytest.mark.parametrize("begun", [b"", GET])
async def test_one_that_says_nothing_is_not_waited_for(dial: Dial, begun: bytes) -> None:
    connection = await dial()
    connection.writer.write(begun)

    assert (await connection.rest()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@bounded(head_timeout=0.05)
async def test_neither_is_a_further_request_that_does_not_end(dial: Dial) -> None:
    connection = await dial()
    connection.writer.write(GET + b"\r\n")
    await connection.answer()

    connection.writer.write(GET)

    assert (await connection.rest()).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@bounded(head_timeout=0.05)
async def test_a_body_may_take_its_time(dial: Dial) -> None:
    connection = await dial()
    connection.writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\na")
    other = await dial()
    await other.rest()  # as long as one may take that is slow
    connection.writer.write(b"b")

    assert (await connection.answer()).endswith(b"2 bytes")


async def test_a_second_request_before_the_first_answer_is_over_ends_both(dial: Dial) -> None:
    connection = await dial()

    connection.writer.write((GET + b"\r\n") * 2)

    assert await connection.rest() == b""


@bounded(most_connections=2)
async def test_one_connection_too_many_is_told_so_and_the_others_go_on(dial: Dial) -> None:
    first, second = [await dial() for _ in range(2)]
    third = await dial()

    assert (await third.rest()).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    first.writer.write(GET + b"connection: close\r\n\r\n")
    assert (await first.rest()).endswith(b"0 bytes")
    fourth = await dial()
    for connection in (second, fourth):
        connection.writer.write(GET + b"\r\n")
        assert (await connection.answer()).endswith(b"0 bytes")
