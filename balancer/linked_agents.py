"""The agents that are linked, as the balancer knows them, and as observers see them."""

from collections.abc import Callable
from dataclasses import dataclass, field

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
    watch: Watch = field(default_factory=Watch)
    description: Described = NOT_DESCRIBED

    @property
    def model(self) -> str | None:
        """The best of its names."""
        return min(self.status.model_names, key=plainness, default=None)

    @property
    def is_open(self) -> bool:
        """Does it serve, as far as operators let it?"""
        return is_open(self.status)

    def serves(self, model: str | None) -> bool:
        return self.status.slots_total > 0 and (model is None or model in self.status.model_names)

    def view(self, *, bound: int) -> "AgentView":
        """``bound``: how many of its slots this balancer has bound."""
        return AgentView(
            self.agent_id,
            self.name,
            self.labels,
            self.status,
            bound,
            self.description,
            self.fleet,
        )

    def seen(self) -> SeenAgent:
        """For the supervisor."""
        issues = self.status.issues
        return SeenAgent(
            name=self.name or "",
            phase=self.status.phase,
            phases=self.status.phases,
            slots=self.status.slots_total,
            processing=self.status.slots_processing,
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

    @property
    def slots_busy(self) -> int:
        """Its report may be a moment older than what has just been bound to it."""
        return max(self.status.slots_processing, self.slots_bound)


def is_open(status: Status) -> bool:
    return status.slots_total > 0 and not status.held


def plainness(name: str) -> tuple[bool, int, str]:
    """The names of a model in their order: the best one first."""
    return "/" in name, len(name), name
