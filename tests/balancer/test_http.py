import asyncio
import base64
from collections.abc import AsyncGenerator

import httpx
import pytest
from serving import serving
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from balancer import http
from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.http import ClosingStream, KeyHolders, json_answer, paced, role_of
from balancer.keys import Keys, Role
from common.errors import ErrorCode, RequestError

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

KEY_OF = {role: f"the-key-for-{role}" for role in Role}
KEYS = Keys((role, key) for role, key in KEY_OF.items())

ROLES: dict[str, Role | None] = {
    "/health": None,
    "/metrics": Role.MANAGEMENT,
    "/api/v1/continue_from_conversation_history": Role.INFERENCE,
    "/api/v1/continue_from_raw_prompt": Role.INFERENCE,
    "/api/v1/generate_embedding_batch": Role.INFERENCE,
    "/api/v1/inference_socket": Role.INFERENCE,
    "/api/v1/agents": Role.MANAGEMENT,
    "/api/v1/agents/stream": Role.MANAGEMENT,
    "/api/v1/buffered_requests": Role.MANAGEMENT,
    "/api/v1/buffered_requests/stream": Role.MANAGEMENT,
    "/api/v1/balancer_desired_state": Role.MANAGEMENT,
    "/api/v1/balancer_applicable_state": Role.MANAGEMENT,
    "/api/v1/agent_overrides": Role.MANAGEMENT,
    "/api/v1/fleets": Role.MANAGEMENT,
    "/api/v1/fleets/stream": Role.MANAGEMENT,
    "/api/v1/fleets/{name}": Role.MANAGEMENT,
    "/api/v1/agent/{agent_id}/chat_template_override": Role.MANAGEMENT,
    "/api/v1/agent/{agent_id}/model_metadata": Role.MANAGEMENT,
    "/api/v1/agent/{agent_id}/status": Role.MANAGEMENT,
    "/api/v1/agent/{agent_id}/drain": Role.MANAGEMENT,
    "/api/v1/agent/{agent_id}/undrain": Role.MANAGEMENT,
    "/api/v1/balancer_desired_state/schema": Role.MANAGEMENT,
    "/api/v1/overview": Role.MANAGEMENT,
    "/api/v1/events": Role.MANAGEMENT,
    "/api/v1/requests": Role.MANAGEMENT,
    "/api/v1/requests/{request_id}": Role.MANAGEMENT,
    "/api/v1/chat_template_preview": Role.MANAGEMENT,
    "/panel": None,
    "/panel/{path:path}": None,
    "/v1/models": Role.INFERENCE,
    "/v1/models/{model:path}": Role.INFERENCE,
    "/v1/chat/completions": Role.INFERENCE,
    "/v1/responses": Role.INFERENCE,
    "/v1/completions": Role.INFERENCE,
    "/v1/embeddings": Role.INFERENCE,
    "/v1/tokenize": Role.INFERENCE,
    "/v1/detokenize": Role.INFERENCE,
    # There is nothing.
    "/": Role.MANAGEMENT,
    "/v1/unheard-of": Role.INFERENCE,
    "/api/v1/unheard-of": Role.MANAGEMENT,
    "//v1/models": Role.MANAGEMENT,
    "/panels": Role.MANAGEMENT,
    "/V1/models": Role.MANAGEMENT,
    "/health/": Role.MANAGEMENT,
}


async def reached(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for the routes: streams among them never end."""
    await PlainTextResponse("reached", 299)(scope, receive, send)


async def statuses(path: str, headers: list[dict[str, str]]) -> list[int]:
    """Without and with routes behind it, which come to the same if none is reached."""
    told: list[RequestError] = []
    transport = httpx.ASGITransport(KeyHolders(reached, KEYS, told.append))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answers = [await client.get(path, headers=each) for each in headers]
    refused = [answer for answer in answers if answer.status_code != 299]
    assert [error.code for error in told] == [
        ErrorCode.UNAUTHORIZED if answer.status_code == 401 else ErrorCode.FORBIDDEN
        for answer in refused
    ]
    for answer in refused:
        assert ("www-authenticate" in answer.headers) is (answer.status_code == 401)
    return [answer.status_code for answer in answers]


def test_every_route_has_its_role(balancer: Balancer) -> None:
    """A new route is for those who manage, unless ``role_of`` says otherwise; say here what is meant."""
    routes = create_app(balancer).routes
    paths = {route.path for route in routes if isinstance(route, Route | WebSocketRoute)}

    assert len(paths) > 20
    assert {isinstance(route, Route | WebSocketRoute) for route in routes} == {True}
    assert paths - ROLES.keys() == set()
    assert {path: role_of(path) for path in ROLES} == ROLES


@pytest.mark.parametrize("path", ROLES)
async def test_a_route_wants_a_key_of_its_role(path: str) -> None:
    role = ROLES[path]
    others = [key for other, key in KEY_OF.items() if other is not role]
    bearers = [{"authorization": f"Bearer {key}"} for key in ["of-nobody", *others]]

    refused = await statuses(path, [{}, *bearers])

    assert refused == ([299] * 5 if role is None else [401, 401, 403, 403])[: len(refused)]
    if role is not None:
        key = KEY_OF[role]
        right = [{"authorization": f"bearer {key}"}, {"x-api-key": key}]
        assert await statuses(path, right) == [299, 299]


async def test_keys_are_asked_for_before_the_routes(balancer: Balancer) -> None:
    transport = httpx.ASGITransport(create_app(balancer, keys=KEYS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        without = await client.post("/v1/chat/completions")
        other = await client.post(
            "/v1/chat/completions", headers={"x-api-key": KEY_OF[Role.MANAGEMENT]}
        )
        agents = await client.get("/api/v1/agents")
        right = await client.get(
            "/api/v1/agents", headers={"authorization": f"Bearer {KEY_OF[Role.MANAGEMENT]}"}
        )
        health = await client.get("/health")

    assert (without.status_code, other.status_code) == (401, 403)
    assert without.json()["error"]["code"] == "invalid_api_key"
    assert other.json()["error"]["message"] == "this key is not one for inference"
    assert (agents.status_code, right.status_code, health.status_code) == (401, 200, 200)
    assert agents.text == "a key for management is needed: Authorization: Bearer KEY\n"


async def test_without_keys_everybody_may_do_everything(balancer: Balancer) -> None:
    transport = httpx.ASGITransport(create_app(balancer))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/api/v1/agents")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_socket_is_refused_before_it_is_open(balancer: Balancer) -> None:
    def bearer(role: Role) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY_OF[role]}"}

    async with serving(create_app(balancer, keys=KEYS)) as port:
        url = f"ws://127.0.0.1:{port}/api/v1/inference_socket"
        with pytest.raises(InvalidStatus) as without:
            await connect(url, proxy=None)
        with pytest.raises(InvalidStatus) as other:
            await connect(url, proxy=None, additional_headers=bearer(Role.AGENT))
        async with connect(url, proxy=None, additional_headers=bearer(Role.INFERENCE)):
            pass
        balancer.close()

    assert without.value.response.status_code == 401
    assert without.value.response.headers["www-authenticate"] == "Bearer"
    assert other.value.response.status_code == 403
    assert other.value.response.body == b"this key is not one for inference\n"


async def test_a_browsers_socket_shows_its_key_as_a_subprotocol(balancer: Balancer) -> None:
    def offered(role: Role) -> list[Subprotocol]:
        key = base64.urlsafe_b64encode(KEY_OF[role].encode()).decode().rstrip("=")
        return [Subprotocol("headrace"), Subprotocol(f"headrace.key.{key}")]

    async with serving(create_app(balancer, keys=KEYS)) as port:
        url = f"ws://127.0.0.1:{port}/api/v1/inference_socket"
        with pytest.raises(InvalidStatus) as other:
            await connect(url, proxy=None, subprotocols=offered(Role.MANAGEMENT))
        async with connect(url, proxy=None, subprotocols=offered(Role.INFERENCE)) as socket:
            assert socket.subprotocol == "headrace"
        balancer.close()

    assert other.value.response.status_code == 403


async def test_a_server_that_cannot_answer_a_socket_closes_it(balancer: Balancer) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "websocket", "path": "/api/v1/inference_socket", "headers": []}
    await KeyHolders(reached, KEYS, balancer.metrics.refuse)(scope, receive, send)

    (message,) = sent
    assert (message["type"], message["code"]) == ("websocket.close", 1008)
