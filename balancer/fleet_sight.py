"""What the supervisor knows of one agent of a fleet, from its actor and from the balancers. No I/O here;
``now`` is an argument.
"""

from dataclasses import dataclass

from balancer.fleet_beats import MemberView, SeenAgent
from balancer.fleet_plan import NODE_IS_SLOW, Member
from common.models import Phase

FRESH = 2.0
"""Seconds for which what a balancer says of an agent holds."""

UNSEEN = 10.0
"""Seconds that an agent which serves may be out of sight, while balancers and supervisors come and
go, until it counts as one that does not.
"""


@dataclass(slots=True)
class Sight:
    name: str
    made: float
    """When it was started, or found again."""
    fleet: str
    generation: str = ""
    """Empty: not known, as of one that was found and does not run."""
    was_found: bool = False
    """It was started by a supervisor before this one."""
    placed: float | None = None
    """When its actor was first seen to run."""
    has_process: bool = False
    """Its actor runs now."""
    is_leaving: bool = False
    """It was asked to end."""
    seen: SeenAgent | None = None
    """As a balancer saw it last."""
    seen_at: float = 0.0

    def run(self, fleet: str, generation: str, *, now: float) -> None:
        """Its actor runs, and has said what it is."""
        self.fleet, self.generation = fleet, generation
        self.has_process = True
        self.placed = now if self.placed is None else self.placed

    def lose(self) -> None:
        """Its actor does not run any more; Ray starts it again."""
        self.has_process = False
        self.was_found = False
        self.seen = None

    def see(self, agent: SeenAgent, *, now: float) -> None:
        self.seen, self.seen_at = agent, now

    def member(self, *, now: float) -> Member:
        """As it is to be planned with."""
        phase = self._phase(now)
        serves = phase in {Phase.READY, Phase.DRAINING}
        slots = self.seen.slots if serves and self.seen else 0
        processing = self.seen.processing if serves and self.seen else 0
        if phase is Phase.READY and not self._is_in_sight(now):
            processing = max(1, processing)  # nobody knows, so that it must not be stopped
        problem = None if self.seen is None else self.seen.problem
        return Member(self.name, self.fleet, self.generation, phase, slots, processing, problem)

    def view(self, *, now: float, why_no_node: str | None) -> MemberView:
        """As operators see it. ``why_no_node``: if it waits for one."""
        phase = self._phase(now)
        seconds = {} if self.seen is None else dict(self.seen.phases)
        if self.placed is not None and not self.was_found:
            seconds = {Phase.NODE: round(self.placed - self.made, 3), **seconds}
        problem = None if self.seen is None else self.seen.problem
        if phase is Phase.NODE and now - self.made >= NODE_IS_SLOW:  # else it may just be starting
            problem = why_no_node
        return MemberView(name=self.name, phase=phase, seconds=seconds, problem=problem)

    def _is_in_sight(self, now: float) -> bool:
        return self.seen is not None and now - self.seen_at <= FRESH

    def _phase(self, now: float) -> Phase:
        """
        1. It was asked to end.
        2. A balancer sees it.
        3. It was found, and may be serving.
        4. Its actor does not run: it waits for a node.
        5. It served a moment ago, or else it does not yet.
        """
        if self.is_leaving:
            return Phase.DRAINING
        if self.seen is not None and self._is_in_sight(now):
            return self.seen.phase  # also if its actor does not answer
        if self.seen is None and self.was_found and now - self.made <= UNSEEN:
            return Phase.READY
        if not self.has_process:
            return Phase.NODE
        if self.seen is None:
            return Phase.PROCESS
        served = self.seen.phase is Phase.READY
        return Phase.READY if served and now - self.seen_at <= UNSEEN else Phase.PROCESS
