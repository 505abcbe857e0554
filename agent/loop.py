"""The thread that owns the model: inbox, plan, decode, commit, outbox, again and again.

Documents to be embedded are read between the passes of the scheduler, some tokens at a time.

It decides nothing: the scheduler does. Other threads talk to it through ``submit``, ``cancel`` and
``stop``; it talks to them through the two callbacks, which it calls on its own thread.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from agent.embedding import Batch, Embedder, EmbeddingQueue, EmbeddingRequest
from agent.engine import Capacity, Chunk, Engine
from agent.prompt import PreparedRequest
from agent.scheduler import Effect, Forget, Scheduler, Share, Start, Stop
from agent.step_watch import UNMEASURED, DocumentCosts, Step, StepWatch, step_limit
from common.errors import DecodeError, RequestError
from common.ids import RequestId
from common.messages import Cancel, Event, Figures, Noted

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who is told what happens. Called on the loop's thread: hand over and return."""

    def loaded(self, engine: Engine, /) -> None: ...

    def happened(self, events: Sequence[Event], /) -> None:
        """What one pass brought forth."""
        ...

    def noted(self, notes: Sequence[Noted], /) -> None:
        """What the scheduler decided."""
        ...

    def measured(self, figures: Figures, /) -> None:
        """How the scheduler does: now and then while it works, and when it comes to rest."""
        ...

    def ended(self, error: BaseException | None, /) -> None:
        """The thread is over: None because it was told to stop, else because it could not go on.

        ``ModelError`` means that the model could not be loaded.
        """
        ...


Work: TypeAlias = PreparedRequest | EmbeddingRequest

FIGURES_INTERVAL = 0.5
"""Seconds between two reports to the listener while there is work."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    longest_gap: float = 0.15
    """Seconds between two tokens of a stream while prompts are fed, if that can be had."""
    cache_tokens: int | None = None
    """Tokens that finished requests may keep; None: as many as one request can have. Attention
    looks at every cell in use, so what is cached slows down what runs, if only a little.
    """

    def most_cached(self, capacity: Capacity) -> int:
        return capacity.context if self.cache_tokens is None else self.cache_tokens


DEFAULTS = LoopSettings()


class DecodeLoop:
    def __init__(
        self,
        load: Callable[[], Engine],
        listener: Listener,
        settings: LoopSettings = DEFAULTS,
    ) -> None:
        self._load = load
        self._listener = listener
        self._settings = settings
        self._engine: Engine | None = None
        self._step: Step | None = None
        """The newest one; None while there is nothing to be done."""
        self._step_numbers = itertools.count()
        self._watch = StepWatch()
        """Of the thread that calls ``look``."""
        self._document_costs = DocumentCosts()
        self._batch: Batch | None = None
        """Of documents, the one that the embedder has begun."""
        self._inbox: queue.SimpleQueue[Work | Cancel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="decode-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> bool:
        """To be called once a second, always on the same thread. True: the model makes no progress,
        and will make none.
        """
        return self._watch.look(self._step, progress=self._progress, now=time.monotonic())

    @property
    def step_age(self) -> float | None:
        """Seconds since the newest pass began or, as far as looks tell, got on; None while there is
        nothing to be done.
        """
        step = self._step
        if step is None:
            return None
        return self._watch.age(step, progress=self._progress, now=time.monotonic())

    @property
    def step_limit(self) -> float | None:
        """What ``step_age`` may be at most, unless all is lost."""
        step = self._step
        return None if step is None else step.limit

    @property
    def _progress(self) -> int:
        return 0 if self._engine is None else self._engine.progress

    def _begin(self, limit: float) -> None:
        self._step = Step(next(self._step_numbers), time.monotonic(), limit)

    def submit(self, request: Work) -> None:
        """Run the request. The caller holds a slot for it, which bounds the inbox."""
        self._inbox.put(request)

    def cancel(self, request_id: RequestId) -> None:
        """Takes effect before the next pass; its ``Finished`` follows unless it is over already."""
        self._inbox.put(Cancel(request_id))

    def stop(self) -> None:
        """End the thread after the pass that runs now. May be called more than once."""
        self._inbox.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; False if it is still busy after ``timeout`` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            engine = self._engine = self._load()
            try:
                self._listener.loaded(engine)
                self._decode_until_stopped(engine)
            finally:
                self._begin(UNMEASURED)
                engine.close()
                self._step = None
        except BaseException as caught:
            error = caught
        self._listener.ended(error)

    def _decode_until_stopped(self, engine: Engine) -> None:
        scheduler = Scheduler(
            vocabulary=engine.vocabulary,
            capacity=engine.capacity,
            longest_gap=self._settings.longest_gap,
            most_cached=self._settings.most_cached(engine.capacity),
        )
        embedder = engine.embedder
        documents = EmbeddingQueue(
            capacity=engine.capacity.slots,
            batch_size=embedder.batch_size,
            most_documents=embedder.most_documents,
        )
        told = time.monotonic()
        while self._receive(scheduler, documents, engine):
            batch = documents.plan()
            self._carry_out(scheduler.make_room(), scheduler, engine)
            chunks = scheduler.plan(takes_turns=batch is not None)
            if chunks:
                self._pass(chunks, scheduler, engine)
            if batch is not None and (spare := scheduler.spare_tokens) != 0:
                self._embed(batch, documents, embedder, most_tokens=spare)
            now = time.monotonic()
            if (scheduler.is_idle and documents.is_idle) or now - told > FIGURES_INTERVAL:
                told = now
                self._listener.measured(scheduler.figures)

    def _pass(self, chunks: Sequence[Chunk], scheduler: Scheduler, engine: Engine) -> None:
        self._begin(step_limit(scheduler.expected(chunks)))
        started = time.monotonic()
        try:
            decoded = engine.decode(chunks)
        except DecodeError as error:
            log.warning("a decode of %d sequences failed: %s", len(chunks), error)
            effects = scheduler.fail(chunks, str(error))
        else:
            effects = scheduler.commit(chunks, decoded, seconds=time.monotonic() - started)
        self._carry_out(effects, scheduler, engine)

    def _embed(
        self,
        batch: Batch,
        documents: EmbeddingQueue,
        embedder: Embedder,
        *,
        most_tokens: int | None,
    ) -> None:
        size = sum(map(len, batch.tokens))
        self._begin(step_limit(self._document_costs.expected(size)))
        started = time.monotonic()
        try:
            if batch is not self._batch:
                self._batch = batch
                self._document_costs.began()
                embedder.begin(batch.tokens, batch.pooling)
            vectors = embedder.advance(most_tokens)
        except (DecodeError, RequestError) as error:
            log.warning("embedding %d documents failed: %s", len(batch.documents), error)
            events = documents.fail(error)
        else:
            self._document_costs.spent(time.monotonic() - started)
            events = documents.commit(vectors)
            if not batch.open:
                self._document_costs.completed(size)
        if events:
            self._listener.happened(events)

    def _receive(self, scheduler: Scheduler, documents: EmbeddingQueue, engine: Engine) -> bool:
        """Take what came since the last pass; wait for something if there is nothing to decode.

        False: stop now.
        """
        effects: list[Effect] = []
        block = scheduler.is_idle and documents.is_idle
        if block:
            self._step = None
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                break
            if block:
                self._begin(UNMEASURED)
            block = False
            match command:
                case None:
                    return False
                case Cancel(request_id):
                    effects += scheduler.cancel(request_id)
                    effects += documents.cancel(request_id)
                case PreparedRequest():
                    effects += scheduler.submit(command)
                case EmbeddingRequest():
                    effects += documents.submit(command)
        self._carry_out(effects, scheduler, engine)
        return True

    def _carry_out(self, effects: Sequence[Effect], scheduler: Scheduler, engine: Engine) -> None:
        events, notes = carry_out(effects, scheduler, engine)
        if events:
            self._listener.happened(events)
        if notes:
            self._listener.noted(notes)


def carry_out(
    effects: Sequence[Effect], scheduler: Scheduler, engine: Engine
) -> tuple[list[Event], list[Noted]]:
    """Have the engine do what the scheduler decided; return what is to be told to clients, and to
    operators.
    """
    events: list[Event] = []
    notes: list[Noted] = []
    for effect in effects:
        match effect:
            case Start(sequence_id, sampler):
                engine.start(sequence_id, sampler)
            case Share(source, destination, length):
                if not engine.share(source, destination, length):
                    scheduler.not_shared(destination)
            case Stop(sequence_id):
                engine.stop(sequence_id)
            case Forget(sequence_id):
                engine.forget(sequence_id)
            case Noted():
                notes.append(effect)
            case _:
                events.append(effect)
    return events, notes
