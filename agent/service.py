"""The agent as a whole: the model's thread, the slots and the link, put together.

Runs in one asyncio loop, in a Ray actor or a plain process alike. Its life: load the model and
dial the balancer at once; serve; ``drain``: take nothing new, finish what runs; then stop.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from agent.admission import Admission
from agent.engine import Engine
from agent.link import Link
from agent.loop import DEFAULTS, DecodeLoop, LoopSettings, Work
from agent.prompt import Preparer
from common.errors import ErrorCode, ModelError, RequestError
from common.ids import AgentId, RequestId
from common.messages import (
    PROTOCOL,
    Busy,
    Cancel,
    Embed,
    Event,
    Failed,
    Figures,
    Finished,
    FinishReason,
    Generate,
    Issue,
    Join,
    Status,
    Step,
    ToAgent,
    Usage,
)

log = logging.getLogger(__name__)

STATUS_INTERVAL = 1.0
"""Seconds between two reports while there is work, so that a pass that hangs is seen to grow old."""

GOOD_BYE_TIMEOUT = 2.0
"""Seconds for the last frames and the thread's last pass when the agent stops."""


class Agent:
    def __init__(
        self,
        *,
        balancer: str,
        name: str | None,
        slots: int,
        model_path: str,
        load: Callable[[], Engine],
        loop_settings: LoopSettings = DEFAULTS,
    ) -> None:
        """``balancer``: the websocket address of its agent listener. ``load`` runs on a thread.

        Must be made inside a running asyncio loop.
        """
        self._name = name
        self._slots = slots
        self._model_path = model_path
        self._agent_id = AgentId(uuid.uuid4().hex)
        self._version = 0
        self._issues: tuple[Issue, ...] = ()
        self._figures = Figures()
        self._admission = Admission()
        self._preparer: Preparer | None = None
        self._preparing: dict[RequestId, Future[Work]] = {}
        # More than one, so that a prompt does not wait for somebody's megabyte of documents.
        self._preparation = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
        self._wanted: set[RequestId] = set()
        """Requests that the present link asked for. What came over an earlier one is nobody's."""
        self._asyncio = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._over: asyncio.Future[None] = self._asyncio.create_future()
        self._link = Link(balancer, self)
        self._loop = DecodeLoop(load, self, loop_settings)

    async def run(self) -> None:
        """Serve until ``stop`` or ``drain``, or until it cannot go on.

        Raises ``ModelError`` if the model cannot be loaded, ``LinkRefusedError`` if the balancer
        does not want this agent. When it returns, the model is freed and the link closed.
        """
        self._loop.start()
        link = asyncio.create_task(self._link.run())
        reports = asyncio.create_task(self._report_while_busy())
        try:
            done, _ = await asyncio.wait({link, self._over}, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            reports.cancel()
            self._link.close()
            await asyncio.wait({link}, timeout=GOOD_BYE_TIMEOUT)
            link.cancel()
            await asyncio.gather(link, reports, return_exceptions=True)
            self._loop.stop()
            if not await asyncio.to_thread(self._loop.join, GOOD_BYE_TIMEOUT):
                log.warning("the model's thread is still busy; leaving it behind")
            self._preparation.shutdown(wait=False, cancel_futures=True)

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109
        """Take nothing new, let what runs come to its end for ``timeout`` seconds, then stop."""
        self._admission.draining = True
        self._status_changed()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        self.stop()

    def stop(self) -> None:
        """Make ``run`` return soon; the link's loss tells the balancer about what still runs."""
        if not self._over.done():
            self._over.set_result(None)

    # What the link asks and says (on the asyncio loop)

    def join(self) -> Join:
        return Join(
            protocol=PROTOCOL, agent_id=self._agent_id, name=self._name, status=self.status()
        )

    def status(self) -> Status:
        self._version += 1
        return Status(
            version=self._version,
            slots_desired=self._slots,
            slots_total=self._admission.slots,
            slots_processing=self._admission.processing,
            draining=self._admission.draining,
            model_path=self._model_path,
            issues=self._issues,
            figures=self._figures,
            step_age=self._loop.step_age,
        )

    def received(self, frame: ToAgent, /) -> None:
        match frame:
            case Generate(request_id=request_id) | Embed(request_id=request_id):
                if self._preparer is None or not self._admission.admit(request_id):
                    self._link.send(Step((Busy(request_id),)))
                    return
                self._idle.clear()
                self._wanted.add(request_id)
                self._status_changed()
                self._prepare(self._preparer, frame)
            case Cancel(request_id):
                self._cancel(request_id)

    def lost(self) -> None:
        for request_id in tuple(self._wanted):
            self._cancel(request_id)
        self._wanted.clear()

    # What the model's thread says (on that thread)

    def loaded(self, engine: Engine, /) -> None:
        self._hand_over(self._start_serving, engine.capacity.slots, Preparer(engine))

    def happened(self, events: Sequence[Event], /) -> None:
        self._hand_over(self._tell, events)

    def measured(self, figures: Figures, /) -> None:
        self._hand_over(self._note, figures)

    def ended(self, error: BaseException | None, /) -> None:
        self._hand_over(self._give_up, error)

    def _hand_over(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._asyncio.call_soon_threadsafe(function, *arguments)

    # What follows from it (on the asyncio loop)

    def _start_serving(self, slots: int, preparer: Preparer) -> None:
        self._preparer = preparer
        self._admission.slots = slots
        if not preparer.has_template:
            self._issues = (Issue.UNABLE_TO_FIND_CHAT_TEMPLATE,)
        self._status_changed()

    def _note(self, figures: Figures) -> None:
        self._figures = figures
        self._status_changed()

    async def _report_while_busy(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL)
            if not self._idle.is_set():
                self._status_changed()

    def _give_up(self, error: BaseException | None) -> None:
        self._admission.slots = 0
        if isinstance(error, ModelError):
            self._issues = (Issue.MODEL_CANNOT_BE_LOADED,)
        self._status_changed()
        if error is not None and not self._over.done():
            self._over.set_exception(error)

    def _prepare(self, preparer: Preparer, request: Generate | Embed) -> None:
        request_id = request.request_id
        future: Future[Work] = self._preparation.submit(preparer.prepare, request)
        self._preparing[request_id] = future
        future.add_done_callback(lambda done: self._hand_over(self._prepared, request_id, done))

    def _prepared(self, request_id: RequestId, future: Future[Work]) -> None:
        if self._preparing.get(request_id) is not future:
            return  # cancelled meanwhile, and said so
        del self._preparing[request_id]
        try:
            prepared = future.result()
        except RequestError as error:
            self._tell([Failed(request_id, error.code, error.message)])
        except Exception:
            # A fault of ours, but a fault with this one request: the others go on.
            log.exception("request_id=%s could not be prepared", request_id)
            message = "the prompt could not be prepared"
            self._tell([Failed(request_id, ErrorCode.INTERNAL_ERROR, message)])
        else:
            self._loop.submit(prepared)

    def _cancel(self, request_id: RequestId) -> None:
        future = self._preparing.pop(request_id, None)
        if future is None:
            self._loop.cancel(request_id)
        else:
            future.cancel()
            self._tell([Finished(request_id, FinishReason.CANCELLED, Usage())])

    def _tell(self, events: Sequence[Event]) -> None:
        """Send what the present link asked for, and free the slots of what is over."""
        told = tuple(event for event in events if event.request_id in self._wanted)
        if told:
            self._link.send(Step(told))
        over = [event.request_id for event in events if isinstance(event, Finished | Failed | Busy)]
        if over:
            for request_id in over:
                self._admission.release(request_id)
                self._wanted.discard(request_id)
            if self._admission.is_idle:
                self._idle.set()
            self._status_changed()

    def _status_changed(self) -> None:
        self._link.status_changed()
