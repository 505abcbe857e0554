"""What the supervisor knows from the balancers' beats: who they are, what is wanted, what is there. No I/O
here; ``now`` is an argument. It is rebuilt from their next beats whenever it is lost.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from balancer.fleet_beats import Answer, Beat, FleetView, SeenAgent
from balancer.stored_state import StoredState

SILENCE = 3.0
"""Seconds without a beat after which a balancer is lost: what it said holds no more."""

LONG_SILENCE = 15.0
"""Seconds after which agents hang up on it, too. Its beats may be late and its streams fine: its machine is
busy, or the supervisor has been started anew.
"""


@dataclass(slots=True)
class _Balancer:
    beat: Beat
    heard: float
    is_lost: bool = False
    """It has been silent for a while, and nobody hangs up on it yet."""


class Registry:
    def __init__(self, *, now: float) -> None:
        self._balancers: dict[str, _Balancer] = {}
        self._state: StoredState | None = None
        self._digest = ""
        self._refused = ""
        self.last_heard = now
        """When any balancer was."""

    @property
    def state(self) -> StoredState | None:
        """The latest of all parts that any balancer knows; None: none has told."""
        return self._state

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where agents dial in."""
        return tuple(sorted({each.beat.address for each in self._balancers.values()}))

    @property
    def is_blind(self) -> bool:
        """Is there no balancer that says who waits and what agents do?"""
        return not self._heard

    @property
    def _heard(self) -> dict[str, _Balancer]:
        """What they said holds."""
        return {id_: each for id_, each in self._balancers.items() if not each.is_lost}

    @property
    def waiting(self) -> dict[str, int]:
        """Requests without a slot, by fleet, at all balancers together."""
        total = Counter[str]()
        for each in self._heard.values():
            total.update(each.beat.waiting)
        return dict(total)

    @property
    def agents(self) -> dict[str, SeenAgent]:
        """By name, each as the balancer that was heard last sees it."""
        heard = sorted(self._heard.values(), key=lambda each: each.heard)
        return {agent.name: agent for each in heard for agent in each.beat.agents}

    def hear(self, beat: Beat, *, now: float) -> str | None:
        """Returns what is wrong with it, if anything is: a state that cannot be read is not followed,
        which is said once.
        """
        self.last_heard = now
        if beat.ends:
            self._balancers.pop(beat.balancer_id, None)
        else:
            self._balancers[beat.balancer_id] = _Balancer(beat, now)
        if beat.state is None or beat.digest in {self._digest, self._refused}:
            return None
        try:
            told = StoredState.model_validate_json(beat.state)
        except ValidationError as error:
            self._refused = beat.digest
            return f"the state of balancer {beat.balancer_id} cannot be read: {error}"
        self._state = told if self._state is None else self._state.merged(told)
        self._digest = self._state.digest
        return None

    def answer(self, beat: Beat, views: Mapping[str, FleetView]) -> Answer:
        news = None if self._digest == beat.digest else self._state
        return Answer(
            digest=self._digest,
            state=None if news is None else news.model_dump_json(by_alias=True),
            leads=beat.balancer_id == min(self._heard, default=beat.balancer_id),
            fleets=dict(views),
        )

    def expire(self, *, now: float) -> list[str]:
        """Forget the balancers that are lost; returns the ids of those that were not before."""
        lost = [id_ for id_, each in self._heard.items() if now - each.heard > SILENCE]
        for id_ in lost:
            self._balancers[id_].is_lost = True
        self._balancers = {
            id_: each for id_, each in self._balancers.items() if now - each.heard <= LONG_SILENCE
        }
        return lost
