import json
from typing import Any

import pytest
from bodies import PATIENT, body
from hypothesis import given
from hypothesis import strategies as st

from balancer.openai_chat import ChatRequest
from balancer.openai_completions import CompletionRequest
from balancer.openai_errors import ParameterError, Refusal, parameters_of, parse, refusal
from common.errors import ErrorCode, RequestError

USER: dict[str, Any] = {"role": "user", "content": "Hi"}

INVALID = "invalid_request_error"

# Status, type, code, and the parameter that is to blame where the route has its prompt in "input".
TOLD = {
    ErrorCode.INVALID_PROMPT: (400, INVALID, "invalid_prompt", "input"),
    ErrorCode.INVALID_REQUEST: (400, INVALID, "invalid_value", None),
    ErrorCode.UNAUTHORIZED: (401, INVALID, "invalid_api_key", None),
    ErrorCode.FORBIDDEN: (403, INVALID, "forbidden", None),
    ErrorCode.ORIGIN_NOT_ALLOWED: (403, INVALID, "origin_not_allowed", None),
    ErrorCode.HEADERS_TOO_LARGE: (431, INVALID, "headers_too_large", None),
    ErrorCode.BODY_TOO_LARGE: (413, INVALID, "body_too_large", None),
    ErrorCode.BODY_TOO_SLOW: (408, INVALID, "body_too_slow", None),
    ErrorCode.NOT_SUPPORTED: (400, INVALID, "unsupported_parameter", None),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, INVALID, "context_length_exceeded", "input"),
    ErrorCode.MODEL_NOT_FOUND: (404, INVALID, "model_not_found", "model"),
    ErrorCode.AGENT_NOT_FOUND: (404, INVALID, "agent_not_found", None),
    ErrorCode.FLEET_NOT_FOUND: (404, INVALID, "fleet_not_found", None),
    ErrorCode.REQUEST_NOT_FOUND: (404, INVALID, "request_not_found", None),
    ErrorCode.OVERTAKEN: (409, INVALID, "overtaken", None),
    ErrorCode.CHAT_TEMPLATE_ERROR: (400, INVALID, "chat_template_error", "input"),
    ErrorCode.MULTIMODAL_NOT_SUPPORTED: (400, INVALID, "multimodal_not_supported", "input"),
    ErrorCode.IMAGE_DECODING_FAILED: (400, INVALID, "image_decoding_failed", "input"),
    ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE: (400, INVALID, "image_exceeds_batch_size", "input"),
    ErrorCode.INVALID_GRAMMAR: (400, INVALID, "invalid_grammar", "grammar"),
    ErrorCode.INVALID_SCHEMA: (400, INVALID, "invalid_schema", "response_format"),
    ErrorCode.INVALID_TOOL_SCHEMA: (400, INVALID, "invalid_tool_schema", "tools"),
    ErrorCode.GRAMMAR_WITH_THINKING: (400, INVALID, "grammar_with_thinking", None),
    ErrorCode.GRAMMAR_REJECTED: (500, "server_error", "grammar_rejected", None),
    ErrorCode.SLOW_CLIENT: (503, "server_error", "slow_client", None),
    ErrorCode.GENERATION_DISABLED: (501, "server_error", "generation_disabled", None),
    ErrorCode.EMBEDDINGS_DISABLED: (501, "server_error", "embeddings_disabled", None),
    ErrorCode.AGENT_LOST: (502, "server_error", "agent_lost", None),
    ErrorCode.OVERLOADED: (503, "server_error", "overloaded", None),
    ErrorCode.BALANCER_LOST: (503, "server_error", "balancer_lost", None),
    ErrorCode.BUFFER_FULL: (429, "rate_limit_error", "rate_limit_exceeded", None),
    ErrorCode.BUFFER_TIMEOUT: (504, "server_error", "buffer_timeout", None),
    ErrorCode.DEADLINE_EXCEEDED: (504, "server_error", "deadline_exceeded", None),
    ErrorCode.CANCELLED_BY_OPERATOR: (410, INVALID, "cancelled_by_operator", None),
    ErrorCode.NO_AGENTS: (503, "server_error", "no_agents", None),
    ErrorCode.DECODE_FAILED: (500, "server_error", "decode_failed", None),
    ErrorCode.INTERNAL_ERROR: (500, "server_error", "internal_error", None),
    ErrorCode.SHUTTING_DOWN: (503, "server_error", "shutting_down", None),
}
FOR_GOOD = {"x-should-retry": "false"}
FAILS_AGAIN = {
    ErrorCode.GENERATION_DISABLED,
    ErrorCode.EMBEDDINGS_DISABLED,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.GRAMMAR_REJECTED,
}
RETRY_AFTER = {429: {"retry-after": "1"}, 503: {"retry-after": "5"}}


@pytest.mark.parametrize("code", ErrorCode)
def test_each_error_has_its_status_and_body(code: ErrorCode) -> None:
    told = refusal(RequestError(code, "so it is"), parameters_of("input"))

    status, kind, name, parameter = TOLD[code]
    error = {"message": "so it is", "type": kind, "param": parameter, "code": name}
    headers = RETRY_AFTER.get(status, {}) | (FOR_GOOD if code in FAILS_AGAIN else {})
    assert told == Refusal(status, {"error": error}, headers)


def test_an_error_of_the_prompt_names_what_the_route_calls_it() -> None:
    error = RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")

    assert refusal(error, parameters_of("messages")).body["error"]["param"] == "messages"
    assert refusal(error).body["error"]["param"] is None


def test_an_error_that_names_its_parameter_keeps_it() -> None:
    error = ParameterError("input[3]", "too long", ErrorCode.CONTEXT_LENGTH_EXCEEDED)

    assert refusal(error, parameters_of("input")).body["error"]["param"] == "input[3]"


def refused(keys: dict[str, Any]) -> tuple[str | None, str, str]:
    """The parameter, the code and the message."""
    with pytest.raises(ParameterError) as caught:
        parse(ChatRequest, body(**{"messages": [USER], **keys}))
    error = refusal(caught.value).body["error"]
    return error["param"], error["code"], error["message"]


def says(*content: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", "content": list(content)}]}


def calls(call: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


NOTHING: dict[str, Any] = {}
CALLED: dict[str, Any] = {"name": "f", "arguments": "{}"}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("keys", "parameter"),
    [
        ({"surprise": 1}, "surprise"),
        ({"messages": [{**USER, "surprise": 1}]}, "messages[0].surprise"),
        # Each of these has a key that is called like the alternative that it is in.
        ({"messages": [{**USER, "user": 1}]}, "messages[0].user"),
        (
            says({"type": "text", "text": "x", "cache_control": {}}),
            "messages[1].content[0].cache_control",
        ),
        (says({**IMAGE, "detail": "low"}), "messages[1].content[0].detail"),
        ({"response_format": {**SCHEMA, "strict": True}}, "response_format.strict"),
        ({"tool_choice": {**NAMED, "surprise": 1}}, "tool_choice.surprise"),
        ({"tools": [{**NAMED, "surprise": 1}]}, "tools[0].surprise"),
        ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options.surprise"),
        (
            calls({"id": "c", **NAMED, "function": CALLED, "surprise": 1}),
            "messages[0].tool_calls[0].surprise",
        ),
    ],
)
def test_a_key_that_is_not_known_is_refused_where_it_stands(
    keys: dict[str, Any], parameter: str
) -> None:
    complaint = f"Unrecognized request argument: '{parameter}'."

    assert refused(keys) == (parameter, "unknown_parameter", complaint)


@pytest.mark.parametrize(
    ("keys", "parameter"),
    [
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "user": "x"}]}, "messages[0].content"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (says({"text": "x"}), "messages[1].content[0].type"),
        (says({"type": "text"}), "messages[1].content[0].text"),
        (says({"type": "image_url"}), "messages[1].content[0].image_url"),
        (says(IMAGE, {"type": "image_url", "image_url": NOTHING}), "messages[1].content[1].image_url.url"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": NOTHING}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": NOTHING}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [NAMED]}}, "tool_choice.allowed_tools"),
        ({"response_format": NOTHING}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
            "response_format.json_schema.schema",
        ),
        (calls({"type": "function", "function": {"name": "f", "arguments": ""}}), "messages[0].tool_calls[0].id"),
        (calls({"id": "c", **NAMED}), "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_a_key_that_is_missing_is_named(keys: dict[str, Any], parameter: str) -> None:
    complaint = f"Missing required parameter: '{parameter}'."

    assert refused(keys) == (parameter, "missing_required_parameter", complaint)


def test_a_missing_key_of_the_body_itself_is_named() -> None:
    with pytest.raises(ParameterError) as caught:
        parse(ChatRequest, b"{}")

    assert caught.value.parameter == "messages"


@pytest.mark.parametrize(
    ("keys", "parameter", "complaint"),
    [
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"frequency_penalty": 101}, "frequency_penalty", "less than or equal to 100"),
        ({"seed": 1.5}, "seed", "valid integer"),
        ({"stop": ["x", ""]}, "stop[1]", "at least 1 character"),
        ({"stop": [5]}, "stop[0]", "valid string"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word", "valid integer"),
        ({"messages": "Hi"}, "messages", "valid array"),
        ({"messages": list(NOTHING)}, "messages", "at least 1 item"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'function'"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "'5'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "valid string"),
        (says({"type": "input_audio"}), "messages[1].content[0].type", "input_audio"),
        (says({"type": "text", "text": 5}), "messages[1].content[0].text", "valid string"),
        (says({**IMAGE, "image_url": "x"}), "messages[1].content[0].image_url", "object"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "custom"),
        ({"tools": [{"type": "custom", "custom": NOTHING}]}, "tools[0].type", "'function'"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ],
)
def test_a_value_that_is_wrong_is_named(
    keys: dict[str, Any], parameter: str, complaint: str
) -> None:
    named, code, message = refused(keys)

    assert named == parameter
    assert code in {"invalid_value", "unsupported_value"}
    assert message.startswith(f"Invalid '{parameter}': ")
    assert complaint in message


def test_a_complaint_of_our_own_is_told_without_an_introduction() -> None:
    _, _, message = refused({"max_tokens": 0})

    assert message == "Invalid 'max_tokens': must be at least 1, or -1 for as many as fit"


def test_a_complaint_is_short_whatever_the_client_said() -> None:
    parameter, _, message = refused({"messages": [{**USER, "role": "x" * 1_000_000}]})

    assert parameter == "messages[0].role"
    assert len(message) < 400

    parameter, _, message = refused({"y" * 1_000_000: 1})

    assert parameter is not None
    assert len(parameter) < 400
    assert len(message) < 400


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a": "\\ud83d"}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_a_body_that_is_not_json_blames_no_parameter(data: bytes) -> None:
    with pytest.raises(ParameterError, match="the body is not JSON") as caught:
        parse(ChatRequest, data)

    assert caught.value.parameter is None


@pytest.mark.parametrize("data", [b"[]", b"null", b"5", b'"x"', b"NaN"])
def test_a_body_that_is_no_object_blames_no_parameter(data: bytes) -> None:
    with pytest.raises(ParameterError, match="object") as caught:
        parse(CompletionRequest, data)

    assert caught.value.parameter is None


@PATIENT
@given(st.binary() | st.text().map(str.encode))
def test_no_bytes_are_more_than_a_refusal(data: bytes) -> None:
    for model in (ChatRequest, CompletionRequest):
        with pytest.raises(ParameterError) as caught:
            parse(model, data)
        json.dumps(refusal(caught.value).body)
