import pytest

from agent.gbnf import MAX_BYTES, MAX_DEPTH, check_gbnf
from common.errors import ErrorCode, RequestError

JSON = r"""
# as in llama.cpp's grammars/json.gbnf
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def refusal(grammar: str, root: str = "root") -> str:
    with pytest.raises(RequestError) as refused:
        check_gbnf(grammar, root)
    assert refused.value.code is ErrorCode.INVALID_GRAMMAR
    return refused.value.message.removeprefix("the grammar cannot be used: ")


@pytest.mark.parametrize(
    "grammar",
    [
        JSON,
        'root ::= "yes" | "no"',
        'root ::= "yes" |\n "no" # a comment',
        'root ::= a\r\na ::= "x" a | ""\r\n',
        'root ::= ("a" |\n "b"){2,3} [^\\n] . "\\u00e9\\x41\\U0001F642"',
        'root ::= ("a"?)* "b"',
        'root ::= "a"{3} "b"{2,} "c"{0,2000}',
        "root ::= [a-z-] [\\]] [-a]",
        'root ::= "é" [ä-ü]',
        'expression ::= term ("+" term)*\nroot ::= expression\nterm ::= [0-9]+ | "(" expression ")"',
    ],
)
def test_a_sound_grammar_is_let_through(grammar: str) -> None:
    assert check_gbnf(grammar, "root") == frozenset()


def test_another_rule_can_be_the_root() -> None:
    assert check_gbnf('answer ::= "x"', "answer") == frozenset()


def test_the_tokens_that_a_grammar_names_are_told() -> None:
    grammar = "root ::= <think> (!</think>)* </think> <[17]>"

    assert check_gbnf(grammar, "root") == {"<think>", "</think>", "<[17]>"}


@pytest.mark.parametrize(
    ("grammar", "cause"),
    [
        ("", "it has no rule 'root' to begin with"),
        ('answer ::= "x"', "it has no rule 'root' to begin with"),
        ("root ::= answer", "rule 'answer' is used but not defined"),
        ('root ::= root "x" | "y"', "rule 'root' can begin with itself (left recursion)"),
        ('root ::= a\na ::= b\nb ::= a "x"', "rule 'a' can begin with itself (left recursion)"),
        (
            "%llguidance {}",
            "it is for llguidance; only llama.cpp's own notation (GBNF) is supported",
        ),
        ('root ::= "x', "line 1: the grammar ends too early"),
        ("root ::= [x", "line 1: the grammar ends too early"),
        ("root ::= []", "line 1: brackets without a character between them match nothing"),
        ("root ::= [z-a]", "line 1: a range of characters goes backwards"),
        ('root ::= ("x"', "line 1: expected ')', found the end"),
        ('root ::= "x")', "line 1: expected the end of the rule, found ')'"),
        ('root ::= "x"\nother = "y"', "line 2: expected '::=', found '= \"y\"'"),
        ("?", "line 1: expected the name of a rule, found '?'"),
        ('root ::= "\\q"', "line 1: unknown escape \\q"),
        ('root ::= "\\x4"', "line 1: \\x wants 2 hexadecimal digits"),
        ("root ::= *", "line 1: there is nothing to repeat"),
        ('root ::= "x"{a}', "line 1: expected a number, found 'a}'"),
        ('root ::= "x"{1', "line 1: expected '}', found the end"),
        ("root ::= <think", "line 1: the name of a token has no end"),
        ("root ::= <[x]>", "line 1: expected the number of a token"),
        ('root ::= "a\0b"', "line 1: it contains a null character"),
    ],
)
def test_a_refusal_names_its_cause(grammar: str, cause: str) -> None:
    assert refusal(grammar) == cause


def test_a_grammar_may_not_be_too_long() -> None:
    assert refusal(f'root ::= "{"x" * MAX_BYTES}"') == f"it is longer than {MAX_BYTES} bytes"


def test_brackets_may_not_be_nested_too_deep() -> None:
    def nested(depth: int) -> str:
        return f'root ::= {"(" * depth}"x"{")" * depth}'

    assert check_gbnf(nested(MAX_DEPTH), "root") == frozenset()
    assert refusal(nested(MAX_DEPTH + 1)).endswith("nested more than 64 deep")
    assert refusal("root ::= " + "(" * 60_000).endswith("nested more than 64 deep")


@pytest.mark.parametrize(
    ("repetition", "cause"),
    [
        ("{2001}", "more than 2000 repetitions"),
        ("{0,2001}", "more than 2000 repetitions"),
        ("{" + "9" * 5000 + "}", "more than 2000 repetitions"),
        ("{5,2}", "repeated at least 5 times but at most 2"),
        ("{100}{100}", "repeated more than 2000 times, all in all"),
    ],
)
def test_absurd_repetitions_are_refused(repetition: str, cause: str) -> None:
    assert refusal(f'root ::= "x"{repetition}') == f"line 1: {cause}"


def test_what_becomes_too_large_when_written_out_is_refused() -> None:
    grammar = f'root ::= "{"x" * 30_000}"{{2000}}'

    assert refusal(grammar).endswith("written out it has over 200000 elements")


def test_recursion_after_rules_that_can_only_be_empty_is_refused() -> None:
    """llama.cpp does not see it, and then notes down x after x until the memory is full."""
    grammar = 'root ::= a\na ::= e a "x" | "y"\ne ::= f\nf ::= ""'

    assert refusal(grammar) == "rule 'a' can begin with itself (left recursion)"


def test_rules_that_begin_in_exponentially_many_ways_are_refused() -> None:
    """llama.cpp would look for left recursion for years."""
    rules = [f'a{n} ::= a{n + 1} | a{n + 1} "x"' for n in range(40)]

    assert refusal("\n".join(["root ::= a0", *rules, 'a40 ::= "y"'])).endswith("in too many ways")


def test_a_long_chain_of_rules_is_refused() -> None:
    rules = [f"a{n} ::= a{n + 1}" for n in range(3000)]

    assert refusal("\n".join(["root ::= a0", *rules, 'a3000 ::= "y"'])).endswith("too many ways")


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= e\ne ::= "(" e ")" | "(" e "]" | "x"',
        'root ::= "a long beginning, longer than what is tried" e\ne ::= "(" e ")" | "(" e "]" | "x"',
        'root ::= ("a" | "a" "a"?){0,500} s\ns ::= "a" s "b" | "a" s "c" | ""',
        "root ::= a0\n"
        + "\n".join(f"a{n} ::= a{n + 1} a{n + 1}" for n in range(12))
        + '\na12 ::= "y" | ""',
    ],
)
def test_texts_that_can_be_read_in_exponentially_many_ways_are_refused(grammar: str) -> None:
    assert refusal(grammar).endswith("too ambiguous: one text can be read in many ways")
