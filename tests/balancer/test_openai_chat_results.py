"""Chats as OpenAI tells them, in chunks and in one object."""

from collections.abc import Sequence

import pytest
from bodies import PATIENT
from hypothesis import given
from hypothesis import strategies as st
from official import unknown
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from told import (
    CALLS,
    CHAT,
    CHUNK,
    CONTENT,
    REASONING,
    TOOL_CALL,
    UNDETERMINABLE,
    A,
    B,
    Run,
    check_frame,
    end,
    indices,
    logprob,
    official_json,
    parts_of,
    put_together,
    runs,
    token,
)

from balancer.exchange import Told
from balancer.openai_chat_results import ChatAnswer, ChatStream
from balancer.openai_results import FINGERPRINT, ChatLogprobs, Json, finish_reason
from common.messages import (
    FinishReason,
    Logprobs,
    Segment,
    TokenClass,
    TokenGenerated,
    ToolCallsEnded,
    ToolCallsParsed,
)


def chat_chunks(*events: Told, tells_usage: bool = False, n: int = 1) -> list[Json]:
    stream = ChatStream(CHUNK, indices(n), tells_usage=tells_usage)
    return [official_json(chunk) for told in events for chunk in stream.chunks(told)]


def chat_object(*events: Told, tells_logprobs: bool = False, n: int = 1) -> Json:
    answer = ChatAnswer(CHAT, indices(n), tells_logprobs=tells_logprobs)
    for told in events:
        answer.take(told)
    return official_json(answer.object())


def deltas(chunks: Sequence[Json]) -> list[Json]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def message(answer: Json) -> Json:
    (choice,) = answer["choices"]
    return choice["message"]


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
