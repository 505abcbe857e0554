"""Tools and their schemas: what is refused, what is told, and that hostile ones stop nobody."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agent.patterns import Pattern, PatternError
from agent.tool_schema import LARGEST_CACHED, MAX_OBJECTS
from agent.tools import MAX_SCHEMA_BYTES, MAX_TOOLS_BYTES, MOST_ERRORS, Tools
from common.errors import ErrorCode, RequestError
from common.messages import ToolCall

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def offer(parameters: Any, name: str = "note") -> Tools:
    return Tools([{"type": "function", "function": {"name": name, "parameters": parameters}}])


def call(arguments: Any, name: str = "note") -> ToolCall:
    return ToolCall("1", name, json.dumps(arguments))


def check(parameters: Any, arguments: Any) -> list[str]:
    return offer(parameters).check([call(arguments)])


def test_calls_that_keep_to_their_schemas_are_right():
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "n": {"enum": [1, 2]}},
        "required": ["text"],
        "additionalProperties": False,
    }

    assert offer(parameters).check([call({"text": "a"}), call({"text": "b", "n": 1.0})]) == []


def test_a_tool_that_was_not_offered_is_named():
    assert offer(None).check([call({}, "other")]) == ["other: there is no such tool"]


def test_only_the_first_errors_are_told():
    assert len(offer(None).check([call({}, "other")] * 20)) == MOST_ERRORS


@pytest.mark.parametrize(
    ("parameters", "arguments", "error"),
    [
        ({"properties": {"n": {"type": "integer"}}}, {"n": "a"}, "note: n: breaks type: integer"),
        ({"properties": {"n": {"type": ["null", "number"]}}}, {"n": "a"}, "note: n: breaks type: null or number"),
        ({"required": ["n"]}, {}, "note: arguments: 'n' is a required property"),
        ({"additionalProperties": False}, {"n": 1}, "note: arguments: 'n' is not expected"),
        ({"properties": {"n": False}}, {"n": 1}, "note: arguments: is not expected"),
        ({"properties": {"n": {"enum": ["ä", 1]}}}, {"n": True}, 'note: n: must be one of ["ä", 1]'),
        ({"properties": {"n": {"const": 1}}}, {"n": 2}, "note: n: must be one of [1]"),
        ({"properties": {"n": {"pattern": "^a"}}}, {"n": "b"}, "note: n: does not match ^a"),
        ({"properties": {"n": {"items": {"minimum": 3}}}}, {"n": [3, 2]}, "note: n/1: breaks minimum: 3"),
        ({"properties": {"n": {"uniqueItems": True}}}, {"n": [1, 1.0]}, "note: n: breaks uniqueItems: True"),
        ({"patternProperties": {"^n": {"type": "string"}}}, {"n": 1}, "note: n: breaks type: string"),
        ({"properties": {"n": {"anyOf": [{"type": "string"}, False]}}}, {"n": 1}, "note: n: breaks anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"required": ["n"]}}}, {}, "note: arguments: 'n' is a required property"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(parameters: Any, arguments: Any, error: str):
    assert check(parameters, arguments) == [error]


def test_arguments_that_are_not_json_are_not_checked():
    tools = offer({"required": ["n"]})

    assert tools.check([ToolCall("1", "note", "{", is_json=False)]) == []


def test_a_tool_without_parameters_takes_anything():
    assert check(None, {"n": 1}) == []


def test_errors_are_few_and_short_and_do_not_quote_the_arguments():
    secret = "secret " * 100
    schema = {"items": {"type": "integer", "enum": ["x" * 1000], "pattern": "y" * 1000}}

    errors = offer(schema).check([call([secret] * 3)] * 5)
    assert len(errors) == MOST_ERRORS
    assert all(len(error) <= 300 and "secret" not in error for error in errors)


def test_errors_can_be_sent_whatever_the_model_writes():
    errors = offer({"additionalProperties": False}).check([ToolCall("1", "note", '{"\\ud800": 1}')])

    assert len(errors) == 1
    errors[0].encode()


UNUSABLE: list[Any] = [
    [],
    "object",
    {"type": "nothing"},
    {"properties": 5},
    {"properties": {"a": {"minimum": "low"}}},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/missing"},
    {"$ref": "#anchor", "$anchor": "anchor"},
    {"$ref": "#/default", "default": {"type": "string"}},
    {"$ref": "other.json", "$id": "https://example.com/"},
    {"$dynamicRef": "#"},
    {"unevaluatedProperties": False},
    {"pattern": "(?=a)b"},
    {"pattern": "["},
    {"pattern": "(a{999}){999}"},
    {"patternProperties": {"(a)\\1": True}},
    {"description": "x" * MAX_SCHEMA_BYTES},
    {"properties": {str(n): {} for n in range(MAX_OBJECTS)}},
    {
        "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(900)} | {"900": {}},
        "$ref": "#/$defs/0",
    },
]


@pytest.mark.parametrize("parameters", UNUSABLE, ids=lambda parameters: json.dumps(parameters)[:50])
def test_what_is_no_usable_schema_is_refused(parameters: Any):
    with pytest.raises(RequestError) as caught:
        offer(parameters)

    assert caught.value.code is ErrorCode.INVALID_TOOL_SCHEMA
    assert len(caught.value.message) < 500


def nested(value: Any, key: str | None, times: int) -> Any:
    for _ in range(times):
        value = [value] if key is None else {key: value}
    return value


@pytest.mark.parametrize("depth", [100, 5000])
def test_a_schema_that_is_nested_too_deeply_is_refused(depth: int):
    with pytest.raises(RequestError) as caught:
        offer(nested({}, "items", depth))

    assert caught.value.code is ErrorCode.INVALID_TOOL_SCHEMA


def test_a_tool_without_a_name_is_refused():
    with pytest.raises(RequestError):
        Tools([{"type": "function"}])


def test_schemas_are_bounded_together():
    half = {"description": "x" * (MAX_SCHEMA_BYTES // 2)}
    count = 2 * MAX_TOOLS_BYTES // MAX_SCHEMA_BYTES

    with pytest.raises(RequestError):
        Tools([{"function": {"name": str(n), "parameters": half}} for n in range(count + 1)])


MANY = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}


HOSTILE: list[tuple[Any, Any]] = [
    ({"$defs": {**MANY, "40": {"type": "string"}}, "$ref": "#/$defs/0"}, 1),
    ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, 1),
    ({"$ref": "#"}, 1),
    ({"items": {"$ref": "#"}}, nested(1, None, 400)),
    ({"items": {"anyOf": [{"type": "string"}] * 99 + [True]}}, list(range(10_000))),
    ({"items": {"properties": {str(n): {} for n in range(500)}}}, [{}] * 1000),
    ({"anyOf": [{"type": "string"}] * 500}, ["x" * 100] * 1000),
    ({"anyOf": [{"type": "integer"}] * 500}, "x" * 200_000),
    ({"items": {}}, [1] * 50_000),
    ({"allOf": [{"uniqueItems": True}] * 500}, [[n] for n in range(1000)]),
    ({"allOf": [{"not": {"enum": [[]]}}] * 400}, [[n] for n in range(1000)]),
    ({"pattern": "[ab]*a[ab]{5000}$"}, "ab" * 50_000),
    ({"patternProperties": {f"[ab]*a[ab]{{1000}}{n}": {} for n in range(100)}}, {"ab" * 500: 1}),
    ({"additionalProperties": {"$ref": "#"}}, nested(1, "a", 400)),
]


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    HOSTILE,
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_what_would_take_long_is_given_up(parameters: Any, arguments: Any):
    (error,) = check(parameters, arguments)

    assert error in (
        "note: the arguments are too complicated to check",
        "note: the arguments are nested too deeply to check",
    )


def test_work_is_counted_over_all_calls_of_a_section():
    tools = offer({"items": {"type": "integer"}})
    many = call(list(range(4000)))

    assert tools.check([many]) == []
    assert tools.check([many] * 5)[0] == "note: the arguments are too complicated to check"


def test_a_pattern_that_could_backtrack_for_ever_is_matched():
    assert check({"pattern": "^(a|a|aa)*$"}, "a" * 5000 + "b") == [
        "note: arguments: does not match ^(a|a|aa)*$"
    ]


def test_a_schema_of_another_draft_inside_changes_nothing():
    # The library would change over to that draft's own validator, without any bounds.
    inside = {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a|a|aa)*$"}

    assert (
        len(check({"$schema": inside["$schema"], "properties": {"n": inside}}, {"n": "b" * 100}))
        == 1
    )


def test_numbers_that_do_not_go_together_are_an_error_of_the_call():
    assert check({"multipleOf": 0.1}, 10**400) == ["note: a number is too large to check"]


def test_properties_may_have_the_names_of_keywords():
    schema = {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "integer"}}}

    assert check(schema, {"$ref": "x", "pattern": 1}) == []


def test_the_schema_is_not_changed_and_may_change():
    parameters = {"properties": {"n": {"type": "string", "pattern": "a"}}}
    before = json.dumps(parameters)
    tools = offer(parameters)

    assert json.dumps(parameters) == before
    parameters["properties"]["n"]["type"] = "integer"
    assert tools.check([call({"n": "a"})]) == []


@pytest.mark.parametrize("padding", [0, LARGEST_CACHED])
def test_schemas_are_checked_alike_whether_they_are_remembered(padding: int):
    schema = {"required": ["n"], "description": "x" * padding}

    assert check(schema, {}) == check(schema, {}) == ["note: arguments: 'n' is a required property"]


def test_parameters_that_take_text_are_known():
    tools = offer(
        {
            "properties": {
                "a": {"type": "string"},
                "b": {"enum": ["x"]},
                "c": {"type": "integer"},
                "d": {},
                "e": True,
            }
        }
    )

    assert [key for key in "abcdef" if tools.takes_text("note", key)] == ["a", "b"]
    assert not tools.takes_text("other", "a")


@pytest.mark.parametrize(
    ("source", "text", "found"),
    [
        ("^[A-Z]{2}\\d+$", "AB12", True),
        ("^[A-Z]{2}\\d+$", "xAB12", False),
        ("b", "abc", True),
        ("^[\\w.+-]{1,64}@[\\w-]{1,63}\\.[a-z]{2,}$", "someone@example.org", True),
        ("^.{1,255}$", "雨", True),
    ],
)  # fmt: skip
def test_patterns_are_looked_for_anywhere(source: str, text: str, found: bool):
    assert Pattern(source).is_found_in(text) is found


@pytest.mark.parametrize(
    "source", ["(((a{50}){50}){50})", "a{60000}", "\\w{2000}", "(", "\\", "[", "a{99999}{99999}"]
)
def test_patterns_that_cost_too_much_or_are_none_are_refused(source: str):
    with pytest.raises(PatternError):
        Pattern(source)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([0.5, 1.0])
    | st.sampled_from(["", "a", "ab", "b"]),
    lambda inside: (
        st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from("abc"), inside, max_size=3)
    ),
    max_leaves=6,
)


def _schemas(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.dictionaries(st.sampled_from("abc"), inside, max_size=2)
    several = st.lists(inside, min_size=1, max_size=2)
    types = ["null", "boolean", "integer", "number", "string", "array", "object"]
    small = st.integers(0, 2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(types) | st.lists(st.sampled_from(types), min_size=1, unique=True),
            "enum": st.lists(VALUES, max_size=3), "const": VALUES, "pattern": st.sampled_from(["a", "^a", "b$"]),
            "properties": names, "required": st.lists(st.sampled_from("abc"), unique=True),
            "patternProperties": st.dictionaries(st.sampled_from(["a", "^b", "."]), inside, max_size=2),
            "additionalProperties": inside, "propertyNames": inside, "dependentSchemas": names,
            "dependentRequired": st.just({"a": ["b"]}), "minProperties": small, "maxProperties": small,
            "items": inside, "prefixItems": several, "contains": inside, "minContains": small, "maxContains": small,
            "uniqueItems": st.booleans(), "minItems": small, "maxItems": small, "minLength": small, "maxLength": small,
            "minimum": small, "exclusiveMaximum": small, "multipleOf": st.sampled_from([1, 2, 0.5]),
            "allOf": several, "anyOf": several, "oneOf": several, "not": inside,
            "if": inside, "then": inside, "else": inside,
            "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y~1z"]), "title": st.just("t"), "default": VALUES,
        },
    )  # fmt: skip


NOTHING: dict[str, Any] = {}
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.just(NOTHING), _schemas, max_leaves=8
)


@PATIENT
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=5))
def test_the_rewritten_schema_says_what_the_library_says(schema: Any, values: list[Any]):
    root = {
        "$defs": {"x": {"type": "integer"}, "y/z": {"not": {"type": "null"}}},
        "properties": {"v": schema},
    }
    tools: Tools = offer(root)
    plain: Any = Draft202012Validator(root)

    for value in values:
        arguments = {"v": value}
        assert (tools.check([call(arguments)]) == []) == plain.is_valid(arguments)
