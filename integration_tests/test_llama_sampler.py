"""The sampler with the real model's vocabulary, and logits made up."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sampling import CONTEXT, GREEDY, PLAIN, SMALL, Reference, make, random_row

from agent.llama_library import LlamaVocabulary
from agent.llama_sampler import LlamaSamplers
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Gbnf, Mirostat, Sampling


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
