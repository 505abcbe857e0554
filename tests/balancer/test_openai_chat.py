"""What clients of chats send, also as the official package sends it, and what becomes of it."""

import json
from base64 import b64encode
from typing import Any

import pytest
from bodies import PATIENT, body, json_values, nearly
from hypothesis import given
from hypothesis import strategies as st
from official import sent
from openai import pydantic_function_tool
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from pydantic import BaseModel

from balancer.native_requests import encode_request
from balancer.openai_chat import LOW_DETAIL_SIDE, ChatRequest, chat_frame
from balancer.openai_errors import ParameterError, parameters_of, parse, refusal
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import (
    IMAGE_MARKER,
    CallsTold,
    ChatMessage,
    Constraint,
    Conversation,
    Gbnf,
    Generate,
    JsonSchema,
    Sampling,
    ToolCall,
    decode_to_agent,
)

R = RequestId("r")
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
ANSWER: dict[str, Any] = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [],
}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"x": 1}'},
}


PLAIN: dict[str, Any] = {}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("f", description="d", parameters={"type": "object"}, strict=True), tool("g")]


def image(data: bytes = b"one", **more: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def make(data: bytes) -> Generate:
    return chat_frame(parse(ChatRequest, data), R, Sampling(), longest_image_side=1024)


def frame(**keys: Any) -> Generate:
    return make(body(**{"messages": [USER], **keys}))


def conversation(**keys: Any) -> Conversation:
    prompt = frame(**keys).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def read(*messages: Any) -> tuple[ChatMessage, ...]:
    return conversation(messages=messages).messages


def sent_back(*messages: Any) -> tuple[ChatMessage, ...]:
    """As the official client sends them after the user's first message."""
    prompt = make(sent("chat.completions", ANSWER, model="m", messages=[USER, *messages])).prompt
    assert isinstance(prompt, Conversation)
    return prompt.messages[1:]


def refused(**keys: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        frame(**keys)
    return caught.value


def blamed(**keys: Any) -> str | None:
    return refusal(refused(**keys), parameters_of("messages")).body["error"]["param"]


def test_a_chat_becomes_a_frame() -> None:
    assert frame() == Generate(
        request_id=R,
        prompt=Conversation(
            (ChatMessage("user", "Hi"),),
            enable_thinking=True,
            calls_told=CallsTold.STREAMED,
            constrains_content=True,
        ),
        max_tokens=2**31 - 1,
    )


def test_what_is_said_of_sampling_reaches_the_frame() -> None:
    params = parse(ChatRequest, body(messages=[USER], temperature=0.5, stop="x", seed=1))

    made = chat_frame(params, R, Sampling(top_k=3), longest_image_side=1)

    assert made.sampling == Sampling(top_k=3, temperature=0.5, seed=1)
    assert made.stop == ("x",)


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        ({"role": "system", "content": "Be brief."}, ChatMessage("system", "Be brief.")),
        # Models were trained with the older name.
        ({"role": "developer", "content": "Be brief."}, ChatMessage("system", "Be brief.")),
        ({"role": "system", "content": [text("a"), text("b")]}, ChatMessage("system", "a\nb")),
        ({**USER, "name": "Ann"}, ChatMessage("user", "Hi", "Ann")),
        ({**USER, "name": None}, ChatMessage("user", "Hi")),
        ({"role": "user", "content": ""}, ChatMessage("user", "")),
        ({"role": "user", "content": [text("a"), text("b")]}, ChatMessage("user", "a\nb")),
        ({"role": "assistant", "content": "Hm."}, ChatMessage("assistant", "Hm.")),
        ({"role": "assistant", "content": ""}, ChatMessage("assistant", "")),
        (
            {"role": "assistant", "content": [text("a"), {"type": "refusal", "refusal": "No."}]},
            ChatMessage("assistant", "a\nNo."),
        ),
        ({"role": "assistant", "refusal": "No."}, ChatMessage("assistant", "No.")),
        (
            {"role": "assistant", "content": None, "refusal": "No."},
            ChatMessage("assistant", "No."),
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "b", "name": "Bob"},
            ChatMessage("assistant", "a", "Bob", "b"),
        ),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "f", '{"x": 1}'),)),
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{**CALL, "index": 0}, CALL]},
            ChatMessage("assistant", "a", tool_calls=(ToolCall("c1", "f", '{"x": 1}'),) * 2),
        ),
        (
            {"role": "tool", "content": "5", "tool_call_id": "c1"},
            ChatMessage("tool", "5", tool_call_id="c1"),
        ),
        (
            {"role": "tool", "content": [text("5"), text("6")], "tool_call_id": "c1"},
            ChatMessage("tool", "5\n6", tool_call_id="c1"),
        ),
    ],
)
def test_each_role_is_read(message: dict[str, Any], meant: ChatMessage) -> None:
    assert read(message) == (meant,)


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ({"role": "assistant"}, "messages[0]"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0]"),
        ({"role": "function", "name": "f", "content": "5"}, "messages[0].role"),
        ({"role": "system", "content": [image()]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [image()]}, "messages[0].content[0].type"),
        ({"role": "tool", "content": [image()], "tool_call_id": "c"}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "x", "function_call": CALL["function"]}, "messages[0].function_call"),
        ({**USER, "name": ""}, "messages[0].name"),
        ({**USER, "tool_calls": [CALL]}, "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_a_message_that_says_what_it_cannot_is_refused(
    message: dict[str, Any], parameter: str
) -> None:
    assert blamed(messages=[message]) == parameter


ANSWERED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "reasoning_content": "Hm.",
    "tool_calls": [CALL],
}
UNDERSTOOD = ChatMessage("assistant", "", None, "Hm.", (ToolCall("c1", "f", '{"x": 1}'),))


def test_a_message_of_the_official_package_may_be_sent_back() -> None:
    message = ChatCompletionMessage.model_validate(ANSWERED)
    result = {"role": "tool", "content": "5", "tool_call_id": "c1"}

    messages = sent_back(message, result)

    assert messages == (UNDERSTOOD, ChatMessage("tool", "5", tool_call_id="c1"))


@pytest.mark.parametrize("exclude_none", [True, False])
def test_so_may_all_that_it_dumps(exclude_none: bool) -> None:
    message = ChatCompletionMessage.model_validate(ANSWERED)

    assert sent_back(message.model_dump(exclude_none=exclude_none)) == (UNDERSTOOD,)


class Sum(BaseModel):
    """Adds one."""

    x: int


def test_so_may_what_it_has_parsed() -> None:
    message = ParsedChatCompletionMessage[Sum].model_validate(
        {
            **ANSWERED,
            "parsed": {"x": 1},
            "tool_calls": [
                {**CALL, "function": {**CALL["function"], "parsed_arguments": {"x": 1}}}
            ],
        }
    )

    assert sent_back(message) == (UNDERSTOOD,)
    assert sent_back(message.model_dump()) == (UNDERSTOOD,)


def test_tools_that_the_official_package_makes_are_understood() -> None:
    made = pydantic_function_tool(Sum, name="sum")

    prompt = make(sent("chat.completions", ANSWER, model="m", messages=[USER], tools=[made])).prompt

    assert isinstance(prompt, Conversation)
    assert prompt.tools == (json.loads(json.dumps(made)),)


def test_images_travel_in_their_order_and_leave_a_mark_where_they_were() -> None:
    prompt = conversation(
        messages=[
            {"role": "user", "content": [text("Look:"), image(b"one"), image(b"two")]},
            {"role": "assistant", "content": "Nice."},
            {"role": "user", "content": [image(b"three")]},
        ]
    )

    assert prompt.messages == (
        ChatMessage("user", f"Look:\n{IMAGE_MARKER}\n{IMAGE_MARKER}"),
        ChatMessage("assistant", "Nice."),
        ChatMessage("user", IMAGE_MARKER),
    )
    assert prompt.images == (b"one", b"two", b"three")
    assert prompt.image_marker == IMAGE_MARKER


@pytest.mark.parametrize(
    "keys",
    [
        {"messages": [{"role": "user", "content": IMAGE_MARKER}]},
        {"messages": [{"role": "user", "content": [text(IMAGE_MARKER)]}]},
        {"messages": [{**USER, "name": IMAGE_MARKER}]},
        {"messages": [{"role": "assistant", "refusal": IMAGE_MARKER}]},
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": IMAGE_MARKER}]}]},
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": IMAGE_MARKER}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": IMAGE_MARKER}]}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": IMAGE_MARKER}]},
        {"messages": [USER], "tools": [tool("f", description=IMAGE_MARKER)]},
        {"messages": [USER], "tools": [tool("f", parameters={IMAGE_MARKER: 1})]},
        {"messages": [USER], "chat_template_kwargs": {"x": [IMAGE_MARKER]}},
    ],
)  # fmt: skip
def test_nothing_that_a_client_writes_passes_for_an_image(keys: dict[str, Any]) -> None:
    seen: dict[str, Any] = {"role": "user", "content": [image()]}

    prompt = conversation(**{**keys, "messages": [*keys["messages"], seen]})

    assert prompt.image_marker != IMAGE_MARKER
    assert prompt.messages[-1] == ChatMessage("user", prompt.image_marker)
    assert prompt.image_marker not in repr((prompt.messages[:-1], prompt.tools))


@pytest.mark.parametrize(
    ("details", "side"),
    [
        ([], 1024),
        ([PLAIN], 1024),
        ([{"detail": None}], 1024),
        ([{"detail": "auto"}], 1024),
        ([{"detail": "high"}], 1024),
        ([{"detail": "low"}], LOW_DETAIL_SIDE),
        ([{"detail": "low"}, {"detail": "low"}], LOW_DETAIL_SIDE),
        ([{"detail": "low"}, {"detail": "high"}], 1024),
    ],
)
def test_images_are_small_if_all_of_them_may_be(details: list[dict[str, Any]], side: int) -> None:
    content = [text("Look:"), *(image(**detail) for detail in details)]

    prompt = conversation(messages=[{"role": "user", "content": content}])

    assert prompt.longest_image_side == side


def test_low_detail_makes_no_image_larger() -> None:
    params = parse(ChatRequest, body(messages=[{"role": "user", "content": [image(detail="low")]}]))

    assert params.conversation(longest_image_side=100).longest_image_side == 100


def test_an_image_that_would_have_to_be_fetched_is_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://host/a.png"}}

    error = refused(messages=[{"role": "user", "content": [part]}])

    assert error.code is ErrorCode.IMAGE_DECODING_FAILED
    assert refusal(error, parameters_of("messages")).body["error"]["param"] == "messages"


def test_more_images_than_a_conversation_may_have_are_refused() -> None:
    error = refused(messages=[{"role": "user", "content": [image()] * 65}])

    assert error.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({}, 2**31 - 1),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": -1}, 2**31 - 1),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ],
)
def test_the_newer_name_of_the_limit_goes_before_the_older(
    said: dict[str, Any], tokens: int
) -> None:
    assert frame(**said).max_tokens == tokens


def test_tools_travel_as_they_are_without_what_is_null() -> None:
    parameters = {"properties": {"x": {"enum": [None, 1], "default": None}}}
    given_tool = tool("f", description=None, parameters=parameters, strict=None)

    assert conversation(tools=[given_tool]).tools == (tool("f", parameters=parameters),)


@pytest.mark.parametrize("parallel", [None, True, False])
def test_one_call_at_most_if_it_is_said(parallel: bool | None) -> None:
    prompt = conversation(tools=TOOLS, parallel_tool_calls=parallel)

    assert prompt.parallel_calls is (parallel is not False)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [tool(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "offered", "must_call"),
    [
        (None, "fg", ""),
        ("auto", "fg", ""),
        ("none", "", ""),
        ("required", "fg", "fg"),
        (tool("g"), "fg", "g"),
        (allowed("auto", "g"), "g", ""),
        (allowed("auto", "g", "f"), "fg", ""),
        (allowed("required", "g"), "fg", "g"),
        (allowed("required", "g", "f"), "fg", "gf"),
    ],
)
def test_a_choice_of_tools_says_what_is_offered_and_what_must_be_called(
    choice: Any, offered: str, must_call: str
) -> None:
    prompt = conversation(tools=TOOLS, tool_choice=choice)

    assert [each["function"]["name"] for each in prompt.tools] == list(offered)
    assert prompt.must_call == tuple(must_call)


@pytest.mark.parametrize("choice", ["required", tool("f"), allowed("auto", "f")])
def test_a_choice_needs_tools(choice: Any) -> None:
    assert blamed(tool_choice=choice) == "tool_choice"
    assert blamed(tool_choice=choice, tools=[]) == "tool_choice"


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_nothing_to_choose_from_is_no_fault(choice: Any) -> None:
    assert conversation(tool_choice=choice, tools=[]) == conversation()


@pytest.mark.parametrize("choice", [tool("h"), allowed("auto", "f", "h"), allowed("required", "h")])
def test_a_choice_of_a_tool_that_is_not_offered_is_refused(choice: Any) -> None:
    error = refused(tools=TOOLS, tool_choice=choice)

    assert isinstance(error, ParameterError)
    assert (error.parameter, error.message) == ("tool_choice", "'tools' has no function 'h'.")


def test_two_tools_of_one_name_are_refused() -> None:
    assert blamed(tools=[tool("f"), tool("f")]) == "tools"


@pytest.mark.parametrize(
    ("said", "constraint"),
    [
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonSchema('{"type":"object"}')),
        ({"response_format": {"type": "json_object", "schema": {}}}, JsonSchema("{}")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "n",
                        "description": "d",
                        "strict": False,
                        "schema": {"type": "integer", "enum": [None, 5]},
                    },
                }
            },
            JsonSchema('{"type":"integer","enum":[null,5]}'),
        ),
        ({"grammar": "root ::= x"}, Gbnf("root ::= x")),
        ({"grammar": "root ::= x", "response_format": {"type": "text"}}, Gbnf("root ::= x")),
        ({"json_schema": {"type": "null"}}, JsonSchema('{"type":"null"}')),
    ],
)
def test_an_answer_follows_the_format_that_is_asked_for(
    said: dict[str, Any], constraint: Constraint | None
) -> None:
    assert frame(**said).constraint == constraint


@pytest.mark.parametrize("other", [{"grammar": "root ::= x"}, {"json_schema": {}}])
def test_two_formats_exclude_each_other(other: dict[str, Any]) -> None:
    assert blamed(response_format={"type": "json_object"}, **other) == "response_format"


def test_an_answer_that_must_be_a_call_cannot_follow_a_format() -> None:
    said = {"response_format": {"type": "json_object"}, "tools": TOOLS}

    assert blamed(**said, tool_choice="required") == "tool_choice"
    assert frame(**said).constraint is not None


@pytest.mark.parametrize(
    ("said", "thinks", "arguments"),
    [
        ({}, True, {}),
        ({"reasoning_effort": None}, True, {}),
        ({"reasoning_effort": "none"}, False, {}),
        *(
            ({"reasoning_effort": effort}, True, {"reasoning_effort": effort})
            for effort in ("minimal", "low", "medium", "high", "xhigh", "max")
        ),
        ({"chat_template_kwargs": {"x": [1, None]}}, True, {"x": [1, None]}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "odd"}},
            True,
            {"reasoning_effort": "odd"},
        ),
    ],
)
def test_an_effort_becomes_thinking_and_a_word_for_the_template(
    said: dict[str, Any], thinks: bool, arguments: dict[str, Any]
) -> None:
    prompt = conversation(**said)

    assert prompt.enable_thinking is thinks
    assert prompt.template_arguments == arguments


@pytest.mark.parametrize(
    ("said", "alternatives"),
    [
        ({}, None),
        ({"logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_are_told_if_asked_for(
    said: dict[str, Any], alternatives: int | None
) -> None:
    assert frame(**said).logprobs == alternatives


@pytest.mark.parametrize(
    ("said", "parameter"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"tool_choice": allowed("auto"), "tools": TOOLS}, "tool_choice.allowed_tools.tools"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(said: dict[str, Any], parameter: str) -> None:
    assert blamed(**said) == parameter


REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "verbosity": "low",
    "prompt_cache_retention": "24h",
    "moderation": {},
    "prompt_cache_options": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_by_name(name: str) -> None:
    error = refused(**{name: REFUSED[name]})

    assert isinstance(error, ParameterError)
    assert (error.parameter, error.code) == (name, ErrorCode.NOT_SUPPORTED)


def test_all_that_the_official_package_can_say_is_known_or_refused_by_a_test() -> None:
    known = {field.alias or name for name, field in ChatRequest.model_fields.items()}

    assert set(CompletionCreateParamsStreaming.__annotations__) <= known | REFUSED.keys()


@pytest.mark.parametrize("name", sorted(set(ChatRequest.model_fields) - {"messages"}))
def test_null_is_as_if_nothing_were_said(name: str) -> None:
    assert frame(**{ChatRequest.model_fields[name].alias or name: None}) == frame()


def test_text_is_the_one_modality() -> None:
    assert frame(modalities=["text"]) == frame()


FULL: list[dict[str, Any]] = [
    {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [text("Be brief.")], "name": "Ann"},
            {"role": "user", "content": [text("a"), image(detail="low")]},
            ANSWERED,
            {"role": "tool", "content": "5", "tool_call_id": "c1"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ],
        "tools": TOOLS,
        "tool_choice": allowed("auto", "g"),
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"5": 1},
        "stop": ["x", "y"],
        "seed": 5,
        "n": 2,
        "temperature": 0.5,
        "frequency_penalty": 1,
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"x": 1},
        "json_schema": None,
        "deadline_ms": 5,
    },
    {"messages": [USER], "tools": TOOLS, "tool_choice": tool("f"), "max_tokens": -1},
    {"messages": [USER], "json_schema": {"type": "object"}, "mirostat": 1, "stop": "x"},
    {"messages": [USER]},
]


def outcome(data: bytes) -> Generate | None:
    """As the route has it: None if it is refused. Whatever is taken can travel."""
    try:
        made = make(data)
        frame_bytes = encode_request(made)
    except RequestError as error:
        told = refusal(error, parameters_of("messages"))
        json.dumps(told.body, allow_nan=False)
        assert told.status == 400
        return None
    assert decode_to_agent(frame_bytes) is not None
    return made


def test_the_bodies_that_are_changed_below_are_taken() -> None:
    assert all(outcome(body(**full)) is not None for full in FULL)


@PATIENT
@given(nearly(FULL))
def test_what_is_nearly_a_chat_is_taken_or_refused(almost: Any) -> None:
    outcome(json.dumps(almost).encode())


@PATIENT
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FULL[0], json_values)))
def test_keys_of_any_values_are_taken_or_refused(keys: dict[str, Any]) -> None:
    outcome(body(**{"messages": [USER], **keys}))


@PATIENT
@given(json_values)
def test_no_json_is_more_than_a_refusal(value: Any) -> None:
    assert outcome(json.dumps(value).encode()) is None


@PATIENT
@given(json_values, st.sampled_from(["parameters", "schema", "kwargs"]))
def test_what_only_the_model_understands_travels_or_is_refused(value: Any, where: str) -> None:
    inner = {"x": value}
    match where:
        case "parameters":
            keys: dict[str, Any] = {"tools": [tool("f", parameters=inner)]}
        case "schema":
            keys = {"json_schema": inner}
        case _:
            keys = {"chat_template_kwargs": inner}

    outcome(body(messages=[USER], **keys))
