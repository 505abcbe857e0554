"""The bounds of all routes, through the real application."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from played import Play, Until, metric, want
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.gate import Gate
from balancer.keys import Keys, Role
from balancer.limits import Limit, Limits, Tally
from common.errors import ErrorCode, RequestError

NATIVE = "/api/v1/continue_from_raw_prompt"
CHAT = "/v1/chat/completions"
RAW = {"raw_prompt": "Hi", "max_tokens": 5}
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
SOCKET = "/api/v1/inference_socket"


def limited(**bounds: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("limits", [Limits(**bounds)])


def refusals(balancer: Balancer, reason: str, limit: str) -> tuple[float, float]:
    return (
        metric(balancer, f'headrace_refused_requests_total{{reason="{reason}"}}'),
        metric(balancer, f'headrace_limit_refusals_total{{limit="{limit}"}}'),
    )


def used(balancer: Balancer, limit: Limit) -> float:
    return metric(balancer, f'headrace_limit_used{{limit="{limit}"}}')


async def until_asked(client: httpx.AsyncClient, condition: Callable[[], bool]) -> None:
    """The balancer's changes say nothing of who has come and gone: another request has a turn."""
    async with asyncio.timeout(10):
        while not condition():
            await client.get("/health")


def code(response: httpx.Response) -> str:
    return response.json()["error"]["code"]


# One request


@limited(headers=12)
async def test_a_request_with_too_many_headers_is_refused(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    headers = {f"x-{n}": "a" for n in range(12)}

    plain = await client.post(NATIVE, json=RAW, headers=headers)
    openai = await client.post(CHAT, json=QUESTION, headers=headers)

    assert (plain.status_code, openai.status_code) == (431, 431)
    assert plain.text == "the request has 19 headers, 12 are allowed\n"
    assert code(openai) == "headers_too_large"
    assert refusals(balancer, "headers_too_large", "headers") == (2, 2)


@limited(header_bytes=1000)
@pytest.mark.parametrize(
    ("path", "headers"), [("/health", {"x-long": "a" * 1000}), (f"/{'a' * 1000}", {})]
)
async def test_headers_and_path_that_are_too_long_are_refused(
    client: httpx.AsyncClient, balancer: Balancer, path: str, headers: dict[str, str]
) -> None:
    response = await client.get(path, headers=headers)

    assert response.status_code == 431
    assert refusals(balancer, "headers_too_large", "header_bytes") == (1, 1)


@limited(headers=12)
async def test_so_is_a_websocket_with_too_many(address: str, balancer: Balancer) -> None:
    headers = {f"x-{n}": "a" for n in range(12)}

    with pytest.raises(InvalidStatus):
        await connect(f"ws://{address}{SOCKET}", proxy=None, additional_headers=headers)
    assert refusals(balancer, "headers_too_large", "headers") == (1, 1)


async def chunks(count: int) -> AsyncGenerator[bytes]:
    for _ in range(count):
        yield b" " * 100


@limited(body_bytes=1000)
async def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    said = await client.post(NATIVE, content=b" " * 1001)
    found = await client.post(NATIVE, content=chunks(11))
    chat = await client.post(CHAT, content=chunks(11))
    state = await client.put("/api/v1/balancer_desired_state", content=chunks(11))
    fits = await client.post(NATIVE, content=chunks(10))

    assert [each.status_code for each in (said, found, chat, state, fits)] == [*[413] * 4, 400]
    assert said.text == found.text == state.text == "the body is larger than 1000 bytes\n"
    assert code(chat) == "body_too_large"
    assert refusals(balancer, "body_too_large", "body_bytes") == (4, 4)
    assert used(balancer, Limit.OPEN_BYTES) == 0


@limited(body_bytes=1000)
async def test_a_websocket_message_that_is_too_large_is_counted(
    socket: ClientConnection, balancer: Balancer
) -> None:
    await socket.send(" " * 1001)

    with pytest.raises(ConnectionClosed):
        await socket.recv()
    assert socket.close_code == 1009
    assert refusals(balancer, "body_too_large", "body_bytes") == (1, 1)


async def test_too_many_keys_are_counted(client: httpx.AsyncClient, balancer: Balancer) -> None:
    body = json.dumps({str(n): 0 for n in range(50_001)})

    assert (await client.post(NATIVE, content=body)).status_code == 413
    assert refusals(balancer, "body_too_large", "body_keys") == (1, 1)


@limited(max_tokens=10)
@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (NATIVE, {**RAW, "max_tokens": 11}, None),
        (CHAT, {**QUESTION, "max_tokens": 11}, "max_tokens"),
        (CHAT, {**QUESTION, "max_completion_tokens": 11}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 11}, "max_tokens"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 11}, "max_output_tokens"),
    ],
)
async def test_an_answer_that_may_not_be_so_long_is_refused(
    client: httpx.AsyncClient,
    balancer: Balancer,
    play: Play,
    path: str,
    body: dict[str, Any],
    named: str | None,
) -> None:
    play()

    response = await client.post(path, json=body)

    assert response.status_code == 400
    assert "the most that is allowed here is 10" in response.text
    if named is not None:
        assert response.json()["error"]["param"] == named
    assert refusals(balancer, "invalid_request", "max_tokens") == (1, 1)


@limited(max_tokens=10)
async def test_who_asks_for_no_length_gets_as_much_as_there_may_be(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    asking = asyncio.create_task(client.post(CHAT, json=QUESTION))

    asked = await agent.asked()
    agent.finish(asked.request_id)
    await asking

    assert asked.max_tokens == 10


@limited(documents=2)
async def test_a_call_for_too_many_embeddings_is_refused(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play()
    want(balancer, enable_embeddings=True)
    batch = [{"id": str(n), "content": "a"} for n in range(3)]

    native = await client.post(
        "/api/v1/generate_embedding_batch",
        json={"input_batch": batch, "normalization_method": "None"},
    )
    openai = await client.post("/v1/embeddings", json={"input": ["a"] * 3})

    assert (native.status_code, openai.status_code) == (400, 400)
    assert native.text == "input_batch has 3 documents, 2 are allowed\n"
    assert openai.json()["error"]["param"] == "input"
    assert refusals(balancer, "invalid_request", "documents") == (2, 2)


# All together


@limited(open_requests=2)
async def test_more_open_requests_than_may_be_are_told_to_come_again(
    client: httpx.AsyncClient, balancer: Balancer, until: Until
) -> None:
    async with client.stream("POST", NATIVE, json=RAW), client.stream("POST", NATIVE, json=RAW):
        await until(lambda: balancer.buffered == 2)

        plain = await client.post(NATIVE, json=RAW)
        openai = await client.post(CHAT, json=QUESTION)
        watched = [await client.get(path) for path in ("/health", "/metrics", "/api/v1/agents")]
        assert used(balancer, Limit.OPEN_REQUESTS) == 2

    assert (plain.status_code, openai.status_code) == (503, 503)
    assert plain.text == "too many open requests (2 at most): try again later\n"
    assert code(openai) == "overloaded"
    assert (plain.headers["retry-after"], openai.headers["retry-after"]) == ("5", "5")
    assert [each.status_code for each in watched] == [200, 200, 200]
    assert refusals(balancer, "overloaded", "open_requests") == (2, 2)
    await until_asked(client, lambda: used(balancer, Limit.OPEN_REQUESTS) == 0)
    assert used(balancer, Limit.OPEN_BYTES) == 0


@limited(open_bytes=100)
async def test_bodies_that_are_too_large_together_are_told_to_come_again(
    client: httpx.AsyncClient, balancer: Balancer, until: Until
) -> None:
    body = {**RAW, "raw_prompt": "a" * 30}
    async with client.stream("POST", NATIVE, json=body):
        await until(lambda: balancer.buffered == 1)

        plain = await client.post(NATIVE, json=body)
        openai = await client.post(CHAT, json={**QUESTION, "cache_salt": "a" * 20})
        small = await client.post(NATIVE, json={})

    assert (plain.status_code, openai.status_code, small.status_code) == (503, 503, 400)
    assert code(openai) == "overloaded"
    assert refusals(balancer, "overloaded", "open_bytes") == (2, 2)


@pytest.fixture
async def socket(address: str) -> AsyncGenerator[ClientConnection]:
    async with connect(
        f"ws://{address}{SOCKET}", proxy=None, user_agent_header="test"
    ) as connection:
        yield connection


@limited(open_sockets=1)
async def test_more_websockets_than_may_be_are_closed_with_the_reason(
    socket: ClientConnection, address: str, client: httpx.AsyncClient, balancer: Balancer
) -> None:
    second = await connect(f"ws://{address}{SOCKET}", proxy=None)

    with pytest.raises(ConnectionClosed):
        await second.recv()
    assert (second.close_code, second.close_reason) == (
        1013,
        "too many open websockets (1 at most): try again later",
    )
    assert refusals(balancer, "overloaded", "open_sockets") == (1, 1)
    assert used(balancer, Limit.OPEN_SOCKETS) == 1

    await socket.close()
    await until_asked(client, lambda: used(balancer, Limit.OPEN_SOCKETS) == 0)


@limited(socket_requests=1)
async def test_more_requests_than_a_websocket_may_have_are_refused_and_it_goes_on(
    socket: ClientConnection, balancer: Balancer, until: Until
) -> None:
    for client_id in "xy":
        request = {"ContinueFromRawPrompt": RAW}
        await socket.send(json.dumps({"Request": {"id": client_id, "request": request}}))

    message = json.loads(await socket.recv())["Error"]
    assert message["request_id"] == "y"
    assert message["error"] == {
        "code": 503,
        "description": "more than 1 open requests on one websocket",
    }
    assert balancer.buffered == 1
    assert refusals(balancer, "overloaded", "socket_requests") == (1, 1)


@limited(observers=2)
@pytest.mark.parametrize("path", ["/api/v1/agents/stream", "/api/v1/events"])
async def test_more_observers_than_may_be_are_told_to_come_again(
    client: httpx.AsyncClient, balancer: Balancer, path: str
) -> None:
    async with (
        client.stream("GET", path),
        client.stream("GET", path),
        client.stream("GET", path) as response,
    ):
        assert used(balancer, Limit.OBSERVERS) == 2
        assert (await client.get("/api/v1/agents")).status_code == 200

    assert response.status_code == 503
    assert refusals(balancer, "overloaded", "observers") == (1, 1)


# The buffer


async def test_ten_may_wait_and_fifty_come() -> None:
    """B26: who cannot wait is told so before any stream begins."""
    balancer = Balancer(buffer_capacity=10, patience=60.0)
    app = create_app(balancer)
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        asyncio.TaskGroup() as group,
    ):
        asking = [group.create_task(client.post(CHAT, json=QUESTION)) for _ in range(50)]
        done: set[asyncio.Task[httpx.Response]] = set()
        while len(done) < 40:
            more, _ = await asyncio.wait(set(asking) - done, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert balancer.buffered == 10
        refused = [task.result() for task in done]
        balancer.close()

    assert len(refused) == 40
    assert {each.status_code for each in refused} == {429}
    assert {each.headers["retry-after"] for each in refused} == {"1"}
    assert {each.headers["content-type"] for each in refused} == {"application/json"}
    assert {code(each) for each in refused} == {"rate_limit_exceeded"}
    assert refusals(balancer, "buffer_full", "buffered_requests")[1] == 40


@limited(buffered_bytes=2500)
async def test_what_waits_is_bounded_in_bytes(
    client: httpx.AsyncClient, balancer: Balancer, until: Until
) -> None:
    body = {**QUESTION, "messages": [{"role": "user", "content": "a" * 1000}]}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            client.stream("POST", NATIVE, json={**RAW, "raw_prompt": "a" * 1000})
        )
        await until(lambda: balancer.buffered == 1)
        assert used(balancer, Limit.BUFFERED_BYTES) > 1000

        response = await client.post(CHAT, json=body)

    assert response.status_code == 429
    assert response.json()["error"]["message"] == (
        "the requests that wait for a slot have too many bytes already"
    )
    assert refusals(balancer, "buffer_full", "buffered_bytes") == (1, 1)
    await until(lambda: used(balancer, Limit.BUFFERED_BYTES) == 0)


# What is refused for other reasons is counted as well


async def test_each_refusal_has_its_reason(client: httpx.AsyncClient, balancer: Balancer) -> None:
    await client.post(NATIVE, content=b"{")
    await client.post(CHAT, json={**QUESTION, "model": "nobody's"})
    await client.post("/v1/embeddings", json={"input": "a"})
    await client.get("/health", headers={"origin": "https://evil.example"})

    for reason in (
        "invalid_request",
        "model_not_found",
        "embeddings_disabled",
        "origin_not_allowed",
    ):
        assert metric(balancer, f'headrace_refused_requests_total{{reason="{reason}"}}') == 1, (
            reason
        )


async def test_so_has_one_without_a_key(balancer: Balancer) -> None:
    transport = httpx.ASGITransport(create_app(balancer, keys=Keys([(Role.INFERENCE, "the-key")])))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post(CHAT, json=QUESTION)

    assert metric(balancer, 'headrace_refused_requests_total{reason="unauthorized"}') == 1


async def test_a_message_that_cannot_be_read_is_counted(
    socket: ClientConnection, balancer: Balancer, until: Until
) -> None:
    await socket.send(json.dumps({"Request": {"id": "x", "request": {}}}))

    assert json.loads(await socket.recv())["Error"]["request_id"] == "x"
    assert metric(balancer, 'headrace_refused_requests_total{reason="invalid_request"}') == 1


async def test_a_body_that_does_not_come_gives_its_place_back() -> None:
    limits = Limits(open_requests=1)
    tally = Tally(limits)
    told: list[RequestError] = []

    async def read(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()
        with pytest.raises(RequestError) as caught:
            await receive()
        told.append(caught.value)

    parts = [{"type": "http.request", "body": b"x", "more_body": True}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(_message: Message) -> None:
        pass

    gate = Gate(read, limits, tally, refused=told.append, body_patience=0.01)
    path = "/v1/chat/completions"
    await gate({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)

    assert [error.code for error in told] == [ErrorCode.BODY_TOO_SLOW]
    assert tally.used(Limit.OPEN_REQUESTS) == 0
