"""The agent as a whole: the model, the slots and the link, put together.

Runs in one asyncio loop, in a Ray actor or a plain process alike. Its life: dial the balancer, load
what it wants, serve; load something else when it wants that; ``drain``: take nothing new, finish
what runs; then stop.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from agent.admission import Admission
from agent.host import ModelHost, Models
from agent.link import NO_CREDENTIALS, Credentials, Link
from agent.loop import DEFAULTS, LoopSettings, Work
from agent.prompt import Preparer
from agent.swap import ModelSwap
from common.errors import ErrorCode, RequestError
from common.ids import AgentId, RequestId
from common.messages import (
    PROTOCOL,
    Busy,
    Cancel,
    Conversation,
    Described,
    Detokenize,
    Detokenized,
    Embed,
    Event,
    Failed,
    Figures,
    Finished,
    FinishReason,
    Generate,
    Join,
    LastEvent,
    SetState,
    Status,
    Step,
    Swap,
    ToAgent,
    Tokenize,
    Tokenized,
    Usage,
)
from common.models import Application

log = logging.getLogger(__name__)

STATUS_INTERVAL = 1.0
"""Seconds between two reports while there is work, so that a pass that hangs is seen to grow old."""

GOOD_BYE_TIMEOUT = 2.0
"""Seconds for the last frames and the thread's last pass when the agent stops."""


class StalledError(Exception):
    """The model's thread hangs; only the end of the process ends it."""


class Agent:
    def __init__(
        self,
        *,
        balancer: str,
        name: str | None,
        labels: Sequence[str] = (),
        models: Models,
        swap: ModelSwap,
        loop_settings: LoopSettings = DEFAULTS,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """``balancer``: the websocket address of its agent listener. ``labels``: what operators may
        call this and other agents by.

        Must be made inside a running asyncio loop.
        """
        self._name = name
        self._labels = tuple(labels)
        self._agent_id = AgentId(uuid.uuid4().hex)
        self._version = 0
        self._figures = Figures()
        self._admission = Admission()
        self._leaves = False
        self.has_changed = asyncio.Event()
        """Set with each change of what it is; for whoever waits for one, and clears it."""
        self.is_healthy = True
        """False: its model makes no progress any more, so that ``run`` ends, with an error."""
        self._state_number = 0
        """Of the newest wish that came over the present link."""
        self._swap = swap
        self._host = ModelHost(models, swap, self, loop_settings)
        self._preparing: dict[RequestId, Future[Work]] = {}
        self._consulting: dict[RequestId, Future[Tokenized | Detokenized]] = {}
        self._preparations = 0
        """Calls on the threads that prepare, cancelled ones too: they use the model's vocabulary."""
        # More than one, so that a prompt does not wait for somebody's megabyte of documents.
        self._preparation = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
        # Encoding takes seconds on a CPU, and is done one image after the other.
        self._seeing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="see")
        self._wanted: set[RequestId] = set()
        """Requests that the present link asked for. What came over an earlier one is nobody's."""
        self._given_back: set[RequestId] = set()
        """Those of them that must go on elsewhere."""
        self._asyncio = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._over: asyncio.Future[None] = self._asyncio.create_future()
        self._link = Link(balancer, self, credentials)

    @property
    def serves(self) -> bool:
        """A model is loaded, and takes requests or finishes what runs."""
        return self._host.preparer is not None

    async def run(self) -> None:
        """Serve until ``stop`` or ``drain``, or until it cannot go on.

        Raises ``LinkRefusedError`` if the balancer does not want this agent, ``StalledError`` if the
        model's thread hangs. When it returns, the link is closed and the model freed, unless its
        thread is still busy.
        """
        link = asyncio.create_task(self._link.run())
        reports = asyncio.create_task(self._look_and_report())
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
            self._preparation.shutdown(wait=False, cancel_futures=True)
            self._seeing.shutdown(wait=False, cancel_futures=True)
            if not await self._host.stop(GOOD_BYE_TIMEOUT if self.is_healthy else 0.0):
                log.warning("the model's thread is still busy; leaving it behind")

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109
        """Take nothing new, let what runs come to its end for ``timeout`` seconds, have the rest go on
        elsewhere, then stop.
        """
        self._leaves = True
        self.changed()
        if not await self._is_idle_within(timeout):
            self.give_back()
            await self._is_idle_within(GOOD_BYE_TIMEOUT)
        self.stop()

    async def _is_idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()

    def stop(self) -> None:
        """Make ``run`` return soon; the link's loss tells the balancer about what still runs."""
        if not self._over.done():
            self._over.set_result(None)

    # What the link asks and says

    def join(self) -> Join:
        return Join(
            protocol=PROTOCOL,
            agent_id=self._agent_id,
            name=self._name,
            status=self.status(),
            labels=self._labels,
        )

    def status(self) -> Status:
        self._version += 1
        loop = self._host.loop
        application = self._swap.application
        return Status(
            version=self._version,
            slots_desired=self._swap.choices.slots or 0,
            slots_total=self._admission.slots,
            slots_processing=self._admission.processing,
            draining=self._admission.draining,
            leaving=self._leaves,
            swapping=self._swap.is_swapping,
            awaits_turn=self._swap.awaits_turn,
            turn_taken=self._swap.turn_taken,
            application=application,
            applied=self._state_number
            if application is Application.APPLIED and self._swap.follows
            else 0,
            model_path=self._host.model_path,
            model_names=self._host.model_names,
            output_format=self._host.output_format,
            uses_chat_template_override=self._host.description.chat_template_override is not None,
            download=self._host.download,
            issues=self._swap.issues,
            fingerprint=self._host.fingerprint,
            figures=self._figures,
            step_age=None if loop is None else loop.step_age,
            step_limit=None if loop is None else loop.step_limit,
        )

    def description(self) -> Described:
        return self._host.description

    def received(self, frame: ToAgent, /) -> None:
        match frame:
            case Generate(request_id=request_id) | Embed(request_id=request_id):
                if request_id in self._wanted:
                    return  # repeated
                preparer = self._host.preparer
                if preparer is None or not self._admission.admit(request_id):
                    self._link.send(Step((Busy(request_id),)))
                    return
                self._idle.clear()
                self._wanted.add(request_id)
                self._link.status_changed()
                self._prepare(preparer, frame)
            case Tokenize(request_id=request_id) | Detokenize(request_id):
                if request_id not in self._wanted:
                    self._consult(frame)
            case Cancel(request_id):
                self._cancel(request_id)
            case SetState(number, state):
                self._state_number = number
                self._host.want(state)
            case Swap(turn):
                self._host.turn(turn)
                self._tell_if_idle()

    def lost(self) -> None:
        self._swap.link_lost()
        self._state_number = 0
        for request_id in tuple(self._wanted):
            self._cancel(request_id)
        self._wanted.clear()
        self._given_back.clear()
        self._consulting.clear()

    # What the model says

    def changed(self) -> None:
        self.has_changed.set()
        self._admission.slots = self._host.slots
        self._admission.draining = self._leaves or self._swap.is_swapping or not self.is_healthy
        self._link.status_changed()

    def described(self) -> None:
        self._link.description_changed()

    def happened(self, events: Sequence[Event], /) -> None:
        self._tell(events)

    def give_back(self) -> None:
        # What only takes the vocabulary is over in no time, and no other agent is asked for it.
        for request_id in self._wanted - self._consulting.keys():
            self._given_back.add(request_id)
            self._cancel(request_id)

    def measured(self, figures: Figures, /) -> None:
        self._figures = figures
        self._link.status_changed()

    def broke_down(self, error: BaseException, /) -> None:
        self.changed()
        if not self._over.done():
            self._over.set_exception(error)

    # What follows from it

    async def _look_and_report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL)
            loop = self._host.loop
            if loop is not None and loop.look():
                self._stalled(StalledError("the model makes no progress any more"))
            if not self._idle.is_set():
                self._link.status_changed()

    def _stalled(self, error: StalledError) -> None:
        if self.is_healthy:
            log.error("%s; the agent ends", error)
            self.is_healthy = False
            self.broke_down(error)

    def _prepare(self, preparer: Preparer, request: Generate | Embed) -> None:
        request_id = request.request_id
        threads = self._seeing if _has_images(request) else self._preparation
        future: Future[Work] = threads.submit(
            preparer.prepare, request, lambda: request_id in self._wanted
        )
        self._preparing[request_id] = future
        self._preparations += 1
        future.add_done_callback(
            lambda done: self._host.hand_over(self._prepared, request_id, done)
        )

    def _consult(self, request: Tokenize | Detokenize) -> None:
        """It needs the model's vocabulary only, so it waits for no slot."""
        request_id = request.request_id
        self._wanted.add(request_id)
        preparer = self._host.preparer
        if preparer is None:
            message = "the agent has no model at the moment"
            self._tell([Failed(request_id, ErrorCode.NO_AGENTS, message)])
            return
        future = self._preparation.submit(preparer.consult, request)
        self._consulting[request_id] = future
        self._preparations += 1
        future.add_done_callback(
            lambda done: self._host.hand_over(self._consulted, request_id, done)
        )

    def _consulted(self, request_id: RequestId, future: Future[Tokenized | Detokenized]) -> None:
        self._preparations -= 1
        if self._consulting.get(request_id) is not future:  # nobody waits for it any longer
            self._tell_if_idle()
            return
        del self._consulting[request_id]
        try:
            self._tell([future.result()])
        except RequestError as error:
            self._tell([Failed(request_id, error.code, error.message)])
        except Exception:
            log.exception("request_id=%s: a fault in its tokens", request_id)
            message = "the tokens could not be computed"
            self._tell([Failed(request_id, ErrorCode.INTERNAL_ERROR, message)])

    def _prepared(self, request_id: RequestId, future: Future[Work]) -> None:
        self._preparations -= 1
        if self._preparing.get(request_id) is not future:  # cancelled meanwhile, and said so
            self._tell_if_idle()
            return
        del self._preparing[request_id]
        try:
            prepared = future.result()
        except RequestError as error:
            self._tell([Failed(request_id, error.code, error.message, error.figures)])
        except Exception:
            # A fault of ours, but a fault with this one request: the others go on.
            log.exception("request_id=%s could not be prepared", request_id)
            message = "the prompt could not be prepared"
            self._tell([Failed(request_id, ErrorCode.INTERNAL_ERROR, message)])
        else:
            # It holds a slot, and no model is freed before all slots are free.
            assert self._host.loop is not None
            self._host.loop.submit(prepared)

    def _cancel(self, request_id: RequestId) -> None:
        future = self._preparing.pop(request_id, None) or self._consulting.pop(request_id, None)
        if future is None:
            if self._host.loop is not None:
                self._host.loop.cancel(request_id)
        else:
            future.cancel()  # it may run already; else it never will
            self._tell([Finished(request_id, FinishReason.CANCELLED, Usage())])

    def _tell(self, events: Sequence[Event]) -> None:
        """Send what the present link asked for, and free the slots of what is over."""
        told = tuple(
            self._as_given_back(event) for event in events if event.request_id in self._wanted
        )
        if told:
            self._link.send(Step(told))
        over = [event.request_id for event in events if isinstance(event, LastEvent)]
        if over:
            for request_id in over:
                self._admission.release(request_id)
                self._wanted.discard(request_id)
                self._given_back.discard(request_id)
            self._link.status_changed()
            self._tell_if_idle()

    def _as_given_back(self, event: Event) -> Event:
        match event:
            case Finished(request_id, FinishReason.CANCELLED) if request_id in self._given_back:
                return Busy(request_id)
            case _:
                return event

    def _tell_if_idle(self) -> None:
        if self._admission.is_idle and not self._preparations:
            self._idle.set()
            self._host.idle()


def _has_images(request: Generate | Embed) -> bool:
    if isinstance(request, Embed) or not isinstance(request.prompt, Conversation):
        return False
    return bool(request.prompt.images)
