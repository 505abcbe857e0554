import json
from typing import Any

import pytest
from bodies import PATIENT, body, json_values, nearly
from hypothesis import given
from hypothesis import strategies as st
from official import sent
from openai.types.completion_create_params import CompletionCreateParamsStreaming

from balancer.native_requests import encode_request
from balancer.openai_completions import MOST_PROMPTS, CompletionRequest
from balancer.openai_errors import ParameterError, parameters_of, parse, refusal
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import Generate, Prompt, RawPrompt, Sampling, TokenPrompt, decode_to_agent

R = RequestId("r")
ANSWER: dict[str, Any] = {
    "id": "x",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [],
}


NOTHING: list[Any] = []


def read(**keys: Any) -> CompletionRequest:
    return parse(CompletionRequest, body(**{"prompt": "Hi", **keys}))


def frame(**keys: Any) -> Generate:
    params = read(**keys)
    return params.generate(R, params.prompts()[0], Sampling())


def plain(text: str) -> Prompt:
    return RawPrompt(text, is_plain=True)


def tokens(*given_tokens: int) -> Prompt:
    return TokenPrompt(tuple(map(TokenId, given_tokens)))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", [plain("Hi")]),
        ("", [plain("")]),
        (["Hi"], [plain("Hi")]),
        (["a", "b", "a"], [plain("a"), plain("b"), plain("a")]),
        ([5], [tokens(5)]),
        ([5, 0, 6], [tokens(5, 0, 6)]),
        ([[5, 6]], [tokens(5, 6)]),
        ([[5], [6, 7]], [tokens(5), tokens(6, 7)]),
        (["a", [5]], [plain("a"), tokens(5)]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several_of_them(prompt: Any, prompts: list[Prompt]) -> None:
    params = parse(CompletionRequest, sent("completions", ANSWER, model="m", prompt=prompt))

    assert params.prompts() == prompts
    assert params.echoes() == [""] * len(prompts)


@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ([], "prompt"),
        ([NOTHING], "prompt[0]"),
        ([5, "a"], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([2**31], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        (["a", None, "b"], "prompt[1]"),
        ([None], "prompt[0]"),
        (["a", 5], "prompt[1]"),
        ([[5], [-1]], "prompt[1][0]"),
        (["a"] * (MOST_PROMPTS + 1), "prompt"),
    ],
)
def test_a_prompt_of_another_shape_is_refused_where_it_is_wrong(
    prompt: Any, parameter: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        read(prompt=prompt)

    assert caught.value.parameter == parameter


def test_as_many_prompts_as_there_may_be_are_taken() -> None:
    assert len(read(prompt=["a"] * MOST_PROMPTS).prompts()) == MOST_PROMPTS


def test_an_answer_goes_before_its_prompt_if_the_client_wants_an_echo() -> None:
    assert read(echo=True).echoes() == ["Hi"]
    assert read(echo=True, prompt=["a", "b"]).echoes() == ["a", "b"]
    assert read(echo=False).echoes() == [""]


@pytest.mark.parametrize("prompt", [[5], [[5], [6]], ["a", [5]]])
def test_an_echo_of_tokens_is_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        read(echo=True, prompt=prompt).echoes()

    assert caught.value.parameter == "echo"


@pytest.mark.parametrize("logprobs", [0, 3])
def test_an_echo_with_log_probabilities_is_refused(logprobs: int) -> None:
    with pytest.raises(ParameterError) as caught:
        read(echo=True, logprobs=logprobs).prompts()

    assert caught.value.parameter == "echo"


@pytest.mark.parametrize(("said", "meant"), [(None, 16), (1, 1), (-1, 2**31 - 1)])
def test_an_answer_is_short_unless_it_is_said(said: int | None, meant: int) -> None:
    assert frame(max_tokens=said).max_tokens == meant


@pytest.mark.parametrize("said", [None, 0, 1, 20])
def test_log_probabilities_are_told_if_asked_for(said: int | None) -> None:
    assert frame(logprobs=said).logprobs == said


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"best_of": 2}, ErrorCode.INVALID_REQUEST),
        ({"suffix": "x"}, ErrorCode.INVALID_REQUEST),
        ({"logprobs": 21}, ErrorCode.INVALID_REQUEST),
        ({"logprobs": True}, ErrorCode.INVALID_REQUEST),
        ({"messages": []}, ErrorCode.NOT_SUPPORTED),
        ({"top_logprobs": 1}, ErrorCode.NOT_SUPPORTED),
        ({"response_format": {"type": "text"}}, ErrorCode.NOT_SUPPORTED),
    ],
)
def test_what_is_not_there_is_refused_by_name(keys: dict[str, Any], code: ErrorCode) -> None:
    with pytest.raises(ParameterError) as caught:
        read(**keys)

    assert ([caught.value.parameter], caught.value.code) == (list(keys), code)


def test_one_of_one_is_the_best() -> None:
    assert frame(best_of=1) == frame()


def test_all_that_the_official_package_can_say_is_known() -> None:
    known = {field.alias or name for name, field in CompletionRequest.model_fields.items()}

    assert set(CompletionCreateParamsStreaming.__annotations__) <= known


FULL: list[dict[str, Any]] = [
    {
        "model": "m",
        "prompt": ["a", "b"],
        "echo": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1},
        "stop": ["x", "y"],
        "seed": 5,
        "n": 2,
        "max_tokens": 5,
        "best_of": 1,
        "suffix": None,
        "grammar": "root ::= x",
        "repeat_penalty": 1.5,
        "dry_sequence_breakers": ["x"],
        "priority": "low",
    },
    {"prompt": [[5, 6], [7]], "logprobs": 3, "json_schema": {"type": "object"}},
    {"prompt": [5, 6]},
]


def outcome(data: bytes) -> int | None:
    """How many frames it is, which can travel; None: it is refused."""
    try:
        params = parse(CompletionRequest, data)
        prompts = params.prompts()
        frames = [encode_request(params.generate(R, each, Sampling())) for each in prompts]
        assert len(params.echoes()) == len(prompts)
    except RequestError as error:
        told = refusal(error, parameters_of("prompt"))
        json.dumps(told.body, allow_nan=False)
        assert told.status == 400
        return None
    assert all(map(decode_to_agent, frames))
    return len(frames)


def test_the_bodies_that_are_changed_below_are_taken() -> None:
    assert [outcome(body(**full)) for full in FULL] == [2, 2, 1]


@PATIENT
@given(nearly(FULL))
def test_what_is_nearly_a_request_is_taken_or_refused(almost: Any) -> None:
    outcome(json.dumps(almost).encode())


@PATIENT
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FULL[0], json_values)))
def test_keys_of_any_values_are_taken_or_refused(keys: dict[str, Any]) -> None:
    outcome(body(**{"prompt": "Hi", **keys}))
