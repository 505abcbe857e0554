"""Completions as OpenAI tells them, in chunks and in one object."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from bodies import PATIENT
from hypothesis import given
from hypothesis import strategies as st
from official import unknown
from openai.types import Completion
from told import (
    CONTENT,
    REASONING,
    TEXT,
    A,
    B,
    C,
    Run,
    check_frame,
    end,
    logprob,
    official_json,
    parts_of,
    runs,
    token,
)

from balancer.exchange import Told
from balancer.openai_completion_results import CompletionAnswer, Completions, CompletionStream
from balancer.openai_results import Json
from common.ids import RequestId
from common.messages import (
    FinishReason,
    Logprobs,
)


def completion_object(
    *events: Told,
    prompts: Mapping[RequestId, int] | None = None,
    echoes: Sequence[str] = ("",),
    tells_logprobs: bool = False,
) -> Json:
    answer = CompletionAnswer(
        Completions(TEXT, prompts or {A: 0}, echoes, tells_logprobs=tells_logprobs)
    )
    for told in events:
        answer.take(told)
    return official_json(answer.object())


def completion_chunks(
    *events: Told,
    prompts: Mapping[RequestId, int] | None = None,
    echoes: Sequence[str] = ("",),
    tells_logprobs: bool = False,
    tells_usage: bool = False,
) -> list[Json]:
    completions = Completions(TEXT, prompts or {A: 0}, echoes, tells_logprobs=tells_logprobs)
    stream = CompletionStream(completions, tells_usage=tells_usage)
    return [official_json(chunk) for told in events for chunk in stream.chunks(told)]


def texts(chunks: Sequence[Json]) -> list[str]:
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


def test_a_completion_is_all_of_the_text() -> None:
    events = [token((CONTENT, "a"), (REASONING, "b")), token(), end(reason=FinishReason.LENGTH)]

    (choice,) = completion_object(*events)["choices"]

    assert choice == {"text": "ab", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert texts(completion_chunks(*events)) == ["ab", ""]


@pytest.mark.parametrize("events", [[end()], [token(), end()], [token((CONTENT, "a")), end()]])
def test_an_echo_goes_before_each_answer_once(events: list[Told]) -> None:
    text = "Hi" + ("a" if len(events) == 2 and events[0] != token() else "")

    assert completion_object(*events, echoes=["Hi"])["choices"][0]["text"] == text
    assert "".join(texts(completion_chunks(*events, echoes=["Hi"]))) == text


def test_each_answer_echoes_its_own_prompt() -> None:
    prompts = {A: 0, B: 0, C: 1}
    events = [end(C), end(B), end(A)]

    whole = completion_object(*events, prompts=prompts, echoes=["x", "y"])

    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "x"), (1, "x"), (2, "y")]
    chunks = completion_chunks(*events, prompts=prompts, echoes=["x", "y"])
    told = [(c["index"], c["text"]) for chunk in chunks for c in chunk["choices"]]
    assert told == [(2, "y"), (1, "x"), (0, "x")]


def test_older_log_probabilities_are_one_list_for_each_fact() -> None:
    first = Logprobs(logprob(b"a", -1.0), (logprob(b"b", -0.5),))
    second = Logprobs(logprob(b"cd", -0.25), (logprob(b"cd", -0.25),))
    events = [token((CONTENT, "a"), logprobs=first), token((CONTENT, "cd"), logprobs=second)]

    whole = completion_object(*events, end(), tells_logprobs=True)

    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["a", "cd"],
        "token_logprobs": [-1.0, -0.25],
        "top_logprobs": [{"b": -0.5, "a": -1.0}, {"cd": -0.25}],
        "text_offset": [0, 1],
    }


def test_older_log_probabilities_come_with_their_text() -> None:
    events = [token(logprobs=Logprobs(logprob(b"a"), ())), token((CONTENT, "a")), token()]

    chunks = completion_chunks(*events, tells_logprobs=True)

    told = [(c["text"], c["logprobs"]["tokens"]) for chunk in chunks for c in chunk["choices"]]
    assert told == [("a", ["a"])]


def test_tokens_that_make_one_character_begin_where_it_does() -> None:
    events = [
        token(logprobs=Logprobs(logprob(b"\xf0\x9f"), ())),
        token((CONTENT, "😀"), logprobs=Logprobs(logprob(b"\x98\x80"), ())),
        token((CONTENT, "x"), logprobs=Logprobs(logprob(b"x"), ())),
        token((CONTENT, "y"), logprobs=Logprobs(logprob(b"y"), ())),
    ]

    whole = completion_object(*events, end(), tells_logprobs=True)

    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2]


def completions(run: Run, make: Callable[..., Any], **more: Any) -> Any:
    return make(
        *run.events,
        prompts=run.prompts,
        echoes=["x", "y"],
        tells_logprobs=run.has_logprobs,
        **more,
    )


@PATIENT
@given(runs(has_calls=False), st.booleans())
def test_the_chunks_of_a_completion_say_what_its_object_says(run: Run, tells_usage: bool) -> None:
    chunks = completions(run, completion_chunks, tells_usage=tells_usage)
    whole = completions(run, completion_object)

    check_frame(chunks, whole, tells_usage=tells_usage)
    for choice in whole["choices"]:
        parts = parts_of(chunks, choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [
            *[None] * (len(parts) - 1),
            choice["finish_reason"],
        ]
        if run.has_logprobs:
            for name, values in choice["logprobs"].items():
                assert [each for part in parts for each in part["logprobs"][name]] == values
        else:
            assert {part["logprobs"] for part in parts} == {choice["logprobs"]} == {None}


@PATIENT
@given(runs(has_calls=False), st.booleans())
def test_completions_are_what_the_official_types_say(run: Run, tells_usage: bool) -> None:
    whole = completions(run, completion_object)
    ours = unknown(Completion.model_validate(whole, strict=True))
    for chunk in completions(run, completion_chunks, tells_usage=tells_usage):
        for choice in chunk["choices"]:
            # The type knows ends only, though it is that of the chunks too.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        ours |= unknown(Completion.model_validate(chunk, strict=True))

    assert ours == {"timings"}
