"""Answers that follow a grammar or a schema: the real vocabulary, made-up logits, llama.cpp as judge."""

import ctypes
import importlib
import json
import math
import random
import subprocess
import sys
import weakref
from codecs import getincrementaldecoder
from collections.abc import Generator, Sequence
from re import search
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llama_running import Running
from msgspec.structs import replace
from numpy.typing import NDArray
from sampling import GREEDY, PLAIN, SMALL, Reference, make, random_row

from agent.constraint import ConstraintCompiler
from agent.llama import LlamaEngine
from agent.llama_candidates import Row
from agent.llama_library import LlamaVocabulary, lib
from agent.llama_sampler import LlamaSamplers
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import (
    CallsTold,
    ChatMessage,
    Constraint,
    Conversation,
    FinishReason,
    Gbnf,
    JsonSchema,
    Sampling,
    ToolCallsEnded,
    ToolCallsParsed,
)
from deploy.model import default_model


@pytest.fixture(scope="module")
def silent(vocabulary: LlamaVocabulary) -> list[TokenId]:
    return [token for token in vocabulary.control() if not vocabulary.is_end(token)]


@pytest.fixture(scope="module")
def short(vocabulary: LlamaVocabulary) -> NDArray[np.intp]:
    """Tokens of which none takes llama.cpp exponential time, where a grammar is ambiguous."""
    pieces = vocabulary.pieces()
    some = [t for t, piece in enumerate(pieces) if len(piece) < 4 and (t < 700 or piece[:1] > b"~")]
    return np.array([*some, *vocabulary.ends()])


@pytest.fixture(scope="module")
def constraints(vocabulary: LlamaVocabulary) -> ConstraintCompiler:
    return ConstraintCompiler(
        vocabulary.pieces,
        tokenize=vocabulary.tokenize,
        ends=vocabulary.ends(),
        control=vocabulary.control(),
    )


class LlamaGrammar:
    """llama.cpp's own sampler for grammars."""

    def __init__(self, model: Any, grammar: str, *, silent: Sequence[int]) -> None:
        """``silent``: the tokens that are never text, whatever their names look like."""
        vocab = lib.llama_model_get_vocab(model)
        self._sampler = lib.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        self.refused = not self._sampler
        weakref.finalize(self, lib.llama_sampler_free, self._sampler)
        self._silent = silent

    def allowed(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these."""
        data = np.zeros(len(tokens), dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
        data["id"] = tokens
        pointer = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
        candidates = lib.llama_token_data_array(pointer, len(tokens), -1, False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(candidates))
        return (data["logit"] == 0) & ~np.isin(tokens, self._silent)

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._sampler, token)


def answer(
    samplers: LlamaSamplers,
    vocabulary: LlamaVocabulary,
    constraint: Constraint,
    *,
    seed: int = 0,
    sampling: Sampling = PLAIN,
    wish: str = "",
    limit: int = 400,
) -> str:
    """What random logits make under a constraint; the tokens of the wish are the likeliest."""
    sampler = make(samplers, sampling, constraint=constraint)
    wished = vocabulary.tokenize(wish)
    text = b""
    for n in range(limit):
        row = random_row(seed + n % 50, vocabulary.size, 1)
        if n < len(wished):
            row[wished[n]] = 1000
        before = row.copy()
        token = sampler.sample(row)
        assert np.array_equal(row, before)
        if vocabulary.is_end(token):
            return text.decode()
        text += vocabulary.piece(token)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(3))
def test_a_grammar_is_followed_to_its_end(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary, seed: int
) -> None:
    grammar = 'root ::= ("yes" | "no") ", " [a-c]{2,4} "é"? "."'

    text = answer(samplers, vocabulary, Gbnf(grammar), seed=seed)

    start, _, rest = text.partition(", ")
    assert start in ("yes", "no")
    assert rest.endswith(".")
    assert 2 <= len(rest.rstrip(".").rstrip("é")) <= 4
    assert set(rest.rstrip(".").rstrip("é")) <= set("abc")


def test_what_the_model_wants_is_kept_where_the_grammar_allows_it(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    grammar = Gbnf("root ::= [a-zA-Z ]+ [.!]")
    wish = "Hello there, world!"

    assert answer(samplers, vocabulary, grammar, wish="Hello there!") == "Hello there!"
    assert answer(samplers, vocabulary, grammar, wish=wish, sampling=GREEDY)[:11] == "Hello there"


def test_another_root_is_taken(samplers: LlamaSamplers, vocabulary: LlamaVocabulary) -> None:
    grammar = Gbnf('root ::= "no"\nother ::= "yes"', root="other")

    assert answer(samplers, vocabulary, grammar) == "yes"


def test_a_complete_answer_ends_even_if_the_end_is_to_be_ignored(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    going_on = replace(PLAIN, ignore_eos=True)

    assert answer(samplers, vocabulary, Gbnf('root ::= "x"'), sampling=going_on) == "x"
    assert answer(samplers, vocabulary, JsonSchema('{"const": 1}'), sampling=going_on) == "1"


def test_control_tokens_are_never_part_of_a_constrained_answer(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    """Though their names, such as <|im_start|>, look like text that the grammar allows."""
    row = random_row(1, vocabulary.size)
    control = vocabulary.control()
    assert len(control) > 2
    row[control] = 1000

    for constraint in (Gbnf("root ::= [^x]+"), JsonSchema("{}")):
        for sampling in (GREEDY, PLAIN, Sampling()):
            assert make(samplers, sampling, constraint=constraint).sample(row) not in control


def test_the_second_draw_takes_another_random_number_as_in_llama_cpp(
    model: Any, few: LlamaSamplers, silent: list[TokenId]
) -> None:
    grammar = 'root ::= [a-z ]+ "."'
    sampling = Sampling(top_k=40, top_p=1, min_p=0, seed=5)
    ours = make(few, sampling, constraint=Gbnf(grammar))
    theirs = Reference(model, sampling, [], SMALL)
    rules = LlamaGrammar(model, grammar, silent=silent)
    every = np.arange(SMALL)

    rejected = 0
    for n in range(20):
        row = random_row(n, SMALL, 2)
        mask = rules.allowed(every)
        token = theirs.draw(row)
        if not mask[token]:
            rejected += 1
            token = theirs.draw(np.where(mask, row, np.float32(-np.inf)))
        lib.llama_sampler_accept(theirs.chain, token)
        rules.accept(token)
        assert ours.sample(row) == token
    assert rejected > 0


ALPHABET = 'ab"\\\\]^- \n\u00e9\u65e5\U0001f642'


def escaped(text: str) -> str:
    return "".join(
        f"\\U{ord(c):08X}" if c in '"\\\\]^-\n' or not text.isascii() else c for c in text
    )


CHARACTERS = st.sampled_from(ALPHABET)
LITERALS = st.text(CHARACTERS, min_size=1, max_size=3).map(lambda text: f'"{escaped(text)}"')
CLASSES = st.one_of(
    st.text(CHARACTERS, min_size=1, max_size=3).map(lambda text: f"[{escaped(text)}]"),
    st.sampled_from(
        ["[a-c]", "[^a]", "[^b-y]", ".", "[à-ü]", "[一-龯]", "[\U0001f600-\U0001f64f]"]
    ),
)
OPERATORS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,9}"])


def sequences(names: list[str]) -> st.SearchStrategy[str]:
    """What follows a character may come back to any rule; what comes first goes to later ones."""

    def deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        alternatives = st.lists(inner, min_size=1, max_size=3).map(" | ".join)
        return st.lists(
            st.tuples(LITERALS | CLASSES | alternatives.map(lambda text: f"({text})"), OPERATORS),
            max_size=3,
        ).map(lambda parts: " ".join(element + operator for element, operator in parts) or '""')

    plain = st.recursive(LITERALS | CLASSES | st.sampled_from([*names, '""']), deeper)
    back = st.tuples(LITERALS, st.sampled_from(["root", "a", "b", "root?", "(a | b)*"])).map(
        " ".join
    )
    return plain | back | st.tuples(plain, back).map(" ".join)


def is_text(start: bytes, *, final: bool) -> bool:
    """Is it one, or can it go on to be one?"""
    try:
        getincrementaldecoder("utf-8")().decode(start, final)
    except UnicodeDecodeError:
        return False
    return search(b"\xed[\xa0-\xbf]", start) is None  # half a pair; the decoder waits for its end


@st.composite
def grammars(draw: st.DrawFn) -> str:
    rules: list[str] = []
    for name, later in (("root", ["a", "b"]), ("a", ["b"]), ("b", [])):
        alternatives = draw(st.lists(sequences(later), min_size=1, max_size=3))
        rules.append(f"{name} ::= {' | '.join(alternatives)}")
    return "\n".join(rules)


@given(grammars(), st.randoms(use_true_random=False))
@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    derandomize=True,  # now and then llama.cpp takes hours over a grammar, and cannot be stopped
)
def test_the_same_texts_are_allowed_as_by_llama_cpp(
    model: Any,
    vocabulary: LlamaVocabulary,
    constraints: ConstraintCompiler,
    silent: list[TokenId],
    short: NDArray[np.intp],
    grammar: str,
    chance: random.Random,
) -> None:
    theirs = LlamaGrammar(model, grammar, silent=silent)
    assume(not theirs.refused)  # such as the repetition of what may be empty
    text = b""

    def theirs_allowed() -> NDArray[np.bool_]:
        # llama.cpp takes bytes for characters that no text has, and may end within a character.
        tokens = [TokenId(int(token)) for token in short]
        sound = [
            is_text(text + vocabulary.piece(token), final=vocabulary.is_end(token))
            for token in tokens
        ]
        return theirs.allowed(short) & sound

    try:
        ours = constraints.compile(Gbnf(grammar))
        for _ in range(8):
            allowed = theirs_allowed()
            assert np.array_equal(ours.allowed()[short], allowed)
            possible = [TokenId(int(token)) for token in short[allowed]]
            token = chance.choice(possible)
            assert ours.allows(token)
            if vocabulary.is_end(token):
                break
            text += vocabulary.piece(token)
            ours.accept(token)
            theirs.accept(token)
    except RequestError as error:
        refusal = error.message
        assume("too ambiguous" not in refusal)
    else:
        return
    assert "nothing can follow" in refusal
    assert not theirs_allowed().any()


def test_a_constraint_that_leaves_nothing_ends_the_request(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    (token,) = vocabulary.tokenize("x")
    sampling = replace(PLAIN, logit_bias=((token, -math.inf),))
    row = random_row(1, vocabulary.size)

    with pytest.raises(RequestError, match="logit_bias forbids") as refused:
        make(samplers, sampling, constraint=Gbnf('root ::= "x"')).sample(row)
    assert refused.value.code is ErrorCode.GRAMMAR_REJECTED
    impossible = make(samplers, GREEDY, constraint=Gbnf('root ::= "x" a\na ::= a "y"'))
    assert impossible.sample(row) == token
    with pytest.raises(RequestError, match="the grammar cannot be followed: nothing") as refused:
        impossible.sample(row)
    assert refused.value.code is ErrorCode.GRAMMAR_REJECTED


@pytest.mark.parametrize(
    ("constraint", "cause"),
    [
        (Gbnf('answer ::= "x"'), "no rule 'root'"),
        (Gbnf('root ::= root "x"'), "nothing can follow"),
        (Gbnf("root ::= <[17]>"), "tokens are not supported"),
        (
            Gbnf('root ::= x x x x x x x x x x x x\nx ::= "a"? "a"? | y*\ny ::= [a-z]? [a-z]?'),
            "too ambiguous",
        ),
        (JsonSchema("{"), "it is not JSON"),
        (JsonSchema('{"$ref": "#"}'), "nothing can follow"),
        (JsonSchema('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused_with_its_cause(
    samplers: LlamaSamplers, constraint: Constraint, cause: str
) -> None:
    with pytest.raises(RequestError) as refused:
        make(samplers, constraint=constraint)

    is_schema = isinstance(constraint, JsonSchema)
    code = ErrorCode.INVALID_SCHEMA if is_schema else ErrorCode.INVALID_GRAMMAR
    assert refused.value.code is code
    assert cause in refused.value.message


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "size": {"type": "integer", "minimum": 3, "maximum": 500},
        "kind": {"enum": ["small", "large", None]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}\\!$"},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "code", "parts"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_follows_its_schema(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary, seed: int
) -> None:
    validate: Any = importlib.import_module("jsonschema").validate  # it has no types

    text = answer(samplers, vocabulary, JsonSchema(json.dumps(SCHEMA)), seed=seed)

    validate(json.loads(text), SCHEMA)


@pytest.fixture
def dashes(vocabulary: LlamaVocabulary) -> Row:
    """Logits for many equal characters."""
    (longest,) = vocabulary.tokenize("-" * 64)
    assert vocabulary.piece(longest) == b"-" * 64
    row = np.zeros(vocabulary.size, dtype=np.float32)
    row[longest] = 10
    return row


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= ([-a-z]? [-a-z ]?)* [-a-z0-9]* [^.]* "."',
        'root ::= e "."\ne ::= "-" e "b" | "-" e "c" | ""',
        'root ::= x x x x x x x x x x "."\nx ::= "-"? "-"? | y*\ny ::= [-a]? [-b]?',
    ],
)
def test_a_text_that_can_be_read_in_exponentially_many_ways_is_followed(
    samplers: LlamaSamplers, dashes: Row, grammar: str
) -> None:
    sampler = make(samplers, GREEDY, constraint=Gbnf(grammar))

    assert {sampler.sample(dashes) for _ in range(10)} == {dashes.argmax()}


def test_a_grammar_that_takes_too_long_fails_one_answer_and_no_other(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary, dashes: Row
) -> None:
    hostile = make(samplers, GREEDY, constraint=Gbnf('root ::= x+ "."\nx ::= "-"+ | "(" root ")"'))

    def many() -> None:
        for _ in range(30):
            hostile.sample(dashes)

    with pytest.raises(RequestError, match="too ambiguous") as refused:
        many()
    assert refused.value.code is ErrorCode.GRAMMAR_REJECTED
    assert answer(samplers, vocabulary, Gbnf('root ::= "x"')) == "x"


HOSTILE = """
import resource, sys
from agent.llama_library import LlamaVocabulary, lib, start_library
from agent.llama_sampler import LlamaSamplers
from common.errors import RequestError
from common.messages import Gbnf, Sampling
from deploy.model import default_model

start_library()
params = lib.llama_model_default_params()
params.vocab_only = True
model = lib.llama_model_load_from_file(str(default_model()).encode(), params)
samplers = LlamaSamplers(model, LlamaVocabulary(model), context=100)
samplers.make([], Sampling(), Gbnf('root ::= "x"'), None)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000,) * 2)
for grammar in {grammars!r}:
    try:
        samplers.make([], Sampling(), Gbnf(grammar), None)
    except RequestError as error:
        print(error.code.value)
"""


def test_hostile_grammars_do_not_take_the_process_along() -> None:
    grammars = [
        "root ::= " + "(" * 20_000,
        'root ::= "a"{5,2}',
        f'root ::= "{"a" * 30_000}"{{2000}}',
        "\n".join(["root ::= a0", *(f"a{n} ::= a{n + 1}" for n in range(3000)), "a3000 ::= [x]"]),
        "root ::= a0\n" + "\n".join(f"a{n} ::= a{n + 1}{{2}}" for n in range(30)) + "\na30 ::= .?",
        "root ::= " + "[" * 1000,
        'root ::= "\\U',
        "root ::= <[99999999999999999999]>",
    ]

    ended = subprocess.run(
        [sys.executable, "-c", HOSTILE.format(grammars=grammars)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (ended.returncode, ended.stdout.split()) == (0, ["invalid_grammar"] * len(grammars))


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OFFERED = (
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
)
HERMES = (
    "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{# <tool_call> #}"
)


@pytest.fixture(scope="module")
def engine() -> Generator[LlamaEngine]:
    engine = LlamaEngine(str(default_model()), slots=5, threads=1, context=512, cells=2560)
    yield engine
    engine.close()


@pytest.mark.parametrize("parallel", [True, False])
def test_a_model_that_must_call_a_tool_calls_one_that_may_be_called(
    engine: LlamaEngine, parallel: bool
) -> None:
    running = Running(engine, template=HERMES)
    question = (ChatMessage("user", "What is the weather in Rome for the next 3 days?"),)
    conversation = Conversation(
        question,
        tools=OFFERED,
        must_call=("weather",),
        parallel_calls=parallel,
        calls_told=CallsTold.CHECKED,
    )
    names = [str(seed) for seed in range(10)]
    ended = 0

    for seed, name in enumerate(names):
        running.submit(name, conversation, max_tokens=300, sampling=replace(PLAIN, seed=seed))
    running.run()
    running.forget()

    for name in names:
        _, end = running.outcome(name)
        results = [
            event.result
            for event in running.events
            if isinstance(event, ToolCallsEnded) and event.request_id == name
        ]
        if end.reason is FinishReason.LENGTH:
            continue
        ended += 1
        (result,) = results
        assert isinstance(result, ToolCallsParsed)
        assert {call.name for call in result.calls} == {"weather"}
        assert parallel or len(result.calls) == 1
    assert ended >= 5
