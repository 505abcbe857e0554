"""What a balancer tells of itself, kept up to date by the events of its status stream. No I/O here.

Keys that are not known here are left aside, and those that are missing have a value that says nothing,
so that command and balancer may be of different versions.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import HeadraceError


class OverviewError(HeadraceError):
    """The balancer tells what cannot be understood here."""


class Download(msgspec.Struct, frozen=True):
    filename: str
    current: int = 0
    total: int | None = None


class Issue(msgspec.Struct, frozen=True):
    kind: str
    model_path: str = ""
    detail: str = ""

    @property
    def words(self) -> str:
        return ": ".join(part for part in (self.kind, self.model_path, self.detail) if part)


class Figures(msgspec.Struct, frozen=True):
    cells_total: int = 0
    cells_running: int = 0
    cells_cached: int = 0
    prompt_tokens_fed: int = 0
    prompt_tokens_cached: int = 0
    prefill_rate: float | None = None
    decode_rate: float | None = None

    @property
    def cell_use(self) -> float | None:
        """The part of the KV cells that is held by what runs or is cached."""
        if not self.cells_total:
            return None
        return (self.cells_running + self.cells_cached) / self.cells_total

    @property
    def hit_rate(self) -> float | None:
        """The part of the prompts' tokens that were cached."""
        tokens = self.prompt_tokens_fed + self.prompt_tokens_cached
        return self.prompt_tokens_cached / tokens if tokens else None


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str | None = None
    fleet: str | None = None
    state: str = ""
    held: bool = False
    slots: int = 0
    slots_busy: int = 0
    slots_desired: int = 0
    model: str | None = None
    model_path: str | None = None
    application: str = ""
    applied: int = 0
    """The wish number that it serves; 0: none, or a model of its own."""
    download: Download | None = None
    issues: tuple[Issue, ...] = ()
    figures: Figures = Figures()
    step_age: float | None = None

    @property
    def title(self) -> str:
        return self.name or self.id

    @property
    def is_stuck(self) -> bool:
        """It cannot do what is wanted, and tries no more; it may serve what it had before."""
        return self.application == "Stuck"

    @property
    def tries_again(self) -> bool:
        return self.application == "AttemptedAndRetrying" and bool(self.issues)

    @property
    def is_on_its_way(self) -> bool:
        """To another model; it may serve meanwhile."""
        moves = self.state in {"swapping", "waits_for_turn", "downloading", "loading"}
        return moves or self.download is not None


class FleetDefinition(msgspec.Struct, frozen=True):
    min: int = 0
    max: int = 0
    model: Any = None


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    fleet: FleetDefinition = FleetDefinition()
    wanted: int | None = None
    """None: no supervisor has said so yet."""
    seen: int = 0
    ready: int = 0
    reason: str | None = None
    is_stuck: bool = False
    waiting: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    client_id: str | None = None
    """What its client calls it."""
    route: str = ""
    model: str | None = None
    priority: str = ""
    state: str = ""
    arrived: float = 0.0
    waited: float | None = None
    why: str | None = None
    agent: str | None = None
    agent_id: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int = 0
    first_token: float | None = None
    ended: float | None = None
    outcome: str | None = None
    message: str | None = None
    moves: int = 0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Errors that clients were told, those of one kind in a row counted."""

    at: float = 0.0
    code: str = ""
    message: str = ""
    count: int = 1
    request_id: str | None = None
    agent: str | None = None


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    failures: int = 0
    first_token: float | None = None


class Buffer(msgspec.Struct, frozen=True):
    waiting: int = 0
    capacity: int = 0
    bytes: int = 0


class Counts(msgspec.Struct, frozen=True):
    """Requests by state."""

    waiting: int = 0
    running: int = 0
    cancelling: int = 0
    over: dict[str, int] = {}
    """By outcome."""


class Model(msgspec.Struct, frozen=True):
    wish_number: int = 0
    desired: str | None = None
    halted_by: str | None = None
    """The agent that was lost while it changed its model, so that the others keep theirs."""


class About(msgspec.Struct, frozen=True):
    version: str = ""
    started: float | None = None
    accepts: bool = True
    supervisor_silent_for: float | None = None


KINDS: Mapping[str, Any] = {
    "agents": Agent,
    "fleets": Fleet,
    "requests": Request,
    "errors": Fault,
    "history": Moment,
}

ONES: Mapping[str, Any] = {"buffer": Buffer, "requests": Counts, "model": Model, "about": About}
"""The keys of the section ``balancer``."""

RATE_SPAN = 10.0
"""Seconds that a rate of now looks back."""


class StatusEvent(msgspec.Struct, frozen=True):
    id: str
    kind: str
    """``snapshot`` or ``change``."""
    data: Mapping[str, Mapping[str, Any]]


class StatusView:
    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]]
        self._ones: dict[str, Any]
        self._clear()

    def _clear(self) -> None:
        self._rows = {section: {} for section in KINDS}
        self._ones = {}

    @classmethod
    def of(cls, data: Mapping[str, Mapping[str, Any]]) -> "StatusView":
        """As ``GET /api/v1/overview`` tells it. Raises ``OverviewError``."""
        view = cls()
        view.apply(StatusEvent("", "snapshot", data))
        return view

    def apply(self, event: StatusEvent) -> None:
        """Raises ``OverviewError``."""
        if event.kind == "snapshot":
            self._clear()
        try:
            for section, values in event.data.items():
                for key, value in values.items():
                    if section == "balancer" and key in ONES:
                        self._ones[key] = msgspec.convert(value, ONES[key])
                    elif section in KINDS and value is None:
                        self._rows[section].pop(key, None)
                    elif section in KINDS:
                        self._rows[section][key] = msgspec.convert(value, KINDS[section])
        except (msgspec.ValidationError, AttributeError, TypeError) as error:
            raise OverviewError(f"the balancer has another version of headrace: {error}") from error

    @property
    def agents(self) -> Mapping[str, Agent]:
        return self._rows["agents"]

    @property
    def fleets(self) -> Mapping[str, Fleet]:
        return self._rows["fleets"]

    @property
    def requests(self) -> Mapping[str, Request]:
        return self._rows["requests"]

    @property
    def errors(self) -> list[Fault]:
        """The newest first."""
        return sorted(self._rows["errors"].values(), key=lambda each: each.at, reverse=True)

    @property
    def history(self) -> list[Moment]:
        """The newest last."""
        return sorted(self._rows["history"].values(), key=lambda each: each.at)

    @property
    def buffer(self) -> Buffer:
        return self._ones.get("buffer", Buffer())

    @property
    def counts(self) -> Counts:
        return self._ones.get("requests", Counts())

    @property
    def model(self) -> Model:
        return self._ones.get("model", Model())

    @property
    def about(self) -> About:
        return self._ones.get("about", About())

    @property
    def slots(self) -> tuple[int, int]:
        """Busy ones, and all."""
        agents = self.agents.values()
        return sum(agent.slots_busy for agent in agents), sum(agent.slots for agent in agents)

    @property
    def token_rate(self) -> float | None:
        """Generated tokens a second, now; None: not known yet."""
        history = self.history
        if len(history) < 2:
            return None
        last = history[-1]
        first = next(each for each in history if last.at - each.at <= RATE_SPAN)
        if first is last:
            first = history[-2]
        return (last.tokens - first.tokens) / (last.at - first.at) if last.at > first.at else None
