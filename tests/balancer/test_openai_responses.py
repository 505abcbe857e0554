"""``/v1/responses``, inwards. What is said once in a chat request is tested there."""

import base64
import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.openai_chat import ChatRequest, chat_frame
from balancer.openai_errors import ParameterError, parse, refusal
from balancer.openai_responses import RESPONSES_PARAMETERS, ResponsesRequest
from balancer.terms import Priority, Route, Terms
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import (
    ChatMessage,
    Conversation,
    Gbnf,
    Generate,
    JsonSchema,
    Sampling,
    ToolCall,
)

IMAGE = "data:image/png;base64," + base64.b64encode(b"png").decode()
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CLOCK = {"type": "function", "name": "clock"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
USER = {"role": "user", "content": "Hello"}


def request(**said: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"model": "m", "input": "Hello"} | said).encode())


def chat(**said: Any) -> ChatRequest:
    return request(**said).chat()


def frame(**said: Any) -> Generate:
    return chat_frame(chat(**said), RequestId("r"), Sampling(), longest_image_side=1024)


def conversation(**said: Any) -> Conversation:
    prompt = frame(**said).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def messages(*items: Any, **said: Any) -> tuple[ChatMessage, ...]:
    return conversation(input=list(items), **said).messages


def refused(**said: Any) -> tuple[str | None, str]:
    with pytest.raises(ParameterError) as caught:
        frame(**said)
    return caught.value.parameter, caught.value.message


def test_a_text_is_what_the_user_says() -> None:
    assert conversation(input="Hi").messages == (ChatMessage("user", "Hi"),)


def test_instructions_come_first_and_join_the_systems_messages_behind_them() -> None:
    developer = {"type": "message", "role": "developer", "content": "In verse."}
    parts = [{"type": "input_text", "text": "Be"}, {"type": "input_text", "text": "kind."}]
    system = {"role": "system", "content": parts}

    told = messages(developer, system, USER, developer, instructions="Be brief.")

    assert told == (
        ChatMessage("system", "Be brief.\nIn verse.\nBe\nkind."),
        ChatMessage("user", "Hello"),
        ChatMessage("system", "In verse."),
    )


def test_images_stand_among_the_parts() -> None:
    content = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": IMAGE, "detail": "low"},
    ]

    told = conversation(input=[{"role": "user", "content": content}])

    assert told.messages == (ChatMessage("user", f"What is this?\n{told.image_marker}"),)
    assert told.images == (b"png",)
    assert told.longest_image_side == 512


def test_two_questions_of_a_user_stay_two() -> None:
    assert messages(USER, USER) == (ChatMessage("user", "Hello"), ChatMessage("user", "Hello"))


def test_what_an_assistant_thought_said_and_called_is_one_message() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Look it up."}],
    }
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "A moment."}]}
    second = CALL | {"call_id": "c2", "arguments": "{}"}

    told = messages(USER, reasoning, said, CALL, second, RESULT, RESULT | {"call_id": "c2"})

    calls = (ToolCall("c1", "weather", '{"city":"Rome"}'), ToolCall("c2", "weather", "{}"))
    assert told == (
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", "A moment.", reasoning="Look it up.", tool_calls=calls),
        ChatMessage("tool", "sunny", tool_call_id="c1"),
        ChatMessage("tool", "sunny", tool_call_id="c2"),
    )


def test_a_result_between_two_calls_parts_them() -> None:
    told = messages(USER, CALL, RESULT, CALL | {"call_id": "c2"})

    assert [message.role for message in told] == ["user", "assistant", "tool", "assistant"]


def test_reasoning_that_cannot_be_read_is_left_out() -> None:
    encrypted: Any = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"}

    assert messages(USER, encrypted, {"role": "assistant", "content": "Hi"}) == (
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", "Hi"),
    )
    assert refused(input=[encrypted])[0] == "input"


def test_a_summary_is_reasoning_where_there_is_no_other() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}

    assert messages(USER, reasoning)[1] == ChatMessage("assistant", "", reasoning="Hm.")


def test_a_refusal_is_what_the_assistant_said() -> None:
    content = [{"type": "refusal", "refusal": "No."}]

    assert messages(USER, {"role": "assistant", "content": content})[1].content == "No."


def test_a_result_may_be_a_list_of_texts() -> None:
    texts = [{"type": "input_text", "text": "sunny"}, {"type": "input_text", "text": "warm"}]

    told = messages(USER, CALL, RESULT | {"output": texts, "name": "weather"})

    assert told[2] == ChatMessage("tool", "sunny\nwarm", "weather", tool_call_id="c1")


def test_what_bookkeeping_clients_send_back_changes_nothing() -> None:
    part: Any = {
        "type": "output_text",
        "text": "Hi",
        "annotations": [],
        "logprobs": [],
        "parsed": None,
    }
    message: Any = {"type": "message", "role": "assistant", "id": "msg_1", "content": [part]}
    call = CALL | {"id": "fc_1", "status": "completed", "async": None, "async_": None}
    call |= {"caller": None, "namespace": None, "parsed_arguments": {}}
    result = RESULT | {"id": None, "status": None}

    told = messages(USER, message | {"status": "completed", "phase": None}, call, result)

    assert told == messages(USER, {"role": "assistant", "content": "Hi"}, CALL, RESULT)


def test_sampling_and_the_keys_of_llama_cpp_reach_the_frame() -> None:
    told = frame(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        repeat_penalty=1.2,
        logit_bias={"7": -100},
        seed=11,
        stop=["END"],
        grammar='root ::= "a"',
        cache_salt="me",
        chat_template_kwargs={"tone": "dry"},
    )

    assert told.max_tokens == 9
    assert told.sampling.temperature == 0.5
    assert told.sampling.top_p == 0.9
    assert told.sampling.top_k == 3
    assert told.sampling.penalty_repeat == 1.2
    assert told.sampling.logit_bias == ((7, float("-inf")),)
    assert told.sampling.seed == 11
    assert told.stop == ("END",)
    assert told.constraint == Gbnf('root ::= "a"')
    assert told.cache_salt == "me"
    assert not told.cache_prompt
    assert isinstance(told.prompt, Conversation)
    assert told.prompt.template_arguments == {"tone": "dry"}


def test_terms_and_streaming_are_the_chats_too() -> None:
    keys: dict[str, Any] = {"priority": "high", "deadline_ms": 1500, "stream": True}

    assert request(**keys).terms == Terms("m", Priority.HIGH, 1.5, route=Route.RESPONSES)
    assert chat(**keys).streams


def test_tools_are_given_flat_and_offered_as_in_a_chat() -> None:
    told = conversation(tools=[WEATHER, CLOCK], parallel_tool_calls=False)

    function = {key: value for key, value in WEATHER.items() if key != "type"}
    assert told.tools == (
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "clock"}},
    )
    assert not told.parallel_calls
    assert told.must_call == ()


@pytest.mark.parametrize(
    ("choice", "offered", "must_call"),
    [
        ("none", [], ()),
        ("auto", ["weather", "clock"], ()),
        ("required", ["weather", "clock"], ("weather", "clock")),
        ({"type": "function", "name": "clock"}, ["weather", "clock"], ("clock",)),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "clock"}],
            },
            ["clock"],
            (),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "clock"}],
            },
            ["weather", "clock"],
            ("clock",),
        ),
    ],
)
def test_the_choice_of_tools(choice: Any, offered: list[str], must_call: tuple[str, ...]) -> None:
    said = request(tools=[WEATHER, CLOCK], tool_choice=choice)

    told = said.chat().conversation(longest_image_side=1024)

    assert [tool["function"]["name"] for tool in told.tools] == offered
    assert told.must_call == must_call
    assert said.settings(Sampling())["tool_choice"] == choice


@pytest.mark.parametrize(
    ("text_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}}, {"type": "array"}),
    ],
)
def test_the_text_may_have_a_format(text_format: Any, schema: Any) -> None:
    constraint = frame(text={"format": text_format}).constraint

    assert constraint == (
        None if schema is None else JsonSchema(json.dumps(schema).replace(" ", ""))
    )
    assert request(text={"format": text_format}).settings(Sampling())["text"] == {
        "format": text_format
    }


def test_effort_is_the_templates_and_none_of_it_turns_thinking_off() -> None:
    thinking = conversation(reasoning={"effort": "low", "summary": "auto"})
    silent = conversation(reasoning={"effort": "none"})

    assert thinking.enable_thinking
    assert thinking.template_arguments == {"reasoning_effort": "low"}
    assert not silent.enable_thinking


def test_log_probabilities_are_told_if_they_are_to_be_included() -> None:
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]

    assert frame(include=include, top_logprobs=3).logprobs == 3
    assert frame(include=include).logprobs == 0
    assert frame(top_logprobs=0).logprobs is None
    assert refused(top_logprobs=3)[0] == "top_logprobs"


def test_what_changes_nothing_is_taken() -> None:
    plain = frame()

    assert plain == frame(
        store=False,
        truncation="disabled",
        background=False,
        service_tier="auto",
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        metadata={"a": "b"},
        client_metadata={"x": "y"},
        include=["web_search_call.results"],
        previous_response_id=None,
        text={"verbosity": None},
        tools=None,
        reasoning=None,
        stream=True,
        stream_options={"include_obfuscation": False},
    )


@pytest.mark.parametrize(
    "said",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
        {"max_tool_calls": 3},
        {"n": 2},
        {"max_tokens": 5},
        {"prompt_cache_retention": "24h"},
        {"no_such_key": 1},
    ],
)
def test_what_is_not_there_is_refused_by_name(said: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        request(**said)

    assert caught.value.parameter == next(iter(said))
    assert caught.value.code == ErrorCode.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("said", "parameter", "words"),
    [
        ({"store": True}, "store", "False"),
        ({"background": True}, "background", "False"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "same name"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "no function 'x'",
        ),
        ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "False",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            "stream_options",
            "include_usage",
        ),
        ({"input": []}, "input", "nothing in it"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "web_search_call"),
        ({"input": [{"type": ["message"]}]}, "input[0]", "cannot be told"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            "input_file",
        ),
        (
            {"input": [RESULT | {"output": [{"type": "input_image", "image_url": IMAGE}]}]},
            "input[0].output[0].type",
            "input_text",
        ),
        (
            {"grammar": 'root ::= "a"', "text": {"format": {"type": "json_object"}}},
            "text.format",
            "grammar",
        ),
    ],
)
def test_a_refusal_names_the_parameter(said: dict[str, Any], parameter: str, words: str) -> None:
    told = refused(**said)

    assert told[0] == parameter
    assert words in told[1]


def test_later_complaints_name_this_routes_parameters() -> None:
    def blamed(code: ErrorCode) -> Any:
        return refusal(RequestError(code, "why"), RESPONSES_PARAMETERS).body["error"]["param"]

    assert blamed(ErrorCode.CHAT_TEMPLATE_ERROR) == "input"
    assert blamed(ErrorCode.IMAGE_DECODING_FAILED) == "input"
    assert blamed(ErrorCode.INVALID_SCHEMA) == "text.format"
    assert blamed(ErrorCode.MODEL_NOT_FOUND) == "model"


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
KINDS: st.SearchStrategy[Any] = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "other", None, 1, []]
)
PARTS: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["input_text", "output_text", "refusal", "input_image", "reasoning_text", None]
        ),
        "text": st.text(max_size=5),
        "refusal": st.text(max_size=5),
        "image_url": st.sampled_from([IMAGE, "https://x", ""]),
        "annotations": JSON,
    },
)
TEXTS: st.SearchStrategy[Any] = st.text(max_size=5) | st.lists(PARTS, max_size=3) | JSON
ITEMS: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", None]),
        "content": TEXTS,
        "summary": st.lists(PARTS, max_size=2) | JSON,
        "call_id": st.text(max_size=3),
        "name": st.text(max_size=3),
        "arguments": st.text(max_size=3),
        "output": TEXTS,
        "status": st.sampled_from(["completed", None, 1]),
    },
)
WHOLE_ITEMS: st.SearchStrategy[Any] = st.sampled_from(
    [
        USER,
        CALL,
        RESULT,
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": []},
        {"role": "system", "content": []},
        {"role": "user", "content": []},
        {"type": "reasoning", "summary": []},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    ]
)
TOOLS: st.SearchStrategy[Any] = st.lists(st.sampled_from([WEATHER, CLOCK]) | JSON, max_size=3)
CHOICES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        "none",
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "a"}]},
    ]
)
BODIES: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"input": st.text(max_size=5) | st.lists(WHOLE_ITEMS | ITEMS, max_size=4) | JSON},
    optional={
        "model": st.just("m"),
        "instructions": st.text(max_size=3),
        "tools": TOOLS,
        "tool_choice": CHOICES | JSON,
        "text": st.sampled_from([{"format": {"type": "json_object"}}, {}]) | JSON,
        "grammar": st.just("root"),
        "include": st.sampled_from([[], ["message.output_text.logprobs"]]) | JSON,
        "top_logprobs": st.integers(-1, 21),
        "reasoning": st.sampled_from([{}, {"effort": "high"}]) | JSON,
        "stream": st.booleans(),
        "stream_options": JSON,
        "stop": st.sampled_from(["a", ["a", "b"], []]),
        "seed": st.integers(),
        "mirostat": st.integers(0, 3),
        "logit_bias": st.just({"1": 2}) | JSON,
        "priority": st.sampled_from(["high", "low", "none"]),
    },
)


@given(BODIES | JSON)
def test_no_body_does_anything_but_become_a_frame_or_a_refusal(body: Any) -> None:
    blamed = None
    try:
        said = parse(ResponsesRequest, json.dumps(body).encode())
        said.settings(Sampling())
        told = said.chat()
        chat_frame(told, RequestId("r"), Sampling(), longest_image_side=1024)
    except ParameterError as error:
        blamed = error.parameter
    except RequestError:
        pass

    assert blamed is None or blamed.startswith("input") or re.split(r"[.\[]", blamed)[0] in body


@given(st.lists(WHOLE_ITEMS, min_size=1, max_size=6))
def test_whole_items_are_refused_only_if_they_say_nothing(items: list[Any]) -> None:
    try:
        told = messages(*items)
    except ParameterError:
        assert all(item.get("type") == "reasoning" and "content" not in item for item in items)
    else:
        roles = [message.role for message in told]
        assert ("assistant", "assistant") not in pairwise(roles)
