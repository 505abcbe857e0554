"""How single sections of tool calls are read."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.literals import DEEPEST
from agent.tool_calls import (
    Part,
    Places,
    ReadCalls,
    ToolCallError,
    WrittenCall,
    made_calls,
    read_blocks,
    read_gemma,
    read_harmony,
    read_json,
    read_llama,
    read_python,
)
from agent.tools import Tools
from common.messages import ToolCall

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TOOLS = Tools(
    [
        {
            "type": "function",
            "function": {
                "name": "note",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "size": {"enum": ["1", "2"]},
                        "count": {"type": "integer"},
                    },
                },
            },
        }
    ]
)


def read(reader: ReadCalls, text: str, mark: str = "") -> list[ToolCall]:
    ids = itertools.count()
    return made_calls(reader([Part(mark, text)], TOOLS), make_id=lambda: f"made {next(ids)}")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "note", "arguments": {"text": "a"}}',
        '{"name": "note", "parameters": {"text": "a"}}',
        '{"name": "note", "arguments": "{\\"text\\": \\"a\\"}"}',
        '{"type": "function", "function": {"name": "note", "parameters": {"text": "a"}}}',
        '{"function": "note", "parameters": {"text": "a"}}',
        '{"tool_call_id": "0", "tool_name": "note", "parameters": {"text": "a"}}',
        '[{"note": {"text": "a"}}]',
    ],
)
def test_json_calls_may_name_their_parts_in_several_ways(text: str):
    assert read(read_json, text) == [ToolCall("made 0", "note", '{"text": "a"}')]


def test_line_breaks_in_strings_are_taken_in_json():
    (call,) = read(read_json, '{"name": "note", "arguments": {"text": "a\nb"}}')

    assert json.loads(call.arguments) == {"text": "a\nb"}


def test_an_id_is_kept_unless_it_is_used_twice():
    calls = read(read_json, '[{"name": "a", "id": "x"}, {"name": "b", "id": "x"}, {"name": "c"}]')

    assert [call.call_id for call in calls] == ["x", "made 0", "made 1"]


def test_missing_arguments_are_an_empty_object():
    assert read(read_json, '{"name": "note"}') == [ToolCall("made 0", "note", "{}")]


def test_arguments_that_are_not_json_are_handed_on():
    places = Places(name="[N]", arguments="[A]")

    written = places([Part("[N]", "note"), Part("[A]", ' {"text": ')], TOOLS)
    assert made_calls(written, make_id=lambda: "1") == [
        ToolCall("1", "note", '{"text":', is_json=False)
    ]


@pytest.mark.parametrize("number", ["1e999", "NaN", "Infinity", "9" * 5000])
def test_numbers_that_no_json_holds_make_arguments_something_else(number: str):
    (call,) = made_calls([WrittenCall("note", f"[{number}]")], make_id=lambda: "1")

    assert not call.is_json


def test_halves_of_surrogate_pairs_do_not_get_out():
    (call,) = read(read_json, '{"name": "note", "arguments": {"text": "\\ud800"}}')

    assert call.arguments == '{"text": "\\ud800"}'
    with pytest.raises(ToolCallError, match="no proper name"):
        read(read_json, '{"name": "\\ud800"}')


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (read_json, '{"name": "note", '),
        (read_json, '{"name": "note"} and more'),
        (read_json, '{"name": 1}'),
        (read_json, '{"arguments": {}, "more": 1}'),
        (read_json, '"note"'),
        (read_json, '{"name": ""}'),
        (read_json, '{"name": "%s"}' % ("x" * 300)),
        (read_json, "[" * 5000),
        (read_json, '{"name": "note", "arguments": {"n": 1e999}}'),
        (read_json, "[" + ",".join(['{"name": "note"}'] * 1001) + "]"),
        (read_json, ""),
        (read_blocks, "<wrong>"),
        (read_blocks, "<function=note><parameter=text>a"),
        (read_blocks, "note<arg_key>text</arg_key>"),
        (read_blocks, "note<arg_key>text"),
        (read_blocks, "?"),
        (read_python, "note(text='a'"),
        (read_python, "note(text=a)"),
        (read_python, "note('a')"),
        (read_python, "note(text='a"),
        (read_python, "note(text='a') and more"),
        (read_python, "note(text=" + "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1) + ")"),
        (read_gemma, "call:note{text}"),
        (read_gemma, "note{}"),
        (read_gemma, 'call:note{text:<|"|>a}'),
        (read_harmony, "{}"),
    ],
)
def test_what_cannot_be_read_is_said_in_short_words(reader: ReadCalls, text: str):
    with pytest.raises(ToolCallError) as caught:
        read(reader, text)

    assert 0 < len(str(caught.value)) < 200


def test_what_stands_in_a_tag_is_text_if_the_tool_takes_text():
    text = (
        "<function=note><parameter=text>\n12\n</parameter><parameter=size>1</parameter>"
        "<parameter=count>3</parameter><parameter=other>[1, true]</parameter>"
        "<parameter=last>[1, </parameter></function>"
    )

    (call,) = read(read_blocks, text)
    assert json.loads(call.arguments) == {
        "text": "12", "size": "1", "count": 3, "other": [1, True], "last": "[1, ",
    }  # fmt: skip


def test_a_tag_may_hold_what_looks_like_a_call():
    text = "<function=note><parameter=text><function=x></function></parameter></function>"

    (call,) = read(read_blocks, text)
    assert json.loads(call.arguments) == {"text": "<function=x></function>"}


def test_a_tag_may_hold_anything_between_marks_of_its_own():
    text = '<function name="note"><param name="text"><![CDATA[</param>]]></param></function>'

    (call,) = read(read_blocks, text)
    assert json.loads(call.arguments) == {"text": "</param>"}


def test_programs_are_read_and_never_run():
    text = "note(text='it\\'s\\n\\u00e9', n=-1.5e3, l=[True, None, {'a': \"b\"}]), note()"

    first, second = read(read_python, text)
    assert json.loads(first.arguments) == {
        "text": "it's\né",
        "n": -1500,
        "l": [True, None, {"a": "b"}],
    }
    assert second.arguments == "{}"


def test_gemma_writes_objects_without_quotation_marks():
    text = 'call:note{text:<|"|>a"b{}<|"|>,in:{list:[1,true,null],empty:{}}}'

    (call,) = read(read_gemma, text)
    assert json.loads(call.arguments) == {
        "text": 'a"b{}', "in": {"list": [1, True, None], "empty": {}},
    }  # fmt: skip


def test_a_program_for_llama_is_a_call_of_python():
    (call,) = read(read_llama, "print(1)\nprint(2)", "<|python_tag|>")

    assert (call.name, json.loads(call.arguments)) == ("python", {"code": "print(1)\nprint(2)"})


def test_numbered_names_are_those_of_the_tools():
    places = Places(name="[N]", arguments="[A]")

    names = [
        call.name for call in places([Part("[N]", "functions.note:3"), Part("[N]", "a:b")], TOOLS)
    ]
    assert names == ["note", "a:b"]


def test_a_tool_may_have_such_a_name_itself():
    places = Places(name="[N]", arguments="[A]")
    tools = Tools([{"function": {"name": "functions.note:3"}}])

    assert [call.name for call in places([Part("[N]", "functions.note:3")], tools)] == [
        "functions.note:3"
    ]


PIECES = st.sampled_from(
    ['{"name"', ": ", '"note"', "}", "{", "[", "]", ",", '"', "'", "\\", "note", "(", ")", "text", "=",
     "<function=", "note>", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
     "<arg_value>", "</arg_value>", "call:", '<|"|>', "1", "-", "e", ".", "\n", " ", "雨", "\\u12", "x"]
)  # fmt: skip


@PATIENT
@given(
    st.sampled_from([read_json, read_blocks, read_python, read_gemma, read_llama, read_harmony]),
    st.lists(PIECES).map("".join),
    st.sampled_from(["", "<|python_tag|>", "<|message|>", "to=note"]),
)
def test_whatever_a_model_writes_is_read_or_refused(reader: ReadCalls, text: str, mark: str):
    try:
        calls = read(reader, text, mark)
    except ToolCallError:
        return
    for call in calls:
        if call.is_json:
            json.loads(call.arguments)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
)


@PATIENT
@given(st.dictionaries(st.text(), JSON))
def test_arguments_come_out_as_they_went_in(arguments: dict[str, Any]):
    (call,) = read(read_json, json.dumps({"name": "note", "arguments": arguments}))

    assert json.loads(call.arguments) == arguments
