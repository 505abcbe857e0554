"""``/v1/responses``, outwards, judged by the official client's own types."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from answers import content
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from balancer.exchange import Timing, Told
from balancer.openai_errors import parse
from balancer.openai_response_events import (
    FAILURES,
    Event,
    ResponseAnswer,
    ResponseHead,
    ResponseStream,
)
from balancer.openai_responses import ResponsesRequest
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    ChatMessage,
    Embedded,
    Finished,
    FinishReason,
    Logprobs,
    Sampling,
    Segment,
    TokenClass,
    TokenGenerated,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ID = RequestId("r")
USAGE = Usage(
    prompt_tokens=10,
    cached_prompt_tokens=4,
    content_tokens=3,
    reasoning_tokens=2,
    tool_call_tokens=5,
)
TIMING = Timing(arrived=100.0, dispatched=100.5, started=101.5, ended=103.5)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}


def head(**said: Any) -> ResponseHead:
    request = parse(ResponsesRequest, json.dumps({"input": "Hello"} | said).encode())
    settings = request.settings(Sampling(temperature=0.5, top_p=0.25))
    return ResponseHead(id="resp_1", created=1000, model="m", settings=settings)


def thought(text: str) -> tuple[Segment, ...]:
    return (Segment(TokenClass.REASONING, text),)


def token(
    *segments: Segment,
    calls: Sequence[ToolCallDelta] = (),
    logprob: float | None = None,
    piece: bytes | None = None,
) -> Told:
    """``piece``: the token's own bytes, if they are not what is shown."""
    logprobs = None
    if logprob is not None:
        shown = "".join(segment.text for segment in segments).encode()
        chosen = TokenLogprob(TokenId(1), logprob, shown if piece is None else piece)
        logprobs = Logprobs(chosen, (chosen,))
    return Told("a", TokenGenerated(ID, TokenId(1), segments, logprobs, tuple(calls)))


def end(
    reason: FinishReason = FinishReason.STOP,
    segments: Sequence[Segment] = (),
    calls: Sequence[ToolCallDelta] = (),
) -> Told:
    return Told("a", Finished(ID, reason, USAGE, tuple(segments), tuple(calls)), TIMING)


def named(index: int, arguments: str = "") -> ToolCallDelta:
    return ToolCallDelta(index, arguments, f"call_{index}", "weather")


def stream(*told: Told, to: ResponseHead | None = None) -> list[Event]:
    """Of a whole answer; that each event is what the official client knows."""
    answering = ResponseStream(to or head())
    events = answering.begin()
    for each in told:
        events += answering.events(each)
    return checked(events)


def checked(events: list[Event]) -> list[Event]:
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: Sequence[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def whole(*told: Told, to: ResponseHead | None = None) -> Any:
    answer = ResponseAnswer(to or head())
    for each in told:
        answer.take(each)
    Response.model_validate(answer.object())
    return answer.object()


ANSWER = (
    token(*thought("Hm")),
    token(*thought("m.")),
    token(*content("\n")),
    token(*content("It ")),
    token(*content("rains.")),
    token(calls=[named(0)]),
    token(calls=[ToolCallDelta(0, '{"city"')]),
    token(calls=[ToolCallDelta(0, ':"Rome"}'), named(1, "{}")]),
    end(),
)


def test_a_text_is_told_as_openai_tells_it() -> None:
    events = stream(token(*content("Hel")), token(*content("lo")), end())

    part: Any = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item: Any = {"id": "msg_1_0", "type": "message", "role": "assistant"}
    done = item | {"content": [part | {"text": "Hello"}], "status": "completed"}
    place: Any = {"item_id": "msg_1_0", "output_index": 0, "content_index": 0}
    assert kinds(events[:2]) == ["created", "in_progress"]
    assert events[0]["response"] == events[1]["response"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2:-1] == [
        {
            "type": "response.output_item.added",
            "sequence_number": 2,
            "output_index": 0,
            "item": item | {"content": [], "status": "in_progress"},
        },
        {"type": "response.content_part.added", "sequence_number": 3, **place, "part": part},
        {
            "type": "response.output_text.delta",
            "sequence_number": 4,
            **place,
            "delta": "Hel",
            "logprobs": [],
        },
        {
            "type": "response.output_text.delta",
            "sequence_number": 5,
            **place,
            "delta": "lo",
            "logprobs": [],
        },
        {
            "type": "response.output_text.done",
            "sequence_number": 6,
            **place,
            "text": "Hello",
            "logprobs": [],
        },
        {
            "type": "response.content_part.done",
            "sequence_number": 7,
            **place,
            "part": part | {"text": "Hello"},
        },
        {
            "type": "response.output_item.done",
            "sequence_number": 8,
            "output_index": 0,
            "item": done,
        },
    ]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == [done]


def test_items_open_and_close_in_the_order_of_the_answer() -> None:
    added, done = "output_item.added", "output_item.done"
    text = ["content_part.added", "{}.delta", "{}.delta", "{}.done", "content_part.done", done]

    assert kinds(stream(*ANSWER)) == [
        "created",
        "in_progress",
        added,
        *[kind.format("reasoning_text") for kind in text],
        added,
        *[kind.format("output_text") for kind in text],
        added,
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        done,
        added,
        "function_call_arguments.delta",
        "function_call_arguments.done",
        done,
        "completed",
    ]


def test_the_whole_answer_is_the_streams_last_response() -> None:
    answer = whole(*ANSWER)

    assert stream(*ANSWER)[-1]["response"] == answer
    assert [item["id"] for item in answer["output"]] == ["rs_1_0", "msg_1_1", "fc_1_2", "fc_1_3"]
    assert [item["status"] for item in answer["output"]] == ["completed"] * 4
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert message["content"][0]["text"] == "\nIt rains."
    assert (first["call_id"], first["name"], first["arguments"]) == (
        "call_0",
        "weather",
        '{"city":"Rome"}',
    )
    assert (second["call_id"], second["arguments"]) == ("call_1", "{}")


def test_usage_and_timings_come_with_the_last_response() -> None:
    answer = whole(*ANSWER)

    assert answer["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 20,
    }
    assert answer["timings"]["queue_ms"] == 500
    assert answer["timings"]["predicted_per_second"] == 5
    assert (answer["created_at"], answer["completed_at"]) == (1000, 1004)


def test_the_response_repeats_the_request() -> None:
    said: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 20,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tool_choice": {"type": "function", "name": "weather"},
        "tools": [TOOL | {"description": "of a city"}],
        "top_logprobs": 2,
        "user": "u",
    }

    answer = whole(*ANSWER, to=head(reasoning={"effort": "low"}, **said))

    assert {key: answer[key] for key in said} == said
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert (answer["temperature"], answer["top_p"]) == (0.5, 0.25)
    assert (answer["truncation"], answer["store"]) == ("disabled", False)


def test_what_the_request_leaves_open_is_told_by_its_default() -> None:
    answer = whole(*ANSWER)

    assert answer["tools"] == []
    assert answer["tool_choice"] == "auto"
    assert answer["text"] == {"format": {"type": "text"}}
    assert answer["metadata"] == {}
    assert answer["parallel_tool_calls"] is True


def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item() -> None:
    told = (token(*thought("Hm.")), token(*content("It ra")), end(FinishReason.LENGTH))

    events = stream(*told)

    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response == whole(*told)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert response["usage"]["total_tokens"] == 20
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert events[-2]["item"] == response["output"][1]


def test_an_answer_that_is_cut_before_its_first_word_has_no_message() -> None:
    told = (token(*thought("Hm")), end(FinishReason.LENGTH))

    assert [item["type"] for item in whole(*told)["output"]] == ["reasoning"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (ErrorCode.AGENT_LOST, "server_error"),
        (ErrorCode.BUFFER_FULL, "rate_limit_exceeded"),
        (ErrorCode.BUFFER_TIMEOUT, "server_error"),
        (ErrorCode.CHAT_TEMPLATE_ERROR, "invalid_prompt"),
        (ErrorCode.NOT_SUPPORTED, "invalid_prompt"),
        (ErrorCode.IMAGE_DECODING_FAILED, "image_parse_error"),
    ],
)
def test_a_failure_is_the_last_event(code: ErrorCode, told: str) -> None:
    answering = ResponseStream(head())
    events = answering.begin() + answering.events(token(*content("It ra")))

    events += answering.fail(RequestError(code, "why"))

    response = checked(events)[-1]["response"]
    assert events[-1]["type"] == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {"code": told, "message": "why"}
    assert response["usage"] is None
    assert [item["status"] for item in response["output"]] == ["incomplete"]


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for() -> None:
    failed = ResponseStream(head()).fail(
        RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "5 tokens, 4 fit")
    )

    assert failed[0]["response"]["error"]["code"] == "context_length_exceeded"
    assert failed[0]["sequence_number"] == 0


def test_every_other_code_of_a_failure_is_one_of_the_official_list() -> None:
    for code in ErrorCode:
        if FAILURES.get(code) != "context_length_exceeded":
            checked(ResponseStream(head()).fail(RequestError(code, "why")))


def test_white_space_between_items_makes_no_message() -> None:
    told = (
        token(*thought("\n\n")),
        token(*content("\n")),
        token(calls=[named(0, "{}")]),
        token(*content("\n")),
        end(segments=content(" ")),
    )

    assert [item["type"] for item in whole(*told)["output"]] == ["function_call"]


def test_white_space_between_items_is_no_part_of_the_next() -> None:
    told = (
        token(*thought("\n")),
        token(*content(" A"), logprob=-1.0),
        token(*thought("Hm.")),
        token(*content("\n"), logprob=-2.0),
        token(calls=[named(0, "{}")]),
        token(*content("B"), logprob=-3.0),
        end(),
    )

    first, _, _, second = whole(*told)["output"]

    assert first["content"][0]["text"] == " A"
    assert second["content"][0]["text"] == "B"
    assert [each["logprob"] for each in second["content"][0]["logprobs"]] == [-3.0]


def test_white_space_alone_is_a_message() -> None:
    told = (token(*content("\n")), end(FinishReason.LENGTH, content("\n")))

    assert whole(*told)["output"][0]["content"][0]["text"] == "\n\n"


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    assert [item["content"][0]["text"] for item in whole(end())["output"]] == [""]
    assert "output_text.delta" not in kinds(stream(end()))


def test_an_answer_may_speak_again_behind_a_call() -> None:
    told = (
        token(*content("First. ")),
        token(calls=[named(0, "{")]),
        token(*content("Then."), calls=[ToolCallDelta(0, "}")]),
        end(),
    )

    output = whole(*told)["output"]

    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert output[1]["arguments"] == "{}"


def test_a_call_stands_where_its_text_stands() -> None:
    segments = (
        *content("First."),
        Segment(TokenClass.TOOL_CALL, "<call>"),
        *content("Then."),
    )

    output = whole(token(*segments, calls=[named(0, "{}")]), end())["output"]

    assert [item["type"] for item in output] == ["message", "function_call", "message"]


def test_what_is_held_back_until_the_end_is_told() -> None:
    told = (token(*content("It ")), end(segments=content("rains."), calls=[named(0, "{}")]))

    message, call = whole(*told)["output"]

    assert message["content"][0]["text"] == "It rains."
    assert call["arguments"] == "{}"


def test_text_of_an_unknown_format_is_a_message() -> None:
    segment = Segment(TokenClass.UNDETERMINABLE, "[weather]")

    assert whole(token(segment), end())["output"][0]["content"][0]["text"] == "[weather]"


def test_log_probabilities_are_those_of_the_messages_tokens() -> None:
    told = (
        token(*thought("Hm."), logprob=-1.0),
        token(logprob=-2.0, piece=b"</think>"),
        token(*thought("!"), logprob=-2.5),
        token(*content("It "), logprob=-3.0),
        token(logprob=-4.0, piece="é".encode()[:1]),
        token(*content("é"), logprob=-5.0, piece="é".encode()[1:]),
        token(logprob=-6.0, piece=b"a stop text"),
        end(),
    )

    events = stream(*told)

    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    done = next(e for e in events if e["type"] == "response.output_text.done")
    part = events[-1]["response"]["output"][1]["content"][0]
    assert [[each["logprob"] for each in e["logprobs"]] for e in deltas] == [
        [-3.0],
        [-4.0, -5.0],
    ]
    assert [each["logprob"] for each in done["logprobs"]] == [-3.0, -4.0, -5.0]
    assert part["logprobs"] == done["logprobs"]
    assert part["logprobs"][0] == {
        "token": "It ",
        "bytes": [73, 116, 32],
        "logprob": -3.0,
        "top_logprobs": [{"token": "It ", "bytes": [73, 116, 32], "logprob": -3.0}],
    }


def test_what_is_no_part_of_an_answer_is_not_told() -> None:
    told = Told("a", Embedded(ID, "d", 1, b"0000"))

    assert ResponseStream(head()).events(told) == []


def dumped(response: Response, **how: Any) -> list[Any]:
    return [item.model_dump(mode="json", **how) for item in response.output]


@pytest.mark.parametrize(
    "how",
    [{}, {"by_alias": True}, {"exclude_unset": True}, {"exclude_none": True}],
    ids=["plain", "by_alias", "exclude_unset", "exclude_none"],
)
def test_what_was_told_can_be_given_back(how: dict[str, Any]) -> None:
    output = dumped(Response.model_validate(whole(*ANSWER)), **how)
    results = [
        {"type": "function_call_output", "call_id": f"call_{n}", "output": "sunny"} for n in (0, 1)
    ]
    body = {"input": [{"role": "user", "content": "Weather?"}, *output, *results]}

    chat = parse(ResponsesRequest, json.dumps(body).encode()).chat()

    calls = (ToolCall("call_0", "weather", '{"city":"Rome"}'), ToolCall("call_1", "weather", "{}"))
    assert chat.conversation(longest_image_side=1024).messages == (
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", "\nIt rains.", reasoning="Hmm.", tool_calls=calls),
        ChatMessage("tool", "sunny", tool_call_id="call_0"),
        ChatMessage("tool", "sunny", tool_call_id="call_1"),
    )


@st.composite
def answers(draw: st.DrawFn) -> list[Told]:
    """Any that an agent may tell: calls one after the other, texts in between."""
    told: list[Told] = []
    words = st.sampled_from([" ", "\n", "a", "b c", "é"])
    shown = st.builds(Segment, st.sampled_from(list(TokenClass)), words)
    calls = 0
    for _ in range(draw(st.integers(0, 8))):
        deltas: list[ToolCallDelta] = []
        if draw(st.booleans()):
            deltas.append(named(calls, draw(st.sampled_from(["", "{"]))))
            calls += 1
        elif told and isinstance(told[-1].event, TokenGenerated) and told[-1].event.calls:
            deltas.append(ToolCallDelta(calls - 1, "}"))
        quiet = bool(deltas)
        segments = [] if quiet else draw(st.lists(shown, max_size=3))
        logprob = draw(st.none() | st.just(-1.0))
        told.append(token(*segments, calls=deltas, logprob=logprob))
    told.append(end(draw(st.sampled_from(list(FinishReason))), draw(st.lists(shown, max_size=2))))
    return told


@given(answers())
def test_deltas_add_up_to_what_is_done_and_to_the_response(told: list[Told]) -> None:
    events = stream(*told)

    done: dict[int, Any] = {}
    texts: dict[int, str] = {}
    still_open: list[int] = []
    for event in events[2:-1]:
        place = event["output_index"]
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert place == len(done)
            still_open.append(place)
            texts[place] = ""
        assert still_open == [place]
        if kind.endswith(".delta"):
            texts[place] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts[place]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[place]
        elif kind == "output_item.done":
            still_open.remove(place)
            done[place] = event["item"]
    assert still_open == []
    response = events[-1]["response"]
    assert response["output"] == list(done.values())
    assert response == whole(*told)
    told_texts = [
        item["arguments"] if "arguments" in item else item["content"][0]["text"]
        for item in response["output"]
    ]
    assert told_texts == list(texts.values())


@given(answers())
def test_no_word_of_an_answer_is_lost(told: list[Told]) -> None:
    shown = [
        segment
        for each in told
        if isinstance(each.event, TokenGenerated | Finished)
        for segment in each.event.segments
        if segment.token_class is not TokenClass.TOOL_CALL
    ]

    output = whole(*told)["output"]

    texts = [item["content"][0]["text"] for item in output if "content" in item]
    assert "".join("".join(texts).split()) == "".join("".join(s.text for s in shown).split())


@given(answers())
def test_any_answer_can_be_given_back(told: list[Told]) -> None:
    output = dumped(Response.model_validate(whole(*told)))
    body = {"input": [{"role": "user", "content": "Go on."}, *output]}

    chat = parse(ResponsesRequest, json.dumps(body).encode()).chat()

    messages = chat.conversation(longest_image_side=1024).messages
    assert [message.role for message in messages[1:]] == ["assistant"] * bool(output)
