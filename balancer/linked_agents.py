"""The agents that are linked, as the balancer knows them, and as observers see them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

from balancer.fleet_beats import SeenAgent
from balancer.watch import Watch
from common.ids import AgentId
from common.messages import Described, Status

NOT_DESCRIBED = Described(metadata=None, chat_template_override=None)


@dataclass(slots=True)
class LinkedAgent:
    agent_id: AgentId
    name: str | None
    labels: tuple[str, ...]
    status: Status
    send: Callable[[bytes], None]
    drop: Callable[[str], None]
    fleet: str | None = None
    told_at: float = field(default_factory=monotonic)
    """When its newest status came."""
    watch: Watch = field(default_factory=Watch)
    description: Described = NOT_DESCRIBED

    @property
    def model(self) -> str | None:
        """The best of its names."""
        return best_name(self.status.model_names)

    @property
    def is_open(self) -> bool:
        """Does it serve, as far as operators let it?"""
        return is_open(self.status)

    def serves(self, model: str | None) -> bool:
        return self.status.slots_total > 0 and (model is None or model in self.status.model_names)

    def view(self, *, bound: int) -> "AgentView":
        """``bound``: how many of its slots this balancer has bound."""
        age = self.status.step_age
        return AgentView(
            self.agent_id,
            self.name,
            self.labels,
            self.status,
            bound,
            self.description,
            self.fleet,
            None if age is None else age + monotonic() - self.told_at,
        )

    def seen(self) -> SeenAgent:
        """For the supervisor. One that an operator drained has no slot to give, and is not idle."""
        issues = self.status.issues
        taken = self.status.slots_total if self.status.held else 0
        return SeenAgent(
            name=self.name or "",
            phase=self.status.phase,
            phases=self.status.phases,
            slots=self.status.slots_total,
            processing=max(self.status.slots_processing, taken),
            problem="; ".join(f"{issue.kind}: {issue.detail}" for issue in issues) or None,
        )


@dataclass(frozen=True, slots=True)
class AgentView:
    """An agent as observers see it."""

    agent_id: AgentId
    name: str | None
    labels: tuple[str, ...]
    status: Status
    slots_bound: int
    description: Described
    fleet: str | None
    step_age: float | None
    """Seconds, also of one that says nothing any more; see ``Status.step_age``."""

    @property
    def model(self) -> str | None:
        """The best name of the one that it has."""
        return best_name(self.status.model_names)

    @property
    def slots_busy(self) -> int:
        """Its report may be a moment older than what has just been bound to it."""
        return max(self.status.slots_processing, self.slots_bound)


def is_open(status: Status) -> bool:
    return status.slots_total > 0 and not status.held


def best_name(names: Iterable[str]) -> str | None:
    """Of those of one model, the one that operators are told; None: there is none."""
    return min(names, key=plainness, default=None)


def plainness(name: str) -> tuple[bool, int, str]:
    """The names of a model in their order: the best one first."""
    return "/" in name, len(name), name
