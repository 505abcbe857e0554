"""Continuous batching: which tokens to feed next, and what came of it.

One pass is ``make_room`` -> ``plan`` -> ``Engine.decode`` -> ``commit`` (or ``fail``). Planning
changes nothing that a failed decode would have to undo. ``submit`` and ``cancel`` come between
passes only, else a sequence ID in the plan could already be somebody else's. No I/O here, no clock
and no model.

Effects come in one list, in the order in which they must be carried out: ``Start``, ``Share``,
``Stop`` and ``Forget`` are for the engine, the events are for the client, ``Noted`` is for operators.

| a request is | and it is found in | it leaves by |
|---|---|---|
| waiting, for cells or for a prefix that is being fed | ``_waiting``; holds no cells | ``make_room`` |
| ingesting its prompt, or after a pause what it had | ``_active`` | ``commit`` |
| generating | ``_active``, with ``is_generating`` | the end; short cells: back to waiting |
| over | nowhere; its sequence may stay cached | |

Always true: the oldest request can go on; what an older request needs is taken from cached
sequences first, then from the youngest request, which waits and is fed again later.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agent.budget import TILE, PromptBudget
from agent.engine import Capacity, Chunk, Decoded, Sampler, Vocabulary
from agent.kv import KvCache, Prefix
from agent.prompt import PreparedRequest
from agent.rates import Rates
from agent.request import ActiveRequest
from common.errors import ErrorCode
from common.ids import RequestId, SequenceId
from common.messages import (
    Event,
    Failed,
    Figures,
    Finished,
    FinishReason,
    Note,
    Noted,
    TokenGenerated,
    ToolCallsEnded,
)

WORTH_SHARING = 8
"""A shorter prefix is fed again: that costs less than keeping account of it."""

WORTH_WAITING = TILE
"""Waiting for a prefix that is being fed costs about one pass, which feeds this much anyway."""

SMALLEST_SHARE = 16
"""Prompt tokens that a prompt gets in a pass at least, if it gets any and has so many."""

HEADROOM = 16
"""Cells that must be left for each active request when another one is admitted, so that it is
not paused again at once."""

MOST_FAILURES = 3
"""Failed decodes after which a request is given up, even if it never failed alone."""


@dataclass(frozen=True, slots=True)
class Start:
    sequence_id: SequenceId
    sampler: Sampler


@dataclass(frozen=True, slots=True)
class Share:
    """If the engine cannot, ``not_shared`` must be called before ``plan``."""

    source: SequenceId
    destination: SequenceId
    length: int


@dataclass(frozen=True, slots=True)
class Stop:
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class Forget:
    sequence_id: SequenceId


Effect: TypeAlias = Start | Share | Stop | Forget | Event | Noted


class Scheduler:
    def __init__(
        self, *, vocabulary: Vocabulary, capacity: Capacity, longest_gap: float, most_cached: int
    ) -> None:
        """``longest_gap``: seconds between two tokens of a stream while prompts are fed, if that
        can be had. ``most_cached``: cells that finished requests may keep.
        """
        assert capacity.slots <= capacity.sequences <= capacity.batch_size
        assert capacity.context <= capacity.cells
        self._vocabulary = vocabulary
        self._context = capacity.context
        self._batch_size = capacity.batch_size
        self._kv = KvCache(capacity, most_cached=most_cached)
        self._budget = PromptBudget(longest_gap=longest_gap, batch_size=capacity.batch_size)
        self._rates = Rates()
        self._arrivals = 0
        self._requests: dict[RequestId, ActiveRequest] = {}
        self._active: dict[SequenceId, ActiveRequest] = {}
        self._waiting: list[ActiveRequest] = []  # by arrival
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._pauses = 0
        self._has_failed = False
        """A decode has failed, and there may be requests that are suspected of it."""
        self._suspect_was_fed = False
        self._prompts_were_fed = False
        """In the latest pass."""
        self._image_was_fed = False
        """In the latest pass that fed prompts, but for those of suspects."""

    @property
    def is_idle(self) -> bool:
        return not self._requests

    @property
    def spare_tokens(self) -> int | None:
        """How many tokens others may have the model compute before the next pass without making
        streams wait for too long; None: as many as they like.
        """
        rows, _ = self._split()
        if not rows:
            return None
        return 0 if self._prompts_were_fed else self._budget.tokens(len(rows))

    @property
    def figures(self) -> Figures:
        cells = self._kv.cells
        return Figures(
            cells_total=cells.capacity,
            cells_running=cells.running,
            cells_cached=cells.cached,
            prompt_tokens_fed=self._prompt_tokens,
            prompt_tokens_cached=self._cached_tokens,
            pauses=self._pauses,
            waiting=len(self._waiting),
            prefill_rate=self._rates.prefill,
            decode_rate=self._rates.decode,
            concurrency=self._rates.concurrency,
            step_seconds=self._rates.step_seconds,
            step_tokens=self._rates.step_tokens,
        )

    def submit(self, request: PreparedRequest) -> list[Effect]:
        """Begin a request. The caller owns the slots and submits no more than there are."""
        assert 0 < len(request.prompt) < self._context
        assert request.request_id not in self._requests
        tokens = [*request.prompt, *request.resumed]
        sequence_id, dropped = self._kv.acquire(tokens, salt=request.cache_salt)
        self._arrivals += 1
        active = ActiveRequest(
            request.request_id,
            sequence_id,
            self._arrivals,
            tokens,
            len(request.prompt),
            request.max_tokens,
            request.output,
            request.marks,
            request.cache_salt,
            request.cache_prompt,
            request.images,
            len(request.resumed),
        )
        self._requests[request.request_id] = active
        self._waiting.append(active)
        effects: list[Effect] = [*map(Forget, dropped), Start(sequence_id, request.sampler)]
        if request.resumed:
            effects += self._finish_if_complete(active)  # its context may be smaller here
        return effects

    def cancel(self, request_id: RequestId) -> list[Effect]:
        """End the request, with what it has used. Nothing to do if it is over already."""
        request = self._requests.get(request_id)
        return [] if request is None else self._finish(request, FinishReason.CANCELLED)

    def make_room(self) -> list[Effect]:
        """See to it that the next pass has its cells, and let requests in that wait."""
        effects: list[Effect] = []
        self._admit(effects)
        while True:
            rows, prompts = self._split()
            parts = self._prompt_tokens_wanted(rows, prompts)
            wanted = len(rows) + max(parts, _next_image(prompts))
            while self._kv.cells.free < wanted and (dropped := self._kv.evict()):
                effects += map(Forget, dropped)
            needed = len(rows) + _next_image(prompts[:1])  # fed whole, so that it can go on
            if self._kv.cells.free >= max(1, needed) or not self._active:
                return effects
            youngest = max(self._active.values(), key=lambda request: request.arrival)
            self._pauses += 1
            why = f"it gave up its {youngest.fed} KV cells to older ones, to be fed again later"
            self._pause(youngest, Noted(youngest.request_id, Note.PAUSED, why), effects)

    def not_shared(self, sequence_id: SequenceId) -> None:
        """The engine could not carry out the ``Share`` to this sequence: it is fed instead."""
        request = self._active.get(sequence_id)
        if request is None:
            return  # paused at once: it will be fed anyway
        self._kv.cells.drop(sequence_id)
        request.fed = 0
        if request.is_new:
            request.cached = 0

    def plan(self, *, takes_turns: bool = False) -> list[Chunk]:
        """Chunks for one decode; none if there is nothing to do.

        ``takes_turns``: others have tokens to be computed too (``spare_tokens``), so that beside
        streams prompts are fed in every second pass only.

        0. After a failed decode those it touched are fed alone, the oldest first, by turns with
           all others.
        1. An image is fed alone, if it must be so whole, that of the oldest prompt which has come to
           one. The next pass is for the streams, and the next that feeds prompts for others' texts.
        2. Requests that generate go first, one token each, so that no prompt stalls a stream.
        3. Prompts share what the budget allows. In order of their age each gets up to half of what
           is left, so that a short one does not wait for a long one; then the oldest the rest.
        """
        rows, prompts = self._split()
        if takes_turns and rows and self._prompts_were_fed:
            prompts = []
        alone: list[Chunk] = []
        if suspects := self._suspects():
            rows = [request for request in rows if not request.is_suspect]
            prompts = [request for request in prompts if not request.is_suspect]
            alone = self._plan_alone(suspects, budget=self._budget.tokens(len(rows)))
            if alone and not (self._suspect_was_fed and (rows or prompts)):
                return alone
        at_image = [request for request in prompts if request.image is not None]
        prompts = [request for request in prompts if request.image is None]
        others = bool(prompts or (rows and self._prompts_were_fed))
        budget = self._budget.tokens(len(rows))
        image = self._plan_alone(at_image[:1], budget=budget, kept=len(rows))
        if image and not (self._image_was_fed and others):
            return image
        chunks = [self._chunk(request, 1) for request in rows]
        left = min(self._prompt_tokens_wanted(rows, prompts), self._kv.cells.free - len(rows))
        counts: list[int] = []
        for n, request in enumerate(prompts):
            share = left if n == len(prompts) - 1 else max(left // 2, SMALLEST_SHARE)
            counts.append(min(request.ahead, share, left))
            left -= counts[-1]
        for n, request in enumerate(prompts):
            more = min(request.ahead - counts[n], left)
            left -= more
            if counts[n] + more:
                chunks.append(self._chunk(request, counts[n] + more))
        return chunks or alone

    def expected(self, chunks: Sequence[Chunk]) -> float | None:
        """Seconds that their decode is likely to take, None if nobody knows yet."""
        rows = sum(self._active[chunk.sequence_id].is_generating for chunk in chunks)
        fed = sum(len(chunk.tokens) for chunk in chunks)
        return self._budget.expected(rows=rows, prompt_tokens=fed - rows)

    def commit(self, chunks: Sequence[Chunk], decoded: Decoded, *, seconds: float) -> list[Effect]:
        """Take note that the chunks were decoded in so many seconds, and of what was sampled."""
        effects: list[Effect] = []
        rows = 0
        fed = 0
        self._suspect_was_fed = self._active[chunks[0].sequence_id].is_suspect
        for chunk in chunks:
            request = self._active[chunk.sequence_id]
            rows += request.is_generating
            fed += len(chunk.tokens)
            request.fed += len(chunk.tokens)
            self._kv.cells.grow(chunk.sequence_id, len(chunk.tokens))
            if chunk.wants_token:
                self._take(request, decoded, effects)
        self._prompts_were_fed = fed > rows
        if self._prompts_were_fed and not self._suspect_was_fed:
            self._image_was_fed = chunks[0].image is not None
        self._prompt_tokens += fed - rows
        self._budget.measured(seconds=seconds, rows=rows, prompt_tokens=fed - rows)
        self._rates.measured(seconds=seconds, rows=rows, prompt_tokens=fed - rows)
        return effects

    def fail(self, chunks: Sequence[Chunk], message: str) -> list[Effect]:
        """The decode of these chunks failed, and their sequences are not to be relied on.

        1. A request that was alone in it is at fault: it ends with the message.
        2. So does one that took part in too many failures.
        3. The others begin anew, each fed alone until it is past the point of failure.
        """
        effects: list[Effect] = []
        self._has_failed = True
        self._suspect_was_fed = self._active[chunks[0].sequence_id].is_suspect  # it had its turn
        if not self._suspect_was_fed and chunks[0].image is not None:
            self._image_was_fed = True
        for chunk in chunks:
            request = self._active[chunk.sequence_id]
            request.failures += 1
            if len(chunks) == 1 or request.failures > MOST_FAILURES:
                effects += self._abort(request, ErrorCode.DECODE_FAILED, message)
            else:
                request.alone_until = chunk.position + len(chunk.tokens)
                why = f"a pass with {len(chunks)} requests failed: it is fed again, alone"
                self._pause(request, Noted(request.request_id, Note.DECODE_FAILED, why), effects)
        return [*effects, *map(Forget, self._kv.trim())]

    # Letting in and pausing

    def _admit(self, effects: list[Effect]) -> None:
        """First come, first served, but for those that wait for a prefix: they let others pass."""
        if not self._waiting:
            return
        fed = {sequence_id: request.fed for sequence_id, request in self._active.items()}
        promised = sum(request.remaining for request in self._active.values())
        still_waiting: list[ActiveRequest] = []
        full = False
        for request in self._waiting:
            if full:
                if request.waits_for is None:  # else what it waits for itself is told already
                    self._keep_waiting(request, Note.WAITS_FOR_CELLS, effects)
                still_waiting.append(request)
                continue
            prefix = None
            if request.shares:
                prefix = self._kv.find(request.tokens, fed, salt=request.salt, whole=request.whole)
            if prefix is not None and prefix.expected - prefix.ready >= WORTH_WAITING:
                self._keep_waiting(request, Note.WAITS_FOR_PREFIX, effects)
                still_waiting.append(request)
                continue
            if prefix is not None and prefix.ready < WORTH_SHARING:
                prefix = None
            if self._active and not self._fits(request, prefix, promised):
                full = True
                self._keep_waiting(request, Note.WAITS_FOR_CELLS, effects)
                still_waiting.append(request)
                continue
            self._activate(request, prefix, effects)
            fed[request.sequence_id] = request.fed
            promised += request.remaining
        self._waiting = still_waiting

    def _fits(self, request: ActiveRequest, prefix: Prefix | None, promised: int) -> bool:
        """Are there cells for all that is active, this one too, once cached ones are dropped?"""
        needed = len(request.tokens)
        if prefix is not None and not self._kv.is_cached(prefix.source):
            needed -= prefix.ready  # these cells are counted as running already
        headroom = HEADROOM * (len(self._active) + 1)
        cells = self._kv.cells
        return cells.running + promised + needed + headroom <= cells.capacity

    def _activate(
        self, request: ActiveRequest, prefix: Prefix | None, effects: list[Effect]
    ) -> None:
        self._active[request.sequence_id] = request
        self._kv.admit(request.sequence_id, request.tokens, salt=request.salt)
        request.fed = 0
        if prefix is not None:
            request.fed = prefix.ready
            self._kv.cells.share(prefix.source, request.sequence_id, prefix.ready)
            effects.append(Share(prefix.source, request.sequence_id, prefix.ready))
        if request.is_new:  # else it was paused: what it was spared at first stays true
            request.cached = min(request.fed, request.prompt_length)
        request.waits_for = None
        effects.append(
            Noted(
                request.request_id,
                Note.ADMITTED,
                self._origin(request, prefix),
                request.prompt_length,
                request.cached,
            )
        )

    def _origin(self, request: ActiveRequest, prefix: Prefix | None) -> str:
        """Of its tokens, in words."""
        told = f"it has {len(request.tokens)} tokens"
        if prefix is None:
            return f"{told}; no other sequence holds how they begin"
        holder = "finished" if self._kv.is_cached(prefix.source) else "running"
        return f"{told}; the first {request.fed} are shared with a {holder} request"

    def _keep_waiting(self, request: ActiveRequest, note: Note, effects: list[Effect]) -> None:
        if request.waits_for is note:
            return
        request.waits_for = note
        if note is Note.WAITS_FOR_PREFIX:
            why = "another prompt that begins alike is being fed: this one will share it"
        else:
            cells = self._kv.cells
            why = (
                f"{cells.running} of {cells.capacity} KV cells are in use by "
                f"{len(self._active)} requests, and it has {len(request.tokens)} tokens"
            )
        effects.append(Noted(request.request_id, note, why))

    def _pause(self, request: ActiveRequest, note: Noted, effects: list[Effect]) -> None:
        """Give up its cells; its tokens are kept, to be fed again later. ``note``: why."""
        self._kv.empty(request.sequence_id)
        effects.append(Forget(request.sequence_id))
        del self._active[request.sequence_id]
        effects.append(note)
        request.fed = 0
        insort(self._waiting, request, key=lambda request: request.arrival)

    # The parts of a pass

    def _split(self) -> tuple[list[ActiveRequest], list[ActiveRequest]]:
        """The active requests that generate, and those whose prompts are fed, oldest first."""
        rows: list[ActiveRequest] = []
        prompts: list[ActiveRequest] = []
        for request in self._active.values():
            (rows if request.is_generating else prompts).append(request)
        prompts.sort(key=lambda request: request.arrival)
        return rows, prompts

    def _suspects(self) -> list[ActiveRequest]:
        if not self._has_failed:
            return []
        suspects = [request for request in self._active.values() if request.is_suspect]
        self._has_failed = bool(suspects or self._waiting)
        return suspects

    def _prompt_tokens_wanted(
        self, rows: Sequence[ActiveRequest], prompts: Sequence[ActiveRequest]
    ) -> int:
        if not prompts:
            return 0
        return min(self._budget.tokens(len(rows)), sum(request.ahead for request in prompts))

    def _plan_alone(
        self, requests: Sequence[ActiveRequest], *, budget: int, kept: int = 0
    ) -> list[Chunk]:
        """A pass for the oldest of these that can go on, with text or with an image.

        ``kept``: cells that must be left.
        """
        free = self._kv.cells.free - kept
        for request in sorted(requests, key=lambda request: request.arrival):
            count = _next_image([request]) or min(request.ahead, budget, free)
            if 0 < count <= free:
                return [self._chunk(request, count)]
        return []

    def _chunk(self, request: ActiveRequest, count: int) -> Chunk:
        end = request.fed + count
        return Chunk(
            request.sequence_id,
            request.fed,
            request.tokens[request.fed : end],
            wants_token=end == len(request.tokens),
            image=request.image,
        )

    # What came of it

    def _take(self, request: ActiveRequest, decoded: Decoded, effects: list[Effect]) -> None:
        sequence_id = request.sequence_id
        refused = decoded.refused.get(sequence_id)
        if refused is not None:
            effects += self._abort(request, refused.code, refused.message)
            return
        token = decoded.tokens[sequence_id]
        if self._vocabulary.is_end(token):
            effects += self._finish(request, FinishReason.STOP)
            return
        if request.is_new:
            self._cached_tokens += request.cached
        request.tokens.append(token)
        piece = self._vocabulary.piece(token) or request.marks.get(token, b"")
        told = request.output.feed(piece)
        logprobs = decoded.logprobs.get(sequence_id) if decoded.logprobs else None
        effects.append(
            TokenGenerated(request.request_id, token, told.segments, logprobs, told.calls)
        )
        effects += (ToolCallsEnded(request.request_id, result) for result in told.results)
        effects += self._finish_if_complete(request)

    def _finish_if_complete(self, request: ActiveRequest) -> list[Effect]:
        if request.output.stopped:
            return self._finish(request, FinishReason.STOP)
        if request.generated >= request.max_tokens or len(request.tokens) >= self._context:
            return self._finish(request, FinishReason.LENGTH)
        return []

    def _finish(self, request: ActiveRequest, reason: FinishReason) -> list[Effect]:
        told = request.output.flush(is_cut=reason is FinishReason.LENGTH)
        effects: list[Effect] = [
            *(ToolCallsEnded(request.request_id, result) for result in told.results),
            Finished(request.request_id, reason, request.usage, told.segments, told.calls),
        ]
        del self._requests[request.request_id]
        effects.append(Stop(request.sequence_id))
        if self._active.pop(request.sequence_id, None) is None:
            self._waiting.remove(request)
        held = request.tokens[: request.fed]
        if held:
            dropped = self._kv.rest(request.sequence_id, held, salt=request.salt)
        else:
            dropped = self._kv.release(request.sequence_id)
        effects += map(Forget, dropped)
        return effects

    def _abort(self, request: ActiveRequest, code: ErrorCode, message: str) -> list[Effect]:
        """End an active request with an error; what its sequence holds is of no further use."""
        del self._requests[request.request_id]
        del self._active[request.sequence_id]
        return [
            Failed(request.request_id, code, message),
            Stop(request.sequence_id),
            *map(Forget, self._kv.release(request.sequence_id)),
            *map(Forget, self._kv.trim()),
        ]


def _next_image(prompts: Sequence[ActiveRequest]) -> int:
    """How many tokens the first image has that is next and must be fed whole; 0: there is none."""
    images = (request.image for request in prompts)
    whole = (image.length for image in images if image is not None and not image.divisible)
    return next(whole, 0)
