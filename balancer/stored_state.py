"""All that operators want, and how the states of several balancers become one. No I/O here.

A state has parts: the desired state, the agents' overrides, and each fleet. A part that was ``PUT`` or
deleted carries when that was, and of two balancers the one that was told later is followed. All other
parts are as they were declared with the start or the deployment, and the latest declaration holds as
a whole: a fleet that is not in it any more is gone.
"""

import hashlib
import json
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from balancer.desired_state import AgentOverrides, BalancerDesiredState, Strict
from balancer.fleets import Fleet, FleetName

DESIRED_STATE = "balancer_desired_state"
AGENT_OVERRIDES = "agent_overrides"

MOST_DELETED = 1000
"""Deleted fleets that are remembered as such; the oldest are forgotten."""

Time: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
"""Milliseconds since 1970, or a little more: one balancer never says the same twice."""


def fleet_part(name: str) -> str:
    return f"fleets/{name}"


class StoredState(Strict):
    """The content of the file; of the published format are ``balancer_desired_state`` and ``version``."""

    balancer_desired_state: BalancerDesiredState
    agent_overrides: AgentOverrides = AgentOverrides()
    fleets: dict[FleetName, Fleet] = Field(default_factory=dict)
    declared: Time = 0
    """When those parts were that have no revision; 0: never."""
    revisions: dict[str, Time] = Field(default_factory=dict)
    """When the parts were put or deleted that ever were."""
    version: Literal["1"] = "1"

    @property
    def digest(self) -> str:
        """The same for equal states only."""
        return hashlib.sha256(_text(self).encode()).hexdigest()

    @property
    def latest(self) -> int:
        """When any of it was said."""
        return max(self.declared, *self.revisions.values(), 0)

    @property
    def wish_number(self) -> int:
        """Of what agents are told: at least 1, and greater when any of that was said again."""
        parts = DESIRED_STATE, AGENT_OVERRIDES
        return max(1, *(self.revisions.get(part, self.declared) for part in parts))

    def put(self, *parts: str, at: int) -> "StoredState":
        """With these parts, which it has or has not, as put or deleted now."""
        return self.model_copy(update={"revisions": {**self.revisions, **dict.fromkeys(parts, at)}})

    @property
    def parts(self) -> dict[str, Strict]:
        return {
            DESIRED_STATE: self.balancer_desired_state,
            AGENT_OVERRIDES: self.agent_overrides,
            **{fleet_part(name): fleet for name, fleet in self.fleets.items()},
        }

    def merged(self, other: "StoredState") -> "StoredState":
        """With the later of each part. The same whichever of them is asked, and, of several, in
        whatever order.
        """
        fleets = {
            name: later.fleets[name]
            for name in {**self.fleets, **other.fleets}
            if name in (later := self._later(other, fleet_part(name))).fleets
        }
        revisions = {
            part: max(self.revisions.get(part, 0), other.revisions.get(part, 0))
            for part in {**self.revisions, **other.revisions}
        }
        deleted = revisions.keys() - {DESIRED_STATE, AGENT_OVERRIDES, *map(fleet_part, fleets)}
        for part in sorted(deleted, key=lambda part: (revisions[part], part))[:-MOST_DELETED]:
            del revisions[part]
        return StoredState(
            balancer_desired_state=self._later(other, DESIRED_STATE).balancer_desired_state,
            agent_overrides=self._later(other, AGENT_OVERRIDES).agent_overrides,
            fleets=fleets,
            declared=max(self.declared, other.declared),
            revisions=revisions,
        )

    def _later(self, other: "StoredState", part: str) -> "StoredState":
        def rank(state: StoredState) -> tuple[int, int, str]:
            put = state.revisions.get(part, 0)
            return put, 0 if put else state.declared, _text(state.parts.get(part))

        return max(self, other, key=rank)


def _text(part: Strict | None) -> str:
    told = None if part is None else part.model_dump(mode="json", by_alias=True)
    return json.dumps(told, sort_keys=True)
