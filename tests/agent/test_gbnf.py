import sys

import pytest

from agent.constraint import ConstraintCompiler
from agent.gbnf import MAX_BYTES, MAX_DEPTH, MAX_ELEMENTS
from agent.lark import MAX_CHAIN, to_lark
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Gbnf

END = TokenId(256)
COMPILER = ConstraintCompiler(
    lambda: [*(bytes([n]) for n in range(256)), b""],
    tokenize=lambda text: [TokenId(byte) for byte in text.encode()],
    ends=[END],
    control=[],
)

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
        to_lark(grammar, root)
    assert refused.value.code is ErrorCode.INVALID_GRAMMAR
    return refused.value.message.removeprefix("the grammar cannot be used: ")


def accepted(grammar: str, text: str | bytes, root: str = "root") -> str:
    """How much of it, by bytes; and a full stop if an answer can end there."""
    matcher = COMPILER.compile(Gbnf(grammar, root))
    data = text.encode() if isinstance(text, str) else text
    at = 0
    while at < len(data) and matcher.allows(TokenId(data[at])):
        matcher.accept(TokenId(data[at]))
        at += 1
    return data[:at].decode(errors="replace") + ("." if matcher.allows(END) else "")


def follows(grammar: str, text: str, root: str = "root") -> bool:
    return accepted(grammar, text, root) == text + "."


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON, ['{"a": [1, true, "\\u00e9"]}', "{}"], ["[1]", '{"a"}', '{"a": 01}', '"\x01"']),
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "ye", "yesno", "yes "]),
        ('root ::= "yes" |\n "no" # a comment', ["yes", "no"], ["a comment"]),
        ('root ::= a\r\na ::= "x" a | ""\r\n', ["", "xxx"], ["y"]),
        ('root ::= ("a" |\n "b"){2,3} [^\\n] .', ["abxy", "bbb😀\n"], ["abx\n\n", "ab\nx", "axy"]),
        ('root ::= "\\u00e9\\x41\\U0001F642\\t\\r\\n\\\\\\"\\[\\]\\-"', ['éA🙂\t\r\n\\"[]-'], []),
        ('root ::= ("a"?)* "b"', ["b", "aab"], ["a", "ba"]),
        ('root ::= "ab"{2} "c"{2,} "d"{0,2000}', ["ababcc", "ababcccddd"], ["abb", "ababc"]),
        ('root ::= "x" "a"{0} "y"', ["xy"], ["xay"]),
        ('root ::= "a"{2}* "b"?+', ["", "aa", "aaaabb"], ["a", "aaa"]),
        ("root ::= [a-z-] [\\]] [-a]", ["-]-", "b]a"], ["b]b", "A]a"]),
        ('root ::= "é" [ä-ü] [^a-zä-ü]', ["éöÿ", "éäA"], ["eöA", "éöö", "éoA"]),
        ("root ::= [^\\x00-\\U0001FFFF]", ["\U00020000"], ["\U0001ffff", "a"]),
        ("root ::= [\\uD700-\\uE000]", ["\ud7ff", "\ue000"], ["\ue001"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= (([a]))", ["a"], ["aa"]),
        ('root ::= "a" "b"+ | ("c" | "d")+', ["ab", "abb", "dcd"], ["a", "", "abc"]),
        ('root ::= (""){2} ("a" "")+', ["a", "aa"], [""]),
        ('root ::= "(" root ")" | root "!" | "x"', ["x", "(x)", "(x!)!!"], ["(x", "!"]),
        ('root ::= b "x" | "y"\nb ::= | b "z"', ["x", "zzx", "y"], ["z", "zy"]),
    ],
)
def test_an_answer_has_to_follow_the_grammar(
    grammar: str, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not follows(grammar, text)] == []
    assert [text for text in wrong if follows(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= [a-z]+ "x"', "abxcx"),
        ('root ::= "ab" | "abc" "d"', "abcd"),
        ('root ::= [a-z]* [0-9a-z] "z"', "zz"),
        ('root ::= "a"* "ab"', "aaab"),
        ('root ::= ("a" | "ab") ("c" | "bcd")', "abcd"),
        ('root ::= [a-z]+ | "if" [(]', "if("),
        ('root ::= .* "e" [a-f]{2}', "eeeeaa"),
    ],
)
def test_all_ways_to_split_a_text_are_kept(grammar: str, text: str) -> None:
    assert follows(grammar, text)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= [a-z] root | "."', ["ab."], ["a", "ab.c"]),
        ('root ::= ([a-z] root)? "" | "-"', ["", "ab", "ab-"], ["-a"]),
        ('root ::= [a-z] ("," root | ";" (root)?)', ["a,b;", "a;b,c;"], ["a", "a,", "a,b,"]),
        ('root ::= l "."\nl ::= [a-z] r\nr ::= "," l | ""', ["a.", "a,b."], [".", "a,.", "a"]),
        (
            'root ::= a\na ::= "a" b | "x"\nb ::= "b" c\nc ::= "c" a | "d" b | "y"',
            ["abdbcx", "x", "aby"],
            ["ab", "ax"],
        ),
        ("root ::= root | [a-c]", ["a"], ["", "ab"]),
        ("root ::= root root | [a-c]", ["a", "abc"], [""]),
        ('root ::= "a" root "b" | "c" root | ""', ["", "aabb", "cab", "acb"], ["abb", "bc"]),
    ],
)
def test_right_recursion_means_the_same_as_a_loop(
    grammar: str, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not follows(grammar, text)] == []
    assert [text for text in wrong if follows(grammar, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "x," root | "x"',
        'root ::= item rest\nitem ::= "x"\nrest ::= "," root | ""',
        'root ::= "x" a\na ::= "," b | ""\nb ::= "x" c\nc ::= "," root',
        'root ::= root ",x" | "x"',
    ],
)
def test_a_recursive_list_may_be_as_long_as_it_likes(grammar: str) -> None:
    assert follows(grammar, "x," * 3000 + "x")


def test_what_never_ends_goes_on() -> None:
    assert accepted('root ::= "x" root', "xxx") == "xxx"
    grammar = 'root ::= "x" root | "." | "-" a\na ::= b\nb ::= "y" a'
    assert accepted(grammar, "x-yy") == "x-yy"
    assert accepted(grammar, "xx.") == "xx.."


def test_a_text_has_no_other_bytes_than_those_of_characters() -> None:
    assert accepted("root ::= .*", b"a\xc3\xa9\xf0\x9f\x99\x82\xff") == "aé🙂."
    assert accepted("root ::= [^a]*", b"\xed\xa0") == "\ufffd"
    assert accepted("root ::= .*", b"\x01\x00") == "\x01."


def test_another_rule_can_be_the_root() -> None:
    assert follows('root ::= "no"\nanswer ::= "x"', "x", root="answer")


def test_of_two_rules_of_one_name_the_last_one_counts() -> None:
    assert follows('root ::= "x"\nroot ::= "y"', "y")


@pytest.mark.parametrize(
    ("grammar", "cause"),
    [
        ("", "it has no rule 'root' to begin with"),
        ('answer ::= "x"', "it has no rule 'root' to begin with"),
        ("root ::= answer", "rule 'answer' is used but not defined"),
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
        ("root ::= <think>", "line 1: tokens are not supported, only their text"),
        ("root ::= !<[17]>", "line 1: tokens are not supported, only their text"),
        ('root ::= "\\x00"', "line 1: no text has such a character"),
        ("root ::= [\\uD800-\\uDFFF\\U00110000]", "line 1: no text has such a character"),
        ("root ::= [^\\x01-\\U7FFFFFFF]", "line 1: no text has such a character"),
        ('root ::= "a\0b"', "line 1: it contains a null character"),
    ],
)
def test_a_refusal_names_its_cause(grammar: str, cause: str) -> None:
    assert refusal(grammar) == cause


def test_a_grammar_may_not_be_too_long() -> None:
    assert refusal(f'root ::= "{"x" * MAX_BYTES}"') == f"it is longer than {MAX_BYTES} bytes"


def test_brackets_may_not_be_nested_too_deep() -> None:
    def nested(depth: int) -> str:
        return f'root ::= {"(" * depth}"x" | "y"{")" * depth}'

    assert follows(nested(MAX_DEPTH), "x")
    assert refusal(nested(MAX_DEPTH + 1)).endswith("nested more than 64 deep")
    assert refusal("root ::= " + "(" * 60_000).endswith("nested more than 64 deep")


@pytest.mark.parametrize(
    ("repetition", "cause"),
    [
        ("{2001}", "more than 2000 repetitions"),
        ("{0,2001}", "more than 2000 repetitions"),
        ("{" + "9" * 5000 + "}", "more than 2000 repetitions"),
        ("{5,2}", "repeated at least 5 times but at most 2"),
        ("*****", "more than 4 repetitions of one another"),
    ],
)
def test_absurd_repetitions_are_refused(repetition: str, cause: str) -> None:
    assert refusal(f'root ::= "x"{repetition}') == f"line 1: {cause}"


def test_a_grammar_may_not_have_too_many_elements() -> None:
    assert refusal(f'root ::= "{"x" * MAX_ELEMENTS}"').endswith("over 20000 elements")


def chain(length: int) -> str:
    rules = [f'a{n} ::= a{n + 1} | "{n}"' for n in range(1, length - 1)]
    return "\n".join(["root ::= a1", *rules, f'a{length - 1} ::= "y"'])


def test_a_chain_of_rules_may_not_be_too_long() -> None:
    assert follows(chain(MAX_CHAIN), "y")
    assert refusal(chain(MAX_CHAIN + 1)) == "it has a chain of more than 500 rules"


def test_what_becomes_too_large_is_refused() -> None:
    names = [f"a{n}" for n in range(60)]
    ends = " | ".join(f'"x" {name}' for name in names)
    rules = "\n".join(f"{name} ::= {ends}" for name in names)

    assert refusal(f"root ::= {' [,] '.join(names)}\n{rules}").endswith(
        "it becomes too large: too many of its rules end with one another"
    )


def test_deep_nesting_does_not_exhaust_the_stack_or_the_time() -> None:
    deep = '"x"'
    for _ in range(MAX_DEPTH):
        deep = f"({deep} | [a-z])*+*+"

    assert follows(f"root ::= {deep}", "abc")
    assert (
        nested_calls(sys.getrecursionlimit() - 300, f"root ::= {deep}") == "it is nested too deep"
    )


def nested_calls(depth: int, grammar: str) -> str:
    return refusal(grammar) if depth == 0 else nested_calls(depth - 1, grammar)
