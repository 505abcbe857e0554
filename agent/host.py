"""Finds, loads and replaces this agent's model as ``agent.swap`` decides.

Everything here runs on the asyncio loop; what takes long runs on threads and comes back as an
event. A loaded model belongs to its decode loop's thread, and is freed there before the next one
is loaded.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, assert_never

from agent.engine import Engine
from agent.loop import DecodeLoop, LoopSettings
from agent.model_files import ModelFileError
from agent.prompt import Preparer
from agent.swap import (
    Effect,
    Find,
    GiveBack,
    LimitDrain,
    Load,
    ModelSwap,
    Retry,
    Setup,
    StopFinding,
    Target,
    Unload,
    UseTemplate,
)
from agent.template import ChatTemplate
from common.errors import ModelError, ProjectorError, RequestError
from common.messages import Described, Event, Figures, Noted
from common.models import (
    AgentDesiredState,
    AgentIssue,
    Download,
    HuggingFaceModel,
    IssueKind,
    LocalModel,
    ModelReference,
    NoModel,
    Phase,
    UrlModel,
    names,
)
from common.references import describe

log = logging.getLogger(__name__)


class Models(Protocol):
    """Where models come from. Every method blocks, and is called on a thread."""

    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        /,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> str:
        """The path of the file, fetched if need be. Raises ``ModelFileError``; after ``stop`` has
        been set, soon, whatever it likes.
        """
        ...

    def check(self, setup: Setup, /) -> None:
        """What can be said beside a model that serves. Raises ``ModelError``."""
        ...

    def load(self, setup: Setup, warms_up: Callable[[], None], /) -> Engine:
        """Called on the thread that will own the engine. ``warms_up``: to be called when the weights
        are there, and only a first pass is to be made yet. Raises ``ModelError``.
        """
        ...


class Owner(Protocol):
    """Who is told, on the asyncio loop."""

    def changed(self) -> None:
        """Of the status."""
        ...

    def described(self) -> None: ...

    def happened(self, events: Sequence[Event], /) -> None: ...

    def noted(self, notes: Sequence[Noted], /) -> None: ...

    def measured(self, figures: Figures, /) -> None: ...

    def give_back(self) -> None:
        """What runs must go on elsewhere; tell ``idle`` when nothing runs."""
        ...

    def broke_down(self, error: BaseException, /) -> None:
        """A fault of ours, or of the model's thread: this agent cannot go on."""
        ...


NOTHING = Described(metadata=None, chat_template_override=None)


class ModelHost:
    def __init__(
        self, models: Models, swap: ModelSwap, owner: Owner, settings: LoopSettings
    ) -> None:
        """Must be made inside a running asyncio loop."""
        self._models = models
        self._swap = swap
        self._owner = owner
        self._settings = settings
        self._asyncio = asyncio.get_running_loop()
        self._finder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model-files")
        self._stop_finding = threading.Event()
        self._retry: asyncio.TimerHandle | None = None
        self._drain_limit: asyncio.TimerHandle | None = None
        self._running: _Running | None = None
        """The model that is loaded, is being loaded, or is about to be freed."""
        self._then: Setup | None = None
        """What is to be loaded when that one has been freed."""
        self._frees = False
        self.preparer: Preparer | None = None
        """Of the model that serves."""
        self.download: Download | None = None
        self.description = NOTHING

    @property
    def loop(self) -> DecodeLoop | None:
        """Of the model that serves, or is being loaded or freed."""
        return None if self._running is None else self._running.loop

    @property
    def slots(self) -> int:
        """0 while no model serves."""
        return 0 if self.preparer is None else self.preparer.slots

    @property
    def model_path(self) -> str | None:
        return None if self._running is None else self._running.setup.model_path

    @property
    def output_format(self) -> str:
        return "" if self.preparer is None else self.preparer.format.name

    @property
    def fingerprint(self) -> str:
        """Empty while no model serves."""
        return "" if self.preparer is None else self.preparer.fingerprint

    @property
    def model_names(self) -> tuple[str, ...]:
        return () if self._running is None else tuple(names(self._running.setup.target.model))

    @property
    def phase(self) -> Phase:
        """How far it is with what it is to serve; while the model is changed it has begun to serve."""
        if self.preparer is not None or self._swap.is_swapping:
            return Phase.READY
        if self._running is None:
            return Phase.DOWNLOAD
        return Phase.WARM_UP if self._running.warms_up else Phase.LOAD

    def want(self, state: AgentDesiredState) -> None:
        self._carry_out(self._swap.want(state))

    def turn(self, number: int, link: Hashable) -> None:
        self._carry_out(self._swap.turn(number, link))

    def idle(self) -> None:
        if effects := self._swap.idle():
            if self._drain_limit is not None:
                self._drain_limit.cancel()
            self._carry_out(effects)

    async def stop(self, timeout: float) -> bool:  # noqa: ASYNC109
        """Free what is loaded; False if its thread is still busy after so many seconds."""
        self._stop_finding.set()
        for timer in (self._retry, self._drain_limit):
            if timer is not None:
                timer.cancel()
        self._finder.shutdown(wait=False, cancel_futures=True)
        running, self._running = self._running, None
        if running is None:
            return True
        running.loop.stop()
        return await asyncio.to_thread(running.loop.join, timeout)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        if effects and self._retry is not None:
            self._retry.cancel()  # it goes on another way
        for effect in effects:
            match effect:
                case Find(target):
                    self._find(target)
                case StopFinding():
                    self._stop_finding.set()
                case Load(setup):
                    self._free(then=setup)
                case Unload():
                    self._free(then=None)
                case UseTemplate(template, embeddings_only):
                    self._use_template(template, embeddings_only=embeddings_only)
                case LimitDrain(after):
                    self._drain_limit = self._asyncio.call_later(after, self._drained_long_enough)
                case GiveBack():
                    self._owner.give_back()
                case Retry(after):
                    log.info("the model is tried again in %g s", after)
                    self._retry = self._asyncio.call_later(after, self._try_again)
                case _:
                    assert_never(effect)
        self._owner.changed()

    def _try_again(self) -> None:
        self._carry_out(self._swap.retry())

    def _drained_long_enough(self) -> None:
        self._carry_out(self._swap.drained_long_enough())

    # Finding

    def _find(self, target: Target) -> None:
        stop = self._stop_finding = threading.Event()
        self._finder.submit(self._find_on_thread, target, stop)

    def _find_on_thread(self, target: Target, stop: threading.Event) -> None:
        def progress(download: Download | None) -> None:
            self.hand_over(self._progress, download)

        def find(reference: ModelReference) -> str | None:
            if isinstance(reference, NoModel):
                return None
            return self._models.find(reference, progress=progress, stop=stop)

        try:
            model_path = find(target.model)
            assert model_path is not None, "no model need not be looked for"
            setup = Setup(target, model_path, find(target.projection))
            self._models.check(setup)
            if target.chat_template is not None:
                ChatTemplate(target.chat_template, {})
        except ModelFileError as error:
            self.hand_over(self._not_found, target, error.issue, error.is_final)
        except ModelError as error:
            issue = _load_issue(
                error, model=_named(target.model), projection=_named(target.projection)
            )
            self.hand_over(self._not_found, target, issue, True)
        except RequestError as error:
            self.hand_over(self._not_found, target, _template_issue(target, error), True)
        except Exception as error:
            if not stop.is_set():  # a fault of ours, but what serves goes on
                log.exception("the model could not be looked for")
                issue = _load_issue(error, model=_named(target.model), projection="")
                self.hand_over(self._not_found, target, issue, False)
        else:
            self.hand_over(self._found, setup)
        finally:
            progress(None)

    def _progress(self, download: Download | None) -> None:
        self.download = download
        self._owner.changed()

    def _found(self, setup: Setup) -> None:
        self._carry_out(self._swap.found(setup))

    def _not_found(self, target: Target, issue: AgentIssue, is_final: bool) -> None:
        log.warning("%s: %s: %s", issue.kind, issue.model_path, issue.detail)
        self._carry_out(self._swap.not_found(target, issue, is_final=is_final))

    # Loading and freeing

    def _free(self, *, then: Setup | None) -> None:
        """Free what is loaded, if anything is; then load, or have nothing."""
        self.preparer = None
        self._then = then
        if self._running is None:
            self._freed()
            return
        self._frees = True
        self._running.loop.stop()  # and when it has: ``ended``

    def _freed(self) -> None:
        self._running = None
        setup, self._then = self._then, None
        self._owner.measured(Figures())
        if setup is None:
            self._describe(NOTHING)
            self._carry_out(self._swap.unloaded())
            return
        log.info("loading %s", setup.model_path)
        self._running = _Running(self, self._models, setup, self._settings)
        self._running.loop.start()

    def loaded(self, running: "_Running", engine: Engine) -> None:
        if running is not self._running or self._frees:
            return
        target = running.setup.target
        preparer = Preparer(engine, target.chat_template)
        self._serve(preparer, target)
        self._carry_out(self._swap.loaded(_shortcomings(preparer, target)))

    def warms_up(self, running: "_Running") -> None:
        running.warms_up = True
        self._owner.changed()

    def happened(self, running: "_Running", events: Sequence[Event]) -> None:
        if running is self._running:
            self._owner.happened(events)

    def noted(self, running: "_Running", notes: Sequence[Noted]) -> None:
        if running is self._running:
            self._owner.noted(notes)

    def measured(self, running: "_Running", figures: Figures) -> None:
        if running is self._running:
            self._owner.measured(figures)

    def ended(self, running: "_Running", error: BaseException | None) -> None:
        if running is not self._running:
            return
        if self._frees:
            self._frees = False
            self._freed()
        elif isinstance(error, Exception) and self.preparer is None:
            log.warning("the model was not loaded", exc_info=error)
            self._running = None
            self._describe(NOTHING)
            setup = running.setup
            issue = _load_issue(
                error, model=setup.model_path, projection=setup.projection_path or ""
            )
            self._carry_out(self._swap.not_loaded(issue))
        elif error is not None:
            self.preparer = None
            self._owner.broke_down(error)

    # Templates

    def _use_template(self, template: str | None, *, embeddings_only: bool) -> None:
        assert self.preparer is not None
        assert self._running is not None
        setup = self._running.setup
        target = replace(setup.target, chat_template=template, embeddings_only=embeddings_only)
        preparer = Preparer(self.preparer.engine, template)
        if template is not None and (error := preparer.template_error) is not None:
            self._carry_out(self._swap.template_refused(_template_issue(target, error)))
            return
        self._running.setup = replace(setup, target=target)
        self._serve(preparer, target)
        self._carry_out(self._swap.template_used(_shortcomings(preparer, target)))

    def _serve(self, preparer: Preparer, target: Target) -> None:
        self.preparer = preparer
        self._describe(
            Described(
                dict(preparer.engine.metadata),
                target.chat_template,
                preparer.engine.capacity.context,
            )
        )

    def _describe(self, description: Described) -> None:
        self.description = description
        self._owner.described()

    def hand_over(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have it called on the asyncio loop. From any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._asyncio.call_soon_threadsafe(function, *arguments)


class _Running:
    """A model and its decode loop. What the loop says, on its thread, is handed over to the host."""

    def __init__(
        self, host: ModelHost, models: Models, setup: Setup, settings: LoopSettings
    ) -> None:
        self.setup = setup
        self.warms_up = False
        """The weights are there."""

        def warms_up() -> None:
            host.hand_over(host.warms_up, self)

        self.loop = DecodeLoop(lambda: models.load(setup, warms_up), self, settings)
        self._host = host

    def loaded(self, engine: Engine, /) -> None:
        self._host.hand_over(self._host.loaded, self, engine)

    def happened(self, events: Sequence[Event], /) -> None:
        self._host.hand_over(self._host.happened, self, events)

    def noted(self, notes: Sequence[Noted], /) -> None:
        self._host.hand_over(self._host.noted, self, notes)

    def measured(self, figures: Figures, /) -> None:
        self._host.hand_over(self._host.measured, self, figures)

    def ended(self, error: BaseException | None, /) -> None:
        self._host.hand_over(self._host.ended, self, error)


def _named(reference: ModelReference) -> str:
    return "" if isinstance(reference, NoModel) else describe(reference)


def _load_issue(error: Exception, *, model: str, projection: str) -> AgentIssue:
    if isinstance(error, ProjectorError):
        kind = IssueKind.MULTIMODAL_PROJECTION_CANNOT_BE_LOADED
        return AgentIssue(kind, projection, str(error))
    return AgentIssue(IssueKind.MODEL_CANNOT_BE_LOADED, model, str(error) or repr(error))


def _template_issue(target: Target, error: RequestError) -> AgentIssue:
    return AgentIssue(
        IssueKind.CHAT_TEMPLATE_DOES_NOT_COMPILE,
        _named(target.model),
        error.message,
        template=target.chat_template or "",
    )


def _shortcomings(preparer: Preparer, target: Target) -> tuple[AgentIssue, ...]:
    error = preparer.template_error
    if error is None or target.embeddings_only:
        return ()
    if preparer.template is None:
        kind = IssueKind.UNABLE_TO_FIND_CHAT_TEMPLATE
        return (AgentIssue(kind, _named(target.model), error.message),)
    kind = IssueKind.CHAT_TEMPLATE_DOES_NOT_COMPILE
    return (AgentIssue(kind, _named(target.model), error.message, template=preparer.template),)
