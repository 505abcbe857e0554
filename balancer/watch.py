"""Tells an agent that has come to a stop from one that is slow. No I/O here.

An agent whose process is dead, or whose machine, is found by its link. This is for one that answers
pings and does nothing else. Time is counted in looks, not by the clock: a balancer that was itself
held up for a while blames nobody for it.
"""

from dataclasses import dataclass

from common.messages import Status

LOOK_INTERVAL = 1.0
"""Seconds between two looks."""

MOST_SILENT = 5
"""Looks in which an agent that has requests may have said nothing: it reports every second."""


@dataclass(slots=True)
class Watch:
    _silent: int = 0

    def heard(self) -> None:
        self._silent = 0

    def look(self, status: Status, *, bound: int) -> str | None:
        """``bound``: requests that it has. Why it is to be given up; None: it is not."""
        self._silent = self._silent + 1 if bound else 0
        if self._silent > MOST_SILENT:
            return f"it has requests and says nothing for {self._silent * LOOK_INTERVAL:g} s"
        age, limit = status.step_age, status.step_limit
        if age is not None and limit is not None and age > limit:
            return f"its step takes {age:.1f} s already; it said itself that {limit:.1f} s is much"
        return None
