"""Single rules and terminals. Whole grammars are walked through in the tests of what is made of them."""

import pytest

from agent.lark_rules import Rules, Written, text_without
from agent.notations import Perhaps, Place
from common.errors import ErrorCode, RequestError
from common.ids import TokenId

OPEN, CLOSE, END = "<|a|>", "<|/a|>", "<|end|>"


def rules() -> Rules:
    return Rules({OPEN: TokenId(7), CLOSE: TokenId(8), END: TokenId(9)}, ends=[END])


def lines(of: Rules) -> list[str]:
    """What has been defined since the beginning."""
    return of.write().split("\n")[2:]


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ('é"\n', '"é\\"\\n"'),
        (OPEN, "<[7]>"),
        (f"x{OPEN}\n{CLOSE}", '"x" <[7]> "\\n" <[8]>'),
        ("", ""),
    ],
)
def test_marks_that_are_control_tokens_are_these_tokens(text: str, expression: str) -> None:
    assert rules().literal(text) == expression


def test_the_longest_mark_is_the_one_that_counts() -> None:
    one = Rules({"<a>": TokenId(1), "<a><b>": TokenId(2)}, ends=[])

    assert one.literal("<a><b><a>") == "<[2]> <[1]>"


def test_nothing_follows_a_mark_that_ends_the_answer() -> None:
    assert rules().closing(CLOSE) == "<[8]>"
    assert rules().closing(END) == ""
    with pytest.raises(RequestError) as refused:
        rules().literal(f"{END}x")
    assert refused.value.code is ErrorCode.NOT_SUPPORTED


def test_equal_rules_are_kept_once() -> None:
    one = rules()

    names = [one.rule('"a"'), one.rule('"b"'), one.rule('"a"'), one.terminal('"a"')]

    assert names == ["x1", "x2", "x1", "X3"]
    assert lines(one) == ['x1: "a"', 'x2: "b"', 'X3: "a"']


@pytest.mark.parametrize(
    ("mark", "expression", "defined"),
    [
        ("</a>", "x2", ['X1: (/b/) "</a>"', "x2[lazy]: X1"]),
        (CLOSE, "X1? <[8]>", ["X1: (/b/) & /(?s:.+)/"]),
        (f"\n{CLOSE}", "X1 <[8]>", ['X1: (/b/) "\\n"']),
    ],
)
def test_text_lasts_until_its_mark(mark: str, expression: str, defined: list[str]) -> None:
    one = rules()

    assert one.up_to("/b/", mark) == expression
    assert lines(one) == defined


def test_text_may_hold_anything_but_its_marks() -> None:
    assert text_without([]) == "/(?s:.*)/"
    assert text_without(["<a", "b", "<a"]) == r"/(?s:.*)/ & ~/(?s:.*)(?:\x{3C}a|b)(?s:.*)/"


def test_a_mark_may_reach_from_one_part_of_a_notation_into_the_next() -> None:
    parts = ["<|", "a|", ">", Written("x9"), Written(""), Place.SPACE, Perhaps(CLOSE), "b"]

    one = rules()

    assert one.sequence(parts) == '<[7]> x9 X0{0,4} x1? "b"'
    assert lines(one) == ["x1: <[8]>"]


def test_a_schema_is_kept_with_the_name_to_tell_when_it_cannot_be_used() -> None:
    one = rules()

    names = [one.json("a", "{}"), one.json("b", '{"type": "object"}'), one.json("a", "true")]

    assert names[0] == names[2] != names[1]
    assert one.schemas == [("a", "{}"), ("b", '{"type": "object"}')]
