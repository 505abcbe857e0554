"""The model's thread, with engines that need no model."""

import queue
from collections.abc import Generator, Sequence

import pytest
from answers import plain_output, text_of
from engines import HeldEngine

from agent import step_watch
from agent.budget import TILE
from agent.echo import EchoSampler
from agent.embedding import EmbeddingRequest, TokenizedDocument
from agent.engine import Engine
from agent.loop import DecodeLoop, LoopSettings
from agent.prompt import PreparedRequest
from common.errors import ErrorCode, ModelError
from common.ids import RequestId, TokenId
from common.messages import (
    Embedded,
    Event,
    Failed,
    Figures,
    Finished,
    FinishReason,
    Noted,
    Pooling,
    TokenGenerated,
    Unchanged,
    Usage,
)

R1, R2 = RequestId("r1"), RequestId("r2")


class Heard:
    """Remembers what the loop says."""

    def __init__(self) -> None:
        self.engines: queue.Queue[Engine] = queue.Queue()
        self.steps: queue.Queue[Sequence[Event]] = queue.Queue()
        self.figures: queue.Queue[Figures] = queue.Queue()
        self.notes: list[Noted] = []
        self.ends: queue.Queue[BaseException | None] = queue.Queue()

    def loaded(self, engine: Engine, /) -> None:
        self.engines.put(engine)

    def happened(self, events: Sequence[Event], /) -> None:
        self.steps.put(events)

    def noted(self, notes: Sequence[Noted], /) -> None:
        self.notes += notes

    def measured(self, figures: Figures, /) -> None:
        self.figures.put(figures)

    def ended(self, error: BaseException | None, /) -> None:
        self.ends.put(error)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
def loop(heard: Heard, engine: HeldEngine) -> Generator[DecodeLoop]:
    loop = DecodeLoop(lambda: engine, heard)
    loop.start()
    yield loop
    loop.stop()
    engine.open()
    assert loop.join(10)


def request(request_id: RequestId, text: str) -> PreparedRequest:
    prompt = [TokenId(b) for b in text.encode()]
    return PreparedRequest(
        request_id, prompt, 100, EchoSampler(prompt, repeats=False), plain_output()
    )


def test_two_requests_share_each_step(heard: Heard, engine: HeldEngine, loop: DecodeLoop) -> None:
    loop.submit(request(R1, "ab"))
    loop.submit(request(R2, "xy"))
    engine.allow(1)
    first = heard.steps.get(timeout=10)
    engine.allow(1)
    second = heard.steps.get(timeout=10)

    told = [(e.request_id, text_of(e)) for e in second if isinstance(e, TokenGenerated)]
    # The second request came before the first pass or after it, but not later.
    assert {e.request_id for e in first} <= {R1, R2}
    assert [request_id for request_id, _ in told] == [R1, R2]


def test_a_cancel_takes_effect_before_the_next_pass(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop
) -> None:
    loop.submit(request(R1, "abcdef"))
    engine.allow(1)
    heard.steps.get(timeout=10)

    loop.cancel(R1)  # the second pass may have begun, a third may not
    engine.allow(1)

    end = heard.steps.get(timeout=10)[-1]
    if isinstance(end, TokenGenerated):
        end = heard.steps.get(timeout=10)[-1]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.CANCELLED
    assert end.usage.content_tokens <= 2


def test_documents_are_embedded_while_a_stream_runs(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop
) -> None:
    loop.submit(request(R1, "abcdef"))
    engine.allow(1)
    heard.steps.get(timeout=10)
    document = TokenizedDocument("d", [TokenId(7)])
    loop.submit(EmbeddingRequest(R2, (document,), Pooling.LAST, Unchanged()))

    engine.allow(2)  # the second pass may have begun before the document came
    told: list[Event] = []
    while not any(isinstance(event, Embedded) for event in told):
        told += heard.steps.get(timeout=10)

    (embedded,) = (event for event in told if isinstance(event, Embedded))
    assert embedded.vectors == [[7.0, 1.0]]
    assert told[-1] == Finished(R2, FinishReason.STOP, Usage(prompt_tokens=1))
    assert not [event for event in told if event.request_id == R1 and isinstance(event, Finished)]


def test_a_stream_goes_on_while_a_long_document_is_read(heard: Heard, engine: HeldEngine) -> None:
    loop = DecodeLoop(lambda: engine, heard, LoopSettings(longest_gap=0))
    loop.start()
    document = TokenizedDocument("d", [TokenId(7)] * 512)
    try:
        loop.submit(request(R1, "a" * 100))
        engine.allow(1)
        heard.steps.get(timeout=10)
        loop.submit(EmbeddingRequest(R2, (document,), Pooling.LAST, Unchanged()))
        engine.open()
        told: list[Event] = []
        while not any(isinstance(event, Embedded) for event in told):
            told += heard.steps.get(timeout=10)
    finally:
        loop.stop()

    assert len([event for event in told if isinstance(event, TokenGenerated)]) > 10
    assert not any(isinstance(event, Finished) and event.request_id == R1 for event in told)
    assert loop.join(10)


def test_documents_that_wait_can_be_cancelled(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop
) -> None:
    loop.submit(request(R1, "abcdef"))
    engine.allow(1)
    heard.steps.get(timeout=10)
    document = TokenizedDocument("d", [TokenId(7)])

    loop.submit(EmbeddingRequest(R2, (document,) * 1000, Pooling.LAST, Unchanged()))
    loop.cancel(R2)
    engine.open()
    told: list[Event] = []
    while not any(isinstance(e, Finished) and e.request_id == R1 for e in told):
        told += heard.steps.get(timeout=10)

    (end,) = (e for e in told if isinstance(e, Finished) and e.request_id == R2)
    assert end.reason is FinishReason.CANCELLED
    assert end.usage.prompt_tokens < 1000


def test_the_age_of_a_pass_is_known_while_it_runs(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop
) -> None:
    assert loop.step_age is None
    loop.submit(request(R1, "a"))
    engine.allow(1)
    heard.steps.get(timeout=10)  # the second pass waits now, or will soon

    assert loop.step_age is not None
    engine.open()
    figures = heard.figures.get(timeout=10)
    while figures.cells_running:
        figures = heard.figures.get(timeout=10)
    assert figures.cells_cached == 2
    assert figures.prompt_tokens_fed == 1


def test_a_pass_that_hangs_is_over_its_limit_and_a_loop_at_rest_never_is(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watch, "FLOOR", 0.0)  # and passes of this engine take no time
    assert loop.step_limit is None
    loop.submit(request(R1, "a" * TILE))
    engine.allow(3)
    for _ in range(3):
        heard.steps.get(timeout=10)  # now it is known what passes take

    while not loop.look():
        assert heard.steps.empty()

    assert loop.step_limit is not None
    assert loop.step_limit < step_watch.UNMEASURED
    engine.open()
    while loop.step_age is not None:
        pass  # soon
    assert not any(loop.look() for _ in range(10))


def test_a_pass_that_gets_on_is_never_over_its_limit(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watch, "FLOOR", 0.0)
    loop.submit(request(R1, "a" * TILE))
    engine.allow(3)
    for _ in range(3):
        heard.steps.get(timeout=10)

    for _ in range(100):
        engine.progress += 1
        assert not loop.look()


def test_of_the_first_pass_nothing_is_known(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop
) -> None:
    loop.submit(request(R1, "a"))
    engine.is_used.wait(10)

    assert loop.step_limit == step_watch.UNMEASURED


def test_embedding_has_a_limit_too(heard: Heard, loop: DecodeLoop) -> None:
    document = TokenizedDocument("d", [TokenId(7)])
    limits: list[float | None] = []
    heard.happened = lambda _: limits.append(loop.step_limit)  # on the loop's thread

    loop.submit(EmbeddingRequest(R1, (document,), Pooling.LAST, Unchanged()))
    heard.figures.get(timeout=10)
    loop.submit(EmbeddingRequest(R2, (document,), Pooling.LAST, Unchanged()))
    heard.figures.get(timeout=10)

    first, second = limits
    assert first == step_watch.UNMEASURED
    assert second is not None
    assert step_watch.FLOOR <= second < step_watch.UNMEASURED


def test_the_loop_outlives_a_failed_decode(
    heard: Heard, engine: HeldEngine, loop: DecodeLoop
) -> None:
    engine.failures = 1
    loop.submit(request(R1, "ab"))
    engine.open()
    assert list(heard.steps.get(timeout=10)) == [
        Failed(R1, ErrorCode.DECODE_FAILED, "told to fail")
    ]

    loop.submit(request(R2, "x"))

    assert [type(e) for e in heard.steps.get(timeout=10)] == [TokenGenerated]


def test_stopping_ends_the_thread_and_can_be_repeated(heard: Heard, engine: HeldEngine) -> None:
    loop = DecodeLoop(lambda: engine, heard)
    loop.start()

    loop.stop()
    loop.stop()

    assert loop.join(10)
    assert heard.ends.get(timeout=10) is None


def test_a_loop_that_was_never_started_can_be_joined(heard: Heard, engine: HeldEngine) -> None:
    assert DecodeLoop(lambda: engine, heard).join(0)


def test_a_model_that_cannot_be_loaded_is_told(heard: Heard) -> None:
    def load() -> Engine:
        raise ModelError("no such file")

    loop = DecodeLoop(load, heard)
    loop.start()

    assert str(heard.ends.get(timeout=10)) == "no such file"
    assert heard.engines.empty()


def test_an_error_of_our_own_ends_the_thread_and_is_told(heard: Heard, engine: HeldEngine) -> None:
    loop = DecodeLoop(lambda: engine, heard)
    loop.start()
    engine.open()

    loop.submit(request(R1, ""))  # the scheduler's contract forbids an empty prompt

    assert isinstance(heard.ends.get(timeout=10), AssertionError)
