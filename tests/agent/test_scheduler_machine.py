"""The scheduler, whatever clients and the model do, in whatever order: what it must keep is said here
a second time, from outside, and compared after each step.

The engine has no model but checks each cell. ``HEADRACE_EXAMPLES`` sets how many histories are played.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from answers import plain_output, text_of
from bodies import PATIENT
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from agent.echo import EchoEngine, EchoSampler
from agent.engine import Chunk, Decoded, ImageRun
from agent.loop import carry_out
from agent.prompt import PreparedRequest
from agent.scheduler import (
    MOST_FAILURES,
    WORTH_SHARING,
    Effect,
    Forget,
    Scheduler,
    Share,
    Start,
    Stop,
)
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, SequenceId, TokenId
from common.messages import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Noted,
    TokenGenerated,
)

CONTEXT = 160
SLOTS = 4
NOWHERE = SequenceId(-1)

IMAGES = {
    "<cat*9>": ("cat", 9, False),
    "<dog*30>": ("dog", 30, False),
    "<map/40>": ("map", 40, True),
}
"""Name, length, and whether it may be fed in parts."""

HEADS = ["", "a" * 9, "a" * 70, "a" * 70, "ba" * 40, "<dog*30>"]
"""How prompts begin, so that they have something to share. The long ones are worth waiting for."""

PIECES = ["a", "b", "ab", "é", "a" * 20, "b" * 9, *IMAGES]
"""How they go on."""


@dataclass(eq=False)
class Asked:
    """A request as its client sees it, and where it stands in the scheduler."""

    request_id: RequestId
    arrival: int
    pieces: Sequence[str]
    prompt: list[TokenId]
    images: tuple[ImageRun, ...]
    max_tokens: int
    stop: tuple[str, ...]
    salt: str
    shares: bool
    repeats: bool
    resumed: int = 0
    """How many tokens of its answer were told elsewhere."""
    sequence: SequenceId = NOWHERE
    told: list[TokenId] = field(default_factory=list[TokenId])
    text: str = ""
    cached: int = 0
    failures: int = 0
    alone_until: int = 0
    skipped: int = 0
    """Passes in a row that had no token for it, though it generates."""

    @property
    def is_new(self) -> bool:
        """It has had no token here."""
        return len(self.told) == self.resumed

    @property
    def tokens(self) -> list[TokenId]:
        """All that is to be fed."""
        return [*self.prompt, *self.told]

    def answer(self) -> tuple[list[TokenId], str, FinishReason]:
        """What its client must be told, if nothing comes between."""
        words = [token for token in self.prompt if token >= 0]
        said: list[TokenId] = []
        while words and (self.repeats or len(said) < len(words)):
            said.append(words[len(said) % len(words)])
            text = bytes(said).decode(errors="ignore")
            if starts := [text.index(stop) for stop in self.stop if stop in text]:
                return said, text[: min(starts)], FinishReason.STOP
            if len(said) >= self.max_tokens or len(self.prompt) + len(said) >= CONTEXT:
                return said, bytes(said).decode(errors="replace"), FinishReason.LENGTH
        return said, bytes(said).decode(errors="replace"), FinishReason.STOP


class WatchedEngine(EchoEngine):
    refuses = False
    """To share."""

    def share(self, source: SequenceId, destination: SequenceId, length: int, /) -> bool:
        return not self.refuses and super().share(source, destination, length)

    def length(self, sequence_id: SequenceId) -> int:
        """How many tokens the sequence holds."""
        return len(self._held.get(sequence_id, ()))

    @property
    def samplers(self) -> set[SequenceId]:
        return set(self._samplers)


def read(pieces: Sequence[str]) -> tuple[list[TokenId], tuple[ImageRun, ...]]:
    """As a prompt, as far as the context allows."""
    tokens: list[TokenId] = []
    images: list[ImageRun] = []
    for piece in pieces:
        if image := IMAGES.get(piece):
            name, length, _ = image
            more = [TokenId(-1 - 1000 * len(IMAGES) * ord(name[0]) - n) for n in range(length)]
        else:
            more = [TokenId(byte) for byte in piece.encode()]
        if len(tokens) + len(more) < CONTEXT:
            if image:
                images.append(ImageRun(len(tokens), len(more), image[0], divisible=image[2]))
            tokens += more
    return tokens, tuple(images)


asked = st.fixed_dictionaries(
    {
        "pieces": st.tuples(
            st.sampled_from(HEADS), st.lists(st.sampled_from(PIECES), min_size=1, max_size=4)
        ).map(lambda told: [told[0], *told[1]]),
        "max_tokens": st.integers(0, 60) | st.just(1000),
        "stop": st.sampled_from([(), (), (), ("bab",), ("é", "aab"), ("a",)]),
        "salt": st.sampled_from(["", "", "other"]),
        "shares": st.sampled_from([True, True, False]),
        "repeats": st.booleans(),
        "resumed": st.sampled_from([0, 0, 0, 1, 7, 30, 200]),
    }
)


class Histories(RuleBasedStateMachine):
    @initialize(
        batch_size=st.integers(10, 200),
        cells=st.sampled_from([CONTEXT, CONTEXT + 20, 2 * CONTEXT, 3 * CONTEXT]),
        sequences=st.integers(SLOTS, 2 * SLOTS),
        most_cached=st.sampled_from([0, 30, CONTEXT, 2 * CONTEXT]),
        shares_cells=st.booleans(),
        shares_part=st.booleans(),
    )
    def start(
        self,
        batch_size: int,
        cells: int,
        sequences: int,
        most_cached: int,
        shares_cells: bool,
        shares_part: bool,
    ) -> None:
        self.engine = WatchedEngine(
            slots=SLOTS,
            context=CONTEXT,
            batch_size=batch_size,
            cells=cells,
            sequences=sequences,
            shares_cells=shares_cells,
            shares_part=shares_part,
        )
        self.scheduler = Scheduler(
            vocabulary=self.engine.vocabulary,
            capacity=self.engine.capacity,
            longest_gap=0.15,
            most_cached=most_cached,
        )
        self.most_cached = most_cached
        self.count = 0
        self.live: dict[RequestId, Asked] = {}
        self.owners: dict[SequenceId, Asked] = {}
        self.salts: dict[SequenceId, str] = {}
        """Of what sequences hold."""
        self.ending: Asked | None = None
        self.has_failed = False
        self.prompt_tokens = 0

    # What clients do

    @rule(several=st.lists(asked, min_size=1, max_size=3))
    def submit(self, several: Sequence[Mapping[str, Any]]) -> None:
        for each in several:
            if len(self.live) < SLOTS:
                self.submit_one(**each)

    def submit_one(
        self,
        *,
        pieces: Sequence[str],
        max_tokens: int,
        stop: tuple[str, ...] = (),
        salt: str = "",
        shares: bool = True,
        repeats: bool = False,
        resumed: int = 0,
    ) -> None:
        """``resumed``: so many of its tokens were told by another agent, if it has so many."""
        self.count += 1
        prompt, images = read(pieces)
        request = Asked(
            RequestId(f"r{self.count:03}"),
            self.count,
            pieces,
            prompt,
            images,
            max_tokens,
            stop,
            salt,
            shares,
            repeats,
        )
        request.told = request.answer()[0][:resumed]
        request.resumed = len(request.told)
        output = plain_output(stop)
        for token in request.told:
            request.text += "".join(each.text for each in output.feed(bytes([token])).segments)
        self.live[request.request_id] = request
        effects = self.scheduler.submit(
            PreparedRequest(
                request.request_id,
                list(prompt),
                max_tokens,
                EchoSampler(prompt, repeats, list(request.told)),
                output,
                cache_salt=salt,
                cache_prompt=shares,
                images=images,
                resumed=tuple(request.told),
            )
        )
        (started,) = [effect for effect in effects if isinstance(effect, Start)]
        assert started.sequence_id not in self.owners, "somebody else's sequence"
        request.sequence = started.sequence_id
        self.owners[request.sequence] = request
        self.do(effects)
        assert self.engine.length(request.sequence) == 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_one(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give_back_and_get_again(self, data: st.DataObject) -> None:
        """What it had is cached, its answer's beginning too."""
        request = self.cancel_one(data.draw(st.sampled_from(sorted(self.live))))
        self.submit_one(
            pieces=request.pieces,
            max_tokens=request.max_tokens,
            stop=request.stop,
            salt=request.salt,
            shares=request.shares,
            repeats=request.repeats,
            resumed=len(request.told),
        )

    def cancel_one(self, request_id: RequestId) -> Asked:
        request = self.live[request_id]
        told = self.do(self.scheduler.cancel(request_id))
        (end,) = told
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.CANCELLED
        shown = request.text
        so_far = bytes(request.told).decode(errors="replace")
        whole = request.answer()[1]
        assert so_far.startswith(shown)
        assert shown in {so_far, whole[: len(shown)]}
        return request

    @rule()
    def cancel_what_is_over_or_never_was(self) -> None:
        for number in range(self.count + 2):
            request_id = RequestId(f"r{number:03}")
            if request_id not in self.live:
                assert self.scheduler.cancel(request_id) == []

    # What the model does

    @rule(
        takes_turns=st.booleans(),
        refuses_to_share=st.sampled_from([False, False, False, True]),
        seconds=st.sampled_from([0.001, 0.02, 0.2, 3.0]),
    )
    def step(self, takes_turns: bool, refuses_to_share: bool, seconds: float) -> None:
        chunks = self.plan(takes_turns=takes_turns, refuses_to_share=refuses_to_share)
        if chunks:
            self.commit(chunks, self.engine.decode(chunks), seconds)

    @rule(seconds=st.sampled_from([0.001, 0.02]), passes=st.integers(2, 12))
    def several_steps(self, seconds: float, passes: int) -> None:
        for _ in range(passes):
            self.step(False, False, seconds)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_token_is_refused(self, data: st.DataObject) -> None:
        chunks = self.plan()
        decoded = self.engine.decode(chunks)
        wanted = sorted(decoded.tokens)
        if wanted:
            refused = data.draw(st.sampled_from(wanted))
            tokens = {each: decoded.tokens[each] for each in wanted if each != refused}
            error = RequestError(ErrorCode.GRAMMAR_REJECTED, "nothing fits")
            self.ending = self.owners[refused]
            decoded = Decoded(tokens, {}, {refused: error})
        self.commit(chunks, decoded, 0.01)
        assert self.ending is None, "the refused one goes on"

    @precondition(lambda self: self.live)
    @rule(times=st.sampled_from([1, 1, MOST_FAILURES + 1]))
    def decodes_fail(self, times: int) -> None:
        for _ in range(times):
            if chunks := self.plan():
                self.fail(chunks)

    def fail(self, chunks: Sequence[Chunk]) -> None:
        self.has_failed = True
        touched = [self.owners[chunk.sequence_id] for chunk in chunks]
        given_up: set[RequestId] = set()
        for request, chunk in zip(touched, chunks, strict=True):
            request.failures += 1
            if len(chunks) == 1 or request.failures > MOST_FAILURES:
                given_up.add(request.request_id)
            else:
                request.alone_until = chunk.position + len(chunk.tokens)
        told = self.do(self.scheduler.fail(chunks, "failed"), may_fail=given_up)
        assert {event.request_id for event in told} == given_up
        assert all(self.engine.length(request.sequence) == 0 for request in touched)

    # What is seen

    def plan(self, *, takes_turns: bool = False, refuses_to_share: bool = False) -> list[Chunk]:
        self.engine.refuses = refuses_to_share
        effects = self.scheduler.make_room()
        told = self.do(effects)
        self.engine.refuses = False
        assert told == [], "making room is nobody's business"
        paused = [
            self.owners[e.sequence_id]
            for e in effects
            if isinstance(e, Forget) and e.sequence_id in self.owners
        ]
        for request in paused:
            younger = [each for each in self.live.values() if each.arrival > request.arrival]
            assert not any(self.engine.length(each.sequence) for each in younger), (
                "not the youngest"
            )
        chunks = self.scheduler.plan(takes_turns=takes_turns)
        assert bool(chunks) == bool(self.live), "stalled"
        self.check_plan(chunks, takes_turns=takes_turns)
        return chunks

    def check_plan(self, chunks: Sequence[Chunk], *, takes_turns: bool) -> None:
        planned = {chunk.sequence_id: chunk for chunk in chunks}
        assert len(planned) == len(chunks)
        for chunk in chunks:
            request = self.owners[chunk.sequence_id]
            end = chunk.position + len(chunk.tokens)
            assert chunk.position == self.engine.length(chunk.sequence_id) < end
            assert list(chunk.tokens) == request.tokens[chunk.position : end]
            assert chunk.wants_token == (end == len(request.tokens))
        first = self.owners[chunks[0].sequence_id] if chunks else None
        is_special = first is not None and (chunks[0].image is not None or self.is_suspect(first))
        for request in self.live.values():
            if self.is_suspect(request):
                continue  # it is fed alone, when it is its turn
            if self.is_generating(request):
                left_out = request.sequence not in planned
                request.skipped = request.skipped + 1 if left_out else 0
                assert not left_out or is_special, "a stream is held up"
                assert request.skipped <= (3 if self.has_failed else 1)
            elif not request.shares and not request.images:
                # It waits for nobody's prefix, so none that is younger is fed before it.
                overtaking = [
                    each
                    for each in map(self.owners.__getitem__, planned)
                    if each.arrival > request.arrival and not self.is_generating(each)
                ]
                assert request.sequence in planned or is_special or not overtaking, "overtaken"

    def is_generating(self, request: Asked) -> bool:
        held = self.engine.length(request.sequence)
        return bool(request.told) and held == len(request.tokens) - 1

    def is_suspect(self, request: Asked) -> bool:
        return self.engine.length(request.sequence) < request.alone_until

    def commit(self, chunks: Sequence[Chunk], decoded: Decoded, seconds: float) -> None:
        for chunk in chunks:
            request = self.owners[chunk.sequence_id]
            self.salts[chunk.sequence_id] = request.salt
            is_row = bool(request.told) and chunk.position == len(request.tokens) - 1
            self.prompt_tokens += 0 if is_row else len(chunk.tokens)
            if request.is_new and chunk.position == 0:
                request.cached = 0
        wanted = {c.sequence_id for c in chunks if c.wants_token}
        asked = {self.owners[each].request_id for each in wanted}
        told = self.do(self.scheduler.commit(chunks, decoded, seconds=seconds))
        assert {event.request_id for event in told} == asked, "each has its token or its end"
        assert self.scheduler.figures.prompt_tokens_fed == self.prompt_tokens

    def do(
        self, effects: Sequence[Effect], *, may_fail: set[RequestId] | None = None
    ) -> list[Event]:
        """Carry out; check all that clients are told. Returns the events."""
        for effect in effects:
            match effect:
                case Share(source, destination, length):
                    taker = self.owners[destination]
                    assert taker.shares, "it wants its prompt read anew"
                    assert self.salts[source] == taker.salt, "another's salt"
                    assert length >= WORTH_SHARING
                    assert length < len(taker.tokens)
                    self.salts[destination] = taker.salt
                    if taker.is_new:
                        most = min(length, len(taker.prompt))
                        taker.cached = 0 if self.engine.refuses else most
                case Stop(sequence_id):
                    gone = self.owners.pop(sequence_id)
                    assert gone.request_id not in self.live, "stopped before its end"
                case Start() | Forget():
                    pass
                case Noted(request_id=request_id):
                    assert request_id in self.live, "operators are told of what is over"
                case TokenGenerated() | Finished() | Failed():
                    self.tell(effect, may_fail or set())
                case _:
                    raise AssertionError(f"of no use here: {effect}")
        events, _ = carry_out(effects, self.scheduler, self.engine)
        return events

    def tell(self, event: Event, may_fail: set[RequestId]) -> None:
        assert event.request_id in self.live, "spoke of the dead"
        request = self.live[event.request_id]
        tokens, text, reason = request.answer()
        match event:
            case TokenGenerated(token=token):
                request.told.append(token)
                request.text += text_of(event)
                assert request.told == tokens[: len(request.told)], "another's token"
                assert text.startswith(request.text), "another's text"
            case Finished():
                del self.live[request.request_id]
                request.text += text_of(event)
                usage = event.usage
                assert usage.content_tokens == len(request.told), "each token counts once"
                assert usage.prompt_tokens == len(request.prompt)
                assert usage.input_image_tokens == sum(each.length for each in request.images)
                assert usage.cached_prompt_tokens < len(request.prompt) + bool(request.resumed)
                if not request.is_new:
                    assert usage.cached_prompt_tokens == request.cached
                if event.reason is not FinishReason.CANCELLED:
                    assert (request.told, request.text, event.reason) == (tokens, text, reason)
            case Failed():
                del self.live[request.request_id]
                if self.ending is request:
                    self.ending = None
                else:
                    assert request.request_id in may_fail, "it has done nothing wrong"
            case _:
                raise AssertionError(f"of no use here: {event}")

    @invariant()
    def the_account_of_cells_is_that_of_the_engine(self) -> None:
        figures = self.scheduler.figures
        assert figures.cells_running + figures.cells_cached == self.engine.used
        assert min(figures.cells_running, figures.cells_cached, figures.cells_free) >= 0

    @invariant()
    def no_more_is_cached_than_may_be(self) -> None:
        assert self.scheduler.figures.cells_cached <= self.most_cached

    @invariant()
    def each_live_request_has_a_sequence_and_nobody_else(self) -> None:
        assert self.scheduler.is_idle == (not self.live)
        assert {request.sequence for request in self.live.values()} == self.engine.samplers
        assert self.owners.keys() == self.engine.samplers

    def teardown(self) -> None:
        """All come to their ends, and in bounded time; then all is free."""
        if not hasattr(self, "live"):
            return
        self.drain()
        for n in range(SLOTS):
            self.submit_one(pieces=["ab", "é" * n, "b"], max_tokens=5, salt=f"{n}")
        assert len(self.live) == SLOTS
        self.drain()

    def drain(self) -> None:
        lengths = (len(each.prompt) + len(each.answer()[0]) for each in self.live.values())
        passes = 0
        most = 10 + 4 * sum(lengths)
        while self.live:
            self.step(False, False, 0.01)
            passes += 1
            assert passes <= most, "they hold each other up"
        figures = self.scheduler.figures
        assert (figures.cells_running, figures.waiting) == (0, 0)
        assert self.scheduler.make_room() == []
        assert self.scheduler.plan() == []
        self.the_account_of_cells_is_that_of_the_engine()
        self.each_live_request_has_a_sequence_and_nobody_else()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    PATIENT, max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "100")), stateful_step_count=30
)
