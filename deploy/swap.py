"""How far a change of the desired model is: which agents follow it, and what each of them does. No I/O
here: ``now`` is an argument.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.models import ModelReference, NoModel
from common.references import describe
from deploy.load_bars import Row, load_row
from deploy.overview import Agent, StatusView

UNHEARD = 5.0
"""Seconds that an agent that had applied nothing before may take to hear of a new wish. Until then it may
complain of the one before.
"""

HALTED = (
    "No further agent changes its model: one was lost while it did. It goes on when one has shown "
    "that the model works, or when the desired state is put again."
)


REPLACED = "another model was asked for meanwhile; headrace status shows which"


class Standing(enum.Enum):
    PENDING = enum.auto()
    SERVES = enum.auto()
    """What is wanted."""
    CANNOT = enum.auto()
    APART = enum.auto()
    """It goes, or has a model of its own, as its fleet or whoever started it says."""


@dataclass(frozen=True, slots=True)
class Outcome:
    serving: int
    problem: str | None = None


class Swap:
    def __init__(
        self, reference: ModelReference, wish: int, before: Mapping[str, Agent], *, now: float
    ) -> None:
        """``wish``: the number that it was given. ``before``: the agents as they were when it was put."""
        self._desired = None if isinstance(reference, NoModel) else describe(reference)
        self._wish = wish
        self._silent = {agent.id for agent in before.values() if not agent.applied}
        self._put = now
        self._was_pending = False

    def rows(self, view: StatusView, *, now: float) -> list[Row]:
        """Of the agents that follow the desired state."""
        rows: list[Row] = []
        for agent in sorted(view.agents.values(), key=lambda each: each.title):
            row = load_row(agent)
            match self.standing(agent, view, now=now):
                case Standing.APART:
                    continue
                case Standing.SERVES:
                    row = replace(row, words="done", part=1.0)
                case Standing.PENDING if not agent.is_on_its_way:
                    row = replace(row, words="prepares the model", part=None)
                case Standing.PENDING | Standing.CANNOT:
                    pass
            rows.append(row)
        return rows

    def outcome(self, view: StatusView, *, now: float) -> Outcome | None:
        """None: it goes on."""
        standings = {
            agent.id: self.standing(agent, view, now=now) for agent in view.agents.values()
        }
        serving = sum(each is Standing.SERVES for each in standings.values())
        if view.model.wish_number >= self._wish and view.model.desired != self._desired:
            return Outcome(serving, REPLACED)
        for agent_id, standing in standings.items():
            if standing is Standing.CANNOT:
                agent = view.agents[agent_id]
                reasons = "; ".join(issue.words for issue in agent.issues)
                again = ", and tries again by itself" if agent.tries_again else ""
                return Outcome(serving, f"{agent.title} cannot serve it{again}: {reasons}")
        if any(each is Standing.PENDING for each in standings.values()):
            self._was_pending = True
            return None if view.model.halted_by is None else Outcome(serving, HALTED)
        if not serving and self._was_pending:
            return None  # those that followed have gone, and may come back
        return Outcome(serving)

    def standing(self, agent: Agent, view: StatusView, *, now: float) -> Standing:
        """1. Who goes, or is of a fleet with a model of its own, does not follow.
        2. Who has applied a wish serves it if it is this one, or a later one.
        3. Who complains and is not on its way cannot, once it has heard of this wish.
        4. Who has applied something, but no wish, has a model of its own.
        """
        fleet = view.fleets.get(agent.fleet) if agent.fleet is not None else None
        if agent.state == "draining" or (fleet is not None and fleet.fleet.model is not None):
            return Standing.APART
        if agent.applied:
            return Standing.SERVES if agent.applied >= self._wish else Standing.PENDING
        if agent.is_on_its_way:
            return Standing.PENDING
        if agent.is_stuck or agent.tries_again:
            is_heard = agent.id not in self._silent or now >= self._put + UNHEARD
            return Standing.CANNOT if is_heard else Standing.PENDING
        return Standing.APART if agent.application == "Applied" else Standing.PENDING
