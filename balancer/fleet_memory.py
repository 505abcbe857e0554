"""What the plan of a fleet remembers: the load of the last time, and which starts have failed. No I/O here:
``now`` is an argument.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

LONGEST_BACK_OFF = 60.0
WELL = 60.0
"""Seconds that an agent must serve before earlier failures are forgotten."""


class Peak:
    """How many agents the load of the last time needed. Each number is kept once, with when it was
    last needed, and only while no larger one has come later.
    """

    def __init__(self) -> None:
        self._falling: deque[tuple[float, int]] = deque()
        self._last = 0

    def add(self, agents: int, *, now: float) -> None:
        for needed in (self._last, agents):  # the last one was needed until now
            while self._falling and self._falling[-1][1] <= needed:
                self._falling.pop()
            self._falling.append((now, needed))
        self._last = agents

    def forget(self, *, before: float) -> None:
        while self._falling and self._falling[0][0] <= before:
            self._falling.popleft()

    def since(self, time: float) -> int:
        return next((needed for at, needed in self._falling if at > time), self._last)


@dataclass(slots=True)
class Failures:
    """Members that ended by themselves, or cannot serve. Those that were started before the last failure that
    counts have failed with it: a lost node is one failure.
    """

    count: int = 0
    in_vain: int = 0
    """In a row, of the wanted generation, and no member of it began to serve in between."""
    counted_at: float = -inf
    retry_at: float = -inf
    reason: str = ""

    @property
    def delay(self) -> float:
        return min(2.0 ** min(self.count - 1, 10), LONGEST_BACK_OFF)

    def add(self, reason: str, *, born: float, is_current: bool, now: float) -> None:
        self.reason = reason
        if born > self.counted_at:
            self.count += 1
            self.in_vain += is_current
            self.counted_at = now
            self.retry_at = now + self.delay
        else:
            self.retry_at = max(self.retry_at, now + 1)

    def serves(self, *, since: float, now: float) -> None:
        """A member of the wanted generation."""
        if since > self.counted_at:
            self.in_vain = 0
            if now - since >= WELL:
                self.count = 0
