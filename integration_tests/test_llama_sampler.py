"""The sampler with the real model's vocabulary, and logits made up."""

import ctypes
import gc
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
from msgspec.structs import replace
from numpy.typing import NDArray

from agent.constraint import ConstraintCompiler
from agent.llama_candidates import Row
from agent.llama_library import LlamaVocabulary, lib, start_library
from agent.llama_sampler import LlamaSampler, LlamaSamplers
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Constraint, Gbnf, JsonSchema, Mirostat, Sampling
from deploy.model import default_model

CONTEXT = 200
SMALL = 5003
PLAIN = Sampling(
    temperature=1, top_k=0, top_p=1, min_p=0, penalty_repeat=1, penalty_presence=0, seed=1
)
GREEDY = Sampling(temperature=0, penalty_repeat=1, penalty_presence=0)


@pytest.fixture(scope="module")
def model() -> Generator[Any]:
    start_library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(default_model()).encode(), params)
    yield model
    gc.collect()
    lib.llama_model_free(model)


@pytest.fixture(scope="module")
def vocabulary(model: Any) -> LlamaVocabulary:
    return LlamaVocabulary(model)


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
def samplers(model: Any, vocabulary: LlamaVocabulary) -> LlamaSamplers:
    return LlamaSamplers(model, vocabulary, context=CONTEXT)


@pytest.fixture(scope="module")
def constraints(vocabulary: LlamaVocabulary) -> ConstraintCompiler:
    return ConstraintCompiler(
        vocabulary.pieces,
        tokenize=vocabulary.tokenize,
        ends=vocabulary.ends(),
        control=vocabulary.control(),
    )


class FewTokens(LlamaVocabulary):
    """The first tokens of the model; no multiple of anything."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.size = SMALL


@pytest.fixture(scope="module")
def few(model: Any) -> LlamaSamplers:
    return LlamaSamplers(model, FewTokens(model), context=CONTEXT)


def make(
    samplers: LlamaSamplers,
    sampling: Sampling = PLAIN,
    *,
    prompt: Sequence[int] = (),
    constraint: Constraint | None = None,
    logprobs: int | None = None,
) -> LlamaSampler:
    return samplers.make([TokenId(t) for t in prompt], sampling, constraint, logprobs)


def random_row(seed: int, size: int, spread: float = 4) -> Row:
    """No two are the same: among equals llama.cpp's sorting knows no order."""
    chance = np.random.default_rng(seed)
    values = np.unique(chance.normal(0, spread, 2 * size).astype(np.float32))
    return chance.permutation(values)[:size].copy()


class Reference:
    """llama.cpp's chain in its own order, with all samplers, over all candidates."""

    def __init__(self, model: Any, sampling: Sampling, prompt: Sequence[int], size: int) -> None:
        vocab = lib.llama_model_get_vocab(model)
        self.chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        weakref.finalize(self, lib.llama_sampler_free, self.chain)
        self.size = size
        bias = [*sampling.logit_bias]
        if sampling.ignore_eos:
            bias += [
                (TokenId(t), -math.inf) for t in range(size) if lib.llama_vocab_is_eog(vocab, t)
            ]
        biases = (lib.llama_logit_bias * len(bias))(*(lib.llama_logit_bias(*b) for b in bias))
        seed = sampling.seed
        breakers = [text.encode() for text in sampling.dry_sequence_breakers]
        self._add(lib.llama_sampler_init_logit_bias(size, len(bias), biases))
        if sampling.mirostat is Mirostat.OFF:
            self._add(
                lib.llama_sampler_init_penalties(
                    size,
                    window(sampling.penalty_last_n),
                    sampling.penalty_repeat,
                    sampling.penalty_frequency,
                    sampling.penalty_presence,
                )
            )
            self._add(
                lib.llama_sampler_init_dry(
                    vocab,
                    sampling.dry_multiplier,
                    sampling.dry_base,
                    sampling.dry_allowed_length,
                    window(sampling.dry_penalty_last_n),
                    (ctypes.c_char_p * len(breakers))(*breakers),
                    len(breakers),
                )
            )
            if sampling.temperature <= 0:
                self._add(lib.llama_sampler_init_greedy())
            else:
                self._add(lib.llama_sampler_init_top_k(sampling.top_k))
                self._add(lib.llama_sampler_init_typical(sampling.typical_p, 1))
                self._add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
                self._add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
                self._add(
                    lib.llama_sampler_init_xtc(
                        sampling.xtc_probability, sampling.xtc_threshold, 1, seed
                    )
                )
                self._add(lib.llama_sampler_init_temp(sampling.temperature))
                self._add(lib.llama_sampler_init_dist(seed))
        else:
            tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
            self._add(lib.llama_sampler_init_temp(max(sampling.temperature, 0)))
            if sampling.mirostat is Mirostat.V1:
                self._add(lib.llama_sampler_init_mirostat(size, seed, tau, eta, 100))
            else:
                self._add(lib.llama_sampler_init_mirostat_v2(seed, tau, eta))
        for token in prompt:
            lib.llama_sampler_accept(self.chain, token)

    def _add(self, sampler: Any) -> None:
        lib.llama_sampler_chain_add(self.chain, sampler)

    def draw(self, row: Row) -> int:
        data = np.zeros(self.size, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
        data["id"] = np.arange(self.size)
        data["logit"] = row
        pointer = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
        candidates = lib.llama_token_data_array(pointer, self.size, -1, False)
        lib.llama_sampler_apply(self.chain, ctypes.byref(candidates))
        return candidates.data[candidates.selected].id

    def sample(self, row: Row) -> int:
        token = self.draw(row)
        lib.llama_sampler_accept(self.chain, token)
        return token


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


def window(last_n: int) -> int:
    return CONTEXT if last_n < 0 else last_n


def mostly(off: float, others: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    return st.just(off) | others


TOKENS = st.integers(0, SMALL - 1).map(TokenId)
WINDOWS = st.sampled_from([-1, -1, 0, 1, 7, 60])

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 80, 300, SMALL // 4, SMALL, 2**31 - 1]),
    top_p=mostly(1.0, st.floats(0, 1, width=32)),
    min_p=mostly(0.0, st.floats(0, 1, width=32)),
    penalty_repeat=mostly(1.0, st.floats(0.5, 2, width=32)),
    penalty_frequency=mostly(0.0, st.floats(-1, 1, width=32)),
    penalty_presence=mostly(0.0, st.floats(-2, 2, width=32)),
    penalty_last_n=WINDOWS,
    seed=st.integers(0, 2**32 - 2),
    typical_p=mostly(1.0, st.floats(0, 1, width=32)),
    dry_multiplier=mostly(0.0, st.floats(0, 3, width=32)),
    dry_base=st.floats(1, 3, width=32),
    dry_allowed_length=st.integers(0, 4),
    dry_penalty_last_n=WINDOWS,
    dry_sequence_breakers=st.sampled_from([(), ("\n",), ("\n", ":", "the")]),
    xtc_probability=mostly(0.0, st.floats(0, 1, width=32)),
    xtc_threshold=st.floats(2**-7, 1, width=32),
    mirostat=st.sampled_from([Mirostat.OFF] * 8 + [Mirostat.V1, Mirostat.V2]),
    mirostat_tau=st.floats(1, 10, width=32),
    mirostat_eta=st.floats(0, 1, width=32),
    logit_bias=st.lists(
        st.tuples(TOKENS, st.floats(-20, 20, width=32) | st.just(-math.inf)),
        max_size=20,
        unique_by=lambda bias: bias[0],
    ).map(tuple),
    ignore_eos=st.booleans(),
)


@given(
    SAMPLINGS,
    st.lists(st.integers(0, 20).map(lambda n: n * 17), max_size=2 * CONTEXT),
    st.integers(0, 2**32),
    st.sampled_from([0.5, 4.0]),
)
@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_the_same_tokens_come_out_as_from_llama_cpp_over_all_candidates(
    model: Any,
    few: LlamaSamplers,
    sampling: Sampling,
    prompt: list[int],
    seed: int,
    spread: float,
) -> None:
    # A logit of minus infinity turns llama.cpp's entropy, and with it typical_p, into no number.
    forbids = sampling.ignore_eos or any(bias == -math.inf for _, bias in sampling.logit_bias)
    assume(sampling.typical_p == 1 or not forbids)
    ours = make(few, sampling, prompt=prompt)
    theirs = Reference(model, sampling, prompt, SMALL)

    for n in range(6):
        row = random_row(seed + n % 3, SMALL, spread)
        before = row.copy()
        assert ours.sample(row) == theirs.sample(before)
        assert np.array_equal(row, before)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3),
        GREEDY,
        Sampling(temperature=0),
        Sampling(top_k=0, top_p=1, seed=3),
        Sampling(top_k=40, xtc_probability=0.5, dry_multiplier=0.8, seed=3),
        Sampling(top_k=40, dry_multiplier=0.8, dry_penalty_last_n=3, seed=3),
    ],
)
def test_the_same_holds_for_the_whole_vocabulary_and_long_answers(
    model: Any, samplers: LlamaSamplers, vocabulary: LlamaVocabulary, sampling: Sampling
) -> None:
    prompt = vocabulary.tokenize("Once upon a time, in a land of lakes, there was a lake.")
    ours = make(samplers, sampling, prompt=prompt)
    theirs = Reference(model, sampling, prompt, vocabulary.size)
    rows = [random_row(n, vocabulary.size, 2) for n in range(7)]

    expected = [theirs.sample(rows[n * n % 7]) for n in range(2 * CONTEXT)]

    assert [ours.sample(rows[n * n % 7]) for n in range(2 * CONTEXT)] == expected


def test_of_equal_logits_the_first_token_wins(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    row = np.zeros(vocabulary.size, dtype=np.float32)
    row[[70, 50, 60]] = 1
    mild = Sampling(temperature=0, penalty_repeat=1, penalty_presence=1e-30)

    assert make(samplers, GREEDY).sample(row) == 50
    assert make(samplers, mild, prompt=[60]).sample(row) == 50


def test_the_same_seed_gives_the_same_tokens(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    rows = [random_row(n, vocabulary.size, 1) for n in range(5)]

    def tokens(seed: int | None) -> list[TokenId]:
        sampler = make(samplers, Sampling(seed=seed, min_p=0, top_p=1))
        return [sampler.sample(row) for row in rows]

    assert tokens(11) == tokens(11)
    assert tokens(2**32 - 1) == tokens(2**32 - 1)  # llama.cpp's own word for "any"
    assert tokens(11) != tokens(12)
    assert tokens(None) != tokens(None)


def test_a_bias_forbids_and_forces(samplers: LlamaSamplers, vocabulary: LlamaVocabulary) -> None:
    row = random_row(1, vocabulary.size)
    likeliest = TokenId(int(row.argmax()))
    unlikely = TokenId(int(row.argmin()))

    for sampling in (GREEDY, PLAIN, Sampling()):
        forced = replace(sampling, logit_bias=((unlikely, 1000.0),))
        assert make(samplers, forced).sample(row) == unlikely
    forbidden = replace(GREEDY, logit_bias=((likeliest, -math.inf),))
    assert make(samplers, forbidden).sample(row) == np.argsort(row)[-2]


def test_biases_of_the_same_token_add_up(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    row = np.zeros(vocabulary.size, dtype=np.float32)
    bias = ((TokenId(5), 2.0), (TokenId(5), -1.0), (TokenId(9), 0.5))

    assert make(samplers, replace(GREEDY, logit_bias=bias)).sample(row) == 5


def test_the_end_can_be_ignored(samplers: LlamaSamplers, vocabulary: LlamaVocabulary) -> None:
    row = random_row(1, vocabulary.size)
    row[vocabulary.ends()] = 1000

    assert vocabulary.is_end(make(samplers, GREEDY).sample(row))
    for sampling in (GREEDY, PLAIN, Sampling()):
        going_on = replace(sampling, ignore_eos=True)
        assert not vocabulary.is_end(make(samplers, going_on).sample(row))


def test_when_all_tokens_are_forbidden_the_request_is_refused(few: LlamaSamplers) -> None:
    all_of_them = tuple((TokenId(t), -math.inf) for t in range(SMALL))

    for sampling in (GREEDY, PLAIN, Sampling()):
        sampler = make(few, replace(sampling, logit_bias=all_of_them))
        with pytest.raises(RequestError, match="forbids all tokens"):
            sampler.sample(random_row(1, SMALL))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("at", [3, SMALL - 1])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        PLAIN,
        Sampling(),
        Sampling(temperature=0),
        Sampling(top_k=0, top_p=1),
        Sampling(mirostat=Mirostat.V2),
    ],
)
def test_logits_that_are_no_numbers_fail_the_request_and_nothing_else(
    few: LlamaSamplers, sampling: Sampling, wrong: float, at: int
) -> None:
    row = random_row(1, SMALL)
    row[at] = wrong
    before = row.copy()

    for prompt in ([], [at, 5]):
        with pytest.raises(RequestError) as refused:
            make(few, sampling, prompt=prompt).sample(row)
        assert refused.value.code is ErrorCode.DECODE_FAILED
    assert np.array_equal(row, before, equal_nan=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", math.nan),
        ("min_p", math.nan),
        ("penalty_repeat", 0.0),
        ("penalty_repeat", -1.0),
        ("penalty_repeat", math.inf),
        ("penalty_frequency", 1e300),
        ("penalty_presence", math.nan),
        ("typical_p", math.nan),
        ("dry_multiplier", -1.0),
        ("dry_base", math.inf),
        ("dry_sequence_breakers", ("x" * 41,)),
        ("dry_sequence_breakers", ("a\0b",)),
        ("dry_sequence_breakers", ("x",) * 33),
        ("xtc_threshold", math.nan),
        ("mirostat_tau", math.inf),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1 << 40, 1.0),)),
        ("logit_bias", ((5, math.nan),)),
        ("logit_bias", ((5, math.inf),)),
    ],
)
def test_what_llama_cpp_would_not_survive_is_refused_by_name(
    samplers: LlamaSamplers, field: str, value: object
) -> None:
    with pytest.raises(RequestError) as refused:
        make(samplers, Sampling(**{field: value}))  # pyright: ignore[reportArgumentType]

    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert field.removesuffix("s") in refused.value.message


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=10**30, penalty_last_n=10**30, dry_penalty_last_n=10**30, dry_multiplier=1),
        Sampling(top_k=-(10**30), penalty_last_n=-5, seed=-(10**30), dry_allowed_length=-(10**30)),
        Sampling(dry_multiplier=1, dry_allowed_length=10**30),
        Sampling(
            dry_multiplier=1e6, dry_base=1e6, dry_sequence_breakers=("", "é", "🙂" * 9, "\x7f")
        ),
        Sampling(temperature=1e-300, min_p=1e-300, top_p=-5, typical_p=-5, xtc_probability=9),
        Sampling(
            penalty_repeat=1e-3, penalty_frequency=-1e6, penalty_presence=-1e6, temperature=1e-5
        ),
        Sampling(mirostat=Mirostat.V1, mirostat_tau=-1e6, mirostat_eta=1e6),
        Sampling(mirostat=Mirostat.V2, mirostat_tau=1e6, mirostat_eta=-1e6, temperature=0),
        Sampling(top_k=0, top_p=1, min_p=5),
    ],
)
def test_absurd_values_are_survived(few: LlamaSamplers, sampling: Sampling) -> None:
    sampler = make(few, sampling, prompt=[1, 2, 3] * 50)

    assert all(0 <= sampler.sample(random_row(n, SMALL)) < SMALL for n in range(20))


def test_the_prompts_tokens_are_penalised_too(few: LlamaSamplers) -> None:
    row = random_row(1, SMALL)
    first, second = np.argsort(row)[-1], np.argsort(row)[-2]
    penalising = Sampling(temperature=0, penalty_repeat=1, penalty_presence=50, penalty_last_n=2)

    assert make(few, penalising, prompt=[first, 7]).sample(row) == second
    assert make(few, penalising, prompt=[first, 7, 8]).sample(row) == first


def test_tokens_of_a_prompt_that_are_no_text_do_no_harm(few: LlamaSamplers) -> None:
    """Images stand in a prompt under ids of their own."""
    row = random_row(1, SMALL)

    assert make(few, Sampling(temperature=0), prompt=[-1, 2**31 - 1, 5]).sample(row) == row.argmax()


def test_dry_breaks_a_repetition(few: LlamaSamplers) -> None:
    row = random_row(1, SMALL)
    row[30] = row.max() + 1
    plain = Sampling(temperature=0, penalty_repeat=1, penalty_presence=0)
    dry = replace(plain, dry_multiplier=5.0)
    prompt = [10, 20, 30, 40, 10, 20]

    assert make(few, plain, prompt=prompt).sample(row) == 30
    assert make(few, dry, prompt=prompt).sample(row) != 30


def test_xtc_leaves_out_the_likeliest(few: LlamaSamplers) -> None:
    row = np.full(SMALL, -30, dtype=np.float32)
    row[[5, 6]] = 2, 1
    xtc = replace(PLAIN, xtc_probability=1.0, xtc_threshold=0.2)

    assert {make(few, replace(xtc, seed=n)).sample(row) for n in range(20)} == {6}


def test_typical_p_works_beside_forbidden_tokens(few: LlamaSamplers) -> None:
    row = np.full(SMALL, -30, dtype=np.float32)
    row[[5, 6, 7]] = 3, 2.9, 2.8
    typical = replace(PLAIN, typical_p=0.5, logit_bias=((TokenId(5), -math.inf),))

    drawn = {make(few, replace(typical, seed=n)).sample(row) for n in range(20)}
    assert drawn <= {6, 7}


@pytest.mark.parametrize("mirostat", [Mirostat.V1, Mirostat.V2])
def test_mirostat_surprises_more_with_a_higher_target(
    few: LlamaSamplers, mirostat: Mirostat
) -> None:
    row = random_row(1, SMALL, 2)
    probabilities = np.exp(row) / np.exp(row).sum()

    def surprise(tau: float) -> float:
        sampler = make(few, Sampling(mirostat=mirostat, mirostat_tau=tau, temperature=1, seed=1))
        return float(np.mean([-np.log2(probabilities[sampler.sample(row)]) for _ in range(300)]))

    assert surprise(3) < surprise(7)


def test_logprobs_are_those_of_the_model_itself(
    samplers: LlamaSamplers, vocabulary: LlamaVocabulary
) -> None:
    row = random_row(1, vocabulary.size)
    sampling = Sampling(logit_bias=((TokenId(7), 100.0),), temperature=0.1)
    sampler = make(samplers, sampling, logprobs=3)

    told = sampler.logprobs(row, sampler.sample(row))

    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    likeliest = np.argsort(-row)[:3].tolist()
    assert told.chosen.token == 7
    assert told.chosen.piece == vocabulary.piece(TokenId(7))
    assert told.chosen.logprob == pytest.approx(exact[7], abs=1e-4)
    assert [entry.token for entry in told.top] == likeliest
    assert [entry.logprob for entry in told.top] == pytest.approx(exact[likeliest], abs=1e-4)
    assert make(samplers, logprobs=0).logprobs(row, TokenId(7)).top == ()


def test_only_what_llama_cpp_can_do_alone_is_attached(
    samplers: LlamaSamplers, model: Any, vocabulary: LlamaVocabulary
) -> None:
    attaching = LlamaSamplers(model, vocabulary, context=CONTEXT, attach=True)
    assert make(attaching, Sampling()).attached
    assert make(attaching, Sampling(ignore_eos=True)).attached
    assert not make(samplers, Sampling()).attached
    assert not make(attaching, logprobs=0).attached
    assert not make(attaching, Sampling(dry_multiplier=1)).attached
    assert not make(attaching, Sampling(mirostat=Mirostat.V2)).attached
    assert not make(attaching, constraint=Gbnf('root ::= "x"')).attached


def test_a_closed_sampler_can_be_closed_again(samplers: LlamaSamplers) -> None:
    sampler = make(samplers)

    sampler.close()
    sampler.close()

    assert sampler.chain is None


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
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
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
