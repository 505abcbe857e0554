"""Continuous batching, with an engine that has no model."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent.echo import END, ByteVocabulary, EchoEngine
from agent.engine import Chunk
from agent.prompt import PreparedRequest
from agent.scheduler import PROMPT_BUDGET, Effect, Forget, Scheduler, Start
from common.errors import ErrorCode
from common.ids import RequestId, SequenceId, TokenId
from common.messages import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Sampling,
    TokenGenerated,
    Usage,
)

R1, R2 = RequestId("r1"), RequestId("r2")


def request(
    request_id: RequestId, text: str, *, max_tokens: int = 100, stop: tuple[str, ...] = ()
) -> PreparedRequest:
    prompt = [TokenId(byte) for byte in text.encode()]
    return PreparedRequest(request_id, prompt, max_tokens, Sampling(), stop)


class Running:
    """A scheduler with an echo engine: carries out effects, remembers what clients were told."""

    def __init__(self, *, sequences: int = 2, context: int = 64, batch_size: int = 512) -> None:
        self.engine = EchoEngine(slots=sequences, context=context)
        self.engine.batch_size = batch_size
        self.scheduler = Scheduler(
            vocabulary=ByteVocabulary(),
            sequences=sequences,
            context=context,
            batch_size=batch_size,
        )
        self.told: list[Event] = []
        self.passes: list[list[Chunk]] = []

    def do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(sequence_id, prompt, sampling):
                    self.engine.start(sequence_id, prompt, sampling)
                case Forget(sequence_id):
                    self.engine.forget(sequence_id)
                case _:
                    self.told.append(effect)

    def submit(self, request: PreparedRequest) -> None:
        self.do(self.scheduler.submit(request))

    def step(self) -> None:
        chunks = self.scheduler.plan()
        self.passes.append(chunks)
        self.do(self.scheduler.commit(chunks, self.engine.decode(chunks)))

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.step()

    def text(self, request_id: RequestId) -> str:
        return "".join(
            event.text
            for event in self.told
            if event.request_id == request_id and isinstance(event, TokenGenerated | Finished)
        )

    def last(self, request_id: RequestId) -> Event:
        return [event for event in self.told if event.request_id == request_id][-1]


def test_requests_of_several_clients_share_each_decode() -> None:
    running = Running()
    running.submit(request(R1, "abc"))
    running.submit(request(R2, "xyz"))

    running.run()

    assert [len(chunks) for chunks in running.passes] == [2, 2, 2, 2]
    assert (running.text(R1), running.text(R2)) == ("abc", "xyz")


def test_what_generates_goes_before_a_long_prompt() -> None:
    running = Running(batch_size=4)
    running.submit(request(R1, "a"))
    running.step()

    running.submit(request(R2, "123456"))

    chunks = running.scheduler.plan()
    assert [(chunk.sequence_id, list(chunk.tokens)) for chunk in chunks] == [
        (0, [ord("a")]),
        (1, [ord("1"), ord("2"), ord("3")]),
    ]


def test_a_long_prompt_is_fed_in_bounded_chunks_while_a_stream_goes_on() -> None:
    running = Running(context=2000, batch_size=512)
    running.submit(request(R1, "a" * 20))
    running.step()
    running.submit(request(R2, "b" * 1000))

    while running.scheduler.plan()[-1].sequence_id == 1 and len(running.passes) < 4:
        running.step()

    fed = [sum(len(c.tokens) for c in chunks if c.sequence_id == 1) for chunks in running.passes]
    assert fed[1:4] == [PROMPT_BUDGET] * 3
    assert all(chunks[0].sequence_id == 0 for chunks in running.passes)
    assert len(running.text(R1)) == 4


def test_only_the_last_chunk_of_a_prompt_asks_for_a_token() -> None:
    running = Running(batch_size=2, sequences=1)
    running.submit(request(R1, "abcde"))

    running.run()

    assert [chunks[0].wants_token for chunks in running.passes[:3]] == [False, False, True]


def test_the_end_token_ends_a_request_and_is_not_counted() -> None:
    running = Running()
    running.submit(request(R1, "ab"))

    running.run()

    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(2, 0, 2))


def test_max_tokens_ends_a_request() -> None:
    running = Running()
    running.submit(request(R1, "abcdef", max_tokens=2))

    running.run()

    assert running.text(R1) == "ab"
    assert running.last(R1) == Finished(R1, FinishReason.LENGTH, Usage(6, 0, 2))


def test_the_context_limit_ends_a_request() -> None:
    running = Running(context=8)
    running.submit(request(R1, "abcdef"))

    running.run()

    assert running.last(R1) == Finished(R1, FinishReason.LENGTH, Usage(6, 0, 2))
    assert max(chunk.position for chunks in running.passes for chunk in chunks) < 8


def test_a_stop_text_ends_a_request_and_stays_hidden() -> None:
    running = Running()
    running.submit(request(R1, "one, two", stop=(", ",)))

    running.run()

    assert running.text(R1) == "one"
    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(8, 0, 5))


def test_text_held_back_for_a_stop_text_comes_with_the_end() -> None:
    running = Running()
    running.submit(request(R1, "one,", stop=(", ",)))

    running.run()

    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(4, 0, 4), ",")


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    running = Running()
    running.submit(request(R1, "é"))

    running.run()

    assert [e.text for e in running.told if isinstance(e, TokenGenerated)] == ["", "é"]


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_cancelled_request_ends_before_the_next_pass_with_its_usage(passes: int) -> None:
    running = Running(sequences=1, batch_size=3)
    running.submit(request(R1, "abcdef"))
    for _ in range(passes):
        running.step()

    running.do(running.scheduler.cancel(R1))

    assert running.last(R1) == Finished(
        R1, FinishReason.CANCELLED, Usage(6, 0, max(0, passes - 1)), ""
    )
    assert running.scheduler.plan() == []
    running.submit(request(R2, "xy"))  # the sequence is free and empty again
    running.run()
    assert running.text(R2) == "xy"


def test_cancelling_does_not_change_another_stream() -> None:
    running = Running()
    running.submit(request(R1, "abcdef"))
    running.submit(request(R2, "uvwxyz"))
    running.step()

    running.do(running.scheduler.cancel(R1))
    running.run()

    assert running.text(R2) == "uvwxyz"


def test_cancelling_what_is_over_does_nothing() -> None:
    running = Running()
    running.submit(request(R1, "a"))
    running.run()

    assert running.scheduler.cancel(R1) == []


def test_a_failed_decode_ends_only_what_it_fed() -> None:
    running = Running(batch_size=2)
    running.submit(request(R1, "abcd"))
    running.submit(request(R2, "x"))
    chunks = running.scheduler.plan()
    assert [chunk.sequence_id for chunk in chunks] == [0]

    running.do(running.scheduler.fail([chunk.sequence_id for chunk in chunks], "out of memory"))
    running.run()

    assert running.last(R1) == Failed(R1, ErrorCode.DECODE_FAILED, "out of memory")
    assert running.text(R2) == "x"


@given(
    prompts=st.lists(st.text(min_size=1, max_size=12), max_size=8),
    sequences=st.integers(1, 4),
    batch_size=st.integers(4, 16),
    max_tokens=st.integers(1, 60),
)
def test_every_client_is_told_its_own_text(
    prompts: list[str], sequences: int, batch_size: int, max_tokens: int
) -> None:
    running = Running(sequences=sequences, context=128, batch_size=batch_size)
    waiting = [
        request(RequestId(f"r{n}"), prompt.encode(errors="replace").decode(), max_tokens=max_tokens)
        for n, prompt in enumerate(prompts)
    ]
    free = sequences
    for n, each in enumerate(waiting):
        while free == 0:
            running.step()
            free = sequences - (n - sum(isinstance(e, Finished) for e in running.told))
        running.submit(each)
        free -= 1

    running.run()

    for each in waiting:
        data = bytes(each.prompt)[:max_tokens]
        assert running.text(each.request_id) == data.decode(errors="replace")


class Histories(RuleBasedStateMachine):
    """Whatever clients and the model do, in whatever order."""

    SEQUENCES = 3

    @initialize(batch_size=st.integers(3, 9))
    def start(self, batch_size: int) -> None:
        self.running = Running(sequences=self.SEQUENCES, context=24, batch_size=batch_size)
        self.count = 0
        self.live: set[RequestId] = set()

    @rule(text=st.text("abc", min_size=1, max_size=20), max_tokens=st.integers(1, 30))
    def submit(self, text: str, max_tokens: int) -> None:
        if len(self.live) < self.SEQUENCES:
            self.count += 1
            request_id = RequestId(f"r{self.count}")
            self.live.add(request_id)
            self.running.submit(request(request_id, text, max_tokens=max_tokens))

    @rule()
    def step(self) -> None:
        self.running.step()
        self.observe()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.live:
            request_id = data.draw(st.sampled_from(sorted(self.live)))
            self.running.do(self.running.scheduler.cancel(request_id))
            self.observe()

    @rule()
    def fail(self) -> None:
        ids: list[SequenceId] = [chunk.sequence_id for chunk in self.running.scheduler.plan()]
        self.running.do(self.running.scheduler.fail(ids, "failed"))
        self.observe()

    def observe(self) -> None:
        for event in self.running.told:
            assert event.request_id in self.live, "spoke of the dead"
            if isinstance(event, Finished | Failed):
                self.live.remove(event.request_id)
        self.running.told.clear()

    @invariant()
    def idle_only_when_nothing_lives(self) -> None:
        assert self.running.scheduler.is_idle == (not self.live)

    @invariant()
    def a_plan_fits_and_leaves_nobody_out_that_generates(self) -> None:
        chunks = self.running.scheduler.plan()
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.running.engine.batch_size
        assert bool(chunks) == bool(self.live), "stalled"


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_echo_engines_end_token_is_silent() -> None:
    vocabulary = ByteVocabulary()

    assert vocabulary.is_end(END)
    assert vocabulary.piece(END) == b""
