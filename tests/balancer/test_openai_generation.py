"""What every request for tokens may say, asked of completions, which add least of their own."""

import math
from typing import Any

import pytest
from bodies import body

from balancer.openai_completions import CompletionRequest
from balancer.openai_errors import ParameterError, parse
from balancer.openai_generation import UNLIMITED, GenerationBody, written_schema
from balancer.terms import Priority, Route, Terms
from common.errors import ErrorCode
from common.ids import RequestId
from common.messages import Constraint, Gbnf, Generate, JsonSchema, Mirostat, RawPrompt, Sampling

R = RequestId("r")


def read(**keys: Any) -> CompletionRequest:
    return parse(CompletionRequest, body(prompt="Hi", **keys))


def frame(sampling: Sampling | None = None, **keys: Any) -> Generate:
    return read(**keys).generate(R, RawPrompt("Hi"), sampling or Sampling())


def refused(**keys: Any) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        frame(**keys)
    return caught.value


def test_a_request_that_says_nothing_is_sampled_as_the_balancer_says() -> None:
    assert frame(Sampling(top_k=3, temperature=0.3)) == Generate(
        request_id=R,
        prompt=RawPrompt("Hi"),
        max_tokens=16,
        sampling=Sampling(top_k=3, temperature=0.3),
    )


SAMPLING: dict[str, tuple[Any, str, Any]] = {
    # By the client's name: what it says, and what becomes of it.
    "temperature": (0.5, "temperature", 0.5),
    "top_k": (10, "top_k", 10),
    "top_p": (0.5, "top_p", 0.5),
    "min_p": (0.1, "min_p", 0.1),
    "typical_p": (0.9, "typical_p", 0.9),
    "repeat_penalty": (1.2, "penalty_repeat", 1.2),
    "repeat_last_n": (64, "penalty_last_n", 64),
    "frequency_penalty": (-2, "penalty_frequency", -2.0),
    "presence_penalty": (2.0, "penalty_presence", 2.0),
    "dry_multiplier": (0.8, "dry_multiplier", 0.8),
    "dry_base": (1.5, "dry_base", 1.5),
    "dry_allowed_length": (3, "dry_allowed_length", 3),
    "dry_penalty_last_n": (128, "dry_penalty_last_n", 128),
    "dry_sequence_breakers": (["\n"], "dry_sequence_breakers", ("\n",)),
    "xtc_probability": (0.5, "xtc_probability", 0.5),
    "xtc_threshold": (0.2, "xtc_threshold", 0.2),
    "mirostat": (2, "mirostat", Mirostat.V2),
    "mirostat_tau": (4.0, "mirostat_tau", 4.0),
    "mirostat_eta": (0.2, "mirostat_eta", 0.2),
    "logit_bias": (
        {"5": 1.5, "6": -100, "7": -99, "8": 100},
        "logit_bias",
        ((5, 1.5), (6, -math.inf), (7, -99.0), (8, 100.0)),
    ),
    "ignore_eos": (True, "ignore_eos", True),
    "seed": (7, "seed", 7),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_value_replaces_that_one_of_the_balancer(name: str) -> None:
    said, ours, meant = SAMPLING[name]
    base = Sampling(temperature=0.3, top_k=3)

    sampling = frame(base, **{name: said}).sampling

    told = {key: getattr(sampling, key) for key in sampling.__struct_fields__}
    expected = {key: getattr(base, key) for key in base.__struct_fields__}
    assert told == {**expected, ours: meant}


def test_all_that_sampling_knows_can_be_said() -> None:
    assert {ours for _, ours, _ in SAMPLING.values()} == set(Sampling.__struct_fields__)


@pytest.mark.parametrize("name", ["penalty_repeat", "penalty_frequency", "n_predict"])
def test_names_of_other_protocols_are_refused(name: str) -> None:
    error = refused(**{name: 1})

    assert (error.parameter, error.code) == (name, ErrorCode.NOT_SUPPORTED)


@pytest.mark.parametrize("name", sorted(set(CompletionRequest.model_fields) - {"prompt"}))
def test_null_is_as_if_nothing_were_said(name: str) -> None:
    said = CompletionRequest.model_fields[name].alias or name

    assert frame(**{said: None}) == frame()
    assert read(**{said: None}).terms == read().terms


@pytest.mark.parametrize(
    ("seed", "meant"), [(0, 0), (-1, None), (-2, 2**32 - 2), (2**32 + 3, 3), (2**63 - 1, 2**32 - 1)]
)
def test_any_seed_becomes_one_that_the_engine_knows(seed: int, meant: int | None) -> None:
    assert frame(seed=seed).sampling.seed == meant


@pytest.mark.parametrize(
    ("keys", "uses"),
    [
        ({}, True),
        ({"seed": 1}, False),
        ({"seed": -1}, True),
        ({"seed": 1, "n": 2}, True),
        ({"seed": 1, "cache_prompt": True}, True),
        ({"cache_prompt": False}, False),
        ({"seed": 1, "n": 2, "cache_prompt": False}, False),
    ],
)
def test_what_is_cached_is_not_used_where_a_seed_must_give_the_same_text(
    keys: dict[str, Any], uses: bool
) -> None:
    assert frame(**keys).cache_prompt is uses


@pytest.mark.parametrize(
    ("stop", "texts"), [("x", ("x",)), (["x", "\n"], ("x", "\n")), ([], ()), (None, ())]
)
def test_one_text_or_several_end_an_answer(stop: Any, texts: tuple[str, ...]) -> None:
    assert frame(stop=stop).stop == texts


@pytest.mark.parametrize(
    ("limit", "tokens"), [(1, 1), (2**31 - 1, 2**31 - 1), (-1, UNLIMITED), (None, 16)]
)
def test_an_answer_is_as_long_as_it_is_said(limit: int | None, tokens: int) -> None:
    assert frame(max_tokens=limit).max_tokens == tokens


@pytest.mark.parametrize(("n", "answers"), [(None, 1), (1, 1), (16, 16)])
def test_there_may_be_several_answers(n: int | None, answers: int) -> None:
    assert read(n=n).answers == answers


@pytest.mark.parametrize(
    ("keys", "streams", "tells_usage"),
    [
        ({}, False, False),
        ({"stream": False}, False, False),
        ({"stream": True}, True, False),
        ({"stream": True, "stream_options": None}, True, False),
        ({"stream": True, "stream_options": {}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, True),
        ({"stream_options": {"include_obfuscation": False}, "stream": True}, True, False),
    ],
)
def test_an_answer_is_a_stream_if_it_is_said(
    keys: dict[str, Any], streams: bool, tells_usage: bool
) -> None:
    params = read(**keys)

    assert (params.streams, params.tells_usage) == (streams, tells_usage)


@pytest.mark.parametrize("keys", [{}, {"stream": False}, {"stream": None}])
def test_options_of_streams_are_refused_without_one(keys: dict[str, Any]) -> None:
    assert refused(stream_options={}, **keys).parameter == "stream_options"


@pytest.mark.parametrize(
    ("keys", "terms"),
    [
        ({}, Terms(route=Route.COMPLETIONS)),
        (
            {"model": "qwen", "priority": "high", "deadline_ms": 1500},
            Terms("qwen", Priority.HIGH, 1.5, route=Route.COMPLETIONS),
        ),
    ],
)
def test_a_request_may_say_where_and_when_it_is_served(keys: dict[str, Any], terms: Terms) -> None:
    assert read(**keys).terms == terms


def test_a_salt_sets_what_is_cached_apart() -> None:
    assert frame(cache_salt="tenant").cache_salt == "tenant"


@pytest.mark.parametrize(
    ("keys", "constraint"),
    [
        ({"grammar": "root ::= x"}, Gbnf("root ::= x")),
        ({"json_schema": {"type": "string"}}, JsonSchema('{"type":"string"}')),
        ({"json_schema": {}}, JsonSchema("{}")),
        ({"json_schema": True}, JsonSchema("true")),
    ],
)
def test_an_answer_may_have_to_follow_a_grammar(
    keys: dict[str, Any], constraint: Constraint
) -> None:
    assert frame(**keys).constraint == constraint


def test_two_grammars_exclude_each_other() -> None:
    assert refused(grammar="root ::= x", json_schema={}).parameter == "grammar"


def test_a_schema_is_written_with_all_its_numbers() -> None:
    schema = {"maximum": 10**30, "enum": [None, "é"], "b": {"x": 1, "a": 2}}

    assert written_schema(schema) == JsonSchema(
        '{"maximum":1000000000000000000000000000000,"enum":[null,"é"],"b":{"x":1,"a":2}}'
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"user": "me"},
        {"safety_identifier": "me"},
        {"prompt_cache_key": "k"},
        {"metadata": {"k": "v"}},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"store": False},
    ],
)
def test_what_promises_nothing_changes_nothing(keys: dict[str, Any]) -> None:
    assert frame(**keys) == frame()


@pytest.mark.parametrize(
    "keys",
    [
        {"model": ""},
        {"n": 0},
        {"n": 17},
        {"n": True},
        {"max_tokens": 0},
        {"max_tokens": -2},
        {"max_tokens": 2**31},
        {"max_tokens": "1"},
        {"seed": 2**63},
        {"stop": ""},
        {"stop": ["x"] * 17},
        {"stream": "yes"},
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 1.1},
        {"repeat_penalty": 0},
        {"repeat_last_n": -2},
        {"mirostat": 3},
        {"priority": "urgent"},
        {"deadline_ms": 0},
        {"cache_salt": "x" * 129},
        {"service_tier": "priority"},
        {"store": True},
        {"user": "x" * 1025},
        {"json_schema": "x"},
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(keys: dict[str, Any]) -> None:
    assert [refused(**keys).parameter] == list(keys)


def test_nothing_is_known_by_two_names() -> None:
    names = [field.alias or name for name, field in GenerationBody.model_fields.items()]

    assert len(set(names)) == len(names)
