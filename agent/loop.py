"""The thread that owns the model: inbox, plan, decode, commit, outbox, again and again.

It decides nothing: the scheduler does. Other threads talk to it through ``submit``, ``cancel`` and
``stop``; it talks to them through the two callbacks, which it calls on its own thread.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from agent.engine import Engine
from agent.prompt import PreparedRequest
from agent.scheduler import Effect, Forget, Scheduler, Start
from common.errors import DecodeError
from common.ids import RequestId
from common.messages import Cancel, Event

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who is told what happens. Called on the loop's thread: hand over and return."""

    def loaded(self, engine: Engine, /) -> None: ...

    def happened(self, events: Sequence[Event], /) -> None:
        """What one pass brought forth."""
        ...

    def ended(self, error: BaseException | None, /) -> None:
        """The thread is over: None because it was told to stop, else because it could not go on.

        ``ModelError`` means that the model could not be loaded.
        """
        ...


class DecodeLoop:
    def __init__(self, load: Callable[[], Engine], listener: Listener) -> None:
        self._load = load
        self._listener = listener
        self._inbox: queue.SimpleQueue[PreparedRequest | Cancel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="decode-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: PreparedRequest) -> None:
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
            engine = self._load()
            try:
                self._listener.loaded(engine)
                self._decode_until_stopped(engine)
            finally:
                engine.close()
        except BaseException as caught:
            error = caught
        self._listener.ended(error)

    def _decode_until_stopped(self, engine: Engine) -> None:
        scheduler = Scheduler(
            vocabulary=engine.vocabulary,
            sequences=engine.slots,
            context=engine.context,
            batch_size=engine.batch_size,
        )
        while self._receive(scheduler, engine):
            chunks = scheduler.plan()
            if not chunks:
                continue
            try:
                sampled = engine.decode(chunks)
            except DecodeError as error:
                log.warning("a decode of %d sequences failed: %s", len(chunks), error)
                effects = scheduler.fail([chunk.sequence_id for chunk in chunks], str(error))
            else:
                effects = scheduler.commit(chunks, sampled)
            self._carry_out(effects, engine)

    def _receive(self, scheduler: Scheduler, engine: Engine) -> bool:
        """Take what came since the last pass; wait for something if there is nothing to decode.

        False: stop now.
        """
        effects: list[Effect] = []
        block = scheduler.is_idle
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                break
            block = False
            match command:
                case None:
                    return False
                case Cancel(request_id):
                    effects += scheduler.cancel(request_id)
                case PreparedRequest():
                    effects += scheduler.submit(command)
        self._carry_out(effects, engine)
        return True

    def _carry_out(self, effects: Sequence[Effect], engine: Engine) -> None:
        events: list[Event] = []
        for effect in effects:
            match effect:
                case Start(sequence_id, prompt, sampling):
                    engine.start(sequence_id, prompt, sampling)
                case Forget(sequence_id):
                    engine.forget(sequence_id)
                case _:
                    events.append(effect)
        if events:
            self._listener.happened(events)
