import json
import random
from typing import Any

import numpy as np
import pytest

from agent.constraint import ConstraintCompiler, GuidedMatcher
from agent.json_schema import FORMATS, MAX_BYTES, MAX_DEPTH, check_schema
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import JsonSchema

END = TokenId(256)
OTHER_END = TokenId(257)
CONTROL = TokenId(258)
NOTHING = TokenId(259)
LONG = TokenId(260)
PIECES = [*(bytes([n]) for n in range(256)), b"", b"</s>", b"<unk>", b"", b'{"a"']


def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(
        lambda: PIECES,
        tokenize=lambda text: [TokenId(byte) for byte in text.encode()],
        ends=[END, OTHER_END],
        control=[CONTROL],
    )


def compiled(schema: Any) -> GuidedMatcher:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return compiler().compile(JsonSchema(text))


def refusal(schema: Any) -> str:
    with pytest.raises(RequestError) as refused:
        compiled(schema)
    assert refused.value.code is ErrorCode.INVALID_SCHEMA
    return refused.value.message.removeprefix("the JSON schema cannot be used: ")


def follows(schema: Any, text: str) -> bool:
    """Is it a whole text that the schema allows?"""
    matcher = compiled(schema)
    for byte in text.encode():
        if not matcher.allows(TokenId(byte)):
            return False
        matcher.accept(TokenId(byte))
    return matcher.allows(END)


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"x":1,"y":2}', True),
        ('{ "x": 1, "y": 2 }', True),
        ('{\n  "x": 1,\n  "y": 2\n}', True),
        ('{"x":1}', False),
        ('{"x":1,"y":2.5}', False),
        ('{"x":1,"y":2,"z":3}', False),
        ('{"x":1,"y":2', False),
        (f'{{"x":1,{" " * 50}"y":2}}', False),
        (f'{{"x":1,{chr(10) * 3}"y":2}}', False),
    ],
)
def test_an_answer_has_to_follow_the_schema(text: str, expected: bool) -> None:
    assert follows(POINT, text) is expected


def test_patterns_are_honoured() -> None:
    schema = {"type": "string", "pattern": "^hello there indeed\\!$"}

    assert follows(schema, '"hello there indeed!"')
    assert not follows(schema, '"hello there indeed"')


def test_true_allows_any_json() -> None:
    assert follows("true", '{"a": [1, null]}')


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ("{", "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("", "it is not JSON"),
        ('{"maximum": NaN}', "it is not JSON: NaN is not a JSON number"),
        ("false", "it allows nothing"),
        ("5", "it is neither an object nor a boolean"),
        ({"type": "strange"}, "Invalid type: strange"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "string", "format": 5}, "Expected string for 'format', got 5"),
        ({"type": "array", "uniqueItems": True, "format": "set"}, "Unimplemented keys"),
        ('{"format": "colour", "const": "\\ud800"}', "it is not JSON: half of"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex parse error"),
        ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
        (
            {"$ref": "https://example.com/schema"},
            "Resource 'https://example.com/schema' is not present",
        ),
        ({"x-guidance": {"lenient": True}}, "'x-guidance' is not supported"),
        ({"enum": ["x" * MAX_BYTES]}, f"it is longer than {MAX_BYTES} bytes"),
        ({"minimum": 2, "maximum": 1, "type": "integer"}, ""),
    ],
)
def test_a_refusal_names_its_cause(schema: Any, cause: str) -> None:
    assert refusal(schema).startswith(cause)


NO_TEXT = {"anyOf": [{"type": "string", "format": "colour"}, {"type": "integer"}]}


@pytest.mark.parametrize("name", ["password", "binary", "uri-reference", "int32", "DATE", ""])
def test_a_format_that_is_not_known_is_a_remark(name: str) -> None:
    assert follows({"type": "string", "format": name, "maxLength": 3}, '"ä\\n3"')
    assert not follows({"type": "string", "format": name, "maxLength": 3}, '"1234"')
    assert follows({"format": name}, "1.5")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date", "2024-02-01"),
        ("date-time", "2024-02-01T10:00:00Z"),
        ("duration", "P1D"),
        ("email", "a@example.com"),
        ("hostname", "example.com"),
        ("ipv4", "127.0.0.1"),
        ("ipv6", "::1"),
        ("time", "10:00:00Z"),
        ("uri", "https://example.com/"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
    ],
)
def test_a_format_that_is_known_is_kept_to(name: str, text: str) -> None:
    schema = {"type": "array", "items": {"type": "string", "format": name}, "format": "list"}

    assert name in FORMATS
    assert follows(schema, f'["{text}"]')
    assert not follows(schema, '["?"]')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"format": NO_TEXT}}, '{"format": "x"}'),
        ({"properties": {"default": NO_TEXT, "enum": NO_TEXT}}, '{"default": "x", "enum": "x"}'),
        ({"patternProperties": {"^const$": NO_TEXT}}, '{"const": "x"}'),
        ({"additionalProperties": NO_TEXT}, '{"a": "x"}'),
        ({"prefixItems": [NO_TEXT], "items": NO_TEXT}, '["x", "x"]'),
        ({"allOf": [NO_TEXT, {"type": "string"}]}, '"x"'),
        ({"$ref": "#/$defs/enum", "$defs": {"enum": NO_TEXT}}, '"x"'),
        ({"$ref": "#/definitions/a", "definitions": {"a": NO_TEXT}}, '"x"'),
        ({"$ref": "#/components/schemas/A", "components": {"schemas": {"A": NO_TEXT}}}, '"x"'),
    ],
)
def test_formats_are_remarks_wherever_there_is_a_schema(schema: Any, text: str) -> None:
    assert follows(schema, text)
    assert not follows(schema, text.replace('"x"', "true"))


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_what_looks_like_a_format_in_a_value_is_part_of_the_value(keyword: str) -> None:
    value = {"format": "colour"}
    schema = {"format": "object", keyword: value if keyword == "const" else [value]}

    assert follows(schema, '{"format": "colour"}')
    assert not follows(schema, "{}")


@pytest.mark.parametrize("keyword", ["default", "examples", "const", "enum", "example"])
def test_values_beside_a_format_stay_as_they_are(keyword: str) -> None:
    value = [{"format": "colour", "items": {"format": "ä"}}]

    kept = check_schema(json.dumps({"format": "colour", keyword: value}))

    assert json.loads(kept) == {keyword: value}


def test_a_schema_without_remarks_stays_as_it_was_written() -> None:
    schema = ' { "maximum":1.50, "format" : "date" } '

    assert check_schema(schema) == schema


def test_a_schema_does_not_get_longer_when_it_loses_its_remarks() -> None:
    schema = json.dumps({"format": "colour", "title": "ä" * 30_000}, ensure_ascii=False)

    assert len(check_schema(check_schema(schema))) < len(schema)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5000])
def test_a_schema_may_not_be_nested_too_deep(depth: int) -> None:
    assert refusal('{"items":' * depth + "{}" + "}" * depth) == "it is nested more than 64 deep"


def test_a_nested_schema_within_the_limit_is_compiled() -> None:
    depth = MAX_DEPTH - 1

    assert follows('{"items":' * depth + "{}" + "}" * depth, "[[]]")


def test_an_answer_ends_when_it_is_whole_and_not_before() -> None:
    matcher = compiled({"type": "integer"})

    assert not matcher.allows(END)
    assert not matcher.allowed()[[END, OTHER_END]].any()
    matcher.accept(TokenId(ord("1")))
    assert matcher.allows(END)
    assert matcher.allows(OTHER_END)
    assert matcher.allowed()[[END, OTHER_END]].all()


def test_only_the_end_follows_a_closed_object() -> None:
    matcher = compiled(POINT)
    for byte in b'{"x":1,"y":2}':
        matcher.accept(TokenId(byte))

    assert np.flatnonzero(matcher.allowed()).tolist() == [END, OTHER_END]
    matcher.accept(END)


def test_tokens_without_text_never_belong_to_an_answer() -> None:
    matcher = compiled({"type": "string"})
    matcher.accept(TokenId(ord('"')))

    assert not matcher.allows(CONTROL)
    assert not matcher.allows(NOTHING)
    assert not matcher.allowed()[[CONTROL, NOTHING]].any()


def test_a_token_of_several_bytes_is_allowed_where_all_of_them_are() -> None:
    matcher = compiled({"properties": {"a": {}}, "required": ["a"], "additionalProperties": False})

    assert matcher.allows(LONG)
    matcher.accept(LONG)
    assert not matcher.allows(LONG)


@pytest.mark.parametrize("prefix", [" ", "\x00"])
def test_a_tokenizer_that_puts_something_in_front_does_not_mislead(prefix: str) -> None:
    """Where only one text can follow, llguidance asks for its tokens."""
    compiling = ConstraintCompiler(
        lambda: PIECES,
        tokenize=lambda text: [TokenId(byte) for byte in (prefix + text).encode()],
        ends=[END],
        control=[CONTROL],
    )
    matcher = compiling.compile(JsonSchema('{"const": "long"}'))

    text = b""
    while not matcher.allows(END):
        token = int(np.flatnonzero(matcher.allowed())[0])
        matcher.accept(TokenId(token))
        text += PIECES[token]
    assert text == b'"long"'


def test_the_single_answer_and_the_one_for_all_tokens_agree() -> None:
    chance = random.Random(7)
    matcher = compiled({"type": "array", "items": {"type": ["number", "string", "null"]}})

    for _ in range(40):
        allowed = matcher.allowed()
        one_by_one = [matcher.allows(TokenId(token)) for token in range(len(PIECES))]
        assert allowed.tolist() == one_by_one
        text = [int(token) for token in np.flatnonzero(allowed) if token < 256]
        if not text:
            break
        matcher.accept(TokenId(chance.choice(text)))


def test_a_token_that_is_not_allowed_fails_one_answer_only() -> None:
    compiling = compiler()
    matcher, other = (compiling.compile(JsonSchema('{"type": "integer"}')) for _ in range(2))

    with pytest.raises(RequestError) as refused:
        matcher.accept(TokenId(ord("x")))

    assert refused.value.code is ErrorCode.GRAMMAR_REJECTED
    assert "<state>" not in refused.value.message
    assert other.allows(TokenId(ord("1")))
