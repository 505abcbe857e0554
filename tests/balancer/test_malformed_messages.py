"""Messages that are no requests, or nearly ones, at every route: each has its answer, which is never
a fault of ours, and what is accepted can be told to agents.

``HEADRACE_EXAMPLES`` sets how many are sent.
"""

import asyncio
import json
import os
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from answers import content
from bodies import PATIENT, json_values, nearly
from hypothesis import given, settings
from hypothesis import strategies as st
from played import want
from starlette.types import Message

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.desired_state import BalancerDesiredState
from common.ids import AgentId, TokenId
from common.messages import (
    PROTOCOL,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    Event,
    Finished,
    FinishReason,
    Generate,
    Join,
    SetState,
    Status,
    TokenGenerated,
    Tokenize,
    Tokenized,
    Usage,
    decode_to_agent,
    decode_to_balancer,
    encode,
)

OFTEN = settings(PATIENT, max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "40")))

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eHl6"}}
HISTORY = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, IMAGE]}]
CONVERSATIONS: list[dict[str, Any]] = [
    {
        "add_generation_prompt": True,
        "conversation_history": HISTORY,
        "enable_thinking": False,
        "max_tokens": 16,
        "tools": [TOOL],
        "parse_tool_calls": True,
        "grammar": {"type": "json_schema", "schema": "{}"},
        "sampling": {"temperature": 0},
    }
]
RAW: list[dict[str, Any]] = [
    {"raw_prompt": "Hi", "max_tokens": 16, "seed": 1, "stop": ["x"], "n": 2, "logprobs": 1},
    {"raw_prompt": "Hi", "max_tokens": 16, "priority": "low", "deadline_ms": 9000, "model": "echo"},
]
DOCUMENTS: list[dict[str, Any]] = [
    {
        "input_batch": [{"content": "a", "id": "0"}, {"content": "b", "id": "1"}],
        "normalization_method": {"RmsNorm": {"epsilon": 1e-6}},
    },
    {"input_batch": [{"content": "a", "id": "0"}], "normalization_method": "L2"},
]
STATES: list[dict[str, Any]] = [
    {
        **BalancerDesiredState.defaults().model_dump(mode="json", by_alias=True),
        "model": {"HuggingFace": {"repo_id": "a/b", "filename": "c", "revision": "main"}},
        "use_chat_template_override": True,
        "chat_template_override": {"content": "{{ messages }}"},
    }
]
OVERRIDES: list[dict[str, Any]] = [
    {
        "overrides": [
            {"name": "echo", "slots": 2, "tensor_split": [1.0, 2.0]},
            {"label": "gpu", "threads": 3},
        ]
    }
]
PUT = {"/api/v1/balancer_desired_state": STATES, "/api/v1/agent_overrides": OVERRIDES}
POST: dict[str, list[dict[str, Any]]] = {
    "/api/v1/continue_from_conversation_history": CONVERSATIONS,
    "/api/v1/continue_from_raw_prompt": RAW,
    "/api/v1/generate_embedding_batch": DOCUMENTS,
    "/v1/chat/completions": [{"messages": HISTORY, "stream": True, "tools": [TOOL], "n": 2}],
    "/v1/completions": [{"prompt": ["a", [5, 6]], "logprobs": 1}],
    "/v1/responses": [{"input": "Hi", "stream": True}],
    "/v1/embeddings": [{"input": ["a", [5]], "encoding_format": "base64", "dimensions": 2}],
    "/v1/tokenize": [{"content": "a", "with_pieces": True}],
    "/v1/detokenize": [{"tokens": [5, 6]}],
}
ROUTES = [*(("PUT", path) for path in PUT), *(("POST", path) for path in POST)]


class Honest:
    """An agent that answers at once."""

    def __init__(self, balancer: Balancer) -> None:
        self.agent_id = AgentId("id-of-echo")
        self.states: list[SetState] = []
        self._balancer = balancer
        status = Status(
            version=1, slots_desired=9, slots_total=9, slots_processing=0, model_names=("echo",)
        )
        join = Join(
            protocol=PROTOCOL, agent_id=self.agent_id, name="echo", status=status, labels=("gpu",)
        )
        assert decode_to_balancer(encode(join)) == join
        balancer.join(join, self._take, print)

    def _take(self, data: bytes) -> None:
        frame = decode_to_agent(data)
        if isinstance(frame, SetState):
            self.states.append(frame)
        elif events := _answer(frame):
            loop = asyncio.get_running_loop()
            loop.call_soon(self._balancer.happened, self.agent_id, events)


def _answer(frame: Any) -> Sequence[Event]:
    match frame:
        case Generate(request_id=request_id):
            return [
                TokenGenerated(request_id, TokenId(1), content("a")),
                Finished(request_id, FinishReason.STOP, Usage(1, 0, 1)),
            ]
        case Embed(request_id=request_id, documents=documents):
            vector = struct.pack("<2f", 3, 4)
            vectors = [Embedded(request_id, each.document_id, 2, vector, 1) for each in documents]
            return [*vectors, Finished(request_id, FinishReason.STOP, Usage(len(vectors)))]
        case Tokenize(request_id=request_id):
            return [Tokenized(request_id, (TokenId(1),), (b"\xff",), 64)]
        case Detokenize(request_id):
            return [Detokenized(request_id, "a")]
        case _:
            return []


async def send(method: str, path: str, body: bytes) -> int:
    """Returns the status."""
    balancer = Balancer(buffer_capacity=2, patience=60)
    agent = Honest(balancer)
    want(balancer, enable_embeddings="embedding" in path)
    transport = httpx.ASGITransport(create_app(balancer))
    async with (
        asyncio.timeout(20),
        httpx.AsyncClient(transport=transport, base_url="http://t") as client,
    ):
        before = len(agent.states)
        response = await client.request(method, path, content=body)
        assert response.status_code in {200, 204, 400, 404, 413, 501}, response.text
        assert response.content or response.status_code == 204
        known = len(agent.states)
        if method == "PUT":
            assert (known > before) == (response.status_code == 204), "accepted, and told"
            assert json.loads((await client.get(path)).content) is not None
    assert balancer.buffered == 0
    assert [view.slots_bound for view in balancer.agents] == [0], "a slot is lost"
    balancer.close()
    return response.status_code


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_whatever_is_sent_is_answered_and_never_by_a_fault(method: str, path: str) -> None:
    good = {**PUT, **POST}[path]

    @OFTEN
    @given(
        st.one_of(
            nearly(good).map(json.dumps).map(str.encode),
            nearly(good).map(json.dumps).map(str.encode),
            json_values.map(json.dumps).map(str.encode),
            st.binary(max_size=30),
        )
    )
    def check(body: bytes) -> None:
        asyncio.run(send(method, path, body))

    for each in good:
        assert asyncio.run(send(method, path, json.dumps(each).encode())) in {200, 204}
    check()


# Over a websocket

REQUESTS: list[dict[str, Any]] = [
    *({"Request": {"id": "x", "request": {"ContinueFromRawPrompt": each}}} for each in RAW),
    *(
        {"Request": {"id": "x", "request": {"ContinueFromConversationHistory": each}}}
        for each in CONVERSATIONS
    ),
    {"Notification": {"StopRespondingTo": "x"}},
]
LAST = {"raw_prompt": "Hi", "max_tokens": 1}
GOOD = json.dumps({"Request": {"id": "good", "request": {"ContinueFromRawPrompt": LAST}}})


async def say(messages: Sequence[str | bytes]) -> list[dict[str, Any]]:
    """Over one socket, and a good one last; until that is answered. Returns what is heard."""
    balancer = Balancer(buffer_capacity=2, patience=60)
    Honest(balancer)
    heard: list[dict[str, Any]] = []
    answered = asyncio.Event()
    waiting = [
        {"type": "websocket.connect"},
        *(
            {"type": "websocket.receive", "text" if isinstance(each, str) else "bytes": each}
            for each in (*messages, GOOD)
        ),
    ]

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        await answered.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.send":
            told = json.loads(message["text"])
            heard.append(told)
            response = told.get("Response", {})
            if response.get("request_id") == "good" and "Done" in str(response):
                answered.set()
        else:
            assert message["type"] == "websocket.accept", message

    scope: dict[str, Any] = {
        "type": "websocket",
        "path": "/api/v1/inference_socket",
        "headers": [],
        "query_string": b"",
        "subprotocols": [],
    }
    async with asyncio.timeout(20):
        await create_app(balancer)(scope, receive, send)
    assert [view.slots_bound for view in balancer.agents] == [0], "a slot is lost"
    balancer.close()
    return heard


@OFTEN
@given(
    st.lists(
        st.one_of(
            nearly(REQUESTS).map(json.dumps),
            nearly(REQUESTS).map(json.dumps),
            json_values.map(json.dumps),
            st.text(max_size=20),
            st.binary(max_size=20),
        ),
        max_size=6,
    )
)
def test_a_socket_goes_on_whatever_is_said_over_it(messages: list[str | bytes]) -> None:
    heard = asyncio.run(say(messages))

    assert all(told.keys() <= {"Response", "Error", "Notification"} for told in heard)


def test_what_the_others_are_changed_from_is_accepted() -> None:
    for request in REQUESTS[:-1]:
        heard = asyncio.run(say([json.dumps(request)]))

        assert any(told.get("Response", {}).get("request_id") == "x" for told in heard), heard
