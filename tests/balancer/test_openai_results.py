"""Answers as OpenAI tells them, against the types of the official package."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from bodies import PATIENT
from hypothesis import given
from hypothesis import strategies as st
from official import unknown
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from balancer.exchange import Timing, Told
from balancer.openai_chat_results import ChatAnswer, ChatStream
from balancer.openai_completion_results import CompletionAnswer, Completions, CompletionStream
from balancer.openai_results import FINGERPRINT, ChatLogprobs, Head, Json, Tally, finish_reason
from common.ids import RequestId, TokenId
from common.messages import (
    Finished,
    FinishReason,
    Logprobs,
    Segment,
    TokenClass,
    TokenGenerated,
    TokenLogprob,
    ToolCallDelta,
    ToolCallsEnded,
    ToolCallsParsed,
    Usage,
)

CONTENT, REASONING = TokenClass.CONTENT, TokenClass.REASONING
TOOL_CALL, UNDETERMINABLE = TokenClass.TOOL_CALL, TokenClass.UNDETERMINABLE

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
TIMING = Timing(arrived=10.0, dispatched=10.5, started=11.5, ended=13.5)


def head(kind: str) -> Head:
    return Head("id-1", kind, 1_700_000_000, "m")


CHAT = head("chat.completion")
CHUNK = head("chat.completion.chunk")
TEXT = head("text_completion")


def token(
    *segments: tuple[TokenClass, str],
    request_id: RequestId = A,
    logprobs: Logprobs | None = None,
    calls: tuple[ToolCallDelta, ...] = (),
) -> Told:
    parts = tuple(Segment(*segment) for segment in segments)
    return Told("agent", TokenGenerated(request_id, TokenId(1), parts, logprobs, calls))


def end(
    request_id: RequestId = A,
    *,
    reason: FinishReason = FinishReason.STOP,
    usage: Usage | None = None,
    timing: Timing | None = TIMING,
    segments: tuple[Segment, ...] = (),
) -> Told:
    used = usage or Usage(prompt_tokens=5, content_tokens=2)
    return Told("agent", Finished(request_id, reason, used, segments), timing)


def logprob(piece: bytes, value: float = -0.5) -> TokenLogprob:
    return TokenLogprob(TokenId(1), value, piece)


def official_json(value: Json) -> Any:
    """As it travels: no NaN, and keys are texts."""
    return json.loads(json.dumps(value, allow_nan=False))


def chat_chunks(*events: Told, tells_usage: bool = False, n: int = 1) -> list[Json]:
    stream = ChatStream(CHUNK, indices(n), tells_usage=tells_usage)
    return [official_json(chunk) for told in events for chunk in stream.chunks(told)]


def chat_object(*events: Told, tells_logprobs: bool = False, n: int = 1) -> Json:
    answer = ChatAnswer(CHAT, indices(n), tells_logprobs=tells_logprobs)
    for told in events:
        answer.take(told)
    return official_json(answer.object())


def indices(n: int) -> dict[RequestId, int]:
    return {request_id: index for index, request_id in enumerate((A, B, C)[:n])}


def deltas(chunks: Sequence[Json]) -> list[Json]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def message(answer: Json) -> Json:
    (choice,) = answer["choices"]
    return choice["message"]


# Chats by example


def test_a_chat_in_one_object() -> None:
    told = chat_object(token((CONTENT, "He")), token((CONTENT, "llo")), end())

    assert told["timings"]["predicted_n"] == 2
    del told["timings"]
    assert told == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def test_a_chat_in_chunks() -> None:
    chunks = chat_chunks(token((CONTENT, "He")), token((CONTENT, "llo")), end())

    begin = {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": FINGERPRINT,
    }

    def chunk(delta: Json, reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**begin, "choices": [choice]}

    assert "timings" in chunks[-1]
    del chunks[-1]["timings"]
    assert chunks == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "He"}),
        chunk({"content": "llo"}),
        chunk({}, "stop"),
    ]


def test_a_token_that_shows_nothing_begins_the_answer_and_says_no_more() -> None:
    assert deltas(chat_chunks(token(), token())) == [{"role": "assistant", "content": ""}]


def test_an_answer_without_a_token_has_its_role_and_its_reason() -> None:
    assert deltas(chat_chunks(end())) == [{"role": "assistant", "content": ""}, {}]
    assert message(chat_object(end()))["content"] == ""


def test_text_that_was_held_back_is_told_at_the_end() -> None:
    held = end(segments=(Segment(CONTENT, "!"),))

    assert deltas(chat_chunks(held))[1:] == [{"content": "!"}, {}]
    assert message(chat_object(held))["content"] == "!"


def test_each_kind_of_text_goes_to_its_place() -> None:
    events = [
        token((REASONING, "Hm"), (REASONING, "."), (CONTENT, "a")),
        token((UNDETERMINABLE, "b"), (TOOL_CALL, "hidden")),
        end(),
    ]

    told = message(chat_object(*events))

    assert (told["content"], told["reasoning_content"]) == ("ab", "Hm.")
    assert deltas(chat_chunks(*events))[1:] == [
        {"reasoning_content": "Hm."},
        {"content": "a"},
        {"content": "b"},
        {},
    ]


def test_reasoning_is_not_told_where_there_is_none() -> None:
    assert "reasoning_content" not in message(chat_object(token((CONTENT, "a")), end()))


CALLS = [
    token((TOOL_CALL, "f("), calls=(ToolCallDelta(0, '{"x"', "c1", "f"),)),
    token((TOOL_CALL, "1)g"), calls=(ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "", "c2", "g"))),
    token((TOOL_CALL, "()"), calls=(ToolCallDelta(1, "{}"),)),
]


def test_a_call_is_told_by_its_name_first_and_then_by_its_arguments() -> None:
    assert deltas(chat_chunks(*CALLS, end())) == [
        {"role": "assistant", "content": ""},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x"'},
                }
            ]
        },
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": ": 1}"}},
                {
                    "index": 1,
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "g", "arguments": ""},
                },
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]


def test_an_answer_of_calls_has_them_whole_and_no_content() -> None:
    told = message(chat_object(*CALLS, end()))

    assert told["content"] is None
    assert told["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_content_beside_calls_is_kept() -> None:
    assert message(chat_object(token((CONTENT, "a")), *CALLS, end()))["content"] == "a"


@pytest.mark.parametrize(
    ("reason", "called", "told"),
    [
        (FinishReason.STOP, False, "stop"),
        (FinishReason.STOP, True, "tool_calls"),
        (FinishReason.LENGTH, False, "length"),
        (FinishReason.LENGTH, True, "length"),
    ],
)
def test_the_reason_to_end_is_told_by_openais_names(
    reason: FinishReason, called: bool, told: str
) -> None:
    events = [*(CALLS if called else []), end(reason=reason)]

    assert finish_reason(reason, called=called) == told
    assert chat_object(*events)["choices"][0]["finish_reason"] == told
    assert chat_chunks(*events)[-1]["choices"][0]["finish_reason"] == told


def test_the_official_client_puts_a_stream_together() -> None:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chat_chunks(token((CONTENT, "a")), *CALLS, end(), tells_usage=True):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))

    final = state.get_final_completion()

    whole = ChatCompletion.model_validate(chat_object(token((CONTENT, "a")), *CALLS, end()))
    mine, theirs = final.choices[0].message, whole.choices[0].message
    assert mine.content == theirs.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage == whole.usage
    assert [call.function.model_dump(include={"name", "arguments"}) for call in mine.tool_calls or ()] == [
        {"name": "f", "arguments": '{"x": 1}'},
        {"name": "g", "arguments": "{}"},
    ]  # fmt: skip


def test_events_that_openai_has_no_word_for_are_passed_over() -> None:
    ended = Told("agent", ToolCallsEnded(A, ToolCallsParsed(())))

    assert chat_chunks(ended) == []
    assert chat_object(ended, end()) == chat_object(end())


def test_answers_are_told_apart_by_their_index() -> None:
    events = [token((CONTENT, "b"), request_id=B), token((CONTENT, "a")), end(), end(B)]

    whole = chat_object(*events, n=2)

    assert [c["message"]["content"] for c in whole["choices"]] == ["a", "b"]
    assert [c["index"] for c in whole["choices"]] == [0, 1]
    chunks = chat_chunks(*events, n=2)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 1, 0, 0, 0, 1]
    assert ["timings" in chunk for chunk in chunks] == [False] * 5 + [True]


@pytest.mark.parametrize("n", [1, 2])
def test_usage_is_told_once_after_the_last_answer_of_a_stream(n: int) -> None:
    events = [end(request_id) for request_id in indices(n)]

    *chunks, last = chat_chunks(*events, tells_usage=True, n=n)

    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * n
    assert last["usage"]["prompt_tokens"] == 5
    assert "timings" in last
    assert not any("timings" in chunk for chunk in chunks)
    assert not any("usage" in chunk for chunk in chat_chunks(*events, n=n))


@pytest.mark.parametrize(
    ("segments", "told"),
    [
        ([(CONTENT, "a")], True),
        ([(UNDETERMINABLE, "a")], True),
        ([], False),
        ([(REASONING, "a")], False),
        ([(TOOL_CALL, "a")], False),
    ],
)
def test_log_probabilities_are_those_of_the_contents_tokens(
    segments: list[tuple[TokenClass, str]], told: bool
) -> None:
    logprobs = Logprobs(logprob(b"a", -1.5), (logprob(b"b", -0.5), logprob(b"a", -1.5)))
    event = token(*segments, logprobs=logprobs).event
    assert isinstance(event, TokenGenerated)

    chosen = {"token": "a", "bytes": [ord("a")], "logprob": -1.5}
    other = {"token": "b", "bytes": [ord("b")], "logprob": -0.5}
    expected = [{**chosen, "top_logprobs": [other, chosen]}] if told else []
    assert ChatLogprobs().of(event) == expected


def test_log_probabilities_come_with_the_text_that_was_held_back() -> None:
    events = [
        token(logprobs=Logprobs(logprob(b"ab"), ())),
        token((CONTENT, "abcd"), logprobs=Logprobs(logprob(b"cd"), ())),
        token(logprobs=Logprobs(logprob(b"stop"), ())),
        end(),
    ]
    chunks = chat_chunks(*events)

    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [[each["token"] for each in logprobs["content"]] for logprobs in told if logprobs]
    assert tokens == [["ab", "cd"]]


def test_a_list_of_log_probabilities_may_be_empty_but_is_there_if_asked_for() -> None:
    (choice,) = chat_object(end(), tells_logprobs=True)["choices"]

    assert choice["logprobs"] == {"content": [], "refusal": None}


# Completions by example


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


# What was used


def tally(prompts: Mapping[RequestId, int], *ends: Told) -> Tally:
    made = Tally(prompts)
    for told in ends:
        assert isinstance(told.event, Finished)
        made.add(told.event, told.timing)
    return made


def test_each_generated_token_is_counted_whatever_it_is_for() -> None:
    usage = Usage(
        prompt_tokens=7,
        cached_prompt_tokens=3,
        content_tokens=1,
        reasoning_tokens=2,
        tool_call_tokens=4,
        undeterminable_tokens=8,
        input_image_tokens=5,
    )

    told = tally({A: 0}, end(usage=usage)).usage()

    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (7, 15, 22)
    assert told["prompt_tokens_details"]["cached_tokens"] == 3
    assert told["completion_tokens_details"]["reasoning_tokens"] == 2


def test_a_prompt_is_counted_once_as_its_first_answer_has_read_it() -> None:
    ends = [
        end(C, usage=Usage(prompt_tokens=7, cached_prompt_tokens=2, content_tokens=4)),
        end(B, usage=Usage(prompt_tokens=5, cached_prompt_tokens=5, content_tokens=2)),
        end(A, usage=Usage(prompt_tokens=5, cached_prompt_tokens=1, content_tokens=1)),
    ]

    made = tally({A: 0, B: 0, C: 1}, *ends)

    usage, timings = made.usage(), made.timings()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 7)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (3, 9, 7)


def test_a_tally_is_whole_when_every_answer_has_ended() -> None:
    made = Tally({A: 0, B: 0})

    for told, is_whole in [(end(A), False), (end(B), True)]:
        assert isinstance(told.event, Finished)
        made.add(told.event, told.timing)
        assert made.is_whole is is_whole


def timings(*each: Timing, usage: Usage | None = None) -> Json:
    ids = [RequestId(str(n)) for n in range(len(each))]
    ends = [end(ids[n], timing=timing, usage=usage) for n, timing in enumerate(each)]
    return tally(dict.fromkeys(ids, 0), *ends).timings()


def test_times_are_told_in_milliseconds_by_llama_cpps_names() -> None:
    usage = Usage(prompt_tokens=10, cached_prompt_tokens=6, content_tokens=4)

    assert timings(Timing(10.0, 10.5, 11.5, 13.5), usage=usage) == {
        "queue_ms": 500.0,
        "cache_n": 6,
        "prompt_n": 4,
        "prompt_ms": 1000.0,
        "prompt_per_token_ms": 250.0,
        "prompt_per_second": 4.0,
        "predicted_n": 4,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
    }


def test_of_several_answers_the_time_is_from_the_first_beginning_to_the_last_end() -> None:
    told = timings(Timing(10.0, 12.0, 13.0, 14.0), Timing(10.0, 11.0, 12.0, 20.0))

    assert (told["queue_ms"], told["prompt_ms"], told["predicted_ms"]) == (1000, 1000, 8000)


def test_a_clock_may_begin_at_zero() -> None:
    told = timings(Timing(0.0, 0.0, 0.0, 2.0), usage=Usage(prompt_tokens=1, content_tokens=1))

    assert (told["queue_ms"], told["prompt_ms"], told["predicted_ms"]) == (0, 0, 2000)


@pytest.mark.parametrize(
    ("timing", "queue", "prompt", "predicted"),
    [
        (Timing(1.0, None, None, 3.0), 2000, 0, 0),
        (Timing(1.0, 2.0, None, 4.0), 1000, 2000, 0),
        (Timing(1.0, 1.0, 1.0, 1.0), 0, 0, 0),
    ],
)
def test_what_never_began_took_no_time(
    timing: Timing, queue: int, prompt: int, predicted: int
) -> None:
    told = timings(timing)

    assert (told["queue_ms"], told["prompt_ms"], told["predicted_ms"]) == (queue, prompt, predicted)


def test_nothing_is_divided_by_nothing() -> None:
    told = timings(Timing(1.0, 1.0, 1.0, 1.0), usage=Usage(prompt_tokens=3, cached_prompt_tokens=3))

    assert {name: value for name, value in told.items() if value is None} == {
        "prompt_per_token_ms": None,
        "prompt_per_second": None,
        "predicted_per_token_ms": None,
        "predicted_per_second": None,
    }


# Streams and objects say the same


@dataclass(frozen=True)
class Run:
    events: list[Told]
    prompts: dict[RequestId, int]
    has_logprobs: bool


pieces = st.builds(
    TokenLogprob, st.integers(0, 9).map(TokenId), st.floats(-20, 0), st.binary(max_size=3)
)
segment_lists = st.lists(
    st.builds(Segment, st.sampled_from(TokenClass), st.text(max_size=3)), max_size=3
).map(tuple)
counts = st.integers(0, 20)
usages = st.builds(Usage, *[counts] * 7)


@st.composite
def call_deltas(draw: st.DrawFn, begun: list[int]) -> tuple[ToolCallDelta, ...]:
    """More of the calls that have begun, or new ones."""
    made: list[ToolCallDelta] = []
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        arguments = draw(st.text(max_size=3))
        if begun and draw(st.booleans()):
            made.append(ToolCallDelta(draw(st.sampled_from(begun)), arguments))
        else:
            begun.append(len(begun))
            made.append(ToolCallDelta(begun[-1], arguments, f"c{begun[-1]}", draw(st.text())))
    return tuple(made)


@st.composite
def runs(draw: st.DrawFn, *, has_calls: bool) -> Run:
    """Answers to up to two prompts, told in any order."""
    has_logprobs = draw(st.booleans())
    ids = [A, B, C][: draw(st.integers(1, 3))]
    firsts = draw(st.integers(1, len(ids)))
    queues: dict[RequestId, list[Told]] = {}
    for request_id in ids:
        begun: list[int] = []

        def calls(begun: list[int] = begun) -> tuple[ToolCallDelta, ...]:
            return draw(call_deltas(begun)) if has_calls else ()

        queues[request_id] = [
            Told(
                "agent",
                TokenGenerated(
                    request_id,
                    TokenId(1),
                    draw(segment_lists),
                    Logprobs(draw(pieces), tuple(draw(st.lists(pieces, max_size=2))))
                    if has_logprobs
                    else None,
                    calls(),
                ),
            )
            for _ in range(draw(st.integers(0, 4)))
        ]
        reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
        last = Finished(request_id, reason, draw(usages), draw(segment_lists), calls())
        queues[request_id].append(Told("agent", last, TIMING))
    turns = [request_id for request_id, queue in queues.items() for _ in queue]
    events = [queues[request_id].pop(0) for request_id in draw(st.permutations(turns))]
    prompts = {request_id: int(n >= firsts) for n, request_id in enumerate(ids)}
    return Run(events, prompts, has_logprobs)


def check_frame(chunks: list[Json], whole: Json, *, tells_usage: bool) -> None:
    """What streams of both kinds have in common with their object."""
    *others, last = chunks
    assert last["timings"] == whole["timings"]
    assert not any("timings" in chunk for chunk in others)
    if tells_usage:
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert {chunk["usage"] for chunk in others} == {None}
    else:
        assert not any("usage" in chunk for chunk in chunks)
    for name in ("id", "created", "model", "system_fingerprint"):
        assert {chunk[name] for chunk in chunks} == {whole[name]}


def parts_of(chunks: list[Json], index: int) -> list[Json]:
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def put_together(parts: list[Json]) -> Json:
    """The choice of a chat that the chunks of a stream make."""
    role = parts[0]["delta"]["role"]
    assert not any("role" in part["delta"] for part in parts[1:])
    *others, last = parts
    assert (last["delta"], last["finish_reason"] is None) == ({}, False)
    assert all(part["finish_reason"] is None for part in others)
    calls: dict[int, Json] = {}
    for part in parts:
        for delta in part["delta"].get("tool_calls", ()):
            if "id" in delta:
                calls[delta["index"]] = {**delta, "function": {**delta["function"]}}
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    told: Json = {
        "role": role,
        "content": "".join(part["delta"].get("content") or "" for part in parts),
    }
    if reasoning := "".join(part["delta"].get("reasoning_content", "") for part in parts):
        told["reasoning_content"] = reasoning
    if calls:
        told["content"] = told["content"] or None
        told["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in calls.values()
        ]
    logprobs = [each for part in parts if part["logprobs"] for each in part["logprobs"]["content"]]
    return {"message": told, "logprobs": logprobs, "finish_reason": last["finish_reason"]}


@PATIENT
@given(runs(has_calls=True), st.booleans())
def test_the_chunks_of_a_chat_say_what_its_object_says(run: Run, tells_usage: bool) -> None:
    n = len(run.prompts)
    chunks = chat_chunks(*run.events, tells_usage=tells_usage, n=n)
    whole = chat_object(*run.events, tells_logprobs=run.has_logprobs, n=n)

    check_frame(chunks, whole, tells_usage=tells_usage)
    for choice in whole["choices"]:
        told = put_together(parts_of(chunks, choice["index"]))
        assert (choice["message"].pop("refusal"), choice["message"].pop("annotations")) == (
            None,
            [],
        )
        assert told["message"] == choice["message"]
        assert told["finish_reason"] == choice["finish_reason"]
        if run.has_logprobs:
            assert told["logprobs"] == choice["logprobs"]["content"]
        else:
            assert (told["logprobs"], choice["logprobs"]) == ([], None)


@PATIENT
@given(runs(has_calls=True), st.booleans())
def test_chats_are_what_the_official_types_say(run: Run, tells_usage: bool) -> None:
    n = len(run.prompts)
    ours: set[str] = set()
    for chunk in chat_chunks(*run.events, tells_usage=tells_usage, n=n):
        ours |= unknown(ChatCompletionChunk.model_validate(chunk, strict=True))
    whole = chat_object(*run.events, tells_logprobs=run.has_logprobs, n=n)
    also_ours = unknown(ChatCompletion.model_validate(whole, strict=True))

    assert ours <= {"timings", "choices.delta.reasoning_content"}
    assert also_ours <= {"timings", "choices.message.reasoning_content"}


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
