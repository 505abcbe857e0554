"""Calls walked through the grammars that are made for them, and read back."""

import json
import random

import pytest
from guided_answers import (
    BOTH,
    FAMILIES,
    HERMES_CALL,
    TOOLS,
    Model,
    follows,
    refusal,
    tool,
    walk,
    written,
)

from common.errors import ErrorCode
from common.ids import TokenId
from common.messages import Conversation


@BOTH
@pytest.mark.parametrize(("family", "form"), FAMILIES.items())
def test_a_call_in_the_familys_own_notation_is_allowed_and_read(
    family: str, form: str, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))
    text = written(form)

    assert follows(model.matcher(conversation), model.tokenized(text))
    assert model.read(text, TOOLS) == [("weather", {"city": "Rom é", "days": 3})]


@BOTH
@pytest.mark.parametrize(("family", "form"), FAMILIES.items())
@pytest.mark.parametrize(
    "change",
    [
        {"name": "clock"},
        {"name": "weathers"},
        {"days": '"x"'},
        {"days": "100"},
        {"days": ""},
    ],
)
def test_other_tools_and_wrong_arguments_are_not_allowed(
    family: str, form: str, marks_are_tokens: bool, change: dict[str, str]
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))

    assert not follows(model.matcher(conversation), model.tokenized(written(form, **change)))


@BOTH
@pytest.mark.parametrize(("family", "form"), FAMILIES.items())
def test_nothing_but_the_call_is_allowed(family: str, form: str, marks_are_tokens: bool) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))
    text = written(form)

    for wrong in (f"Well, {text}", text + "x", text[:-1], ""):
        assert not follows(model.matcher(conversation), model.tokenized(wrong))


@BOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_written_is_read_as_calls_of_the_right_tools(
    family: str, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation(
        (), tools=TOOLS, must_call=("weather", "clock"), enable_thinking=True
    )
    ended = 0
    for seed in range(8):
        text = walk(model, model.matcher(conversation), random.Random(seed))
        if text is None:
            continue
        ended += 1
        calls = model.read(text, TOOLS)
        assert calls, text
        for name, arguments in calls:
            assert name in ("weather", "clock")
            if name == "weather":
                assert {"city", "days"} <= arguments.keys() <= {"city", "days", "unit"}, text
    assert ended >= 3


SEVERAL = {
    "hermes": ("{F}\n{F}", '<tool_call>{"name": "weather", "arguments": ARGS}</tool_call>'),
    "llama": ("{F}; {F}", '{"name": "weather", "parameters": ARGS}'),
    "magistral": ("{F}{F}", "[TOOL_CALLS]weather[ARGS]ARGS"),
    "mistral": ("[TOOL_CALLS][{F}, {F}]", '{"name": "weather", "arguments": ARGS}'),
    "kimi": (
        "<|tool_calls_section_begin|>{F}{F}<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
    ),
    "coder": ("{F}\n{F}", FAMILIES["coder"]),
    "harmony": (
        "{F}<|start|>assistant{F}",
        "<|channel|>commentary to=functions.weather<|message|>ARGS<|call|>",
    ),
}


@BOTH
@pytest.mark.parametrize(("family", "forms"), SEVERAL.items())
def test_there_may_be_several_calls_unless_they_are_not_to_be_parallel(
    family: str, forms: tuple[str, str], marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    whole, one = forms
    text = whole.replace("{F}", written(one))
    single = whole.replace("{F}", "\0", 1)
    single = single[: single.index("\0") + 1] + single[single.index("{F}") + 3 :]

    many = Conversation((), tools=TOOLS, must_call=("weather",))
    assert follows(model.matcher(many), model.tokenized(text))
    assert len(model.read(text, TOOLS)) == 2
    at_most_one = Conversation((), tools=TOOLS, must_call=("weather",), parallel_calls=False)
    assert not follows(model.matcher(at_most_one), model.tokenized(text))
    assert follows(model.matcher(at_most_one), model.tokenized(single.replace("\0", written(one))))


@pytest.mark.parametrize("parallel", [True, False])
def test_where_a_mark_ends_the_answer_it_ends_the_call(parallel: bool) -> None:
    model = Model("harmony", marks_are_tokens=True, ends=["<|call|>", "<|return|>"])
    conversation = Conversation((), tools=TOOLS, must_call=("clock",), parallel_calls=parallel)
    text = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    matcher = model.matcher(conversation)

    assert follows(matcher, model.tokenized(text))
    assert matcher.allows(model.tokens["<|call|>"])
    assert not matcher.allows(model.tokens["<|start|>"])
    assert model.read(text, TOOLS) == [("clock", {})]


def test_a_mark_that_is_a_control_token_is_that_token_and_not_its_text() -> None:
    model = Model("hermes", marks_are_tokens=True)
    conversation = Conversation((), tools=TOOLS, must_call=("clock",))

    assert not follows(
        model.matcher(conversation), [TokenId(byte) for byte in HERMES_CALL.encode()]
    )
    assert follows(model.matcher(conversation), model.tokenized(HERMES_CALL))


@pytest.mark.parametrize(
    ("family", "name"),
    [("kimi", "a b"), ("harmony", "a b"), ("coder", "a>b"), ("apertus", "name"), ("hermes", "</tool_call>"), ("hermes", " a")],
)  # fmt: skip
def test_a_name_that_the_notation_cannot_hold_is_refused(family: str, name: str) -> None:
    code, message = refusal(Conversation((), tools=(tool(name),), must_call=(name,)), family)

    assert code is ErrorCode.INVALID_REQUEST
    assert repr(name) in message


def test_names_are_written_as_json_where_they_stand_in_json() -> None:
    name = 'say "é\\ñ"'
    model = Model("hermes", marks_are_tokens=False)
    text = HERMES_CALL.replace("clock", json.dumps(name, ensure_ascii=False)[1:-1])
    matcher = model.matcher(Conversation((), tools=(tool(name),), must_call=(name,)))

    assert follows(matcher, model.tokenized(text))
    assert model.read(text, (tool(name),)) == [(name, {})]


def test_a_name_may_be_the_beginning_of_another_one() -> None:
    tools = (tool("get"), tool("get_all"))
    model = Model("kimi", marks_are_tokens=True)
    conversation = Conversation((), tools=tools, must_call=("get", "get_all"))

    for name in ("get", "get_all"):
        text = written(FAMILIES["kimi"], name=name)
        assert follows(model.matcher(conversation), model.tokenized(text))


@BOTH
@pytest.mark.parametrize(
    ("family", "mark"),
    [("hermes", "</tool_call>"), ("harmony", "<|end|>"), ("kimi", "<|tool_call_end|>"), ("mistral", "[TOOL_CALLS]"),
     ("functionary", "</function>"), ("magistral", "[ARGS]")],
)  # fmt: skip
def test_a_string_in_json_does_not_hold_a_mark_that_would_end_it(
    family: str, mark: str, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))
    start, end = written(FAMILIES[family], city="CUT").split("CUT")
    marked = [TokenId(byte) for byte in f"a{mark}".encode()]
    almost = marked[:-1]

    before, behind = model.tokenized(start), model.tokenized(end)
    assert follows(model.matcher(conversation), [*before, *almost, *behind])
    assert not follows(model.matcher(conversation), [*before, *marked, *behind])
    if not marks_are_tokens:
        whole = TokenId(model.pieces.index(mark.encode()))
        assert not follows(model.matcher(conversation), [*before, whole, *behind])
