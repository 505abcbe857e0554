"""Bodies that are no requests, or nearly ones, at every route of the running product."""

import json
from typing import Any, cast

import pytest
from bodies import nearly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from product import Up

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA = {"name": "s", "schema": PARAMETERS}
CHATS: list[dict[str, Any]] = [
    {"messages": MESSAGES, "max_tokens": 2, "stop": ["x"], "seed": 1, "logit_bias": {"5": 1}},
    {"messages": MESSAGES[:1], "max_tokens": 2, "stream": True, "n": 2, "logprobs": True},
    {
        "messages": MESSAGES[:2],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
        "tool_choice": "required",
    },
    {
        "messages": MESSAGES[:2],
        "max_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    },
]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": CHATS,
    "/v1/completions": [
        {"prompt": ["a", [5, 6]], "max_tokens": 2, "logprobs": 1, "echo": False},
        {"prompt": "a", "max_tokens": 2, "grammar": 'root ::= "a"', "stream": True},
    ],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 2, "instructions": "Be brief."},
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "max_output_tokens": 2,
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
        },
    ],
    "/v1/embeddings": [{"input": ["a", [5]], "encoding_format": "base64", "dimensions": 4}],
    "/v1/tokenize": [{"content": "a", "add_special": True}, {"messages": MESSAGES}],
    "/v1/detokenize": [{"tokens": [5, 6]}],
}
MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def bounded(body: Any) -> bytes:
    """As it is sent. What is a request after all is a short one."""
    if isinstance(body, dict):
        keys = cast("dict[str, Any]", body)
        rest = {key: value for key, value in keys.items() if key not in MOST_TOKENS}
        body = {**rest, ("max_output_tokens" if "input" in keys else "max_tokens"): 2}
    return json.dumps(body).encode()


@pytest.mark.parametrize("route", BODIES)
def test_whatever_a_client_sends_it_is_answered_and_nobody_else_suffers(up: Up, route: str) -> None:
    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        st.one_of(
            nearly(BODIES[route]).map(bounded),
            st.binary(max_size=30),
        )
    )
    def send(body: bytes) -> None:
        response = up.client.post(route, content=body, timeout=60)

        # 501: this product makes no vectors.
        assert response.status_code in {200, 400, 404} or "_disabled" in response.text, body
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    send()

    up.until(lambda agents: all(agent["slots_processing"] == 0 for agent in agents))
    up.until_buffered(0)
    whole = up.client.post("/v1/chat/completions", json=CHATS[0])
    assert whole.status_code == 200
