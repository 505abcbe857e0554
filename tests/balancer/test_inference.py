"""The inference routes over real HTTP and websockets, with the agent's part played by the test."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
from played import Play, Until, metric, want
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from balancer.balancer import Balancer
from balancer.limits import Limits
from common.errors import ErrorCode
from common.ids import TokenId
from common.messages import (
    L2,
    Conversation,
    Document,
    DocumentFailed,
    DocumentTooLong,
    Failed,
    FinishReason,
    Generate,
    Logprobs,
    Pooling,
    RawPrompt,
    Segment,
    TokenClass,
    TokenGenerated,
    TokenLogprob,
)

CONVERSATION: dict[str, Any] = {
    "add_generation_prompt": True,
    "conversation_history": [{"role": "user", "content": "Hi"}],
    "enable_thinking": False,
    "max_tokens": 16,
}
RAW: dict[str, Any] = {"raw_prompt": "Hi", "max_tokens": 16}
ROUTE = "/api/v1/continue_from_raw_prompt"


@pytest.fixture
async def socket(address: str) -> AsyncGenerator[ClientConnection]:
    async with connect(f"ws://{address}/api/v1/inference_socket", proxy=None) as socket:
        yield socket


def connect_browser(address: str, **options: Any) -> connect:
    """As a client that is not the published one in Python."""
    url = f"ws://{address}/api/v1/inference_socket"
    return connect(url, proxy=None, user_agent_header="Mozilla/5.0", **options)


async def ask(socket: ClientConnection, request_id: str, params: Any = RAW) -> None:
    request = {"ContinueFromRawPrompt": params}
    await socket.send(json.dumps({"Request": {"id": request_id, "request": request}}))


async def receive(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(10):
        return json.loads(await socket.recv())


def content(message: dict[str, Any]) -> tuple[str, str]:
    """The request id and the text of a token."""
    response = message["Response"]
    return response["request_id"], response["response"]["GeneratedToken"]["ContentToken"]


async def test_health(client: httpx.AsyncClient) -> None:
    response = await client.get("/health")

    assert (response.status_code, response.text) == (200, "OK")


async def test_http_streams_a_message_a_line_as_they_come(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play("one")
    async with client.stream(
        "POST", "/api/v1/continue_from_conversation_history", json=CONVERSATION
    ) as response:
        asked = await agent.asked()
        lines = response.aiter_lines()

        agent.say_token(asked.request_id, "a")
        first = json.loads(await anext(lines))  # before the second token exists
        agent.finish(asked.request_id)
        rest = [json.loads(line) async for line in lines]

    assert isinstance(asked.prompt, Conversation)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-cache"
    assert content(first) == (asked.request_id, "a")
    assert first["Response"]["generated_by"] == "one"
    assert ["Done" in m["Response"]["response"]["GeneratedToken"] for m in rest] == [True]


async def test_a_raw_prompt_reaches_the_agent(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    async with client.stream("POST", ROUTE, json=RAW):
        asked = await agent.asked()
        agent.finish(asked.request_id)

    assert asked.prompt == RawPrompt("Hi")


async def test_a_client_that_leaves_while_it_streams_is_a_cancel(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    async with client.stream("POST", ROUTE, json=RAW) as response:
        asked = await agent.asked()
        agent.say_token(asked.request_id, "a")
        await anext(response.aiter_lines())

    assert await agent.cancelled() == asked.request_id


async def test_a_client_that_leaves_before_the_first_token_is_a_cancel(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    async with client.stream("POST", ROUTE, json=RAW):
        asked = await agent.asked()

    assert await agent.cancelled() == asked.request_id


async def test_several_answers_are_told_apart_by_their_index(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play(slots=2)
    async with client.stream("POST", ROUTE, json={**RAW, "n": 2, "seed": 7}) as response:
        first, second = await agent.asked(), await agent.asked()
        agent.say_token(second.request_id, "b")
        agent.say_token(first.request_id, "a")
        agent.finish(first.request_id)
        agent.finish(second.request_id)
        lines = [json.loads(line)["Response"] async for line in response.aiter_lines()]

    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert {line["request_id"] for line in lines} == {first.request_id}
    tokens = [line["response"]["GeneratedToken"] for line in lines]
    assert [
        (line["index"], token.get("ContentToken"))
        for line, token in zip(lines, tokens, strict=True)
    ] == [(1, "b"), (0, "a"), (0, None), (1, None)]


async def test_a_client_that_leaves_cancels_all_its_answers_and_those_that_wait_never_start(
    client: httpx.AsyncClient, balancer: Balancer, play: Play, until: Until
) -> None:
    """B06, with two slots for four answers."""
    agent = play(slots=2)
    async with client.stream("POST", ROUTE, json={**RAW, "n": 4}) as response:
        running = [(await agent.asked()).request_id for _ in range(2)]
        assert balancer.buffered == 2
        agent.say_token(running[0], "a")
        await anext(response.aiter_lines())

    assert [await agent.cancelled() for _ in range(2)] == running
    for request_id in running:
        agent.finish(request_id, FinishReason.CANCELLED)
    assert agent.frames.empty(), "an answer that waited was begun"
    assert balancer.buffered == 0
    assert metric(balancer, 'headrace_requests_total{outcome="cancelled"}') == 4


async def test_log_probabilities_come_with_each_token(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    chosen, other = TokenLogprob(TokenId(1), -0.1, b"a"), TokenLogprob(TokenId(2), -2.5, b"b")
    async with client.stream("POST", ROUTE, json={**RAW, "logprobs": 2}) as response:
        asked = await agent.asked()
        logprobs = Logprobs(chosen, (chosen, other))
        agent.say(
            TokenGenerated(
                asked.request_id, TokenId(1), (Segment(TokenClass.CONTENT, "a"),), logprobs
            )
        )
        agent.finish(asked.request_id)
        lines = [json.loads(line)["Response"] async for line in response.aiter_lines()]

    assert asked.logprobs == 2
    assert lines[0]["logprobs"] == {
        "token_id": 1,
        "token": "a",
        "logprob": -0.1,
        "top_logprobs": [
            {"token_id": 1, "token": "a", "logprob": -0.1},
            {"token_id": 2, "token": "b", "logprob": -2.5},
        ],
    }


async def test_a_client_that_leaves_while_it_waits_frees_its_place(
    client: httpx.AsyncClient, balancer: Balancer, until: Until
) -> None:
    async with client.stream("POST", ROUTE, json=RAW):
        await until(lambda: balancer.buffered == 1)

    await until(lambda: balancer.buffered == 0)


async def test_too_many_waiting_requests_are_told_so_in_the_stream(
    client: httpx.AsyncClient, balancer: Balancer, until: Until
) -> None:
    async with client.stream("POST", ROUTE, json=RAW), client.stream("POST", ROUTE, json=RAW):
        await until(lambda: balancer.buffered == 2)

        response = await client.post(ROUTE, json=RAW)

    assert response.status_code == 200
    assert response.json()["Error"]["error"]["code"] == 503


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (json.dumps({**RAW, "max_tokens": 0}).encode(), 400),
        (json.dumps({**RAW, "surprise": 1}).encode(), 400),
        (json.dumps({**RAW, "grammar": {"type": "gbnf"}}).encode(), 400),
        (json.dumps({**RAW, "n": 17}).encode(), 400),
        (b" " * (Limits().body_bytes + 1), 413),
    ],
)
async def test_a_bad_body_gets_a_status_and_a_reason(
    client: httpx.AsyncClient, body: bytes, status: int
) -> None:
    response = await client.post(ROUTE, content=body)

    assert response.status_code == status
    assert response.headers["content-type"].startswith("text/plain")
    assert len(response.text.splitlines()) == 1


async def test_a_number_that_no_frame_can_carry_is_its_senders_error(
    client: httpx.AsyncClient, play: Play
) -> None:
    """It once cut the link, and with it every other stream of that agent."""
    agent = play(slots=2)
    function = {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"maximum": 10**30}}},
    }
    hostile = {**CONVERSATION, "tools": [{"type": "function", "function": function}]}
    async with client.stream("POST", ROUTE, json=RAW) as response:
        asked = await agent.asked()

        refused = await client.post("/api/v1/continue_from_conversation_history", json=hostile)
        agent.finish(asked.request_id)
        lines = [line async for line in response.aiter_lines()]

    assert refused.status_code == 400
    assert "Done" in lines[-1]
    assert agent.frames.empty()


async def test_embeddings_are_refused_by_name(client: httpx.AsyncClient) -> None:
    response = await client.post("/api/v1/generate_embedding_batch", json={})

    assert (response.status_code, response.text) == (501, "embeddings are not enabled\n")


async def test_a_websocket_carries_many_requests_at_once(
    socket: ClientConnection, play: Play
) -> None:
    agent = play(slots=2)
    await ask(socket, "x")
    await ask(socket, "y")
    x, y = await agent.asked(), await agent.asked()

    agent.say_token(y.request_id, "to y")
    agent.say_token(x.request_id, "to x")
    assert {content(await receive(socket)), content(await receive(socket))} == {
        ("x", "to x"),
        ("y", "to y"),
    }
    agent.finish(x.request_id)
    done = await receive(socket)

    assert done["Response"]["request_id"] == "x"
    assert done["Response"]["response"]["GeneratedToken"]["Done"]["usage"]["prompt_tokens"] == 5


async def test_a_websocket_client_cancels_one_request(socket: ClientConnection, play: Play) -> None:
    agent = play(slots=2)
    await ask(socket, "x")
    await ask(socket, "y")
    x, y = await agent.asked(), await agent.asked()

    await socket.send('{"Notification": {"StopRespondingTo": "x"}}')
    await socket.send('{"Notification": {"StopRespondingTo": "unknown"}}')
    assert await agent.cancelled() == x.request_id
    agent.say_token(x.request_id, "late")
    agent.say_token(y.request_id, "a")

    assert content(await receive(socket)) == ("y", "a")


async def test_a_cancel_right_behind_its_request_is_not_overtaken(
    socket: ClientConnection, balancer: Balancer, until: Until
) -> None:
    await ask(socket, "x")
    await socket.send('{"Notification": {"StopRespondingTo": "x"}}')
    await ask(socket, "y")

    await until(lambda: metric(balancer, 'headrace_requests_total{outcome="cancelled"}') == 1)
    await until(lambda: balancer.buffered == 1)


async def test_an_id_can_be_used_again_right_after_its_cancel(
    socket: ClientConnection, play: Play
) -> None:
    agent = play(slots=2)
    await ask(socket, "x")
    first = await agent.asked()

    await socket.send('{"Notification": {"StopRespondingTo": "x"}}')
    await ask(socket, "x")
    frames = [await agent.next_frame(), await agent.next_frame()]  # a cancel and a request
    (again,) = (frame for frame in frames if isinstance(frame, Generate))
    agent.say_token(first.request_id, "old")
    agent.say_token(again.request_id, "new")

    assert content(await receive(socket)) == ("x", "new")


async def test_a_websocket_that_closes_cancels_all_its_requests(
    address: str, balancer: Balancer, play: Play, until: Until
) -> None:
    agent = play()
    async with connect(f"ws://{address}/api/v1/inference_socket", proxy=None) as socket:
        await ask(socket, "x")
        await ask(socket, "y")
        asked = await agent.asked()
        await until(lambda: balancer.buffered == 1)

    assert await agent.cancelled() == asked.request_id
    await until(lambda: balancer.buffered == 0)


@pytest.mark.parametrize(
    ("params", "code"),
    [({"max_tokens": 1}, 400), ({**RAW, "grammar": {"type": "gbnf"}}, 400)],
)
async def test_a_bad_websocket_request_gets_an_error_and_harms_no_other(
    socket: ClientConnection, play: Play, params: Any, code: int
) -> None:
    agent = play()
    await ask(socket, "good")
    asked = await agent.asked()

    await socket.send("nonsense")
    await socket.send(b"\x00")
    await ask(socket, "bad", params)
    error = (await receive(socket))["Error"]
    agent.say_token(asked.request_id, "a")

    assert (error["request_id"], error["error"]["code"]) == ("bad", code)
    assert content(await receive(socket)) == ("good", "a")


async def test_an_id_that_is_open_already_is_refused(socket: ClientConnection, play: Play) -> None:
    agent = play()
    await ask(socket, "x")
    asked = await agent.asked()

    await ask(socket, "x")
    error = await receive(socket)
    agent.say_token(asked.request_id, "a")
    token = await receive(socket)
    agent.finish(asked.request_id)
    await receive(socket)
    await ask(socket, "x")  # over, so the id can be used again

    assert error["Error"]["error"]["code"] == 400
    assert content(token) == ("x", "a")
    assert (await agent.asked()).request_id != asked.request_id


async def test_an_image_travels_with_the_size_that_the_operator_wants(
    play: Play, socket: ClientConnection, balancer: Balancer
) -> None:
    agent = play()
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eHl6"}}
    params = {**CONVERSATION, "conversation_history": [{"role": "user", "content": [part]}]}
    request = {"ContinueFromConversationHistory": params}

    await socket.send(json.dumps({"Request": {"id": "x", "request": request}}))

    prompt = (await agent.asked()).prompt
    assert isinstance(prompt, Conversation)
    assert prompt.images == (b"xyz",)
    side = balancer.desired_state.inference_parameters.image_resize_to_fit
    assert prompt.longest_image_side == side


async def test_an_image_that_is_none_is_refused_in_the_published_form(
    socket: ClientConnection,
) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://host/image.png"}}
    params = {**CONVERSATION, "conversation_history": [{"role": "user", "content": [part]}]}
    request = {"ContinueFromConversationHistory": params}

    await socket.send(json.dumps({"Request": {"id": "x", "request": request}}))

    response = (await receive(socket))["Response"]
    assert list(response["response"]["GeneratedToken"]) == ["ImageDecodingFailed"]


async def test_a_message_that_is_too_large_closes_its_socket(
    socket: ClientConnection, balancer: Balancer, until: Until
) -> None:
    await ask(socket, "x")
    await until(lambda: balancer.buffered == 1)

    await socket.send("é" * (Limits().body_bytes // 2 + 1))  # counted in bytes, not in characters

    with pytest.raises(ConnectionClosed):
        await receive(socket)
    assert socket.close_code == 1009
    await until(lambda: balancer.buffered == 0)


async def test_a_closing_balancer_tells_every_client_and_closes_the_socket(
    socket: ClientConnection, balancer: Balancer, until: Until
) -> None:
    await ask(socket, "x")
    await until(lambda: balancer.buffered == 1)

    balancer.close()

    assert (await receive(socket))["Error"]["error"]["code"] == 503
    with pytest.raises(ConnectionClosed):
        await receive(socket)
    assert socket.close_code == 1001


EMBEDDINGS = "/api/v1/generate_embedding_batch"


def documents(*names: str) -> dict[str, Any]:
    batch = [{"content": f"text of {name}", "id": name} for name in names]
    return {"input_batch": batch, "normalization_method": "L2"}


def enable_embeddings(balancer: Balancer, **changes: Any) -> None:
    want(balancer, enable_embeddings=True, **changes)


async def next_embedding(lines: AsyncIterator[str]) -> Any:
    async with asyncio.timeout(10):
        return json.loads(await anext(lines))["Response"]["response"]["Embedding"]


async def test_embeddings_wait_for_an_agent(
    client: httpx.AsyncClient, balancer: Balancer, play: Play, until: Until
) -> None:
    enable_embeddings(balancer)
    asked = asyncio.create_task(client.post(EMBEDDINGS, json=documents("a")))
    await until(lambda: balancer.buffered == 1)

    agent = play()
    request_id = (await agent.asked_to_embed()).request_id
    agent.say_vector(request_id, "a", 1.0)
    agent.finish(request_id)

    assert (await asked).status_code == 200


async def test_a_bad_embedding_batch_gets_a_status_and_a_reason(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    enable_embeddings(balancer)

    response = await client.post(EMBEDDINGS, json={"input_batch": []})

    assert response.status_code == 400
    assert "normalization_method" in response.text


async def test_an_empty_batch_is_just_done(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer)
    agent = play()

    response = await client.post(EMBEDDINGS, json=documents())

    message = response.json()["Response"]
    assert (message["generated_by"], message["response"]) == (None, {"Embedding": "Done"})
    assert message["request_id"]
    assert agent.frames.empty()


async def test_a_document_that_fails_is_told_when_the_others_are_done(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer, embedding_batch_size=1)
    agent = play("one")
    async with client.stream("POST", EMBEDDINGS, json=documents("a", "b")) as response:
        lines = response.aiter_lines()
        first = await agent.asked_to_embed()
        agent.say(DocumentFailed(first.request_id, "a", "it is empty"))
        agent.finish(first.request_id)
        second = await agent.asked_to_embed()
        agent.say_vector(second.request_id, "b", 0.5, 0.25)
        agent.finish(second.request_id)

        embedded = await next_embedding(lines)
        end = await next_embedding(lines)

        assert [line async for line in lines] == []
    assert embedded["Embedding"]["source_document_id"] == "b"
    assert end == {"Error": "documents that could not be embedded: 'a' (it is empty)"}


async def test_documents_are_embedded_as_the_desired_state_says(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer, pooling_type=Pooling.MEAN)
    agent = play("one")
    async with client.stream("POST", EMBEDDINGS, json=documents("a", "b")) as response:
        asked = await agent.asked_to_embed()
        lines = response.aiter_lines()

        agent.say_vector(asked.request_id, "a", 0.5, 0.25)
        first = await next_embedding(lines)  # before the second document is done
        agent.say(DocumentTooLong(asked.request_id, "b", 9, 8))
        agent.finish(asked.request_id)
        rest = [await next_embedding(lines), await next_embedding(lines)]

        assert [line async for line in lines] == []

    assert response.headers["content-type"] == "application/json"
    assert asked.documents == (Document("a", "text of a"), Document("b", "text of b"))
    assert (asked.pooling, asked.normalization) == (Pooling.MEAN, L2())
    assert first == {
        "Embedding": {
            "embedding": [0.5, 0.25],
            "normalization_method": "L2",
            "pooling_type": "Mean",
            "source_document_id": "a",
        }
    }
    refusal = {"document_tokens": 9, "n_batch": 8, "source_document_id": "b"}
    assert rest == [{"DocumentExceedsBatchSize": refusal}, "Done"]


async def test_a_large_batch_goes_in_portions_and_is_done_once(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer, embedding_batch_size=2)
    agent = play()
    async with client.stream("POST", EMBEDDINGS, json=documents(*"abcde")) as response:
        portions: list[str] = []
        for _ in range(3):
            asked = await agent.asked_to_embed()
            portions.append("".join(document.document_id for document in asked.documents))
            for document in asked.documents:
                agent.say_vector(asked.request_id, document.document_id, 1)
            agent.finish(asked.request_id)
        messages = [json.loads(line)["Response"] async for line in response.aiter_lines()]

    assert portions == ["ab", "cd", "e"]
    results = [message["response"]["Embedding"] for message in messages]
    assert results.pop() == "Done"
    assert [each["Embedding"]["source_document_id"] for each in results] == list("abcde")
    assert len({message["request_id"] for message in messages}) == 1


async def test_a_chunk_that_fails_is_told_and_the_others_go_on(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer, embedding_batch_size=1)
    agent = play()
    async with client.stream("POST", EMBEDDINGS, json=documents("a", "b")) as response:
        asked = await agent.asked_to_embed()
        agent.say(Failed(asked.request_id, ErrorCode.DECODE_FAILED, "why"))
        asked = await agent.asked_to_embed()
        agent.say_vector(asked.request_id, "b", 1)
        agent.finish(asked.request_id)
        failure, vector, end = [json.loads(line) async for line in response.aiter_lines()]

    assert failure["Error"]["error"] == {"code": 500, "description": "why"}
    assert vector["Response"]["response"]["Embedding"]["Embedding"]["source_document_id"] == "b"
    assert end["Response"]["response"] == {"Embedding": "Done"}


async def test_a_batch_is_split_over_the_agents_at_once(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer)
    agents = [play("one"), play("two")]
    async with client.stream("POST", EMBEDDINGS, json=documents(*"abc")) as response:
        asked = [await agent.asked_to_embed() for agent in agents]
        for agent, each in reversed(list(zip(agents, asked, strict=True))):
            for document in each.documents:
                agent.say_vector(each.request_id, document.document_id, 1)
            agent.finish(each.request_id)
        messages = [json.loads(line)["Response"] async for line in response.aiter_lines()]

    assert [[d.document_id for d in each.documents] for each in asked] == [["a", "b"], ["c"]]
    told = [message["generated_by"] for message in messages]
    assert told == ["two", "one", "one", None]


async def test_a_large_batch_leaves_slots_to_others(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    """As many chunks at once as there are agents, whatever their slots."""
    enable_embeddings(balancer, embedding_batch_size=1)
    agent = play(slots=4)
    async with client.stream("POST", EMBEDDINGS, json=documents(*"abc")) as response:
        for _ in range(3):
            asked = await agent.asked_to_embed()
            assert agent.frames.empty()
            agent.finish(asked.request_id)
        assert [line async for line in response.aiter_lines()]


async def test_the_python_client_learns_of_long_documents_at_the_end(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer)
    agent = play()
    headers = {"user-agent": "python-httpx/0.28"}
    async with client.stream("POST", EMBEDDINGS, json=documents("a"), headers=headers) as response:
        asked = await agent.asked_to_embed()
        agent.say(DocumentTooLong(asked.request_id, "a", 9, 8))
        agent.finish(asked.request_id)
        (line,) = [line async for line in response.aiter_lines()]

    error = json.loads(line)["Response"]["response"]["Embedding"]["Error"]
    assert "'a' (9 tokens, the limit is 8)" in error


async def test_tokens_are_not_generated_while_embeddings_are_enabled(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    agent = play()
    enable_embeddings(balancer)

    response = await client.post(ROUTE, json=RAW)

    assert response.status_code == 501
    assert response.text == "token generation is disabled while embeddings are enabled\n"
    assert agent.frames.empty()


async def test_a_websocket_client_is_told_of_the_mode(address: str, balancer: Balancer) -> None:
    async with connect_browser(address) as socket:
        enable_embeddings(balancer)
        assert await receive(socket) == {"Notification": "TokenGenerationDisabled"}
        await ask(socket, "7")
        refusal = (await receive(socket))["Response"]
        assert refusal["request_id"] == "7"
        assert set(refusal["response"]["GeneratedToken"]) == {"TokenGenerationDisabled"}
        want(balancer, enable_embeddings=False)
        assert await receive(socket) == {"Notification": "TokenGenerationEnabled"}
    enable_embeddings(balancer)
    async with connect_browser(address) as socket:
        assert await receive(socket) == {"Notification": "TokenGenerationDisabled"}


async def test_the_python_client_is_sent_no_notification(
    socket: ClientConnection, balancer: Balancer
) -> None:
    enable_embeddings(balancer)

    await ask(socket, "7")

    assert (await receive(socket))["Error"]["error"]["code"] == 501


async def test_a_request_for_a_model_that_nobody_has_is_refused_with_those_that_there_are(
    client: httpx.AsyncClient, play: Play
) -> None:
    play()

    response = await client.post(ROUTE, json={**RAW, "model": "nope"})

    assert response.status_code == 404
    assert response.text == "no agent serves the model 'nope'; there is: played\n"


async def test_a_request_goes_to_an_agent_that_serves_its_model(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play("one")
    other = play("two")
    other.report(slots=1, model_names=("special",))
    async with client.stream("POST", ROUTE, json={**RAW, "model": "special"}) as response:
        other.finish((await other.asked()).request_id)
        assert [line async for line in response.aiter_lines()]


async def test_a_request_ends_at_its_own_deadline(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    async with client.stream("POST", ROUTE, json={**RAW, "deadline_ms": 20}) as response:
        asked = await agent.asked()
        (line,) = [line async for line in response.aiter_lines()]

    assert json.loads(line)["Error"]["error"]["code"] == 504
    assert await agent.cancelled() == asked.request_id


async def test_a_client_that_leaves_its_embeddings_is_a_cancel(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    enable_embeddings(balancer, embedding_batch_size=1)
    agent = play()
    async with client.stream("POST", EMBEDDINGS, json=documents("a", "b")) as response:
        asked = await agent.asked_to_embed()
        agent.say_vector(asked.request_id, "a", 1)
        await anext(response.aiter_lines())

    assert await agent.cancelled() == asked.request_id
