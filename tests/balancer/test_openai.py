"""OpenAI's routes over real HTTP, with the agent's part played by the test."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from played import Play, PlayedAgent, Until, want

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.limits import Limits
from common.errors import ErrorCode
from common.ids import RequestId, TokenId
from common.messages import (
    L2,
    Busy,
    Conversation,
    Detokenize,
    Detokenized,
    Document,
    DocumentFailed,
    DocumentTooLong,
    Failed,
    Finished,
    FinishReason,
    RawPrompt,
    TokenGenerated,
    Tokenize,
    Tokenized,
    TokenPrompt,
    ToolCallDelta,
    Usage,
)

CHAT: dict[str, Any] = {"model": "played", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE: dict[str, Any] = {"model": "played", "input": "Hi"}
COMPLETION: dict[str, Any] = {"model": "played", "prompt": "Hi"}
ROUTE = "/v1/chat/completions"
KEEP_ALIVE = 0.02


@pytest.fixture
def keep_alive() -> float:
    """Short, so that comments come soon."""
    return KEEP_ALIVE


@pytest.fixture
async def impatient() -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a balancer whose buffer keeps nobody."""
    app = create_app(Balancer(buffer_capacity=2, patience=0.001))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@asynccontextmanager
async def stream(
    client: httpx.AsyncClient, body: dict[str, Any], route: str = ROUTE
) -> AsyncGenerator[AsyncIterator[str]]:
    """The lines of an answer, from its first data."""
    async with client.stream("POST", route, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        yield (line async for line in response.aiter_lines() if line)


async def chunk(lines: AsyncIterator[str]) -> dict[str, Any]:
    """The next one, behind any comments."""
    async for line in lines:
        if line.startswith("data: "):
            return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream is over")


async def post(
    client: httpx.AsyncClient, body: dict[str, Any], route: str = ROUTE
) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(route, json=body))


def refused(response: httpx.Response) -> tuple[int, str | None, str | None]:
    """Status, parameter and code."""
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return response.status_code, error["param"], error["code"]


async def test_models_are_those_that_are_served(client: httpx.AsyncClient, play: Play) -> None:
    play()
    listed = (await client.get("/v1/models")).json()
    one = (await client.get("/v1/models/played")).json()
    none = await client.get("/v1/models/other")

    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["played"]
    assert (one["id"], one["object"]) == ("played", "model")
    assert refused(none) == (404, "model", "model_not_found")


async def test_a_chat_is_answered_in_one_object(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    task = await post(client, CHAT)
    asked = await agent.asked()
    agent.say_token(asked.request_id, "Hello")
    agent.finish(asked.request_id)
    response = await task
    body = response.json()

    assert isinstance(asked.prompt, Conversation)
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 2
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert body["timings"]["prompt_ms"] >= 0


async def test_a_chat_is_streamed_as_it_is_written(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    async with stream(client, CHAT) as lines:
        asked = await agent.asked()
        agent.say_token(asked.request_id, "Hel")
        role, first = await chunk(lines), await chunk(lines)  # before the second token exists
        agent.say_token(asked.request_id, "lo")
        agent.finish(asked.request_id, FinishReason.LENGTH)
        second, last = await chunk(lines), await chunk(lines)
        rest = [line async for line in lines if not line.startswith(":")]

    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"]["content"] for c in (first, second)] == ["Hel", "lo"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert rest == ["data: [DONE]"]


async def test_a_stream_is_not_to_be_buffered_on_the_way(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    async with client.stream("POST", ROUTE, json={**CHAT, "stream": True}) as response:
        agent.finish((await agent.asked()).request_id)

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]


async def test_comments_keep_a_stream_alive_while_it_waits_and_while_it_is_read(
    client: httpx.AsyncClient, play: Play
) -> None:
    """B38, B51: nothing in between sees a silent connection, however long a prompt takes."""
    async with stream(client, {**CHAT, "model": None}) as lines:
        waiting = [await anext(lines), await anext(lines)]  # no agent is there at all
        agent = play()
        asked = await agent.asked()
        reading = [await anext(lines), await anext(lines)]
        agent.say_token(asked.request_id, "late")
        role, first = await chunk(lines), await chunk(lines)
        agent.finish(asked.request_id)

    assert {*waiting, *reading} == {": keep-alive"}
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"]["content"] == "late"


async def test_what_overflows_the_buffer_is_refused_before_any_stream_begins(
    client: httpx.AsyncClient, play: Play, balancer: Balancer, until: Until
) -> None:
    """B26: 2 fit into the buffer, 1 into the slot; the others are told at once."""
    agent = play()
    tasks = [await post(client, {**CHAT, "stream": True}) for _ in range(10)]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 7:
        more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done |= more
    responses = [task.result() for task in done]

    assert [refused(r) for r in responses] == [(429, None, "rate_limit_exceeded")] * 7
    assert {r.headers["content-type"] for r in responses} == {"application/json"}
    assert all(int(r.headers["retry-after"]) > 0 for r in responses)
    for _ in range(3):
        agent.finish((await agent.asked()).request_id)
    assert [(await task).status_code for task in waiting] == [200] * 3


async def test_other_routes_answer_while_every_slot_is_taken(
    client: httpx.AsyncClient, play: Play, balancer: Balancer, until: Until
) -> None:
    """B25"""
    agent = play()
    tasks = [await post(client, CHAT) for _ in range(3)]
    await until(lambda: balancer.buffered == 2)

    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200
    assert (await client.get("/api/v1/agents")).status_code == 200
    for _ in tasks:
        agent.finish((await agent.asked()).request_id)
    assert [(await task).status_code for task in tasks] == [200] * 3


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, (400, "messages", "context_length_exceeded")),
        (ErrorCode.INVALID_SCHEMA, (400, "response_format", "invalid_schema")),
        (ErrorCode.INVALID_GRAMMAR, (400, "grammar", "invalid_grammar")),
        (ErrorCode.DECODE_FAILED, (500, None, "decode_failed")),
    ],
)
async def test_a_failure_before_the_answer_begins_has_its_status(
    client: httpx.AsyncClient,
    play: Play,
    streams: bool,
    code: ErrorCode,
    answer: tuple[int, str | None, str],
) -> None:
    agent = play()
    task = await post(client, {**CHAT, "stream": streams})
    agent.say(Failed((await agent.asked()).request_id, code, "why"))
    response = await task

    assert refused(response) == answer
    assert response.json()["error"]["message"] == "why"
    assert response.headers["x-request-id"]


async def test_a_failure_in_a_stream_is_one_error_event_and_the_end(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    async with stream(client, CHAT) as lines:
        asked = await agent.asked()
        agent.say_token(asked.request_id, "a")
        await chunk(lines)
        await chunk(lines)
        agent.say(Failed(asked.request_id, ErrorCode.DECODE_FAILED, "why"))
        rest = [line async for line in lines if not line.startswith(":")]

    [error] = [json.loads(line.removeprefix("data: ")) for line in rest]
    assert error["error"]["message"] == "why"
    assert error["error"]["code"] == "decode_failed"


async def test_a_request_for_a_lost_model_waits_for_it_to_come_back(
    client: httpx.AsyncClient, play: Play, balancer: Balancer, until: Until
) -> None:
    play().leave()
    assert (await client.get("/v1/models/played")).json()["id"] == "played"
    task = await post(client, CHAT)
    await until(lambda: balancer.buffered == 1)
    agent = play()
    agent.finish((await agent.asked()).request_id)

    assert (await task).status_code == 200


@pytest.mark.parametrize("streams", [True, False])
async def test_if_no_agent_comes_the_client_may_try_again_later(
    impatient: httpx.AsyncClient, streams: bool
) -> None:
    response = await impatient.post(ROUTE, json={**CHAT, "model": None, "stream": streams})

    assert refused(response) == (503, None, "no_agents")
    assert int(response.headers["retry-after"]) > 0


async def test_what_would_fail_again_is_not_to_be_sent_again(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    response = await client.post(ROUTE, json={**CHAT, "deadline_ms": 1})
    await agent.asked()

    assert refused(response) == (504, None, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"


async def test_several_answers_are_told_apart_by_index(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play(slots=2)
    task = await post(client, {**CHAT, "n": 2})
    first, second = await agent.asked(), await agent.asked()
    for asked, text in ((second, "two"), (first, "one")):
        agent.say_token(asked.request_id, text)
        agent.finish(asked.request_id)
    body = (await task).json()

    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [
        (0, "one"),
        (1, "two"),
    ]
    assert body["usage"]["prompt_tokens"] == 5  # which they share
    assert body["usage"]["completion_tokens"] == 4


async def test_if_one_answer_fails_the_others_are_given_up(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play(slots=2)
    task = await post(client, {**CHAT, "n": 2})
    first, second = await agent.asked(), await agent.asked()
    agent.say(Failed(first.request_id, ErrorCode.DECODE_FAILED, "why"))

    assert await agent.cancelled() == second.request_id
    assert refused(await task) == (500, None, "decode_failed")


async def test_a_batch_of_prompts_goes_as_slots_become_free(
    client: httpx.AsyncClient, play: Play
) -> None:
    """More prompts than the buffer holds, so they must not all be submitted at once."""
    agent = play(slots=2)
    prompts = [f"prompt {n}" for n in range(8)]
    task = await post(client, {**COMPLETION, "prompt": prompts}, "/v1/completions")
    for _ in prompts:
        asked = await agent.asked()
        assert isinstance(asked.prompt, RawPrompt)
        agent.say_token(asked.request_id, asked.prompt.text.upper())
        agent.finish(asked.request_id)
    body = (await task).json()

    assert [choice["text"] for choice in body["choices"]] == [p.upper() for p in prompts]
    assert [choice["index"] for choice in body["choices"]] == [*range(8)]


async def test_a_completion_is_streamed(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    async with stream(client, {**COMPLETION, "prompt": [1, 2]}, "/v1/completions") as lines:
        asked = await agent.asked()
        agent.say_token(asked.request_id, "a")
        first = await chunk(lines)
        agent.finish(asked.request_id)
        last = await chunk(lines)

    assert asked.prompt == TokenPrompt((TokenId(1), TokenId(2)))
    assert (first["object"], first["choices"][0]["text"]) == ("text_completion", "a")
    assert last["choices"][0]["finish_reason"] == "stop"


async def test_a_call_is_streamed(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    async with stream(client, CHAT) as lines:
        request_id = (await agent.asked()).request_id
        begun = ToolCallDelta(0, call_id="call_1", name="clock")
        agent.say(TokenGenerated(request_id, TokenId(1), (), calls=(begun,)))
        agent.say(TokenGenerated(request_id, TokenId(1), (), calls=(ToolCallDelta(0, "{}"),)))
        agent.finish(request_id)
        told = [await chunk(lines) for _ in range(4)]

    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    assert deltas[1]["tool_calls"][0]["function"] == {"name": "clock", "arguments": ""}
    assert deltas[2]["tool_calls"] == [{"index": 0, "function": {"arguments": "{}"}}]
    assert told[3]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_is_a_cancel_before_the_first_token(
    client: httpx.AsyncClient, play: Play, streams: bool
) -> None:
    agent = play()
    task = await post(client, {**CHAT, "stream": streams})
    asked = await agent.asked()
    task.cancel()

    assert await agent.cancelled() == asked.request_id


async def test_a_client_that_leaves_a_whole_answer_is_a_cancel(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    task = await post(client, CHAT)
    asked = await agent.asked()
    agent.say_token(asked.request_id, "a")
    task.cancel()

    assert await agent.cancelled() == asked.request_id


async def test_a_client_that_leaves_a_stream_is_a_cancel(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    async with stream(client, CHAT) as lines:
        asked = await agent.asked()
        agent.say_token(asked.request_id, "a")
        await chunk(lines)

    assert await agent.cancelled() == asked.request_id


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_while_it_waits_never_reaches_an_agent(
    client: httpx.AsyncClient, play: Play, balancer: Balancer, until: Until, streams: bool
) -> None:
    task = await post(client, {**CHAT, "stream": streams, "model": None})
    await until(lambda: balancer.buffered == 1)
    task.cancel()
    await until(lambda: balancer.buffered == 0)

    assert play().frames.empty()


async def test_a_request_that_an_agent_refuses_goes_on_elsewhere(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play(slots=2)
    task = await post(client, CHAT)
    asked = await agent.asked()
    agent.say(Busy(asked.request_id))
    agent.report(slots=2)
    again = await agent.asked()
    agent.finish(again.request_id)

    assert again.request_id == asked.request_id
    assert (await task).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "answer"),
    [
        (ROUTE, {**CHAT, "model": "other"}, (404, "model", "model_not_found")),
        (ROUTE, {**CHAT, "audio": {}}, (400, "audio", "unsupported_parameter")),
        (ROUTE, {**CHAT, "unheard_of": 1}, (400, "unheard_of", "unknown_parameter")),
        (ROUTE, {"model": "played"}, (400, "messages", "missing_required_parameter")),
        ("/v1/completions", {"model": "played"}, (400, "prompt", "missing_required_parameter")),
        (
            "/v1/responses",
            {**RESPONSE, "conversation": "c"},
            (400, "conversation", "unsupported_parameter"),
        ),
        ("/v1/embeddings", {"input": "a"}, (501, None, "embeddings_disabled")),
        ("/v1/tokenize", {"prompt": "a", "model": "other"}, (404, "model", "model_not_found")),
        ("/v1/detokenize", {"tokens": ["a"]}, (400, "tokens[0]", "invalid_value")),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    client: httpx.AsyncClient,
    play: Play,
    route: str,
    body: dict[str, Any],
    answer: tuple[int, str | None, str],
) -> None:
    agent = play()

    assert refused(await client.post(route, json=body)) == answer
    assert agent.frames.empty()


async def test_a_body_that_is_too_large_is_refused(client: httpx.AsyncClient, play: Play) -> None:
    play()
    response = await client.post(ROUTE, content=b" " * (Limits().body_bytes + 1))

    assert refused(response) == (413, None, "body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", ROUTE, 405), ("POST", "/v1/audio/speech", 404)]
)
async def test_routes_that_are_not_there_are_refused_in_the_same_form(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)

    assert refused(response) == (status, None, None)


async def test_without_tokens_to_generate_there_is_no_chat(
    client: httpx.AsyncClient, play: Play, balancer: Balancer
) -> None:
    play()
    want(balancer, enable_embeddings=True)

    assert refused(await client.post(ROUTE, json=CHAT)) == (501, None, "generation_disabled")


# Responses


async def event(lines: AsyncIterator[str]) -> dict[str, Any]:
    name = await anext(line async for line in lines if not line.startswith(":"))
    told = json.loads((await anext(lines)).removeprefix("data: "))
    assert name == f"event: {told['type']}"
    return told


async def test_a_response_is_answered_in_one_object(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    task = await post(client, RESPONSE, "/v1/responses")
    asked = await agent.asked()
    agent.say_token(asked.request_id, "Hello")
    agent.finish(asked.request_id)
    response = await task
    body = response.json()

    assert body["id"] == f"resp_{response.headers['x-request-id']}"
    assert (body["object"], body["status"]) == ("response", "completed")
    assert body["output"][0]["content"][0]["text"] == "Hello"


async def test_a_response_is_streamed_in_events(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    async with stream(client, RESPONSE, "/v1/responses") as lines:
        asked = await agent.asked()
        agent.say_token(asked.request_id, "a")
        begun = [await event(lines) for _ in range(5)]
        agent.say(Failed(asked.request_id, ErrorCode.DECODE_FAILED, "why"))
        ended = await event(lines)
        rest = [line async for line in lines]

    assert [told["type"] for told in begun] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]
    assert ended["type"] == "response.failed"
    assert ended["response"]["error"]["message"] == "why"
    assert rest == []


# Embeddings


async def test_documents_are_split_over_the_agents_and_put_together(
    client: httpx.AsyncClient, play: Play, balancer: Balancer
) -> None:
    want(balancer, enable_embeddings=True)
    agents = [play("one"), play("two")]
    task = await post(client, {"model": "played", "input": ["a", [5, 6]]}, "/v1/embeddings")
    frames = [await agent.asked_to_embed() for agent in agents]
    for agent, frame in reversed([*zip(agents, frames, strict=True)]):
        [document] = frame.documents
        agent.say_vector(frame.request_id, document.document_id, float(document.document_id), 1.0)
        agent.say(Finished(frame.request_id, FinishReason.STOP, Usage(prompt_tokens=3)))
    body = (await task).json()

    assert [frame.documents for frame in frames] == [
        (Document("0", "a"),),
        (Document("1", "", (TokenId(5), TokenId(6))),),
    ]
    assert {frame.normalization for frame in frames} == {L2()}
    assert [(d["index"], d["embedding"]) for d in body["data"]] == [
        (0, [0.0, 1.0]),
        (1, [1.0, 1.0]),
    ]
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


@pytest.mark.parametrize(
    ("event", "answer"),
    [
        (
            DocumentTooLong(RequestId(""), "1", 992, 512),
            (400, "input[1]", "context_length_exceeded"),
        ),
        (DocumentFailed(RequestId(""), "1", "it is empty"), (400, "input[1]", "invalid_value")),
    ],
)
async def test_a_document_that_cannot_be_embedded_is_named(
    client: httpx.AsyncClient,
    play: Play,
    balancer: Balancer,
    event: DocumentTooLong | DocumentFailed,
    answer: tuple[int, str, str],
) -> None:
    """B41"""
    want(balancer, enable_embeddings=True)
    agent = play()
    task = await post(client, {"model": "played", "input": ["a", "b"]}, "/v1/embeddings")
    frame = await agent.asked_to_embed()
    changed: dict[str, Any] = {"request_id": frame.request_id}
    agent.say(
        type(event)(**{name: getattr(event, name) for name in event.__struct_fields__} | changed)
    )

    assert refused(await task) == answer
    assert await agent.cancelled() == frame.request_id


# Tokens, which take no slot


async def consulted(agent: PlayedAgent) -> Tokenize | Detokenize:
    frame = await agent.next_frame()
    assert isinstance(frame, Tokenize | Detokenize)
    return frame


async def test_a_text_is_tokenized_though_every_slot_is_taken(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    busy = await post(client, CHAT)
    running = await agent.asked()
    task = await post(client, {"content": "ab"}, "/v1/tokenize")
    frame = await consulted(agent)
    tokens = (TokenId(7), TokenId(8))
    agent.say(Tokenized(frame.request_id, tokens, (b"a", b"b"), 512))
    body = (await task).json()
    agent.finish(running.request_id)

    assert isinstance(frame, Tokenize)
    assert (frame.prompt, frame.adds_beginning) == (RawPrompt("ab"), False)
    assert body == {"tokens": [7, 8], "count": 2, "max_model_len": 512}
    assert (await busy).status_code == 200


async def test_tokens_become_text(client: httpx.AsyncClient, play: Play) -> None:
    agent = play()
    task = await post(client, {"tokens": [7, 8]}, "/v1/detokenize")
    frame = await consulted(agent)
    agent.say(Detokenized(frame.request_id, "ab"))

    assert frame == Detokenize(frame.request_id, (TokenId(7), TokenId(8)))
    assert (await task).json() == {"content": "ab", "prompt": "ab"}


async def test_if_the_agent_is_lost_a_consultation_says_so(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    task = await post(client, {"prompt": "ab"}, "/v1/tokenize")
    await consulted(agent)
    agent.leave()

    assert refused(await task) == (502, None, "agent_lost")


async def test_a_client_that_leaves_its_consultation_is_a_cancel(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play()
    task = await post(client, {"prompt": "ab"}, "/v1/tokenize")
    frame = await consulted(agent)
    task.cancel()

    assert await agent.cancelled() == frame.request_id


async def test_without_an_agent_nothing_is_tokenized(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/tokenize", json={"prompt": "ab"})

    assert refused(response) == (503, None, "no_agents")
    assert int(response.headers["retry-after"]) > 0


async def test_when_the_balancer_ends_every_client_is_told(
    client: httpx.AsyncClient, play: Play, balancer: Balancer
) -> None:
    agent = play()
    chat = await post(client, CHAT)
    await agent.asked()
    tokens = await post(client, {"prompt": "ab"}, "/v1/tokenize")
    await consulted(agent)
    balancer.close()

    assert refused(await chat) == (503, None, "shutting_down")
    assert refused(await tokens) == (503, None, "shutting_down")


IDLE = 0.5
"""Seconds after which the proxy cuts; the real ones take 60."""


@asynccontextmanager
async def impatient_proxy(address: str) -> AsyncGenerator[str]:
    """Cuts a connection that is silent, as most things between client and server do."""
    host, _, port = address.rpartition(":")

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float | None
    ) -> None:
        with suppress(TimeoutError, ConnectionError):
            while data := await asyncio.wait_for(reader.read(65536), patience):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, to_writer, None), copy(to_reader, writer, IDLE))
        for each in (writer, to_writer):
            with suppress(ConnectionError):
                await each.wait_closed()

    tasks: list[asyncio.Task[None] | None] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    await asyncio.gather(*(task for task in tasks if task is not None))


async def test_a_stream_survives_a_proxy_that_cuts_silent_connections(
    address: str, play: Play
) -> None:
    """B51"""
    agent = play()
    async with (
        impatient_proxy(address) as proxy,
        httpx.AsyncClient(base_url=f"http://{proxy}", trust_env=False, timeout=10) as client,
        stream(client, CHAT) as lines,
    ):
        asked = await agent.asked()
        for _ in range(2 * round(IDLE / KEEP_ALIVE)):
            assert await anext(lines) == ": keep-alive"
        agent.say_token(asked.request_id, "at last")
        await chunk(lines)
        said = await chunk(lines)
        agent.finish(asked.request_id)

    assert said["choices"][0]["delta"]["content"] == "at last"
