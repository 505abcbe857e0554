"""Arguments of calls, as JSON and in tags."""

import json
from typing import Any

import pytest
from guided_answers import (
    HERMES_CALL,
    WEATHER,
    Model,
    follows,
    refusal,
    tool,
)

from common.errors import ErrorCode
from common.messages import Conversation


@pytest.mark.parametrize(
    ("parameters", "cause"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"x-guidance": {}}, "'x-guidance' is not supported"),
    ],
)
@pytest.mark.parametrize("family", ["hermes", "coder", "harmony"])
def test_a_strict_schema_that_cannot_be_kept_to_is_refused_with_the_tools_name(
    family: str, parameters: Any, cause: str
) -> None:
    tools = (tool("good", WEATHER), tool("bad", parameters, strict=True))

    code, message = refusal(Conversation((), tools=tools, must_call=("good", "bad")), family)

    assert code is ErrorCode.INVALID_TOOL_SCHEMA
    assert message.startswith("the tools cannot be used: bad: ")
    assert cause in message


REFERRING = {
    "type": "object",
    "properties": {
        "point": {"$ref": "#/$defs/Point"},
        "note": {"type": "string"},
        "way": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
    },
    "required": ["point", "note"],
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "go", "arguments": {"point": {"x": 1}, "note": ""}}</tool_call>', True),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"point": {"y": 1}, "note": ""}}</tool_call>', False),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"x": 1}\n</parameter>\n<parameter=note>\n"<b>"\n\n'
         '</parameter>\n</function>\n</tool_call>', True),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"y": 1}\n</parameter>\n<parameter=note>\na\n'
         '</parameter>\n</function>\n</tool_call>', False),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"x": 1}\n</parameter>\n<parameter=note>\n</tool_call>\n'
         '</parameter>\n</function>\n</tool_call>', False),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"x": 1}\n</parameter>\n</function>\n</tool_call>', False),
    ],
)  # fmt: skip
def test_schemas_may_refer_to_their_definitions(family: str, text: str, expected: bool) -> None:
    tools = (tool("go", REFERRING),)
    model = Model(family, marks_are_tokens=False)
    matcher = model.matcher(Conversation((), tools=tools, must_call=("go",)))

    assert follows(matcher, model.tokenized(text)) is expected
    if expected:
        ((name, arguments),) = model.read(text, tools)
        assert (name, arguments["point"]) == ("go", {"x": 1})


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, {"a": 1}),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}, {"a": "x"}),
        ({"type": "object", "properties": {"a": {"enum": ["x", "</parameter>"]}}}, {"a": "x"}),
        ({"type": "object", "properties": {"a": {"enum": ["x", "\n"]}}}, {"a": "x"}),
        ({"type": "object", "properties": {"a>": {"type": "string"}}}, {"a>": "x"}),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, {"a": 1}),
        ({"type": "object", "properties": {}, "required": ["a"]}, {"a": 1}),
        ({"type": "object"}, {"a": 1}),
        (None, {"a": 1}),
    ],
)
def test_parameters_that_do_not_fit_in_tags_are_written_as_json(
    parameters: Any, arguments: dict[str, Any]
) -> None:
    tools = (tool("go", parameters),)
    model = Model("coder", marks_are_tokens=False)
    matcher = model.matcher(Conversation((), tools=tools, must_call=("go",)))
    text = f"<tool_call>\n<function=go>\n{json.dumps(arguments)}\n</function>\n</tool_call>"

    assert follows(matcher, model.tokenized(text))
    assert model.read(text, tools) == [("go", arguments)]


def test_arguments_are_an_object_even_if_the_schema_does_not_say_so() -> None:
    tools = (tool("clock", {"properties": {"a": {"type": "integer"}}}),)
    model = Model("hermes", marks_are_tokens=False)
    conversation = Conversation((), tools=tools, must_call=("clock",))

    assert follows(model.matcher(conversation), model.tokenized(HERMES_CALL))
    for other in ("5", "[]", '{"a": "b"}'):
        wrong = HERMES_CALL.replace("{}", other)
        assert not follows(model.matcher(conversation), model.tokenized(wrong))
