"""How far a change of the desired model is: which agents follow it, and what each of them does. No I/O
here: ``now`` is an argument.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.models import LocalModel, ModelReference, NoModel, names
from deploy.load_bars import Row, load_row
from deploy.overview import Agent, StatusView

UNHEARD = 5.0
"""Seconds that an agent may take to answer a new wish. Until then what it said before means nothing; who
then has not changed at all has a model of its own.
"""

HALTED = (
    "No further agent changes its model: one was lost while it did. It goes on when one has shown "
    "that the model works, or when the desired state is put again."
)


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
        self, reference: ModelReference, before: Mapping[str, Agent], *, is_new: bool, now: float
    ) -> None:
        """``before``: the agents as they were when it was put. ``is_new``: it differs from what was
        desired before.
        """
        self._reference = reference
        self._before = dict(before) if is_new else {}
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
        2. Who is as it was before has not answered yet, for a while.
        3. Who has applied what is wanted serves it.
        4. Who complains and is not on its way cannot.
        5. Who has applied something else has a model of its own.
        """
        fleet = view.fleets.get(agent.fleet) if agent.fleet is not None else None
        if agent.state == "draining" or (fleet is not None and fleet.fleet.model is not None):
            return Standing.APART
        before = self._before.get(agent.id)
        is_heard = before is None or _said(before) != _said(agent)
        if not is_heard and now < self._put + UNHEARD:
            return Standing.PENDING
        has_applied = agent.application == "Applied" and not agent.is_on_its_way
        if has_applied and self._is_wanted(agent):
            return Standing.SERVES
        if (agent.is_stuck or agent.tries_again) and not agent.is_on_its_way:
            return Standing.CANNOT
        return Standing.APART if has_applied else Standing.PENDING

    def _is_wanted(self, agent: Agent) -> bool:
        match self._reference:
            case NoModel():
                return agent.model_path is None
            case LocalModel(path):
                return agent.model_path == path
            case _:
                return agent.model in names(self._reference)


def _said(agent: Agent) -> tuple[object, ...]:
    return agent.state, agent.application, agent.model_path, agent.issues, agent.download
