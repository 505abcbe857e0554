"""The agent as a whole: the model, the slots and the link, put together.

Runs in one asyncio loop. Its life: dial the balancers, load what they want, serve; load something else
when they want that; ``drain``: take nothing new, finish what runs; then stop.

A request is of the link over which it came: what happens with it is told there, and the link's loss
ends it. The slots are for all of them, first come first served.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import monotonic

from agent.admission import OFFER_TIME, Admission, Offer
from agent.host import ModelHost, Models
from agent.link import NO_CREDENTIALS, Credentials, Link
from agent.links import GOOD_BYE_TIMEOUT, Links
from agent.loop import DEFAULTS, LoopSettings, Work
from agent.phases import Phases
from agent.prompt import Preparer
from agent.swap import ModelSwap
from common.errors import ErrorCode, RequestError
from common.faults import fault
from common.ids import AgentId, RequestId
from common.messages import (
    PROTOCOL,
    Busy,
    Cancel,
    Conversation,
    Described,
    Detokenize,
    Detokenized,
    Drain,
    Embed,
    Event,
    Failed,
    Figures,
    Finished,
    FinishReason,
    Generate,
    Join,
    LastEvent,
    Noted,
    SetState,
    Status,
    Step,
    Swap,
    ToAgent,
    Tokenize,
    Tokenized,
    Undrain,
    Usage,
)
from common.models import AgentDesiredState, Application, Download, Phase

log = logging.getLogger(__name__)

STATUS_INTERVAL = 1.0
"""Seconds between two reports while there is work, so that a pass that hangs is seen to grow old."""


class StalledError(Exception):
    """The model's thread hangs; only the end of the process ends it."""


class Agent:
    def __init__(
        self,
        *,
        balancers: Iterable[str],
        name: str | None,
        labels: Sequence[str] = (),
        fleet: str | None = None,
        models: Models,
        swap: ModelSwap,
        loop_settings: LoopSettings = DEFAULTS,
        credentials: Credentials = NO_CREDENTIALS,
        started: float | None = None,
    ) -> None:
        """``balancers``: the websocket addresses of their agent listeners; see ``dial``. ``labels``:
        what operators may call this and other agents by. ``fleet``: whose it is; None: nobody's.
        ``started``: when its process was, by ``time.monotonic``; None: now.

        Must be made inside a running asyncio loop.
        """
        self._name = name
        self._labels = tuple(labels)
        self._fleet = fleet
        self._agent_id = AgentId(uuid.uuid4().hex)
        self._version = 0
        self._figures = Figures()
        self._admission = Admission()
        self._leaves = False
        self._is_held = False
        """An operator drained it."""
        self.has_changed = asyncio.Event()
        """Set with each change of what it is; for whoever waits for one, and clears it."""
        self.is_healthy = True
        """False: its model makes no progress any more, so that ``run`` ends, with an error."""
        self._state: tuple[int, AgentDesiredState] | None = None
        """The newest wish and its number; None: there has been no link since its loss."""
        self._has_joined = False
        self._phases = Phases(started=monotonic() if started is None else started)
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
        self._askers: dict[RequestId, Link] = {}
        """Over which link each request came. What came over a link that is lost is nobody's."""
        self._given_back: set[RequestId] = set()
        """Those of them that must go on elsewhere."""
        self._asyncio = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._over: asyncio.Future[None] = self._asyncio.create_future()
        self._links = Links(balancers, self, credentials)

    @property
    def serves(self) -> bool:
        """A model is loaded, and takes requests or finishes what runs."""
        return self._host.preparer is not None

    @property
    def loads(self) -> bool:
        """A model is read, or warms up; it does not serve yet."""
        return not self.serves and self._host.model_path is not None

    @property
    def download(self) -> Download | None:
        """The file that is fetched now."""
        return self._host.download

    async def run(self) -> None:
        """Serve until ``stop`` or ``drain``, or until it cannot go on.

        Raises ``LinkRefusedError`` if no balancer wants this agent, ``GivenUpError`` if one takes it
        for dead, ``StalledError`` if the model's thread hangs. When it returns, the links are closed
        and the model freed, unless its thread is still busy.
        """
        self._links.start()
        reports = asyncio.create_task(self._look_and_report())
        try:
            await asyncio.wait({self._over})
            self._over.result()
        finally:
            reports.cancel()
            await self._links.close()
            await asyncio.gather(reports, return_exceptions=True)
            self._preparation.shutdown(wait=False, cancel_futures=True)
            self._seeing.shutdown(wait=False, cancel_futures=True)
            if not await self._host.stop(GOOD_BYE_TIMEOUT if self.is_healthy else 0.0):
                log.warning("the model's thread is still busy; leaving it behind")

    def dial(self, balancers: Iterable[str]) -> None:
        """Keep links to these from now on. The link to one that is not among them is closed, and what
        came over it ended; the others are not touched.
        """
        self._links.dial(balancers)

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
        """Make ``run`` return soon; the links' loss tells the balancers about what still runs."""
        if not self._over.done():
            self._over.set_result(None)

    # What the links ask and say

    def join(self, link: Link, /) -> Join:
        self._has_joined = True
        self._note_phase()
        return Join(
            protocol=PROTOCOL,
            agent_id=self._agent_id,
            name=self._name,
            status=self.status(link),
            labels=self._labels,
            fleet=self._fleet,
        )

    def status(self, link: Link, /) -> Status:
        self._version += 1
        loop = self._host.loop
        number = 0 if self._state is None else self._state[0]
        application = self._swap.application
        return Status(
            version=self._version,
            slots_desired=self._swap.choices.slots or 0,
            slots_total=self._admission.slots,
            slots_processing=self._admission.processing,
            slots_elsewhere=self._admission.elsewhere(link),
            draining=self._admission.draining,
            leaving=self._leaves,
            held=self._is_held,
            swapping=self._swap.is_swapping,
            awaits_turn=self._swap.awaits_turn,
            turn_taken=self._swap.turn_taken(link),
            application=application,
            applied=number if application is Application.APPLIED and self._swap.follows else 0,
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
            phase=self._phases.phase,
            phases=self._phases.seconds,
        )

    def description(self) -> Described:
        return self._host.description

    def received(self, link: Link, frame: ToAgent, /) -> None:
        match frame:
            case Generate(request_id=request_id) | Embed(request_id=request_id):
                asker = self._askers.get(request_id)
                if asker is link:
                    return  # repeated
                preparer = self._host.preparer
                if (
                    preparer is None
                    or asker is not None  # what goes by this name is another's
                    or not self._admission.admit(request_id, link)
                ):
                    log.info("request_id=%s refused: no slot is free for it", request_id)
                    link.send(Step((Busy(request_id),)))
                    return
                log.info("request_id=%s taken on", request_id)
                self._idle.clear()
                self._askers[request_id] = link
                self._status_changed()
                self._prepare(preparer, frame)
            case Tokenize(request_id=request_id) | Detokenize(request_id):
                asker = self._askers.get(request_id)
                if asker is None:
                    self._askers[request_id] = link
                    self._consult(frame)
                elif asker is not link:
                    message = "a request of another balancer goes by this name"
                    link.send(Step((Failed(request_id, ErrorCode.INTERNAL_ERROR, message),)))
            case Cancel(request_id):
                if self._askers.get(request_id) is link:
                    self._cancel(request_id)
            case SetState(number, state):
                self._want(number, state)
            case Swap(turn):
                self._host.turn(turn, link)
                self._tell_if_idle()
            case Drain():
                self._hold(is_held=True)
            case Undrain():
                self._hold(is_held=False)

    def _hold(self, *, is_held: bool) -> None:
        if self._is_held != is_held:
            log.info("an operator has %s this agent", "drained" if is_held else "undrained")
            self._is_held = is_held
            self.changed()

    def _want(self, number: int, state: AgentDesiredState) -> None:
        """The newest wish counts, whoever tells it first. Told again it is nothing new: a model that
        has been given up would be tried again for each balancer that comes.
        """
        if self._state is None or (number >= self._state[0] and (number, state) != self._state):
            self._state = number, state
            self._host.want(state)

    def lost(self, link: Link, /) -> None:
        self._swap.link_lost(link)
        self._admission.forget(link)
        if not self._links.is_linked:
            self._state = None  # the next balancer may have forgotten what was wanted
        lost = [request_id for request_id, asker in self._askers.items() if asker is link]
        for request_id in lost:
            del self._askers[request_id]
            self._given_back.discard(request_id)
        for request_id in lost:
            self._cancel(request_id)
        self._status_changed()

    def failed(self, error: BaseException, /) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    # What the model says

    def changed(self) -> None:
        self.has_changed.set()
        self._admission.slots = self._host.slots
        self._admission.draining = (
            self._leaves or self._is_held or self._swap.is_swapping or not self.is_healthy
        )
        self._note_phase()
        self._status_changed()

    def described(self) -> None:
        for link in self._links:
            link.description_changed()

    def happened(self, events: Sequence[Event], /) -> None:
        self._tell(events)

    def noted(self, notes: Sequence[Noted], /) -> None:
        for note in notes:
            if (asker := self._askers.get(note.request_id)) is not None:
                asker.send(note)

    def give_back(self) -> None:
        # What only takes the vocabulary is over in no time, and no other agent is asked for it.
        for request_id in self._askers.keys() - self._consulting.keys():
            self._given_back.add(request_id)
            self._cancel(request_id)

    def measured(self, figures: Figures, /) -> None:
        self._figures = figures
        self._status_changed()

    def broke_down(self, error: BaseException, /) -> None:
        self.changed()
        self.failed(error)

    # What follows from it

    def _status_changed(self) -> None:
        for link in self._links:
            link.status_changed()

    def _note_phase(self) -> None:
        if self._leaves:
            phase = Phase.DRAINING
        else:
            phase = self._host.phase if self._has_joined else Phase.PROCESS
        if phase is not self._phases.phase:
            log.info("phase=%s has begun", phase)
        self._phases.enter(phase, now=monotonic())

    async def _look_and_report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL)
            loop = self._host.loop
            if loop is not None and loop.look():
                self._stalled(StalledError("the model makes no progress any more"))
            if not self._idle.is_set():
                self._status_changed()

    def _stalled(self, error: StalledError) -> None:
        if self.is_healthy:
            log.error("%s; the agent ends", error)
            self.is_healthy = False
            self.broke_down(error)

    def _prepare(self, preparer: Preparer, request: Generate | Embed) -> None:
        request_id = request.request_id
        threads = self._seeing if _has_images(request) else self._preparation
        future: Future[Work] = threads.submit(
            preparer.prepare, request, lambda: request_id in self._askers
        )
        self._preparing[request_id] = future
        self._preparations += 1
        future.add_done_callback(
            lambda done: self._host.hand_over(self._prepared, request_id, done)
        )

    def _consult(self, request: Tokenize | Detokenize) -> None:
        """It needs the model's vocabulary only, so it waits for no slot."""
        request_id = request.request_id
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
        except Exception as error:
            log.error("request_id=%s fault=%s in its tokens", request_id, fault(error))  # noqa: TRY400
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
        except Exception as error:
            # A fault of ours, but a fault with this one request: the others go on.
            log.error("request_id=%s fault=%s in its prompt", request_id, fault(error))  # noqa: TRY400
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
        """Send each link what it asked for, and free the slots of what is over."""
        told: dict[Link, list[Event]] = {}
        for event in events:
            if (asker := self._askers.get(event.request_id)) is not None:
                told.setdefault(asker, []).append(self._as_given_back(event))
        over = [event.request_id for event in events if isinstance(event, LastEvent)]
        for request_id in over:
            log.info("request_id=%s over, its slot is free", request_id)
            offer = self._admission.release(request_id)
            asker = self._askers.pop(request_id, None)
            self._given_back.discard(request_id)
            if offer is not None:
                self._asyncio.call_later(OFFER_TIME, self._withdraw, offer)
                if asker is not None:
                    # Before it hears of the end, and sends its next request in vain.
                    asker.send(self.status(asker))
        if over:
            self._status_changed()
        for link, its in told.items():
            link.send(Step(tuple(its)))
        if over:
            self._tell_if_idle()

    def _withdraw(self, offer: Offer) -> None:
        if self._admission.withdraw(offer):
            self._status_changed()

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
