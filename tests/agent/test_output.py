"""Samples of every family, cut at any byte, and text without marks."""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from output_samples import (
    CALL,
    CONTENT,
    REASONING,
    SAMPLES,
    TEMPLATES,
    TOOLS,
    UNDETERMINABLE,
    Sample,
)

from agent.formats import recognize
from agent.output import OutputStream
from agent.output_parser import LONGEST_HEADER, MOST_SPACE, Header, State
from agent.tools import Tools
from common.messages import (
    Segment,
    TokenClass,
    ToolCallFormatUnknown,
    ToolCallResult,
    ToolCallsParsed,
)

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FORMATS = {family: recognize(template) for family, template in TEMPLATES.items()}


def stream(
    family: str,
    *,
    prompt: str = "",
    tools: Tools | None = TOOLS,
    has_tools: bool = True,
    stop: Sequence[str] = (),
) -> OutputStream:
    parser = FORMATS[family].parser(
        prompt=prompt, tools=tools if has_tools else None, has_tools=has_tools
    )
    return OutputStream(parser, stop=stop)


def read(
    output: OutputStream, pieces: Iterable[bytes]
) -> tuple[dict[TokenClass, str], list[ToolCallResult]]:
    """All of each class put together, and the results."""
    shown: dict[TokenClass, str] = {}
    results: list[ToolCallResult] = []
    for take in [*((lambda piece=piece: output.feed(piece)) for piece in pieces), output.flush]:
        told = take()
        for segment in told.segments:
            assert segment.text
            shown[segment.token_class] = shown.get(segment.token_class, "") + segment.text
        results += told.results
    return shown, results


def plain(result: ToolCallResult) -> Any:
    if not isinstance(result, ToolCallsParsed):
        return type(result).__name__
    return [
        (call.name, json.loads(call.arguments) if call.is_json else call.arguments)
        for call in result.calls
    ]


def run(
    sample: Sample, pieces: Sequence[bytes]
) -> tuple[dict[TokenClass, str], list[Any], OutputStream]:
    output = stream(sample.family, prompt=sample.prompt, has_tools=sample.has_tools)
    shown, results = read(output, pieces)
    return shown, [plain(result) for result in results], output


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    "sample", SAMPLES, ids=lambda sample: f"{sample.family}: {sample.text[:60]}"
)
def test_a_sample_is_read_alike_wherever_it_is_cut(sample: Sample):
    data = sample.text.encode()
    expected = (sample.shown, sample.results)

    for pieces in (
        [data],
        cut(data, range(1, len(data))),
        *(cut(data, [at]) for at in range(1, len(data))),
    ):
        shown, results, output = run(sample, pieces)
        assert (shown, results) == expected
        assert sum(output.counts.values()) == len(pieces)


@PATIENT
@given(st.data())
def test_a_sample_is_read_alike_however_often_it_is_cut(data: st.DataObject):
    sample = data.draw(st.sampled_from(SAMPLES))
    text = sample.text.encode()
    # The same place twice: a token without text.
    places = data.draw(st.lists(st.integers(0, len(text))))

    pieces = cut(text, places)
    shown, results, output = run(sample, pieces)
    assert (shown, results) == (sample.shown, sample.results)
    assert sum(output.counts.values()) == len(pieces)


@PATIENT
@given(st.sampled_from(sorted(FORMATS)), st.booleans(), st.data())
def test_marks_in_any_order_are_read_alike_wherever_they_are_cut(
    family: str, has_tools: bool, data: st.DataObject
):
    scraps = [
        "a",
        " ",
        "\n",
        "雨",
        "{",
        "}",
        '"',
        "to=clock",
        '{"name": "clock"}',
        "clock",
        "call:clock{}",
    ]
    marks = [mark for state in FORMATS[family].with_tools.values() for mark in marks_of(state)]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps + marks), max_size=12)))
    sample = Sample(family, text, {}, has_tools=has_tools)
    encoded = text.encode()
    places = data.draw(st.lists(st.integers(0, len(encoded))))

    whole, cut_up = run(sample, [encoded]), run(sample, cut(encoded, places))
    assert cut_up[:2] == whole[:2]
    assert sum(cut_up[2].counts.values()) == len(places) + 1


def marks_of(state: State) -> tuple[str, ...]:
    return (state.end,) if isinstance(state, Header) else state.all_marks


WITHOUT_MARKS = st.text(st.sampled_from("ab\n 雨🦉") | st.characters(exclude_characters='<[{◁`H"t'))


@PATIENT
@given(WITHOUT_MARKS, st.sampled_from(sorted(FORMATS)), st.data())
def test_text_without_marks_comes_out_unchanged(text: str, family: str, data: st.DataObject):
    text = text.encode("utf-8", "ignore").decode()
    encoded = text.encode()
    pieces = cut(encoded, data.draw(st.lists(st.integers(0, len(encoded)))))

    shown, _ = read(stream(family), pieces)
    token_class = UNDETERMINABLE if "unknown" in family else CONTENT
    assert shown == ({token_class: text} if text else {})


@PATIENT
@given(st.text(st.sampled_from('<[{|/`"◁ab(=\n')), st.sampled_from(sorted(FORMATS)))
def test_what_looks_like_a_mark_is_not_held_for_long(text: str, family: str):
    states = FORMATS[family].with_tools.values()
    longest = max(state.longest for state in states if not isinstance(state, Header))
    output = stream(family)

    told = ""
    for n, character in enumerate(text, start=1):
        told += "".join(segment.text for segment in output.feed(character.encode()).segments)
        assert n - len(told) <= longest + MOST_SPACE
    told += "".join(segment.text for segment in output.flush().segments)
    assert told == text


def test_ordinary_text_is_shown_at_once():
    output = stream("qwen3")

    shown = [
        "".join(segment.text for segment in output.feed(piece).segments)
        for piece in [b"a ", b"<", b"b", b"> [", b"{x"]
    ]
    assert shown == ["a ", "", "<b", "> [", "{x"]


def test_a_call_is_told_when_its_section_closes():
    output = stream("hermes")
    output.feed(b'<tool_call>{"name": "clock"}</tool_call>')

    assert output.feed(b"\n").results == ()
    (result,) = output.feed(b"Now").results
    assert plain(result) == [("clock", {})]
    assert output.flush().results == ()


def test_calls_that_nobody_wants_read_are_told_apart_all_the_same():
    output = stream("hermes", tools=None)

    shown, results = read(output, [b'<tool_call>{"name": "clock"}</tool_call>'])
    assert shown == {CALL: '{"name": "clock"}'}
    assert results == []


def test_an_unknown_format_hands_on_what_the_model_wrote():
    shown, results = read(stream("unknown think"), [b"<think>a</think>", b"call ", b"clock"])

    assert shown == {REASONING: "a", UNDETERMINABLE: "call clock"}
    (result,) = results
    assert isinstance(result, ToolCallFormatUnknown)
    assert result.text == "call clock"


def test_calls_keep_the_ids_that_mistral_writes():
    _, results = read(
        stream("mistral"),
        [b"[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}"],
    )

    (result,) = results
    assert isinstance(result, ToolCallsParsed)
    first, second = (call.call_id for call in result.calls)
    assert first == "abc"
    assert second not in ("", "abc")


def test_ids_are_made_anew_for_every_call():
    data = b'<tool_call>{"name": "clock"}</tool_call><tool_call>{"name": "clock"}</tool_call>'
    ids = {
        call.call_id
        for _ in range(2)
        for result in read(stream("hermes"), [data])[1]
        if isinstance(result, ToolCallsParsed)
        for call in result.calls
    }

    assert len(ids) == 4


def test_a_stop_text_ends_the_stream_and_is_not_shown():
    output = stream("qwen3", stop=["STOP"])

    assert output.feed(b"<think>a ST").segments == (Segment(REASONING, "a "),)
    assert output.feed(b"OP").segments == ()
    assert output.stopped
    assert output.feed(b"b").segments == ()
    assert output.flush().segments == ()
    assert output.counts[REASONING] == 3


def test_the_beginning_of_a_stop_text_is_shown_at_the_end():
    shown, _ = read(stream("qwen3", stop=["STOP"]), [b"a ST"])

    assert shown == {CONTENT: "a ST"}


def test_a_stop_text_closes_the_section_of_calls():
    output = stream("hermes", stop=["}}"])

    shown, results = read(
        output, [b'<tool_call>{"name": "clock", "arguments": {', b"}}</tool_call>"]
    )
    assert shown == {CALL: '{"name": "clock", "arguments": {'}
    assert [plain(result) for result in results] == ["ToolCallsUnreadable"]


def counted(output: OutputStream, pieces: Iterable[bytes]) -> dict[TokenClass, int]:
    read(output, pieces)
    return {token_class: count for token_class, count in output.counts.items() if count}


def test_marks_count_to_the_section_that_they_open_or_close():
    pieces = [b"<think>", b"a", b"b", b"</think>", b"c", b"<tool_call>", b"{}", b"</tool_call>"]

    assert counted(stream("qwen3"), pieces) == {REASONING: 4, CONTENT: 1, CALL: 3}


def test_a_header_counts_to_the_message_that_it_opens():
    pieces = [
        b"<|channel|>", b"analysis", b"<|message|>", b"a", b"<|end|>",
        b"<|start|>", b"assistant", b"<|channel|>", b"final", b"<|message|>", b"b",
    ]  # fmt: skip

    output = stream("harmony", prompt="<|start|>assistant")
    assert counted(output, pieces) == {REASONING: 5, CONTENT: 6}


def test_tokens_that_are_held_back_count_as_if_the_stream_ended():
    output = stream("qwen3")
    output.feed(b"a")
    output.feed(b"<tool")

    assert output.counts[CONTENT] == 2
    output.feed(b"_call>")
    assert (output.counts[CONTENT], output.counts[CALL]) == (1, 2)


def test_a_token_counts_to_the_class_of_its_first_character():
    pieces = [b"<think>", b"</think>", b"\n\n", b"xy", b"<", b"<tool_call>", b"{}"]

    assert counted(stream("qwen3"), pieces) == {REASONING: 2, CONTENT: 3, CALL: 2}


def test_what_follows_a_section_counts_to_it_until_there_is_something_to_be_shown():
    output = stream("qwen3")
    for piece in (b"<tool_call>", b"{}", b"</tool_call>", b"\n"):
        output.feed(piece)

    assert output.counts[CALL] == 4
    output.feed(b"<tool_ca")
    assert (output.counts[CALL], output.counts[CONTENT]) == (3, 2)
    output.feed(b"n")
    assert (output.counts[CALL], output.counts[CONTENT]) == (3, 3)


def test_the_parts_of_a_character_count_to_its_class():
    owl = "🦉".encode()

    pieces = [b"<think>", owl[:1], owl[1:2], owl[2:], b"</think>", owl[:3], owl[3:]]
    assert counted(stream("qwen3"), pieces) == {REASONING: 5, CONTENT: 2}


def test_tokens_without_text_count_too():
    assert counted(stream("plain"), [b"", b"a", b"", b""]) == {CONTENT: 4}


def test_a_header_without_end_is_text():
    text = "<|channel|>" + "x" * (LONGEST_HEADER + 1)

    shown, _ = read(stream("harmony"), [text.encode()])
    assert shown == {CONTENT: "x" * (LONGEST_HEADER + 1)}


@pytest.mark.parametrize("family", ["hermes", "unknown"])
def test_flushing_twice_tells_nothing_twice(family: str):
    output = stream(family)
    output.feed(b'<tool_call>{"name": "clock"}')

    assert len(output.flush().results) == 1
    assert output.flush() == output.flush()
    assert output.flush().results == ()
