"""Continuous batching, with an engine that has no model but checks all that it is told to do."""

import re
import tracemalloc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from answers import content, plain_output, text_of
from hypothesis import given
from hypothesis import strategies as st

from agent.budget import TILE
from agent.echo import END, ByteVocabulary, EchoEngine
from agent.engine import Chunk, Decoded, ImageRun
from agent.formats import recognize
from agent.loop import carry_out
from agent.output import OutputStream
from agent.prompt import PreparedRequest
from agent.scheduler import MOST_FAILURES, Effect, Scheduler, Share
from agent.tools import Tools
from common.errors import DecodeError, ErrorCode, RequestError
from common.ids import RequestId, SequenceId, TokenId
from common.messages import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Sampling,
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


R1, R2, R3, R4 = (RequestId(f"r{n}") for n in range(1, 5))


def mixed(text: str) -> tuple[list[TokenId], tuple[ImageRun, ...]]:
    """A prompt's tokens and the images among them. ``<cat*5>`` is an image of five tokens, and
    ``<cat/5>`` one that may be fed in parts.
    """
    tokens: list[TokenId] = []
    images: list[ImageRun] = []
    for n, part in enumerate(re.split(r"(<\w+[*/]\d+>)", text)):
        if n % 2 == 0:
            tokens += (TokenId(byte) for byte in part.encode())
            continue
        name, kind, length = re.split("([*/])", part.strip("<>"))
        images.append(ImageRun(len(tokens), int(length), name, divisible=kind == "/"))
        first = int.from_bytes(name.encode()) * 1000
        tokens += (TokenId(-1 - first - at) for at in range(int(length)))
    return tokens, tuple(images)


class Running:
    """A scheduler with an echo engine: carries out effects, remembers what clients were told."""

    def __init__(
        self,
        *,
        slots: int = 2,
        context: int = 64,
        batch_size: int = 512,
        longest_gap: float = 0.25,
        most_cached: int | None = None,
        engine: EchoEngine | None = None,
        vocabulary: ByteVocabulary | None = None,
        **engine_options: Any,
    ) -> None:
        self.engine = engine or EchoEngine(
            slots=slots, context=context, batch_size=batch_size, **engine_options
        )
        self.scheduler = Scheduler(
            vocabulary=vocabulary or ByteVocabulary(),
            capacity=self.engine.capacity,
            longest_gap=longest_gap,
            most_cached=self.engine.capacity.cells if most_cached is None else most_cached,
        )
        self.told: list[Event] = []
        self.passes: list[list[Chunk]] = []
        self.shares: list[Share] = []
        self.seconds = 0.01
        """What the next pass takes."""
        self.poison: TokenId | None = None
        """A token that makes every decode fail that feeds it."""

    def do(self, effects: Sequence[Effect]) -> None:
        self.shares += [effect for effect in effects if isinstance(effect, Share)]
        self.told += carry_out(effects, self.scheduler, self.engine)

    def submit(
        self,
        request_id: RequestId,
        text: str,
        *,
        max_tokens: int = 1000,
        stop: tuple[str, ...] = (),
        salt: str = "",
        ignore_eos: bool = False,
        cache_prompt: bool = True,
        output: OutputStream | None = None,
        marks: Mapping[TokenId, bytes] | None = None,
        resumed: str = "",
    ) -> None:
        prompt, images = mixed(text)
        told = tuple(TokenId(byte) for byte in resumed.encode())
        sampler = self.engine.sampler(prompt, Sampling(ignore_eos=ignore_eos), None, None, told)
        output = output or plain_output(stop)
        for token in told:
            output.feed(bytes([token]))
        self.do(
            self.scheduler.submit(
                PreparedRequest(
                    request_id,
                    prompt,
                    max_tokens,
                    sampler,
                    output,
                    marks or {},
                    cache_salt=salt,
                    cache_prompt=cache_prompt,
                    images=images,
                    resumed=told,
                )
            )
        )

    def plan(self) -> list[Chunk]:
        self.do(self.scheduler.make_room())
        return self.scheduler.plan()

    def step(self) -> list[Chunk]:
        chunks = self.plan()
        self.passes.append(chunks)
        if not chunks:
            return chunks
        try:
            if any(self.poison in chunk.tokens for chunk in chunks):
                raise DecodeError("poisoned")
            decoded = self.engine.decode(chunks)
        except DecodeError as error:
            self.do(self.scheduler.fail(chunks, str(error)))
        else:
            self.do(self.scheduler.commit(chunks, decoded, seconds=self.seconds))
        return chunks

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.step()
            assert self.passes[-1], "stalled"

    @property
    def fed(self) -> int:
        return sum(len(chunk.tokens) for chunks in self.passes for chunk in chunks)

    def text(self, request_id: RequestId) -> str:
        return "".join(
            text_of(event)
            for event in self.told
            if event.request_id == request_id and isinstance(event, TokenGenerated | Finished)
        )

    def last(self, request_id: RequestId) -> Event:
        return [event for event in self.told if event.request_id == request_id][-1]

    def usage(self, request_id: RequestId) -> Usage:
        end = self.last(request_id)
        assert isinstance(end, Finished)
        return end.usage

    def check(self) -> None:
        """The account of cells is that of the engine."""
        figures = self.scheduler.figures
        assert figures.cells_running + figures.cells_cached == self.engine.used
        assert figures.cells_running >= 0
        assert figures.cells_cached >= 0
        assert figures.cells_free >= 0


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


# Sharing prefixes

SYSTEM = "You are a helpful assistant. "


def test_a_second_prompt_takes_over_what_a_finished_one_has_fed() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM + "One?")
    running.run()
    fed = running.fed

    running.submit(R2, SYSTEM + "Two?")
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len(SYSTEM)
    assert running.fed - fed == len("Two?") + len(SYSTEM + "Two?")  # and the answer's rows
    assert running.text(R2) == SYSTEM + "Two?"
    running.check()


def test_the_answer_is_cached_too_so_the_next_turn_of_a_chat_is_cheap() -> None:
    running = Running(context=400)
    running.submit(R1, SYSTEM)
    running.run()

    running.submit(R2, SYSTEM + SYSTEM + "And then?")
    running.run()

    assert running.usage(R2).cached_prompt_tokens == 2 * len(SYSTEM)


def test_a_prompt_that_is_cached_whole_still_feeds_its_last_token() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM)
    running.run()

    running.submit(R2, SYSTEM)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len(SYSTEM) - 1
    assert running.text(R2) == SYSTEM


def test_a_running_prompt_is_shared_while_it_runs() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM + "One?")
    running.step()

    running.submit(R2, SYSTEM + "Two?")
    running.step()

    assert running.shares == [Share(SequenceId(0), SequenceId(1), len(SYSTEM))]
    running.run()
    assert running.text(R1) == SYSTEM + "One?"
    assert running.text(R2) == SYSTEM + "Two?"


def test_a_prefix_that_is_being_fed_is_waited_for() -> None:
    long = SYSTEM * 20
    running = Running(slots=4, context=2000, batch_size=100)
    for n, request_id in enumerate((R1, R2, R3)):
        running.submit(request_id, f"{long}Question {n}?", max_tokens=1)

    running.run()

    distinct = len("Question n?")
    assert running.fed <= len(long) + 3 * distinct
    assert [running.usage(r).cached_prompt_tokens >= len(long) for r in (R1, R2, R3)] == [
        False, True, True,
    ]  # fmt: skip


def test_those_that_wait_for_a_prefix_let_others_pass() -> None:
    running = Running(slots=4, context=2000, batch_size=100)
    running.submit(R1, SYSTEM * 20 + "One?")
    running.submit(R2, SYSTEM * 20 + "Two?")
    running.submit(R3, "Something else?")

    running.step()
    running.step()

    assert running.text(R3) != ""
    assert running.scheduler.figures.waiting == 1


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_a_prefix_that_will_not_come_is_fed_by_the_next(how: str) -> None:
    running = Running(slots=4, context=2000, batch_size=100)
    running.submit(R1, SYSTEM * 20)
    running.submit(R2, SYSTEM * 20)
    chunks = running.step()

    if how == "cancel":
        running.do(running.scheduler.cancel(R1))
    else:
        chunks = running.plan()
        running.do(running.scheduler.fail(chunks, "broken"))
    running.run()

    assert running.text(R2) == SYSTEM * 20


def test_a_request_may_want_its_prompt_read_anew_and_others_share_it_then() -> None:
    running = Running(slots=2, context=200)
    running.submit(R1, "a" * 50, max_tokens=1)
    running.run()

    running.submit(R2, "a" * 50, max_tokens=1, cache_prompt=False)
    running.step()
    assert running.fed == 100
    running.run()
    running.submit(R3, "a" * 50, max_tokens=1)
    running.step()

    assert running.fed == 101


def test_nothing_is_shared_across_salts() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM, salt="tenant a")
    running.run()

    running.submit(R2, SYSTEM, salt="tenant b")
    running.run()
    running.submit(R3, SYSTEM)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == 0
    assert running.usage(R3).cached_prompt_tokens == 0
    assert running.shares == []


def test_the_least_recently_used_prompt_is_dropped_first() -> None:
    running = Running(slots=1, context=100, cells=100, sequences=8)
    texts = {name: name * 20 for name in "abc"}
    for name in "ab":
        running.submit(RequestId(name), texts[name])
        running.run()
    running.submit(RequestId("a again"), texts["a"])
    running.run()

    running.submit(RequestId("c"), texts["c"])  # 40 cells, and 80 are taken
    running.run()
    running.submit(RequestId("a at last"), texts["a"])
    running.run()
    running.submit(RequestId("b at last"), texts["b"])
    running.run()

    assert running.usage(RequestId("a at last")).cached_prompt_tokens == 19
    assert running.usage(RequestId("b at last")).cached_prompt_tokens == 0
    running.check()


def test_a_prompt_does_not_push_out_its_own_beginning() -> None:
    running = Running(slots=1, context=100, cells=1000, sequences=3)
    for name in "abc":
        running.submit(RequestId(name), name * 20)
        running.run()

    running.submit(RequestId("a again"), "a" * 20)  # the oldest of them, and all IDs are taken
    running.run()

    assert running.usage(RequestId("a again")).cached_prompt_tokens == 19


def test_the_same_question_again_and_again_is_kept_once() -> None:
    running = Running(slots=1, context=200, cells=2000)

    for n in range(5):
        running.submit(RequestId(f"r{n}"), SYSTEM)
        running.run()

    assert running.scheduler.figures.cells_cached == 2 * len(SYSTEM) - 1 + 1


def test_the_cache_keeps_no_more_than_it_may() -> None:
    """B19: a bound, and it is shown."""
    running = Running(slots=1, context=200, cells=2000, most_cached=100)

    for n in range(50):
        running.submit(RequestId(f"r{n}"), f"{n:02}" + "x" * 30)
        running.run()
        assert running.scheduler.figures.cells_cached <= 100
    running.check()


def test_the_cache_keeps_no_more_than_it_may_also_when_a_request_fails_that_shared_it() -> None:
    running = Running(slots=3, context=200, cells=600, most_cached=100)
    running.submit(R1, "p" * 80, max_tokens=2)
    running.step()
    running.submit(R2, "p" * 80, ignore_eos=True)
    while not isinstance(running.last(R1), Finished):
        running.step()
    running.submit(R3, "z" * 80, max_tokens=1)
    running.step()
    assert isinstance(running.last(R3), Finished)

    running.do(running.scheduler.fail(running.plan(), "failed"))

    assert isinstance(running.last(R2), Failed)
    assert running.scheduler.figures.cells_cached <= 100
    running.check()


def test_the_cache_keeps_no_more_than_it_may_also_when_a_request_ends_that_brought_nothing_new() -> (
    None
):
    running = Running(slots=3, context=200, cells=600, most_cached=100)
    running.submit(R1, "z" * 80, ignore_eos=True)
    running.step()
    running.submit(R2, "p" * 80, max_tokens=1)
    running.step()
    running.submit(R3, "p" * 80 + "q")
    running.plan()

    running.do(running.scheduler.cancel(R1))
    running.do(running.scheduler.cancel(R3))

    assert len(running.shares) == 1
    assert running.scheduler.figures.cells_cached <= 100
    running.check()


def test_two_chats_with_a_common_beginning_keep_their_own_sequences() -> None:
    """B15 and B17: from the second turn on each finds its own history, whole, and no other's."""
    running = Running(slots=2, context=4000, cells=8000, sequences=8)
    histories = {"a": SYSTEM, "b": SYSTEM}
    turns = 10
    for turn in range(turns):
        for name in "ab":
            request_id = RequestId(f"{name}{turn}")
            prompt = histories[name] + f"[{name} asks {turn}]"
            running.submit(request_id, prompt, max_tokens=30)
            running.run()
            if turn > 0:
                cached = running.usage(request_id).cached_prompt_tokens
                assert cached >= 0.9 * len(histories[name])
            histories[name] = prompt + running.text(request_id)

    assert "b asks" not in histories["a"]
    assert "a asks" not in histories["b"]


def test_a_model_that_cannot_share_a_part_is_fed_and_correct() -> None:
    running = Running(context=400, shares_part=False)
    running.submit(R1, SYSTEM + "One?")
    running.run()

    running.submit(R2, SYSTEM + "Two?")
    running.run()
    held = 2 * (SYSTEM + "One?")
    running.submit(R3, held + "And then?")
    running.run()

    assert running.usage(R2).cached_prompt_tokens == 0
    assert running.text(R2) == SYSTEM + "Two?"
    assert running.usage(R3).cached_prompt_tokens == len(held)
    assert len(running.shares) == 1, "it was tried in vain"


def test_a_share_that_the_engine_refuses_is_fed_instead() -> None:
    class Forgetful(EchoEngine):
        def share(self, source: SequenceId, destination: SequenceId, length: int, /) -> bool:
            return False

    running = Running(engine=Forgetful(slots=2, context=200))
    running.submit(R1, SYSTEM)
    running.run()

    running.submit(R2, SYSTEM + "Two?")
    running.step()
    assert running.scheduler.figures.cells_running == len(SYSTEM + "Two?")
    running.run()

    assert running.shares
    assert running.text(R2) == SYSTEM + "Two?"
    assert running.usage(R2).cached_prompt_tokens == 0
    running.check()


def test_a_layout_that_copies_counts_what_it_copies() -> None:
    running = Running(context=200, shares_cells=False)
    running.submit(R1, SYSTEM + "One?")
    running.step()
    running.submit(R2, SYSTEM + "Two?")
    running.step()

    running.check()
    assert running.engine.used == 2 * len(SYSTEM + "One?") + 1


# Short cells


def test_four_streams_in_the_cells_of_one_all_come_to_their_end() -> None:
    """B11: nobody is aborted; the youngest wait for the others."""
    running = Running(slots=4, context=1024, cells=1024, batch_size=512)
    for n, request_id in enumerate((R1, R2, R3, R4)):
        running.submit(request_id, f"{n}" * 100, max_tokens=500, ignore_eos=True)

    running.run()

    for n, request_id in enumerate((R1, R2, R3, R4)):
        assert running.text(request_id) == f"{n}" * 500
        assert running.usage(request_id) == Usage(100, 0, 500)
    assert running.scheduler.figures.pauses > 0
    running.check()


def test_the_oldest_goes_on_while_the_youngest_is_paused() -> None:
    running = Running(slots=2, context=100, cells=100)
    running.submit(R1, "a" * 30, max_tokens=60, ignore_eos=True)
    running.submit(R2, "b" * 30, max_tokens=60, ignore_eos=True)
    running.run()

    ends = [event.request_id for event in running.told if isinstance(event, Finished)]
    assert ends == [R1, R2]
    assert running.scheduler.figures.pauses == 1
    assert (running.text(R1), running.text(R2)) == ("a" * 60, "b" * 60)


def test_a_large_prompt_drops_what_is_cached_and_nobody_fails() -> None:
    """B12: cells nearly full, then a prompt that needs them."""
    running = Running(slots=2, context=600, cells=1000)
    for n in range(4):
        running.submit(RequestId(f"c{n}"), f"{n}" * 120)
        running.run()
    assert running.scheduler.figures.cells_free < 100

    running.submit(R1, "x" * 512)
    running.run()

    end = running.last(R1)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    assert running.text(R1) == "x" * (600 - 512)
    assert all(running.passes), "a pass without work"


def test_a_request_that_waits_for_cells_is_not_overtaken() -> None:
    running = Running(slots=3, context=100, cells=100)
    running.submit(R1, "a" * 40, max_tokens=20, ignore_eos=True)
    running.submit(R2, "b" * 60, max_tokens=3)
    running.submit(R3, "c", max_tokens=3)

    running.run()

    told = [event.request_id for event in running.told]
    assert told.index(R2) < told.index(R3)


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


# Images


def lengths(running: Running) -> list[list[int]]:
    """Of the chunks in each pass."""
    return [[len(chunk.tokens) for chunk in chunks] for chunks in running.passes]


def test_an_image_is_fed_whole_and_alone() -> None:
    running = Running(batch_size=4)
    running.submit(R1, "ab<cat*6>cde", max_tokens=1)

    running.run()

    assert lengths(running) == [[2], [6], [3]]
    assert running.usage(R1) == Usage(11, 0, 1, input_image_tokens=6)
    running.check()


def test_an_image_whose_tokens_do_not_look_ahead_is_fed_in_parts() -> None:
    running = Running(batch_size=4)
    running.submit(R1, "ab<cat/6>cde", max_tokens=1)

    running.run()

    assert lengths(running) == [[2], [4], [2], [3]]
    assert running.usage(R1) == Usage(11, 0, 1, input_image_tokens=6)
    running.check()


def test_an_image_in_parts_does_not_hold_up_a_stream() -> None:
    running = Running(context=2000, batch_size=512, longest_gap=0.02)
    running.submit(R1, "a", max_tokens=100, ignore_eos=True)
    running.step()
    running.submit(R2, "<cat/500>b", max_tokens=1)

    running.run()

    with_image = [sum(counts) for counts in lengths(running)[1:] if counts != [1]]
    assert max(with_image) <= TILE
    assert lengths(running).count([1]) >= len(with_image), "a token between any two parts"


def test_of_an_image_in_parts_only_the_whole_is_shared() -> None:
    running = Running(context=64, batch_size=8)
    running.submit(R1, "seen here: <cat/20>", max_tokens=1)
    for _ in range(3):
        running.step()
    running.do(running.scheduler.cancel(R1))

    running.submit(R2, "seen here: <cat/20>a", max_tokens=1)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")
    running.check()


@pytest.mark.parametrize(
    "prompt", ["<cat*6>", "<cat*6>a", "a<cat*6>", "<cat*3><dog*3>", "a<cat*1>b", "<cat/9><dog/6>a"]
)
def test_an_image_may_be_anywhere_in_a_prompt(prompt: str) -> None:
    running = Running(batch_size=4)
    running.submit(R1, prompt)

    running.run()

    words = re.sub("<.*?>", "", prompt)
    assert (running.text(R1), running.usage(R1).content_tokens) == (words, len(words))


def test_a_stream_has_its_token_between_two_images() -> None:
    running = Running(context=64)
    running.submit(R1, "a", max_tokens=20, ignore_eos=True)
    running.step()

    running.submit(R2, "<cat*6><dog*6><cow*6>b", max_tokens=1)
    running.run()

    assert lengths(running)[1:7] == [[6], [1], [6], [1], [6], [1, 1]]


def test_somebodys_text_is_fed_between_two_images() -> None:
    running = Running(slots=3, context=64, batch_size=6)
    running.submit(R1, "<cat*9><dog*9><cow*9>", max_tokens=1)
    running.submit(R2, "abcdefghij", max_tokens=1)

    running.run()

    assert lengths(running)[:5] == [[9], [6], [9], [4], [9]]


def test_texts_have_their_turn_though_documents_are_embedded_too() -> None:
    running = Running(slots=3, context=64, batch_size=8)
    running.submit(R1, "a", max_tokens=20, ignore_eos=True)
    running.step()
    running.submit(R2, "<cat*6><dog*6><cow*6><pig*6>", max_tokens=1)
    running.submit(R3, "bcdefgh", max_tokens=1)

    fed: list[list[int]] = []
    for _ in range(6):
        running.do(running.scheduler.make_room())
        chunks = running.scheduler.plan(takes_turns=True)
        fed.append([len(chunk.tokens) for chunk in chunks])
        running.do(running.scheduler.commit(chunks, running.engine.decode(chunks), seconds=0.01))

    assert fed == [[1], [6], [1], [1, 7], [1], [6]]


def test_the_same_image_at_the_same_place_is_shared() -> None:
    running = Running(context=64)
    running.submit(R1, "seen: <cat*9> once", max_tokens=1)
    running.run()

    running.submit(R2, "seen: <cat*9> twice", max_tokens=1)
    running.run()

    assert running.usage(R2) == Usage(21, 16, 1, input_image_tokens=9)
    assert running.fed == 20 + 5
    running.check()


def test_another_image_is_never_shared() -> None:
    running = Running(context=64)
    running.submit(R1, "seen here: <cat*9>", max_tokens=1)
    running.run()

    running.submit(R2, "seen here: <dog*9>", max_tokens=1)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")


def test_an_image_is_not_cut_in_two_by_sharing() -> None:
    """The last token is always fed, here with all of its image."""
    running = Running(context=64)
    for request_id in (R1, R2):
        running.submit(request_id, "seen here: <cat*9>", max_tokens=1)
        running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")
    assert [chunk.image is not None for chunk in running.passes[-1]] == [True]


def test_a_long_image_at_the_end_is_fed_again_and_not_waited_for() -> None:
    running = Running(context=200)
    for request_id in (R1, R2):
        running.submit(request_id, f"seen here: <cat*{2 * TILE}>", max_tokens=1)
        running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")


def test_half_an_image_is_not_shared_while_the_rest_is_being_fed() -> None:
    running = Running(context=200, batch_size=20)
    running.submit(R1, f"seen here: <cat/{TILE - 4}>, so", max_tokens=1)
    running.step()
    running.step()

    running.submit(R2, f"seen here: <cat/{TILE - 4}>, or", max_tokens=1)
    running.run()

    assert running.shares[0].length in (len("seen here: "), len("seen here: ") + TILE - 4)


def test_an_image_that_is_being_fed_is_waited_for() -> None:
    running = Running(context=200)
    running.submit(R1, f"<cat*{TILE}>a", max_tokens=1)
    running.submit(R2, f"<cat*{TILE}>b", max_tokens=1)

    running.run()

    assert running.fed == TILE + 2


def test_a_stream_has_its_turn_between_images_and_suspects() -> None:
    running = Running(slots=4, context=100, batch_size=8)
    for request_id in (R1, R2):
        running.submit(request_id, "s" * 90, cache_prompt=False)
    while running.fed < 150:
        running.step()
    running.do(running.scheduler.fail(running.plan(), "failed"))
    running.submit(R3, "a", ignore_eos=True, max_tokens=20)
    running.submit(R4, "".join(f"<{name}*5>" for name in "klmnopqrstu"))
    waits = [0]
    while not any(isinstance(event, Finished) for event in running.told):
        tokens = len(running.told)
        running.step()
        waits.append(0 if len(running.told) > tokens else waits[-1] + 1)

    assert max(waits) <= 3


def test_an_image_gets_its_cells_from_the_youngest() -> None:
    running = Running(slots=3, context=40, cells=100, most_cached=0)
    for request_id, letter in ((R1, "a"), (R3, "b")):
        running.submit(request_id, letter, max_tokens=39, ignore_eos=True)
    running.step()
    running.submit(R2, "xy<cat*30>z", max_tokens=3)

    running.run()

    assert running.text(R2) == "xyz"
    assert len(running.text(R1)) == len(running.text(R3)) == 39
    running.check()


def test_a_younger_stream_makes_way_for_an_image() -> None:
    running = Running(slots=2, context=1650, cells=1660, batch_size=40, most_cached=0)
    running.submit(R1, "a" * 1600 + "<cat*20>b", max_tokens=1)
    running.submit(R2, "x", max_tokens=200, ignore_eos=True)

    while not any(event.request_id == R1 for event in running.told):
        running.step()

    assert running.scheduler.figures.pauses == 1
    assert len(running.text(R2)) == 42, "at once, and not when its own cells are used up"
    running.run()
    assert running.usage(R2).content_tokens == 200
    running.check()


def test_a_paused_request_is_fed_its_images_again() -> None:
    running = Running(slots=2, context=40, cells=50, most_cached=0)
    running.submit(R1, "a", max_tokens=39, ignore_eos=True)
    running.submit(R2, "b<cat*9>c", max_tokens=20, ignore_eos=True)

    running.run()

    assert running.scheduler.figures.pauses > 0
    assert [chunk.image.encoding for chunks in running.passes for chunk in chunks if chunk.image] == [
        "cat", "cat",
    ]  # fmt: skip
    assert running.text(R2) == "bc" * 10
    running.check()


def test_an_image_whose_decode_fails_ends_its_request_only() -> None:
    running = Running(context=64)
    running.submit(R1, "a", max_tokens=9, ignore_eos=True)
    running.submit(R2, "x<cat*5>y")
    running.poison = mixed("<cat*5>")[0][0]

    running.run()

    assert isinstance(running.last(R2), Failed)
    assert running.text(R1) == "a" * 9
    running.check()


def test_a_request_that_is_over_keeps_no_image() -> None:
    running = Running(context=64)
    prompt, (image,) = mixed("a<cat*5>b")
    encoding = type("Held", (), {})()
    kept = weakref.ref(encoding)
    sampler = running.engine.sampler(prompt, Sampling(), None, None)
    images = (ImageRun(image.start, image.length, encoding),)
    request = PreparedRequest(R1, prompt, 5, sampler, plain_output(), images=images)

    running.do(running.scheduler.submit(request))
    running.run()
    running.passes.clear()
    del encoding, images, request

    assert kept() is None


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
        running.run()
        running.told.clear()
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


def test_an_answer_goes_on_behind_what_was_told_elsewhere() -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc")
    running.submit(R2, "xyz")

    running.run()

    assert (running.text(R1), running.text(R2)) == ("def", "xyz")
    assert running.usage(R1) == Usage(6, 0, content_tokens=6)
    running.check()


def test_what_was_generated_elsewhere_counts_for_the_limit() -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc", max_tokens=4)

    running.run()

    assert running.text(R1) == "d"
    assert running.last(R1) == Finished(R1, FinishReason.LENGTH, Usage(6, 0, content_tokens=4))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 3}, FinishReason.LENGTH),
        ({"stop": ("c",)}, FinishReason.STOP),
    ],
)
def test_an_answer_that_was_complete_elsewhere_ends_at_once(
    options: dict[str, Any], reason: FinishReason
) -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc", **options)

    assert running.scheduler.is_idle
    assert running.last(R1) == Finished(R1, reason, Usage(6, 0, content_tokens=3))
    running.check()


def test_an_answer_too_long_for_this_agents_context_ends_with_its_length() -> None:
    running = Running(context=8)
    running.submit(R1, "abcdef", resumed="abcdef")

    end = running.last(R1)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH


def test_a_stop_text_that_began_elsewhere_is_found() -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc", stop=("cd",))

    running.run()

    assert running.text(R1) == ""
    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(6, 0, content_tokens=4))


def test_only_the_cached_part_of_the_prompt_is_told_when_an_answer_goes_on() -> None:
    running = Running()
    running.submit(R1, "abcdefghijkl", ignore_eos=True, max_tokens=20)
    running.run()

    running.submit(R2, "abcdefghijkl", ignore_eos=True, max_tokens=18, resumed="abcdefghijklabcd")
    running.run()

    assert running.text(R2) == "ef"
    assert running.usage(R2).cached_prompt_tokens == 12


def test_an_answer_that_goes_on_survives_a_pause() -> None:
    running = Running(slots=2, context=64, cells=64)
    running.submit(R1, "aaaa", ignore_eos=True, max_tokens=50)
    running.submit(R2, "bcde", ignore_eos=True, max_tokens=50, resumed="bcdebc")

    running.run()

    assert running.scheduler.figures.pauses
    assert running.text(R2) == ("bcde" * 13)[6:50]
    assert running.usage(R2).content_tokens == 50
    running.check()
