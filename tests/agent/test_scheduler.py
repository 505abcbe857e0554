"""Continuous batching, with an engine that has no model but checks all that it is told to do.

What requests share, images and answers that were begun elsewhere have files of their own."""

import tracemalloc

import pytest
from answers import content, text_of
from hypothesis import given
from hypothesis import strategies as st
from scheduled import R1, R2, R3, Running

from agent.budget import TILE
from agent.echo import END, ByteVocabulary
from agent.engine import Decoded
from agent.formats import recognize
from agent.output import OutputStream
from agent.scheduler import MOST_FAILURES
from agent.tools import Tools
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, SequenceId, TokenId
from common.messages import (
    Failed,
    Finished,
    FinishReason,
    Segment,
    TokenClass,
    TokenGenerated,
    ToolCallsEnded,
    ToolCallsParsed,
    Usage,
)


class WithControlTokens(ByteVocabulary):
    """The first bytes stand for control tokens, which are not shown."""

    def piece(self, token: TokenId) -> bytes:
        return b"" if token in {1, 2, 3} else super().piece(token)


def test_requests_of_several_clients_share_each_decode() -> None:
    running = Running()
    running.submit(R1, "abc")
    running.submit(R2, "xyz")

    running.run()

    assert [len(chunks) for chunks in running.passes] == [2, 2, 2, 2]
    assert (running.text(R1), running.text(R2)) == ("abc", "xyz")


def test_what_generates_goes_before_a_long_prompt() -> None:
    running = Running(batch_size=4)
    running.submit(R1, "a")
    running.step()

    running.submit(R2, "123456")

    assert [(chunk.sequence_id, list(chunk.tokens)) for chunk in running.plan()] == [
        (0, [ord("a")]),
        (1, [ord("1"), ord("2"), ord("3")]),
    ]


def test_only_the_last_chunk_of_a_prompt_asks_for_a_token() -> None:
    running = Running(batch_size=2, slots=1)
    running.submit(R1, "abcde")

    running.run()

    assert [chunks[0].wants_token for chunks in running.passes[:3]] == [False, False, True]


def test_the_end_token_ends_a_request_and_is_not_counted() -> None:
    running = Running()
    running.submit(R1, "ab")

    running.run()

    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(2, 0, 2))


def test_max_tokens_ends_a_request() -> None:
    running = Running()
    running.submit(R1, "abcdef", max_tokens=2)

    running.run()

    assert running.text(R1) == "ab"
    assert running.last(R1) == Finished(R1, FinishReason.LENGTH, Usage(6, 0, 2))


def test_the_context_limit_ends_a_request() -> None:
    running = Running(context=8)
    running.submit(R1, "abcdef")

    running.run()

    assert running.last(R1) == Finished(R1, FinishReason.LENGTH, Usage(6, 0, 2))
    assert max(chunk.position for chunks in running.passes for chunk in chunks) < 8


def test_a_stop_text_ends_a_request_and_stays_hidden() -> None:
    running = Running()
    running.submit(R1, "one, two", stop=(", ",))

    running.run()

    assert running.text(R1) == "one"
    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(8, 0, 5))


def test_text_held_back_for_a_stop_text_comes_with_the_end() -> None:
    running = Running()
    running.submit(R1, "one,", stop=(", ",))

    running.run()

    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(4, 0, 4), content(","))


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    running = Running()
    running.submit(R1, "é")

    running.run()

    assert [text_of(e) for e in running.told if isinstance(e, TokenGenerated)] == ["", "é"]


def test_a_refused_token_ends_its_request_only() -> None:
    running = Running()
    running.submit(R1, "ab")
    running.submit(R2, "xy")
    chunks = running.plan()
    decoded = running.engine.decode(chunks)
    refusal = RequestError(ErrorCode.GRAMMAR_REJECTED, "nothing fits")

    running.do(
        running.scheduler.commit(
            chunks,
            Decoded({SequenceId(1): decoded.tokens[SequenceId(1)]}, {}, {SequenceId(0): refusal}),
            seconds=0.1,
        )
    )
    running.run()

    assert running.last(R1) == Failed(R1, ErrorCode.GRAMMAR_REJECTED, "nothing fits")
    assert running.text(R2) == "xy"


# What the text says


def marked_output() -> OutputStream:
    form = recognize("{# <think></think> <tool_call></tool_call> #}")
    tools = Tools([{"type": "function", "function": {"name": "f", "description": ""}}])
    return OutputStream(form.parser(prompt="", tools=tools, has_tools=True))


def test_each_class_of_text_is_told_and_counted_and_so_are_tool_calls() -> None:
    running = Running(context=200, batch_size=200)
    written = '<think>hm</think>ok<tool_call>{"name": "f", "arguments": {}}</tool_call>!'
    running.submit(R1, written, output=marked_output())

    running.run()

    told = [e for e in running.told if isinstance(e, TokenGenerated | Finished)]
    texts: dict[TokenClass, str] = {}
    for segment in (segment for event in told for segment in event.segments):
        texts[segment.token_class] = texts.get(segment.token_class, "") + segment.text
    assert texts == {
        TokenClass.REASONING: "hm",
        TokenClass.CONTENT: "ok!",
        TokenClass.TOOL_CALL: '{"name": "f", "arguments": {}}',
    }
    (ended,) = [event for event in running.told if isinstance(event, ToolCallsEnded)]
    assert isinstance(ended.result, ToolCallsParsed)
    last = running.last(R1)
    assert isinstance(last, Finished)
    usage = last.usage
    assert usage.content_tokens == len("ok!")
    assert running.told.index(ended) < len(running.told) - 1, "not only at the end"
    assert usage.reasoning_tokens == len("<think>hm</think>")
    counts = usage.content_tokens + usage.reasoning_tokens + usage.tool_call_tokens
    assert counts == len(written)


def streaming_output() -> OutputStream:
    form = recognize("{# <tool_call></tool_call> #}")
    tools = Tools([{"type": "function", "function": {"name": "f"}}])
    return OutputStream(form.streaming_parser(prompt="", tools=tools))


def test_calls_are_told_with_the_tokens_that_write_them() -> None:
    running = Running(context=200, batch_size=200)
    written = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    running.submit(R1, written, output=streaming_output())

    running.run()

    tokens = [event for event in running.told if isinstance(event, TokenGenerated)]
    told = [delta for event in tokens for delta in event.calls]
    assert "".join(delta.arguments for delta in told) == '{"a": 1}'
    assert (told[0].index, told[0].name) == (0, "f")
    assert len(told) == len('{"a": 1}'), "one piece a token"
    assert all(event.segments == () for event in tokens)
    last = running.last(R1)
    assert isinstance(last, Finished)
    assert last.calls == ()
    assert last.usage.tool_call_tokens == len(written)
    assert not any(isinstance(event, ToolCallsEnded) for event in running.told)


def test_a_call_that_only_the_end_completes_is_told_with_it() -> None:
    running = Running(context=200, batch_size=200)
    running.submit(R1, "<tool_call><function=f></function>", output=streaming_output())

    running.run()

    last = running.last(R1)
    assert isinstance(last, Finished)
    assert [(delta.name, delta.arguments) for delta in last.calls] == [("f", "{}")]


def test_a_call_that_is_open_at_the_end_is_told_before_the_end() -> None:
    running = Running(context=200, batch_size=200)
    running.submit(R1, '<tool_call>{"name": "f"', output=marked_output())

    running.run()

    assert [type(event) for event in running.told[-2:]] == [ToolCallsEnded, Finished]


def test_control_tokens_are_hidden_but_for_the_marks_of_the_format() -> None:
    running = Running(context=200, batch_size=200, vocabulary=WithControlTokens())
    marks = {TokenId(1): b"<think>", TokenId(3): b"never written"}
    running.submit(R1, "\x01a\x02b</think>c", output=marked_output(), marks=marks)

    running.run()

    segments = [s for e in running.told if isinstance(e, TokenGenerated) for s in e.segments]
    reasoning = "".join(s.text for s in segments if s.token_class is TokenClass.REASONING)
    assert (reasoning, segments[-1]) == ("ab", Segment(TokenClass.CONTENT, "c"))


# Cancelling


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_cancelled_request_ends_before_the_next_pass_with_its_usage(passes: int) -> None:
    running = Running(slots=1, batch_size=3)
    running.submit(R1, "abcdef")
    for _ in range(passes):
        running.step()

    running.do(running.scheduler.cancel(R1))

    assert running.last(R1) == Finished(R1, FinishReason.CANCELLED, Usage(6, 0, max(0, passes - 1)))
    assert running.plan() == []
    running.submit(R2, "xy")  # the slot is free again
    running.run()
    assert running.text(R2) == "xy"


def test_a_cancelled_prompt_is_fed_no_further() -> None:
    """B02: a client that leaves while its prompt is read."""
    running = Running(slots=1, context=6000, batch_size=512)
    running.submit(R1, "x" * 4096)
    running.step()

    running.do(running.scheduler.cancel(R1))
    running.run()

    assert running.fed == 512


def test_cancelling_all_ends_those_that_wait_too() -> None:
    """B06: those that run keep what they have, those that wait never start."""
    running = Running(slots=6, context=100, cells=100)
    for n in range(6):
        running.submit(RequestId(f"r{n}"), chr(97 + n) * 45)
    running.step()
    before = running.fed

    for n in range(6):
        running.do(running.scheduler.cancel(RequestId(f"r{n}")))

    assert running.scheduler.is_idle
    assert running.plan() == []
    ends = [event for event in running.told if isinstance(event, Finished)]
    assert [(end.reason, end.usage.content_tokens) for end in ends] == [
        (FinishReason.CANCELLED, 1)
    ] * (before // 45) + [(FinishReason.CANCELLED, 0)] * (6 - before // 45)
    assert before // 45 < 6, "all of them ran: nobody waited"
    running.check()


def test_cancelling_does_not_change_another_stream() -> None:
    running = Running()
    running.submit(R1, "abcdef")
    running.submit(R2, "uvwxyz")
    running.step()

    running.do(running.scheduler.cancel(R1))
    running.run()

    assert running.text(R2) == "uvwxyz"


def test_cancelling_what_is_over_does_nothing() -> None:
    running = Running()
    running.submit(R1, "a")
    running.run()

    assert running.scheduler.cancel(R1) == []


# Keeping streams going


def test_a_long_prompt_is_fed_in_pieces_that_fit_the_gap() -> None:
    """B20: each prompt token costs a millisecond here, each pass ten."""
    running = Running(context=20_000, batch_size=2048, longest_gap=0.3)
    running.submit(R1, "a" * 400, ignore_eos=True, max_tokens=200)
    running.seconds = 0.41
    running.step()
    running.submit(R2, "b" * 16_000, max_tokens=1)

    longest = 0.0
    while running.scheduler.figures.prompt_tokens_fed < 16_400:
        chunks = running.plan()
        fed = sum(len(chunk.tokens) for chunk in chunks) - 1
        running.seconds = 0.01 + 0.001 * fed
        longest = max(longest, running.seconds)
        running.step()
        assert chunks[0].tokens == [ord("a")], "the stream stood still"

    assert longest <= 0.3
    assert len(running.passes) < 120, "fed in pieces that are too small"


def test_prompts_and_others_take_turns_beside_a_stream() -> None:
    running = Running(context=2000, batch_size=512)
    running.submit(R1, "a" * 5, ignore_eos=True)
    running.step()
    running.submit(R2, "b" * 1000)

    turns: list[tuple[bool, bool]] = []
    for _ in range(6):
        running.do(running.scheduler.make_room())
        chunks = running.scheduler.plan(takes_turns=True)
        decoded = running.engine.decode(chunks)
        running.do(running.scheduler.commit(chunks, decoded, seconds=0.01))
        turns.append((len(chunks) > 1, running.scheduler.spare_tokens != 0))

    assert turns == [(False, True), (True, False)] * 3


def test_without_streams_a_prompt_gets_the_whole_batch() -> None:
    running = Running(context=2000, batch_size=512)
    running.submit(R1, "a" * 1000)

    running.step()

    assert running.fed == 512


def test_the_first_piece_beside_a_stream_is_small() -> None:
    """Nothing has been measured yet."""
    running = Running(context=2000, batch_size=512)
    running.submit(R1, "a" * 5)
    running.step()
    running.submit(R2, "b" * 1000)

    chunks = running.step()

    assert [len(chunk.tokens) for chunk in chunks] == [1, TILE // 2 - 1]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    running = Running(slots=3, context=4000, batch_size=512)
    running.submit(R1, "a" * 3000, max_tokens=1)
    running.submit(R2, "b" * 100, max_tokens=1)

    running.step()

    assert isinstance(running.last(R2), Finished)
    assert running.fed == 512


# Failing decodes


def test_a_decode_that_failed_alone_ends_its_request() -> None:
    running = Running(batch_size=4)
    running.submit(R1, "abcd")
    running.poison = TokenId(ord("c"))

    running.run()

    assert running.last(R1) == Failed(R1, ErrorCode.DECODE_FAILED, "poisoned")
    assert len(running.passes) == 1
    running.check()


def test_one_poisoned_request_does_not_take_the_others_with_it() -> None:
    running = Running(slots=4, context=300)
    running.submit(R1, "first" * 10)
    running.submit(R2, "second" * 10)
    running.step()
    running.step()
    running.poison = TokenId(ord("!"))

    running.submit(R3, "third!")
    running.run()

    assert running.last(R3) == Failed(R3, ErrorCode.DECODE_FAILED, "poisoned")
    assert running.text(R1) == "first" * 10
    assert running.text(R2) == "second" * 10
    running.check()


def test_streams_go_on_while_the_suspects_of_a_failure_are_fed_alone() -> None:
    running = Running(slots=3, context=600, batch_size=64)
    running.submit(R1, "a" * 500)
    running.submit(R2, "b" * 500)
    while not running.text(R2):
        running.step()
    running.do(running.scheduler.fail(running.plan(), "flaky"))
    running.submit(R3, "c" * 20)

    passes = [running.step() for _ in range(8)]

    suspects = [len(p) == 1 and p[0].tokens[0] != ord("c") for p in passes]
    assert any(suspects)
    assert not all(suspects)
    assert isinstance(running.last(R3), TokenGenerated)
    running.run()
    assert (running.text(R1), running.text(R2)) == ("a" * 100, "b" * 100)
    running.check()


def test_a_decode_that_fails_now_and_then_never_loops() -> None:
    running = Running(slots=2)
    running.submit(R1, "abc")
    running.submit(R2, "xyz")

    failed = 0
    while not running.scheduler.is_idle:
        chunks = running.plan()
        if len(chunks) > 1:
            failed += 1
            running.do(running.scheduler.fail(chunks, "flaky"))
        else:
            running.step()
        assert failed <= 2 * (MOST_FAILURES + 1)

    for request_id in (R1, R2):
        assert isinstance(running.last(request_id), Failed | Finished)


# Whatever happens


@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=30), max_size=8),
    slots=st.integers(1, 4),
    batch_size=st.integers(8, 40),
    max_tokens=st.integers(1, 60),
    spare_cells=st.integers(0, 200),
)
def test_every_client_is_told_its_own_text(
    prompts: list[str], slots: int, batch_size: int, max_tokens: int, spare_cells: int
) -> None:
    running = Running(slots=slots, context=64, batch_size=batch_size, cells=64 + spare_cells)
    for n, prompt in enumerate(prompts):
        while len([e for e in running.told if isinstance(e, Finished)]) <= n - slots:
            running.step()
        running.submit(RequestId(f"r{n}"), prompt, max_tokens=max_tokens)

    running.run()

    for n, prompt in enumerate(prompts):
        assert running.text(RequestId(f"r{n}")) == prompt[: min(max_tokens, 64 - len(prompt))]


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    running = Running(slots=4, context=64, cells=256, most_cached=128)

    def serve(requests: range) -> None:
        for n in requests:
            while running.scheduler.figures.waiting + len(running.plan()) >= 4:
                running.step()
            running.submit(RequestId(f"r{n}"), f"{n % 97:02} asks", max_tokens=3)
            running.step()
            running.told.clear()
            running.passes.clear()
            running.shares.clear()
            running.noted.clear()
        running.run()
        running.told.clear()
        running.noted.clear()
        running.passes.clear()

    serve(range(2_000))
    tracemalloc.start()
    try:
        serve(range(2_000, 4_000))
        before, _ = tracemalloc.get_traced_memory()
        serve(range(4_000, 12_000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 30_000, "bytes that 8,000 requests left behind"


def test_the_echo_engines_end_token_is_silent() -> None:
    vocabulary = ByteVocabulary()

    assert vocabulary.is_end(END)
    assert vocabulary.piece(END) == b""
