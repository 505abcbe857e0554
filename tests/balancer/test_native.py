"""The published wire format, message by message."""

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer import native
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    L2,
    ChatMessage,
    Constraint,
    Conversation,
    Document,
    DocumentTooLong,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Gbnf,
    JsonSchema,
    Normalization,
    Pooling,
    RawPrompt,
    RmsNorm,
    Sampling,
    TokenGenerated,
    Unchanged,
    Usage,
)

R = RequestId("ours")

CONVERSATION: dict[str, Any] = {
    "add_generation_prompt": True,
    "conversation_history": [{"role": "user", "content": "Hi"}],
    "enable_thinking": False,
    "max_tokens": 16,
}
RAW: dict[str, Any] = {"raw_prompt": "Hi", "max_tokens": 16}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {}}, "required": ["x"]},
    },
}
BAD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}, "required": ["x"]},
    },
}


def conversation(**changes: Any) -> native.ContinueFromConversationHistory:
    body = json.dumps({**CONVERSATION, **changes}).encode()
    return native.parse(native.ContinueFromConversationHistory, body)


def raw(**changes: Any) -> native.ContinueFromRawPrompt:
    return native.parse(native.ContinueFromRawPrompt, json.dumps({**RAW, **changes}).encode())


def test_a_conversation_becomes_a_frame() -> None:
    frame = native.generate(conversation(tools=[TOOL]), R, Sampling())

    assert frame.request_id == R
    assert frame.max_tokens == 16
    assert frame.prompt == Conversation(
        (ChatMessage("user", "Hi"),),
        tools=(TOOL,),
        add_generation_prompt=True,
        enable_thinking=False,
    )


def test_a_raw_prompt_becomes_a_frame() -> None:
    assert native.generate(raw(), R, Sampling()).prompt == RawPrompt("Hi")


def test_text_parts_become_paragraphs() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    frame = native.generate(
        conversation(conversation_history=[{"role": "user", "content": parts}]), R, Sampling()
    )

    assert frame.prompt == Conversation((ChatMessage("user", "a\nb"),))


def test_a_request_may_replace_single_sampling_values() -> None:
    frame = native.generate(
        raw(sampling={"temperature": 0}, seed=7, stop="x"), R, Sampling(temperature=0.5, top_k=3)
    )

    assert frame.sampling == Sampling(temperature=0.0, top_k=3, seed=7)
    assert frame.stop == ("x",)


@pytest.mark.parametrize(
    ("options", "uses"), [({}, True), ({"seed": 1}, False), ({"seed": 1, "n": 2}, True)]
)
def test_what_is_cached_is_not_used_where_a_seed_must_give_the_same_text(
    options: dict[str, Any], uses: bool
) -> None:
    assert native.generate(raw(**options), R, Sampling()).cache_prompt is uses


def test_optional_keys_may_be_null() -> None:
    frame = native.generate(raw(sampling=None, stop=None, seed=None, grammar=None), R, Sampling())

    assert frame == native.generate(raw(), R, Sampling())


def test_a_request_without_options_is_sampled_as_the_balancer_says() -> None:
    assert native.generate(raw(), R, Sampling(top_k=3)).sampling == Sampling(top_k=3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_token": 1}, "max_token"),
        ({"conversation_history": []}, "conversation_history"),
        ({"conversation_history": [{"role": "user"}]}, "conversation_history.0.content"),
        ({"conversation_history": [{"role": "user", "content": None}]}, "conversation_history.0"),
        ({"enable_thinking": None}, "enable_thinking"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"heat": 1}}, "sampling.heat"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": -1}, "seed"),
        ({"tools": [{"type": "gadget"}]}, "tools.0"),
        (
            {"tools": [BAD_TOOL]},
            "not in properties: x",
        ),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match="Invalid request parameters") as caught:
        conversation(**changes)

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert named in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"NaN"])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="Invalid request parameters"):
        native.parse(native.ContinueFromRawPrompt, body)


@pytest.mark.parametrize(
    ("params", "code"),
    [
        (
            conversation(
                enable_thinking=True,
                grammar={"type": "gbnf", "grammar": "root ::= x", "root": "root"},
            ),
            "grammar_with_thinking",
        ),
        (conversation(parse_tool_calls=True), "not_supported"),
        (
            conversation(
                conversation_history=[
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                    }
                ]
            ),
            "multimodal_not_supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    params: native.GenerationParams, code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        native.generate(params, R, Sampling())

    assert caught.value.code == code


def test_a_websocket_request_is_read() -> None:
    text = json.dumps({"Request": {"id": "7", "request": {"ContinueFromRawPrompt": RAW}}})

    message = native.parse_message(text)

    assert isinstance(message, native.Request)
    assert message.id == "7"
    assert message.request.params == raw()


def test_a_websocket_cancel_is_read() -> None:
    message = native.parse_message('{"Notification": {"StopRespondingTo": "7"}}')

    assert isinstance(message, native.Stop)
    assert message.request_id == "7"


@pytest.mark.parametrize(
    ("text", "request_id"),
    [
        ("nonsense", None),
        ("[]", None),
        ("{}", None),
        ('{"Error": {"request_id": "7", "error": {"code": 1, "description": ""}}}', None),
        ('{"Request": {"request": {}}}', None),
        ('{"Request": {"id": 7, "request": {}}}', None),
        ('{"Request": {"id": "7"}}', "7"),
        ('{"Request": {"id": "7", "request": {}}}', "7"),
        ('{"Request": {"id": "7", "request": {"ContinueFromRawPrompt": {}}}}', "7"),
        ('{"Request": {"id": "7", "request": "GetModelMetadata"}}', "7"),
    ],
)
def test_a_websocket_message_that_cannot_be_read_names_its_request(
    text: str, request_id: str | None
) -> None:
    with pytest.raises(native.MessageError) as caught:
        native.parse_message(text)

    assert caught.value.request_id == request_id


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys([*CONVERSATION, "sampling"], json_values)))
def test_any_body_is_taken_or_refused_with_a_reason(changes: dict[str, Any]) -> None:
    try:
        params = conversation(**changes)
    except RequestError as error:
        outcome = error.message
    else:
        outcome = native.generate(params, R, Sampling()).request_id

    assert outcome == R or outcome.startswith("Invalid request parameters: ")


def response(result: Any, *, generated_by: str | None = "agent-1") -> dict[str, Any]:
    return {
        "Response": {
            "generated_by": generated_by,
            "request_id": "theirs",
            "response": {"GeneratedToken": result},
        }
    }


DONE = {
    "Done": {
        "usage": {
            "prompt_tokens": 12,
            "cached_prompt_tokens": 3,
            "input_image_tokens": 0,
            "input_audio_tokens": 0,
            "content_tokens": 1,
            "reasoning_tokens": 0,
            "tool_call_tokens": 0,
            "undeterminable_tokens": 0,
        }
    }
}


@pytest.mark.parametrize(
    ("event", "messages"),
    [
        (TokenGenerated(R, TokenId(1), "Hi"), [response({"ContentToken": "Hi"})]),
        (TokenGenerated(R, TokenId(1), ""), []),
        (Finished(R, FinishReason.STOP, Usage(12, 3, 1)), [response(DONE)]),
        (
            Finished(R, FinishReason.LENGTH, Usage(12, 3, 1), "x"),
            [response({"ContentToken": "x"}), response(DONE)],
        ),
        (Finished(R, FinishReason.CANCELLED, Usage(12, 3, 1)), []),
        (
            Failed(R, ErrorCode.CHAT_TEMPLATE_ERROR, "why"),
            [response({"ChatTemplateError": "why"})],
        ),
        (
            Failed(R, ErrorCode.BUFFER_TIMEOUT, "late"),
            [{"Error": {"request_id": "theirs", "error": {"code": 504, "description": "late"}}}],
        ),
        (
            Failed(R, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "long"),
            [{"Error": {"request_id": "theirs", "error": {"code": 400, "description": "long"}}}],
        ),
    ],
)
def test_events_become_the_published_messages(event: Event, messages: list[Any]) -> None:
    assert native.messages("theirs", "agent-1", event) == messages


def test_all_that_sampling_knows_can_be_said() -> None:
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 10,
        "top_p": 0.5,
        "min_p": 0.1,
        "penalty_repeat": 1.2,
        "penalty_frequency": 0.1,
        "penalty_presence": 0.2,
        "penalty_last_n": 64,
        "typical_p": 0.9,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 128,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "logit_bias": {"5": 1.5, "6": -100},
        "ignore_eos": True,
    }

    frame = native.generate(raw(sampling=options, seed=3), RequestId("r"), Sampling())

    told = {name: getattr(frame.sampling, name) for name in frame.sampling.__struct_fields__}
    assert told == {
        **options,
        "seed": 3,
        "dry_sequence_breakers": ("\n",),
        "logit_bias": ((5, 1.5), (6, -math.inf)),
    }


@pytest.mark.parametrize(
    ("grammar", "constraint"),
    [
        ({"type": "gbnf", "grammar": "root ::= x", "root": "start"}, Gbnf("root ::= x", "start")),
        ({"type": "json_schema", "schema": "{}"}, JsonSchema("{}")),
    ],
)
def test_grammars_travel_to_the_agent(grammar: dict[str, Any], constraint: Constraint) -> None:
    frame = native.generate(raw(grammar=grammar), RequestId("r"), Sampling())

    assert frame.constraint == constraint


def batch(**changes: Any) -> native.GenerateEmbeddingBatchParams:
    body: dict[str, Any] = {
        "input_batch": [{"content": "one", "id": "1"}, {"content": "two", "id": "2"}],
        "normalization_method": "L2",
    }
    return native.parse(
        native.GenerateEmbeddingBatchParams, json.dumps({**body, **changes}).encode()
    )


@pytest.mark.parametrize(
    ("method", "normalization"),
    [
        ("None", Unchanged()),
        ("L2", L2()),
        ({"RmsNorm": {"epsilon": 0.5}}, RmsNorm(0.5)),
    ],
)
def test_documents_become_a_frame(method: Any, normalization: Normalization) -> None:
    params = batch(normalization_method=method)

    frame = native.embed(
        params.input_batch, R, pooling=Pooling.MEAN, normalization=params.normalization
    )

    assert frame == Embed(
        request_id=R,
        documents=(Document("1", "one"), Document("2", "two")),
        pooling=Pooling.MEAN,
        normalization=normalization,
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"normalization_method": "L1"}, "normalization_method"),
        ({"normalization_method": {"RmsNorm": {"epsilon": -1}}}, "epsilon"),
        ({"normalization_method": {"RmsNorm": {}}}, "epsilon"),
        ({"input_batch": [{"content": "one"}]}, "id"),
        ({"input_batch": [{"content": "one", "id": 1}]}, "id"),
        ({"input_batch": "one"}, "input_batch"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_bad_embedding_batch_is_refused_by_the_key(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name):
        batch(**changes)


def embedding(result: Any) -> dict[str, Any]:
    return {
        "Response": {
            "generated_by": "agent-1",
            "request_id": "theirs",
            "response": {"Embedding": result},
        }
    }


def record(*vector: float, method: Any = "L2", pooling: str = "Last") -> dict[str, Any]:
    return {
        "embedding": list(vector),
        "normalization_method": method,
        "pooling_type": pooling,
        "source_document_id": "1",
    }


TWO_BY_TWO = Embedded(R, "1", 2, struct.pack("<4f", 1, 2, 3, 4))
RMS_NORM = {"RmsNorm": {"epsilon": 0.5}}


@pytest.mark.parametrize(
    ("event", "messages"),
    [
        (
            Embedded(R, "1", 2, struct.pack("<2f", 0.5, -1)),
            [embedding({"Embedding": record(0.5, -1, method=RMS_NORM, pooling="None")})],
        ),
        (
            TWO_BY_TWO,
            [
                embedding({"Embedding": record(1, 2, method=RMS_NORM, pooling="None")}),
                embedding({"Embedding": record(3, 4, method=RMS_NORM, pooling="None")}),
            ],
        ),
        (
            DocumentTooLong(R, "1", 9, 8),
            [
                embedding(
                    {
                        "DocumentExceedsBatchSize": {
                            "document_tokens": 9,
                            "n_batch": 8,
                            "source_document_id": "1",
                        }
                    }
                )
            ],
        ),
        (Finished(R, FinishReason.STOP, Usage(12)), []),
        (TokenGenerated(R, TokenId(1), "x"), []),
        (
            Failed(R, ErrorCode.NOT_SUPPORTED, "no head"),
            [{"Error": {"request_id": "theirs", "error": {"code": 501, "description": "no head"}}}],
        ),
    ],
)
def test_embedding_events_become_the_published_messages(event: Event, messages: list[Any]) -> None:
    params = batch(normalization_method=RMS_NORM)

    told = native.embedding_messages("theirs", "agent-1", event, params, Pooling.NONE)

    assert list(told) == messages


def test_the_method_without_options_is_told_by_its_name() -> None:
    event = Embedded(R, "1", 1, struct.pack("<f", 1))

    told = native.embedding_messages("theirs", "agent-1", event, batch(), Pooling.LAST)

    assert list(told) == [embedding({"Embedding": record(1)})]


def test_vectors_are_no_answer_to_a_prompt() -> None:
    assert native.messages("theirs", "agent-1", TWO_BY_TWO) == []
