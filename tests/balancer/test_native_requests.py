"""What clients send, and what becomes of it. The messages as they travel stand in ``golden/``."""

import json
import math
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.native_requests import (
    LONGEST_ID,
    ContinueFromConversationHistory,
    ContinueFromRawPrompt,
    GenerateEmbeddingBatchParams,
    GenerationParams,
    MessageError,
    SocketRequest,
    Stop,
    chunks,
    embed,
    generate,
    parse,
    parse_message,
)
from balancer.terms import Priority, Route, Terms
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import (
    IMAGE_MARKER,
    L2,
    CallsTold,
    ChatMessage,
    Constraint,
    Conversation,
    Document,
    Embed,
    Gbnf,
    JsonSchema,
    Normalization,
    Pooling,
    RawPrompt,
    RmsNorm,
    Sampling,
    Unchanged,
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


def image(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    """A message of text and images."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content}


def conversation(**changes: Any) -> ContinueFromConversationHistory:
    body = json.dumps({**CONVERSATION, **changes}).encode()
    return parse(ContinueFromConversationHistory, body)


def raw(**changes: Any) -> ContinueFromRawPrompt:
    return parse(ContinueFromRawPrompt, json.dumps({**RAW, **changes}).encode())


def test_a_conversation_becomes_a_frame() -> None:
    frame = generate(conversation(tools=[TOOL]), R, Sampling())

    assert frame.request_id == R
    assert frame.max_tokens == 16
    assert frame.prompt == Conversation(
        (ChatMessage("user", "Hi"),),
        tools=(TOOL,),
        add_generation_prompt=True,
        enable_thinking=False,
    )


def test_a_raw_prompt_becomes_a_frame() -> None:
    assert generate(raw(), R, Sampling()).prompt == RawPrompt("Hi")


def test_text_parts_become_paragraphs() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    frame = generate(
        conversation(conversation_history=[{"role": "user", "content": parts}]), R, Sampling()
    )

    assert frame.prompt == Conversation((ChatMessage("user", "a\nb"),))


def test_images_travel_in_their_order_and_leave_a_mark_where_they_were() -> None:
    history = [
        user("Look:", image(b"one"), image(b"two")),
        {"role": "assistant", "content": "Nice."},
        user(image(b"three")),
    ]

    frame = generate(
        conversation(conversation_history=history), R, Sampling(), longest_image_side=512
    )

    assert frame.prompt == Conversation(
        (
            ChatMessage("user", f"Look:\n{IMAGE_MARKER}\n{IMAGE_MARKER}"),
            ChatMessage("assistant", "Nice."),
            ChatMessage("user", IMAGE_MARKER),
        ),
        images=(b"one", b"two", b"three"),
        longest_image_side=512,
    )


def test_nobody_can_write_what_stands_for_an_image() -> None:
    written = f"{IMAGE_MARKER} <__media_2__>"

    params = conversation(conversation_history=[user(written, image(b"x"))])
    prompt = generate(params, R, Sampling()).prompt

    assert isinstance(prompt, Conversation)
    assert prompt.image_marker not in written
    assert prompt.messages == (ChatMessage("user", f"{written}\n{prompt.image_marker}"),)


def test_a_request_may_replace_single_sampling_values() -> None:
    frame = generate(
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
    assert generate(raw(**options), R, Sampling()).cache_prompt is uses


def test_optional_keys_may_be_null() -> None:
    frame = generate(raw(sampling=None, stop=None, seed=None, grammar=None), R, Sampling())

    assert frame == generate(raw(), R, Sampling())


def test_a_request_without_options_is_sampled_as_the_balancer_says() -> None:
    assert generate(raw(), R, Sampling(top_k=3)).sampling == Sampling(top_k=3)


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


def test_a_complaint_is_short_whatever_the_client_said() -> None:
    with pytest.raises(RequestError) as caught:
        conversation(**{"x" * 1_000_000: 1}, tools=[{**BAD_TOOL, "y" * 1_000_000: 1}])

    assert len(caught.value.message) < 5000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"NaN"])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="Invalid request parameters"):
        parse(ContinueFromRawPrompt, body)


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
        (conversation(conversation_history=[user(*[image(b"x")] * 65)]), "invalid_request"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(params: GenerationParams, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        generate(params, R, Sampling())

    assert caught.value.code == code


def test_a_websocket_request_is_read() -> None:
    text = json.dumps({"Request": {"id": "7", "request": {"ContinueFromRawPrompt": RAW}}})

    message = parse_message(text)

    assert isinstance(message, SocketRequest)
    assert message.id == "7"
    assert message.request.params == raw()


def test_a_websocket_cancel_is_read() -> None:
    message = parse_message('{"Notification": {"StopRespondingTo": "7"}}')

    assert isinstance(message, Stop)
    assert message.request_id == "7"


SOCKET_PROMPT = {"ContinueFromRawPrompt": {"raw_prompt": "Hi", "max_tokens": 5}}


def test_a_websocket_request_may_have_a_long_name() -> None:
    name = "7" * LONGEST_ID

    message = parse_message(json.dumps({"Request": {"id": name, "request": SOCKET_PROMPT}}))

    assert isinstance(message, SocketRequest)
    assert message.id == name


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
        ('{"Request": {"id": "7", "request": {"x": "\\ud83d"}}}', "7"),
        ('{"Request": {"id": "7", "request": ' + "[" * 300 + "]" * 300 + "}}", "7"),
        ('{"Request": {"id": "\\ud83d", "request": {"x": "\\ud83d"}}}', None),
        ('{"Request": {"id": "7", "request": {}}}', "7"),
        ('{"Request": {"id": "7", "request": {"ContinueFromRawPrompt": {}}}}', "7"),
        ('{"Request": {"id": "7", "request": "GetModelMetadata"}}', "7"),
        (
            json.dumps({"Request": {"id": "7" * (LONGEST_ID + 1), "request": SOCKET_PROMPT}}),
            "7" * (LONGEST_ID + 1),
        ),
    ],
)
def test_a_websocket_message_that_cannot_be_read_names_its_request(
    text: str, request_id: str | None
) -> None:
    with pytest.raises(MessageError) as caught:
        parse_message(text)

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
        outcome = generate(params, R, Sampling()).request_id

    assert outcome == R or outcome.startswith("Invalid request parameters: ")


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

    frame = generate(raw(sampling=options, seed=3), RequestId("r"), Sampling())

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
    frame = generate(raw(grammar=grammar), RequestId("r"), Sampling())

    assert frame.constraint == constraint


def batch(**changes: Any) -> GenerateEmbeddingBatchParams:
    body: dict[str, Any] = {
        "input_batch": [{"content": "one", "id": "1"}, {"content": "two", "id": "2"}],
        "normalization_method": "L2",
    }
    return parse(GenerateEmbeddingBatchParams, json.dumps({**body, **changes}).encode())


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

    frame = embed(params.documents, R, pooling=Pooling.MEAN, normalization=params.normalization)

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


def test_documents_are_split_evenly_over_the_agents() -> None:
    documents = [{"content": "x", "id": str(n)} for n in range(11)]

    def sizes(agents: int, largest: int) -> list[int]:
        parts = chunks(batch(input_batch=documents).documents, agents=agents, largest=largest)
        assert [document.document_id for part in parts for document in part] == [
            str(n) for n in range(11)
        ]
        return [len(part) for part in parts]

    assert sizes(agents=1, largest=256) == [11]
    assert sizes(agents=4, largest=256) == [3, 3, 3, 2]
    assert sizes(agents=1, largest=4) == [4, 4, 3]
    assert sizes(agents=20, largest=256) == [1] * 11


def test_no_documents_are_no_chunks() -> None:
    assert chunks((), agents=3, largest=256) == []


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        ({}, Terms(route=Route.RAW_PROMPT)),
        (
            {"model": "qwen", "priority": "high", "deadline_ms": 1500},
            Terms("qwen", Priority.HIGH, 1.5, route=Route.RAW_PROMPT),
        ),
    ],
)
def test_a_request_may_say_where_and_when_it_is_served(
    options: dict[str, Any], terms: Terms
) -> None:
    assert raw(**options).terms == terms


GOLDEN = json.loads((Path(__file__).parent / "golden" / "requests.json").read_text())

FRAMES = {
    "conversation with images": Conversation(
        (ChatMessage("user", f"What is this?\n{IMAGE_MARKER}\n{IMAGE_MARKER}"),),
        images=(b"\x89PNG", b"\xff\xd8\xff"),
    ),
    "conversation": Conversation(
        (ChatMessage("system", "Be brief."), ChatMessage("user", "Say\nhi.")),
        add_generation_prompt=True,
        enable_thinking=True,
    ),
    "conversation with tools": Conversation(
        (ChatMessage("user", "Weather?"),),
        tools=(
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "description": "Of a city.",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string", "$comment": "any key below"}},
                        "required": ["city"],
                        "additionalProperties": False,
                    },
                },
            },
            {"type": "function", "function": {"name": "now", "description": "The time."}},
        ),
        calls_told=CallsTold.CHECKED,
    ),
    "raw prompt with gbnf": RawPrompt("The meaning of life is"),
    "raw prompt with a json schema": RawPrompt("A number:"),
}
CONSTRAINTS = {
    "raw prompt with gbnf": Gbnf('root ::= "x"', "root"),
    "raw prompt with a json schema": JsonSchema('{"type": "integer"}'),
}


@pytest.mark.parametrize("name", FRAMES)
def test_golden_requests_become_frames(name: str) -> None:
    message = parse_message(json.dumps(GOLDEN[name]))

    assert isinstance(message, SocketRequest)
    frame = generate(message.request.params, R, Sampling())
    assert message.id == GOLDEN[name]["Request"]["id"]
    assert frame.prompt == FRAMES[name]
    assert frame.max_tokens == 16
    assert frame.constraint == CONSTRAINTS.get(name)


def test_golden_cancel() -> None:
    message = parse_message(json.dumps(GOLDEN["cancel"]))

    assert message == Stop(StopRespondingTo="6f1c")


@pytest.mark.parametrize(
    ("name", "normalization"),
    [
        ("embedding batch", L2()),
        ("embedding batch, unchanged", Unchanged()),
        ("embedding batch, rms", RmsNorm(1e-6)),
    ],
)
def test_golden_embedding_batches(name: str, normalization: Normalization) -> None:
    params = parse(GenerateEmbeddingBatchParams, json.dumps(GOLDEN[name]).encode())

    assert params.normalization == normalization
    assert params.input_batch[0].model_dump() == {"content": "Hello", "id": "d1"}


def test_every_golden_request_is_used() -> None:
    batches = {"embedding batch", "embedding batch, unchanged", "embedding batch, rms"}

    assert set(GOLDEN) == {*FRAMES, *batches, "cancel"}
