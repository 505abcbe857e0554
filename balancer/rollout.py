"""Agents change their models one after another, so that the others go on serving meanwhile.

An agent that serves and has the next model's files ready asks for its turn; it gets it when nobody
else is changing. Events in as method calls, effects out. No I/O here.

An agent that is lost while it changes may have been killed by the new model. If nobody has shown yet
that it works, the others keep theirs until somebody does, the lost agent is back, or the operator
says again what is wanted.

Of several balancers one leads, and only that one gives turns; the others follow what happens, so that
each can take over.
"""

from dataclasses import dataclass

from common.ids import AgentId


@dataclass(frozen=True, slots=True)
class GiveTurn:
    agent_id: AgentId
    turn: int


@dataclass(slots=True)
class _Agent:
    awaits_turn: bool = False
    is_swapping: bool = False
    is_leaving: bool = False


class Rollout:
    def __init__(self) -> None:
        self._agents: dict[AgentId, _Agent] = {}
        self._turns = 0
        self._wish = 0
        self._leads = True
        self._works = False
        """Has somebody applied the newest wish?"""
        self._holder: AgentId | None = None
        """Whose turn, the latest one, is not over."""
        self.halted_by: AgentId | None = None
        """Who was lost while it changed its model."""

    def lead(self, leads: bool) -> list[GiveTurn]:
        """Whether this balancer gives the turns from now on. At first it does.

        A turn that was given before and is not over is waited for: our own by its number, another
        balancer's once the agent says that it changes. One that was given just before its giver was
        lost is not known, so let some time pass before another one leads.
        """
        self._leads = leads
        return self._next()

    def restart(self, wish: int) -> list[GiveTurn]:
        """The operator has said what is wanted, for the ``wish``-th time."""
        self._wish = wish
        self._works = False
        self.halted_by = None
        return self._next()

    def report(
        self,
        agent_id: AgentId,
        *,
        awaits_turn: bool = False,
        is_swapping: bool = False,
        is_leaving: bool = False,
        turn_taken: int = 0,
        applied: int = 0,
    ) -> list[GiveTurn]:
        """From an agent, a new one too. ``turn_taken``: the newest of its turns that is over;
        ``applied``: the newest wish that it serves.
        """
        if agent_id not in self._agents and agent_id == self.halted_by:
            self.halted_by = None
        if applied and applied == self._wish:
            self._works = True
            self.halted_by = None
        self._agents[agent_id] = _Agent(awaits_turn, is_swapping, is_leaving)
        if self._holder == agent_id and turn_taken >= self._turns:
            self._holder = None
        return self._next()

    def leave(self, agent_id: AgentId) -> list[GiveTurn]:
        agent = self._agents.pop(agent_id)
        changed = self._holder == agent_id or agent.is_swapping
        if changed and not agent.is_leaving and not self._works:
            self.halted_by = agent_id
        if self._holder == agent_id:
            self._holder = None
        return self._next()

    def _next(self) -> list[GiveTurn]:
        if not self._leads or self._holder is not None or self.halted_by is not None:
            return []
        if any(agent.is_swapping for agent in self._agents.values()):
            return []
        for agent_id, agent in self._agents.items():
            if agent.awaits_turn and not agent.is_leaving:
                self._turns += 1
                self._holder = agent_id
                return [GiveTurn(agent_id, self._turns)]
        return []
