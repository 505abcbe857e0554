import asyncio
import json
import socket
from contextlib import suppress

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from deploy.flow import FLOW, LEFT, STEP, TAKEN
from deploy.proxy import PIECE, TRY_AGAIN, Answered, OwnHeaders


async def names(request: Request) -> JSONResponse:
    return JSONResponse(sorted(request.headers.keys()))


@pytest.mark.parametrize("header", ["x-request-timeout-seconds", "X-Request-Disconnect-Disabled"])
async def test_clients_cannot_steer_serve_by_headers(header: str) -> None:
    app = Starlette(routes=[Route("/", names)], middleware=[Middleware(OwnHeaders)])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        seen = (await client.get("/", headers={header: "1", "x-other": "1"})).json()

    assert "x-other" in seen
    assert header.lower() not in seen


@pytest.mark.parametrize(("given", "seen"), [({"x-request-id": "ours"}, "ours"), ({}, "serve's")])
async def test_an_answer_has_one_id_and_the_balancers_own_goes_first(
    given: dict[str, str], seen: str
) -> None:
    async def answer(_request: Request) -> JSONResponse:
        answer = JSONResponse(None, headers=given)
        answer.headers.append("x-request-id", "serve's")  # as its own middleware does it
        return answer

    app = Starlette(routes=[Route("/", answer)], middleware=[Middleware(OwnHeaders)])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        response = await client.get("/")

    assert response.headers.get_list("x-request-id") == [seen]


# What stands before Serve when the balancer is gone.


class Serve:
    """Its proxy: passes on what the balancer says, and returns without a word if it is lost."""

    def __init__(self, *said: Message) -> None:
        self.said = said
        self.healthy = True
        self.hangs = False
        self.waits = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.told: asyncio.Queue[Message] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            if self.healthy:
                await send({**START, "headers": list(START["headers"])})
                await send({"type": "http.response.body", "body": b"OK"})
            else:
                await asyncio.Event().wait()
            return
        self.scope = scope
        receiving = asyncio.create_task(self._receive(receive))
        try:
            for message in self.said:
                await send(dict(message))
            if self.hangs:
                self.waits.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()  # as Serve does: it cancels the replica's part and returns
        finally:
            receiving.cancel()

    async def _receive(self, receive: Receive) -> None:
        while True:
            self.told.put_nowait(await receive())


START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (FLOW.encode(), b"1")],
}
SERVES_START: Message = {"type": "http.response.start", "status": 500, "headers": []}


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Client:
    def __init__(self, kind: str = "http", path: str = "/api/v1/continue_from_raw_prompt") -> None:
        self.scope: Scope = {"type": kind, "path": path, "headers": []}
        self.seen: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

        self.leaves = asyncio.Event()
        self.is_cut = False

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": f"{self.scope['type']}.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        if self.is_cut:
            raise OSError("as uvicorn says it of websockets")
        await asyncio.sleep(0)  # others may go on
        self.seen.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.seen if m["type"] == "http.response.body")

    async def ask(
        self,
        serve: Serve,
        *,
        silence: float = 100,
        answer_timeout: float = 100,
        slow: float = 100,
        farewell: float = 100,
    ) -> None:
        app = Answered(
            serve,
            silence=silence,
            answer_timeout=answer_timeout,
            slow_client=slow,
            farewell=farewell,
        )
        await app(self.scope, self.receive, self.send)


async def test_an_answer_of_the_balancer_passes_without_its_mark() -> None:
    client = Client()
    serve = Serve(START, part(b"1\n"), part(b"2\n", more=False))

    await client.ask(serve)

    assert client.seen[0]["headers"] == [(b"content-type", b"application/json")]
    assert client.seen[1:] == [part(b"1\n"), part(b"2\n", more=False)]
    assert (FLOW.encode(), b"1") in serve.scope["headers"]


async def test_a_client_cannot_set_the_mark() -> None:
    client = Client()
    client.scope["headers"] = [(b"X-Headrace-Flow", b"7"), (b"other", b"1")]
    serve = Serve(START, part(b"", more=False))

    await client.ask(serve)

    assert serve.scope["headers"] == [(b"other", b"1"), (FLOW.encode(), b"1")]


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    client = Client()

    await client.ask(Serve(START, part(b'{"one": 1}\n')))

    lines = client.body.splitlines()
    assert lines[0] == b'{"one": 1}'
    assert json.loads(lines[1])["Error"]["error"] == {"code": 503, "description": str(TRY_AGAIN)}
    assert not client.seen[-1].get("more_body")


@pytest.mark.parametrize("said", [(), (SERVES_START, part(b"a stack trace", more=False))])
async def test_an_answer_that_never_began_is_a_503(said: tuple[Message, ...]) -> None:
    client = Client(path="/v1/chat/completions")

    await client.ask(Serve(*said))

    start, body = client.seen
    assert start["status"] == 503
    assert (b"retry-after", b"5") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "balancer_lost"


async def test_what_has_no_word_for_an_error_is_cut() -> None:
    client = Client(path="/metrics")

    await client.ask(Serve(START, part(b"a 1\n")))

    assert client.body == b"a 1\n"
    assert client.seen[-1]["more_body"]


async def test_serves_own_routes_are_left_alone() -> None:
    client = Client(path="/-/healthz")

    await client.ask(Serve(SERVES_START, part(b"success", more=False)))

    assert client.seen == [SERVES_START, part(b"success", more=False)]


async def test_a_websocket_that_breaks_is_closed_with_a_reason() -> None:
    client = Client("websocket", "/api/v1/inference_socket")

    await client.ask(Serve({"type": "websocket.accept", "headers": [(FLOW.encode(), b"1")]}))

    close = {"type": "websocket.close", "code": 1012, "reason": str(TRY_AGAIN)}
    assert client.seen == [{"type": "websocket.accept", "headers": []}, close]


async def test_a_websocket_that_was_never_opened_is_a_503() -> None:
    client = Client("websocket", "/api/v1/inference_socket")

    await client.ask(Serve())

    assert [m["type"] for m in client.seen] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert client.seen[0]["status"] == 503


async def test_a_websocket_that_the_balancer_refuses_stays_refused() -> None:
    client = Client("websocket", "/api/v1/inference_socket")
    refusal: Message = {"type": "websocket.close", "code": 1008, "reason": "no"}

    await client.ask(Serve(refusal))

    assert client.seen == [refusal]


async def test_so_does_one_that_it_answers_instead_of_opening_it() -> None:
    client = Client("websocket", "/api/v1/inference_socket")
    refusal: tuple[Message, ...] = (
        {"type": "websocket.http.response.start", "status": 401, "headers": []},
        {"type": "websocket.http.response.body", "body": b"a key", "more_body": False},
    )

    await client.ask(Serve(*refusal))

    assert client.seen == list(refusal)


@pytest.mark.parametrize("said", [(), (START, part(b'{"one": 1}\n'))])
async def test_silence_of_a_balancer_that_does_not_answer_ends(said: tuple[Message, ...]) -> None:
    client, serve = Client(), Serve(*said)
    serve.hangs, serve.healthy = True, False

    await client.ask(serve, silence=0.01, answer_timeout=0.01)

    assert serve.cancelled.is_set()
    assert str(TRY_AGAIN).encode() in client.body


async def test_silence_of_a_balancer_that_is_there_goes_on() -> None:
    client, serve = Client(), Serve(START)
    serve.hangs = True
    asked = asyncio.create_task(client.ask(serve, silence=0.001))
    await serve.waits.wait()

    done, _ = await asyncio.wait({asked}, timeout=0.1)

    assert not done
    asked.cancel()


async def test_a_client_that_does_not_read_is_given_up_and_the_replica_hears_of_it() -> None:
    client, serve = Client(), Serve(START, part(b"1\n"), part(b"2\n"))
    serve.hangs = True
    client.reads.clear()

    await client.ask(serve, slow=0.01)

    assert serve.cancelled.is_set()
    assert client.seen == []


async def test_a_client_that_leaves_is_told_of_and_nothing_is_cancelled() -> None:
    client, serve = Client(), Serve(START, part(b"1\n"))
    serve.hangs = True
    asked = asyncio.create_task(client.ask(serve))
    await serve.waits.wait()

    client.leaves.set()

    assert await serve.told.get() == {"type": LEFT}
    for _ in range(9):
        await asyncio.sleep(0)
    assert serve.told.empty(), "once only"
    assert not serve.cancelled.is_set()
    asked.cancel()


async def test_what_goes_on_for_a_client_that_has_left_is_cancelled() -> None:
    client, serve = Client(), Serve(START, part(b"1\n"))
    serve.hangs = True
    client.leaves.set()

    await client.ask(serve, farewell=0.01)

    assert serve.cancelled.is_set()


async def test_the_sockets_of_clients_that_have_left_take_what_comes_yet() -> None:
    """Serve would forget the replica's answer if a send failed."""
    client = Client("websocket")
    serve = Serve(
        {"type": "websocket.accept", "headers": []}, {"type": "websocket.send", "text": "a"}
    )
    client.is_cut = True

    await client.ask(serve)

    assert client.seen == []


async def test_what_a_client_takes_is_told_in_steps() -> None:
    client = Client()
    serve = Serve(START, *[part(bytes(STEP // 2))] * 5)
    serve.hangs = True
    asked = asyncio.create_task(client.ask(serve))

    first = await serve.told.get()
    await serve.waits.wait()

    assert first["type"] == TAKEN
    assert STEP <= first["bytes"] <= STEP // 2 * 5
    assert client.body == bytes(STEP // 2 * 5)
    asked.cancel()


async def test_a_connection_that_takes_nothing_is_dropped() -> None:
    serve = Serve(START, *[part(bytes(PIECE))] * 200)  # more than the system's buffers hold
    serve.hangs = True
    app = Answered(serve, slow_client=0.05)
    config = uvicorn.Config(app, lifespan="off", log_config=None, port=0)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1)

        writer.write(b"GET /api/v1/any HTTP/1.1\r\nhost: here\r\n\r\n")
        await serve.cancelled.wait()
        server.should_exit = True
        await running  # it waits for all connections

        with suppress(ConnectionResetError):  # what came is a part only
            assert len(await reader.read(-1)) < 200 * PIECE
        writer.close()
