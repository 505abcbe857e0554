"""Which model this agent should run, and the way from one to the next.

Events come in as method calls, effects go out in the order in which they must be carried out. No
I/O here, no clock and no model: finding files, draining and loading take long, and each tells its
outcome as the next event.

| the phase is | and ends by |
|---|---|
| at rest: what is wanted is served, or cannot be | ``want`` |
| finding: files are looked for and checked, the old model serves | ``found``, ``not_found`` |
| awaiting the turn, the old model serves | ``turn`` |
| draining: nothing new is taken on, what runs comes to its end, or must go on elsewhere | ``idle`` |
| loading | ``loaded``, ``unloaded``, ``not_loaded`` |
| loading again after a pause: memory may have been short for a moment only | ``retry`` |
| restoring: the new model could not be loaded, so the old one is, again | ``loaded``, ``not_loaded`` |
| backing off: nothing serves, or files could not be found | ``retry`` |

Always true: a model that serves is let go only in our turn and when nothing runs on it; what was
wanted last is what is tried next.
"""

import enum
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TypeAlias

from common.models import (
    AgentDesiredState,
    AgentIssue,
    Application,
    EngineChoices,
    ModelReference,
    NoModel,
)

LOADS_IN_TURN = 2
"""How often a model is tried before the old one is loaded again."""

PAUSE_IN_TURN = 2.0
"""Seconds between those: a GPU's memory is not free at once."""

LONGEST_DRAIN = 120.0
"""Seconds that what runs on a model may go on when it is to be replaced."""

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
"""Seconds before what failed is tried again; doubled each time."""


@dataclass(frozen=True, slots=True)
class Target:
    """A desired state as it is for this agent."""

    model: ModelReference
    projection: ModelReference
    choices: EngineChoices
    chat_template: str | None
    embeddings_only: bool


@dataclass(frozen=True, slots=True)
class Setup:
    """A target whose files are here."""

    target: Target
    model_path: str
    projection_path: str | None = None


@dataclass(frozen=True, slots=True)
class Find:
    """Look for the files, check what can be checked: ``found`` or ``not_found``."""

    target: Target


@dataclass(frozen=True, slots=True)
class StopFinding:
    """Its outcome is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Load:
    """Free the model that is loaded, if one is, then load this: ``loaded`` or ``not_loaded``."""

    setup: Setup


@dataclass(frozen=True, slots=True)
class Unload:
    """Free the model: ``unloaded``."""


@dataclass(frozen=True, slots=True)
class UseTemplate:
    """Render with this from now on; None: with the model's own. ``template_used`` or
    ``template_refused``.
    """

    chat_template: str | None
    embeddings_only: bool


@dataclass(frozen=True, slots=True)
class Retry:
    """Call ``retry`` after so many seconds."""

    after: float


@dataclass(frozen=True, slots=True)
class LimitDrain:
    """Call ``drained_long_enough`` after so many seconds, unless ``idle`` had effects before."""

    after: float


@dataclass(frozen=True, slots=True)
class GiveBack:
    """What still runs must go on elsewhere."""


Effect: TypeAlias = Find | StopFinding | LimitDrain | GiveBack | Load | Unload | UseTemplate | Retry


class _Phase(enum.Enum):
    AT_REST = enum.auto()
    FINDING = enum.auto()
    AWAITING_TURN = enum.auto()
    DRAINING = enum.auto()
    LOADING = enum.auto()
    PAUSING = enum.auto()
    RESTORING = enum.auto()
    BACKING_OFF = enum.auto()


_WITHOUT_MODEL = {_Phase.LOADING, _Phase.PAUSING, _Phase.RESTORING}
"""What was served, if anything was, is not loaded just now. To be left by its own end only."""


class ModelSwap:
    def __init__(
        self,
        *,
        own: EngineChoices,
        pinned: ModelReference | None,
        longest_drain: float = LONGEST_DRAIN,
    ) -> None:
        """``own``: what this agent was told when it was started; it goes before what holds for all.
        ``pinned``: the model that it was told to run, whatever the others run. ``longest_drain``:
        seconds that what runs may go on when its model is to be replaced.
        """
        self._longest_drain = longest_drain
        self._own = own
        self._pinned = pinned
        self._phase = _Phase.AT_REST
        self._state: AgentDesiredState | None = None
        self._wanted: Target | None = None
        self._serving: Setup | None = None
        """What is loaded, or what was and is to be loaded again if the next cannot be."""
        self._next: Setup | None = None
        """What is to be loaded in place of it; None: nothing."""
        self._loads = 0
        """Of the next model, in this turn."""
        self._turn: tuple[int, Hashable | None] | None = None
        """Its number, and the link that gave it, if that is not lost."""
        self._turns_taken: dict[Hashable, int] = {}
        self._failures = 0
        self._failed: tuple[AgentIssue, ...] = ()
        self._stuck = False
        self._shortcomings: tuple[AgentIssue, ...] = ()
        """Of what is loaded: it serves, but not all."""

    # What the status says

    @property
    def is_swapping(self) -> bool:
        """The model that served is drained, or being replaced."""
        leaves = self._phase is _Phase.DRAINING or self._phase in _WITHOUT_MODEL
        return leaves and self._serving is not None

    @property
    def awaits_turn(self) -> bool:
        return self._phase is _Phase.AWAITING_TURN

    def turn_taken(self, link: Hashable) -> int:
        """The newest turn that this link gave and that is over; 0: none."""
        return self._turns_taken.get(link, 0)

    @property
    def follows(self) -> bool:
        """Does it run what all run?"""
        return self._pinned is None

    @property
    def application(self) -> Application:
        if self._stuck and self._phase is _Phase.AT_REST:
            return Application.STUCK
        if self._failed:
            return Application.RETRYING
        done = self._phase is _Phase.AT_REST and self._wanted is not None
        return Application.APPLIED if done else Application.FRESH

    @property
    def issues(self) -> tuple[AgentIssue, ...]:
        return self._failed + self._shortcomings

    @property
    def choices(self) -> EngineChoices:
        """Of what is wanted; what nobody has said is None."""
        return self._own if self._wanted is None else self._wanted.choices

    # Events

    def want(self, state: AgentDesiredState) -> list[Effect]:
        """What the balancer wants. The same as before is tried again only if it had been given up."""
        if state == self._state and not self._stuck:
            return []
        self._state = state
        self._wanted = Target(
            model=state.model if self._pinned is None else self._pinned,
            projection=state.multimodal_projection if self._pinned is None else NoModel(),
            choices=EngineChoices.merged(state.overrides, self._own, state.choices),
            chat_template=state.chat_template,
            embeddings_only=state.embeddings_only,
        )
        self._failures = 0
        self._failed = ()
        self._stuck = False
        if self._phase in _WITHOUT_MODEL:
            return []
        stop: list[Effect] = [StopFinding()] if self._phase is _Phase.FINDING else []
        return stop + self._go_on()

    def found(self, setup: Setup) -> list[Effect]:
        if self._phase is not _Phase.FINDING or setup.target != self._wanted:
            return []  # of something that is not wanted any more
        return self._make_way(setup)

    def not_found(self, target: Target, issue: AgentIssue, *, is_final: bool) -> list[Effect]:
        """``is_final``: it would not help to try again."""
        if self._phase is not _Phase.FINDING or target != self._wanted:
            return []
        return self._fail(issue, tries_again=not is_final)

    def turn(self, number: int, link: Hashable) -> list[Effect]:
        """It is ours now: nothing new is taken on. Tell ``idle`` when nothing runs, perhaps at once.

        ``link``: over which it came. Each balancer counts turns for itself.
        """
        if self._phase is not _Phase.AWAITING_TURN:
            self._turns_taken[link] = max(self.turn_taken(link), number)
            return []
        self._turn = number, link
        self._phase = _Phase.DRAINING
        return [LimitDrain(self._longest_drain)]

    def link_lost(self, link: Hashable) -> None:
        """Its turns are forgotten, and told to nobody. What has begun goes on."""
        self._turns_taken.pop(link, None)
        if self._turn is not None and self._turn[1] == link:
            self._turn = 0, None

    def drained_long_enough(self) -> list[Effect]:
        return [GiveBack()] if self._phase is _Phase.DRAINING else []

    def idle(self) -> list[Effect]:
        """Nothing runs. May be told at any time."""
        if self._phase is not _Phase.DRAINING:
            return []
        self._loads = 0
        return self._load(self._next)

    def loaded(self, shortcomings: tuple[AgentIssue, ...] = ()) -> list[Effect]:
        self._shortcomings = shortcomings
        if self._phase is _Phase.LOADING:
            self._serving = self._next
        return self._settle()

    def unloaded(self) -> list[Effect]:
        self._serving = None
        self._shortcomings = ()
        return self._settle()

    def not_loaded(self, issue: AgentIssue) -> list[Effect]:
        """Nothing is loaded now.

        1. It was the old one, so there is none to go back to: the new one is tried, ever slower.
        2. There was no old one: the same, or at once if something else is wanted by now.
        3. The new one is tried again, since memory may not have been free yet.
        4. The old one is loaded again; the new one is given up until something changes.
        """
        assert self._next is not None
        changed = self._next.target != self._wanted
        if self._phase is _Phase.RESTORING:
            self._serving = None
        if self._serving is None:
            return self._settle() if changed else self._fail(issue, tries_again=True)
        if changed:
            return self._restore(self._serving)
        self._failed = (issue,)
        if self._loads < LOADS_IN_TURN:
            self._phase = _Phase.PAUSING
            return [Retry(PAUSE_IN_TURN)]
        self._stuck = True
        return self._restore(self._serving)

    def template_used(self, shortcomings: tuple[AgentIssue, ...]) -> list[Effect]:
        self._shortcomings = shortcomings
        return []

    def template_refused(self, issue: AgentIssue) -> list[Effect]:
        """That of the latest ``UseTemplate`` is none; what was used before is used still."""
        return self._fail(issue, tries_again=False)

    def retry(self) -> list[Effect]:
        if self._phase is _Phase.BACKING_OFF:
            return self._go_on()
        if self._phase is _Phase.PAUSING:
            assert self._next is not None
            assert self._serving is not None
            if self._next.target != self._wanted:
                return self._restore(self._serving)
            return self._load(self._next)
        return []

    # What follows

    def _go_on(self) -> list[Effect]:
        """From what serves to what is wanted: the next step."""
        self._end_turn()
        self._phase = _Phase.AT_REST
        wanted, serving = self._wanted, self._serving
        assert wanted is not None
        if serving is not None and _is_same_model(serving.target, wanted):
            before, self._serving = serving.target, replace(serving, target=wanted)
            if before == wanted:
                return []
            return [UseTemplate(wanted.chat_template, wanted.embeddings_only)]
        if isinstance(wanted.model, NoModel):
            return [] if serving is None else self._make_way(None)
        self._phase = _Phase.FINDING
        return [Find(wanted)]

    def _make_way(self, setup: Setup | None) -> list[Effect]:
        self._next = setup
        if self._serving is not None:
            self._phase = _Phase.AWAITING_TURN
            return []
        return self._load(setup)

    def _load(self, setup: Setup | None) -> list[Effect]:
        self._phase = _Phase.LOADING
        self._loads += 1
        return [Unload() if setup is None else Load(setup)]

    def _restore(self, setup: Setup) -> list[Effect]:
        self._phase = _Phase.RESTORING
        return [Load(setup)]

    def _settle(self) -> list[Effect]:
        """A load is over, and nothing is under way."""
        if self._stuck:
            self._end_turn()
            self._phase = _Phase.AT_REST
            return []
        self._failed = ()
        self._failures = 0
        return self._go_on()

    def _fail(self, issue: AgentIssue, *, tries_again: bool) -> list[Effect]:
        self._end_turn()
        self._failed = (issue,)
        self._stuck = not tries_again
        if self._stuck:
            self._phase = _Phase.AT_REST
            return []
        self._phase = _Phase.BACKING_OFF
        self._failures += 1
        return [Retry(min(FIRST_DELAY * 2 ** (self._failures - 1), LONGEST_DELAY))]

    def _end_turn(self) -> None:
        if self._turn is not None:
            number, link = self._turn
            if link is not None:
                self._turns_taken[link] = number
            self._turn = None


def _is_same_model(one: Target, other: Target) -> bool:
    """Does it take no more than another template?"""
    return (one.model, one.projection, one.choices) == (
        other.model,
        other.projection,
        other.choices,
    )
