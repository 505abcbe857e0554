"""The agents that are here, and which request is bound to which of their slots. No I/O here.

The agent owns its slots. What stands here is what the balancer has bound itself, which no report
can change, and how many slots others had taken by the newest report. That may be out of date, which
does no harm: an agent that has fewer free slots than we believe says ``Busy``, and then it is left
alone until it reports again; one that has more says so at once.
"""

from dataclasses import dataclass, field

from common.ids import AgentId, RequestId


@dataclass(slots=True)
class Agent:
    agent_id: AgentId
    slots: int
    elsewhere: int = 0
    """Slots that requests of other balancers had when it last reported; never ours."""
    draining: bool = False
    swapping: bool = False
    """It will serve again as soon as it has its next model."""
    models: frozenset[str] = frozenset()
    """The names of the model that it serves."""
    fingerprint: str = ""
    """The same as another's: they can go on with each other's answers; empty: nobody can."""
    refused: bool = False
    """It said ``Busy`` and has not reported since."""
    bound: set[RequestId] = field(default_factory=set[RequestId])

    @property
    def taken_slots(self) -> int:
        """As far as we know. May be more than there are, for a moment."""
        return len(self.bound) + self.elsewhere

    @property
    def free_slots(self) -> int:
        if self.draining or self.refused:
            return 0
        return max(0, self.slots - self.taken_slots)

    def serves(self, model: str | None, kin: str | None = None) -> bool:
        """``kin``: the fingerprint that it must have; None: any."""
        return (model is None or model in self.models) and kin in (None, self.fingerprint)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why no slot is free for a request; its text is for operators."""

    agents: int
    """That are here."""
    serving: int
    """Of those, that serve its model."""
    closed: int
    """Of those, that take nothing new: they drain or change their model."""
    slots: int
    """Of the others."""

    def __str__(self) -> str:
        if not self.agents:
            return "there is no agent"
        if not self.serving:
            return f"none of {_count(self.agents, 'agent')} serves its model now"
        if self.serving == self.closed:
            return f"{_count(self.closed, 'agent')} for it, but drained, or changing the model"
        open_agents = _count(self.serving - self.closed, "agent")
        told = f"{_count(self.slots, 'slot')} of {open_agents}, all taken"
        return (
            f"{told}; {_count(self.closed, 'more agent')} drained, or changing the model"
            if self.closed
            else told
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class AgentPool:
    def __init__(self) -> None:
        self._agents: dict[AgentId, Agent] = {}

    def join(self, agent_id: AgentId) -> None:
        assert agent_id not in self._agents
        self._agents[agent_id] = Agent(agent_id, slots=0)

    def leave(self, agent_id: AgentId) -> Agent:
        return self._agents.pop(agent_id)

    def report(
        self,
        agent_id: AgentId,
        *,
        slots: int,
        elsewhere: int,
        draining: bool,
        swapping: bool,
        models: frozenset[str],
        fingerprint: str,
    ) -> None:
        agent = self._agents[agent_id]
        agent.slots = slots
        agent.elsewhere = elsewhere
        agent.models = models
        agent.draining = draining
        agent.swapping = swapping
        agent.fingerprint = fingerprint
        agent.refused = False

    @property
    def is_swapping(self) -> bool:
        """Does anybody change its model just now? Its slots are missed meanwhile."""
        return any(agent.swapping for agent in self._agents.values())

    def available(self, model: str | None, kin: str | None = None) -> list[Agent]:
        """The agents with a free slot for this model, and of this fingerprint (None: any), in the
        order in which they joined.
        """
        return [
            agent
            for agent in self._agents.values()
            if agent.free_slots > 0 and agent.serves(model, kin)
        ]

    def obstacle(self, model: str | None, kin: str | None = None) -> Obstacle:
        """Why none is ``available``."""
        agents = self._agents.values()
        serving = [agent for agent in agents if agent.slots and agent.serves(model, kin)]
        closed = [agent for agent in serving if agent.draining]
        slots = sum(agent.slots for agent in serving if not agent.draining)
        return Obstacle(len(agents), len(serving), len(closed), slots)

    def bind(self, agent_id: AgentId, request_id: RequestId) -> None:
        agent = self._agents[agent_id]
        assert agent.free_slots > 0, "more requests than slots"
        agent.bound.add(request_id)

    def release(self, agent_id: AgentId, request_id: RequestId) -> None:
        agent = self._agents[agent_id]
        agent.bound.remove(request_id)
        agent.refused = False  # a slot has become free, if nobody else has taken it already

    def refuse(self, agent_id: AgentId, request_id: RequestId) -> None:
        """The agent did not take the request that was bound to it."""
        agent = self._agents[agent_id]
        agent.bound.remove(request_id)
        agent.refused = True

    def fingerprint(self, agent_id: AgentId) -> str:
        return self._agents[agent_id].fingerprint

    def bound(self, agent_id: AgentId) -> int:
        return len(self._agents[agent_id].bound)
