"""Calls that are told while a model writes them, alike wherever the text is cut."""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from output_samples import CALL, CONTENT, REASONING, SAMPLES, TEMPLATES, UNDETERMINABLE, Sample

from agent.formats import recognize
from agent.output import Output, OutputStream
from agent.tool_calls import MOST_CALLS
from agent.tools import Tools
from common.messages import ToolCallDelta, ToolCallsParsed

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FORMATS = {family: recognize(template) for family, template in TEMPLATES.items()}

NAMES = ("weather", "clock", "nobody", "python", "browser.search")
TOOLS = Tools([{"type": "function", "function": {"name": name}} for name in NAMES])
"""Nothing is invalid: whatever a reader finds is a result."""


def stream(
    family: str, *, prompt: str = "", most_calls: int = MOST_CALLS, is_calls: bool = False
) -> OutputStream:
    parser = FORMATS[family].streaming_parser(
        prompt=prompt, tools=TOOLS, most_calls=most_calls, make_id=made_ids()
    )
    return OutputStream(parser, is_calls=is_calls)


def made_ids() -> Any:
    numbers = itertools.count()
    return lambda: f"made {next(numbers)}"


def fed(output: OutputStream, pieces: Iterable[str | bytes]) -> list[Output]:
    encoded = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return [*map(output.feed, encoded), output.flush()]


def deltas(told: Sequence[Output]) -> list[ToolCallDelta]:
    return [delta for output in told for delta in output.calls]


def put_together(told: Sequence[Output]) -> list[tuple[str, str]]:
    """Names with arguments. Checks that indices come in order, each with its name and id first."""
    calls: list[tuple[str, str]] = []
    for delta in deltas(told):
        if delta.index == len(calls):
            assert delta.name
            assert delta.call_id
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.index == len(calls) - 1
            assert (delta.name, delta.call_id) == (None, None)
            assert delta.arguments, "nothing new"
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + delta.arguments)
    return calls


def shown(told: Sequence[Output]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for segment in (segment for output in told for segment in output.segments):
        texts[segment.token_class] = texts.get(segment.token_class, "") + segment.text
    return texts


def values(calls: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, value(arguments)) for name, arguments in calls]


def value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def read_at_once(sample: Sample) -> tuple[list[tuple[str, Any]], bool]:
    """The calls that the readers find, and whether there was a section that cannot be read."""
    parser = FORMATS[sample.family].parser(prompt=sample.prompt, tools=TOOLS, has_tools=True)
    results = [
        result for told in fed(OutputStream(parser), [sample.text]) for result in told.results
    ]
    parsed = [result for result in results if isinstance(result, ToolCallsParsed)]
    calls = [(call.name, call.arguments) for result in parsed for call in result.calls]
    return values(calls), len(parsed) < len(results)


@pytest.mark.parametrize(
    "sample",
    [sample for sample in SAMPLES if sample.has_tools],
    ids=lambda sample: f"{sample.family}: {sample.text[:60]}",
)
def test_what_is_told_is_what_the_reader_finds_wherever_it_is_cut(sample: Sample):
    data = sample.text.encode()
    calls, is_unreadable = read_at_once(sample)
    texts = {token_class: text for token_class, text in sample.shown.items() if token_class != CALL}
    if is_unreadable and CALL in sample.shown:
        texts[CONTENT] = texts.get(CONTENT, "") + sample.shown[CALL]

    for pieces in (
        [data],
        cut(data, range(1, len(data))),
        *(cut(data, [at]) for at in range(1, len(data))),
    ):
        output = stream(sample.family, prompt=sample.prompt)
        told = fed(output, pieces)
        assert values(put_together(told)) == calls
        assert shown(told) == texts
        assert all(output.results == () for output in told)
        assert sum(output.counts.values()) == len(pieces)


SCRAPS = [
    "a", " ", "\n", "雨", "{", "}", "[", "]", ",", '"', "\\", ":", "```", "to=clock", "clock", "call:clock{}",
    '{"name": "clock"}', '{"name": "clock", "arguments": {"a": "}"}}', '"name": "clock",', '"arguments": {',
]  # fmt: skip


@PATIENT
@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_whatever_a_model_writes_is_told_alike_wherever_it_is_cut(family: str, data: st.DataObject):
    marks = [mark for mark in FORMATS[family].marks if mark]
    text = "".join(data.draw(st.lists(st.sampled_from(SCRAPS + marks), max_size=16)))
    encoded = text.encode()
    places = data.draw(st.lists(st.integers(0, len(encoded))))

    whole, cut_up = (fed(stream(family), pieces) for pieces in ([encoded], cut(encoded, places)))
    assert put_together(cut_up) == put_together(whole)
    assert shown(cut_up) == shown(whole)
    # What the readers can read is told in full.
    found, is_unreadable = read_at_once(Sample(family, text, {}))
    if not is_unreadable:
        assert [name for name, _ in put_together(whole)] == [name for name, _ in found]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"))
"""Marks are marks wherever they stand."""
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inside: st.lists(inside) | st.dictionaries(TEXT, inside),
)


@PATIENT
@given(
    st.lists(st.dictionaries(TEXT, JSON), min_size=1, max_size=3),
    st.sampled_from(["hermes", "granite", "llama"]),
    st.booleans(),
    st.data(),
)
def test_arguments_come_out_as_they_went_in(
    arguments: list[dict[str, Any]], family: str, escapes: bool, data: st.DataObject
):
    calls = [{"name": "clock", "arguments": each} for each in arguments]
    written = json.dumps(calls, ensure_ascii=escapes)
    opened = {"hermes": "<tool_call>", "granite": "<|tool_call|>", "llama": "<|python_tag|>"}
    text = (opened[family] + written).encode()
    pieces = cut(text, data.draw(st.lists(st.integers(0, len(text)))))

    told = put_together(fed(stream(family), pieces))
    assert [name for name, _ in told] == ["clock"] * len(calls)
    assert [json.loads(written) for _, written in told] == arguments


def told_step_by_step(
    family: str, pieces: Sequence[str]
) -> list[list[tuple[int, str | None, str]]]:
    return [
        [(delta.index, delta.name, delta.arguments) for delta in told.calls]
        for told in fed(stream(family), pieces)
    ]


def test_json_calls_are_told_while_they_are_written():
    pieces = [
        '<tool_call>{"name": "clo', 'ck", "argu', 'ments": ', '{"a', '": "}', '\\"', '"', "}", "}\n",
        "</tool_call>",
    ]  # fmt: skip

    assert told_step_by_step("hermes", pieces) == [
        [], [], [], [(0, "clock", '{"a')], [(0, None, '": "}')], [(0, None, '\\"')], [(0, None, '"')],
        [(0, None, "}")], [], [], [],
    ]  # fmt: skip


def test_arguments_behind_a_mark_are_told_while_they_are_written():
    pieces = ["[TOOL_CALLS]clo", "ck", "[ARGS]", ' {"a": ', " 1", "}", " \n"]

    assert told_step_by_step("mistral", pieces) == [
        [], [], [], [(0, "clock", '{"a":')], [(0, None, "  1")], [(0, None, "}")], [], [],
    ]  # fmt: skip


def test_arguments_behind_a_bare_name_are_told_while_they_are_written():
    pieces = ["[TOOL_CALLS]clo", "ck", "{", '"a"', ": 1}"]

    assert told_step_by_step("mistral", pieces) == [
        [], [], [(0, "clock", "{")], [(0, None, '"a"')], [(0, None, ": 1}")], [],
    ]  # fmt: skip


def test_the_message_to_a_tool_is_told_while_it_is_written():
    pieces = [
        "<|channel|>commentary to=functions.clock <|constrain|>json",
        "<|message|>",
        "{",
        "}",
        "<|call|>",
    ]

    assert told_step_by_step("harmony", pieces) == [
        [], [], [(0, "clock", "{")], [(0, None, "}")], [], [],
    ]  # fmt: skip


def test_tagged_calls_are_told_when_their_block_is_closed():
    call = "<tool_call><function=clock></function>"

    assert told_step_by_step("coder", [call, "</tool_call>", "\n", call, "</tool_call>"]) == [
        [], [(0, "clock", "{}")], [], [], [(1, "clock", "{}")], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"a": 1}, "name": "clock"}',
        '{"name": "clock", "arguments": "{\\"a\\": 1}"}',
        '{"type": "function", "function": {"name": "clock", "arguments": {"a": 1}}}',
        '{"clock": {"a": 1}}',
    ],
)
def test_a_call_whose_parts_come_otherwise_is_told_when_it_is_complete(call: str):
    first, second, *_ = fed(stream("hermes"), [f"<tool_call>[{call[:-1]}", "}", ', {"name": "a"}]'])

    assert first.calls == ()
    assert values(put_together([second])) == [("clock", {"a": 1})]


def test_calls_keep_their_order_when_only_some_are_told_early():
    calls = '[{"name": "clock"}, {"name": "weather", "arguments": {"city": "Rome"}}]'

    assert put_together(fed(stream("granite"), ["<|tool_call|>" + calls])) == [
        ("clock", "{}"),
        ("weather", '{"city": "Rome"}'),
    ]


def test_indices_count_over_all_sections_of_an_answer():
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'

    told = fed(stream("hermes"), [f"{call} and {call}"])

    assert [delta.index for delta in deltas(told)] == [0, 1]
    assert shown(told) == {CONTENT: "and "}


def test_ids_that_a_model_writes_are_kept_unless_they_are_used_twice():
    text = "[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}"

    assert [delta.call_id for delta in deltas(fed(stream("mistral"), [text]))] == ["abc", "made 0"]
    text = '<tool_call>{"id": "abc", "name": "clock", "arguments": {}}</tool_call>'
    told = fed(stream("hermes"), [text, "a", text])
    assert [delta.call_id for delta in deltas(told)] == ["abc", "made 0"]


def test_a_section_that_cannot_be_read_is_content_and_counts_as_it_was_taken():
    output = stream("qwen3")
    section, thought = "<tool_call>clock?</tool_call>", "<think>hm</think>"

    told = fed(output, list(f"{section}{thought}Well."))

    assert shown(told) == {CONTENT: "clock?Well.", REASONING: "hm"}
    assert deltas(told) == []
    counts = [output.counts[each] for each in (CALL, REASONING, CONTENT)]
    assert counts == [len(section), len(thought), len("Well.")]


def test_what_follows_an_unreadable_call_in_its_section_is_not_told():
    text = '<tool_call>clock?</tool_call><tool_call>{"name": "clock"}</tool_call>'

    told = fed(stream("hermes"), [text])

    assert deltas(told) == []
    assert shown(told) == {CONTENT: 'clock?{"name": "clock"}'}


def test_arguments_that_come_twice_are_told_once():
    text = '[TOOL_CALLS]clock{"a": 1}[ARGS]{"b": 2}'

    assert put_together(fed(stream("mistral"), [text])) == [("clock", '{"a": 1}')]


def test_the_name_counts_for_more_than_other_names():
    for names in ('"name": "clock", "function": "a"', '"function": "a", "name": "clock"'):
        text = f'<tool_call>{{{names}, "arguments": {{}}}}</tool_call>'

        assert put_together(fed(stream("hermes"), [text])) == [("clock", "{}")]


def test_a_fence_behind_arguments_is_not_told():
    text = "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{\n```\n}\n```\n<｜tool▁call▁end｜>"  # noqa: RUF001

    assert put_together(fed(stream("deepseek"), list(text))) == [("clock", "{\n```\n}")]


def test_nothing_more_is_told_of_a_call_that_is_cut_off():
    cut_off = '<tool_call>{"name": "clock", "arguments": {"a": [1, '

    told = fed(stream("hermes"), [cut_off])

    assert put_together(told) == [("clock", '{"a": [1, ')]
    assert shown(told) == {}


def test_what_is_no_json_is_told_as_it_is():
    for text in (
        '{"name": "clock", "arguments": {a: 1}}',
        '[{"name": "clock", "arguments": {a: 1}}',
    ):
        told = fed(stream("hermes"), [f"<tool_call>{text}</tool_call>", "ok"])

        assert put_together(told) == [("clock", "{a: 1}")]
        assert shown(told) == {CONTENT: "ok"}


def test_line_breaks_in_strings_are_made_json():
    text = '<tool_call>{"name": "clock", "arguments": {\n"a": "1\n2\\\t"}}</tool_call>'

    (call,) = put_together(fed(stream("hermes"), list(text)))
    assert call == ("clock", '{\n"a": "1\\n2\\\t"}')


def test_a_text_that_looks_like_a_mark_is_part_of_the_arguments():
    arguments = '{"text": "<tool_call> </tool"}'
    text = f'<tool_call>{{"name": "clock", "arguments": {arguments}}}</tool_call>'

    assert put_together(fed(stream("hermes"), list(text))) == [("clock", arguments)]


def test_only_one_call_is_told_where_one_is_allowed():
    call = '{"name": "clock", "arguments": {"a": 1}}'
    text = f"<tool_call>[{call}, {call}]</tool_call> and <tool_call>{call}</tool_call>"

    told = fed(stream("hermes", most_calls=1), list(text))

    assert put_together(told) == [("clock", '{"a": 1}')]
    assert shown(told) == {CONTENT: "and "}


def test_calls_of_unknown_tools_are_told_all_the_same():
    text = '<tool_call>{"name": "launch", "arguments": {"n": 1}}</tool_call>'

    assert put_together(fed(stream("hermes"), [text])) == [("launch", '{"n": 1}')]


def test_an_unknown_format_tells_no_calls():
    told = fed(stream("unknown think"), ["<think>a</think>", "clock()"])

    assert shown(told) == {REASONING: "a", UNDETERMINABLE: "clock()"}
    assert deltas(told) == []
    assert [output.results for output in told] == [(), (), ()]


def test_far_too_many_calls_are_told_up_to_the_limit():
    calls = ", ".join(['{"name": "clock"}'] * (MOST_CALLS + 1))

    told = fed(stream("hermes"), [f"<tool_call>[{calls}]</tool_call>"])

    assert len(put_together(told)) == MOST_CALLS


def test_nesting_without_end_does_no_harm():
    text = '<tool_call>{"name": "clock", "arguments": {"a": ' + "[" * 100_000

    told = fed(stream("hermes"), [text])

    (call,) = put_together(told)
    assert call == ("clock", '{"a": ' + "[" * 100_000)


CUT = '<tool_call>\n{"name": "clo'


def test_what_a_cut_leaves_of_a_call_is_not_shown() -> None:
    cut, ended = stream("hermes"), stream("hermes")
    cut.feed(CUT.encode())
    ended.feed(CUT.encode())

    assert shown([cut.flush(is_cut=True)]) == {}
    assert (
        "clo" in shown([ended.flush()])["content"]
    )  # the model has left it at that: it is an answer


def test_a_cut_answer_that_only_looks_like_a_call_is_shown() -> None:
    output = stream("llama")
    told = [output.feed(b'{"name": "So'), output.flush(is_cut=True)]

    assert shown(told) == {"content": '{"name": "So'}


@pytest.mark.parametrize("length", [3, 9, len(CUT)])
def test_an_answer_that_must_be_calls_has_no_content(length: int) -> None:
    output = stream("hermes", is_calls=True)
    told = [output.feed(b"  \n"), output.feed(CUT[:length].encode()), output.flush(is_cut=True)]

    assert shown(told) == {}
