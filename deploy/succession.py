"""Which supervisor stays while balancers of several versions are there. No I/O here; ``now`` is an argument.

There can be one supervisor only, and it is to have the settings of the balancer that was started last, for
Serve starts those of the newest version only. So supervisors are told apart by the birth of the balancer
that has made them. Each balancer looks at every supervisor that it is about to follow:

| what it finds | what it does |
|---|---|
| one with its own settings | follows it |
| one with others, of an older balancer | ends it, makes its own |
| one with others, of a newer balancer | follows it |
| none, for the first time, or after it has ended one | makes one |
| none any more | waits: a newer balancer may have ended it, to make its own; then it makes one |

Whatever the older ones make meanwhile, the newest ends it when it comes across it, and nobody ends what the
newest makes.
"""

from dataclasses import dataclass, replace
from typing import Self

PATIENCE = 5.0
"""Seconds without a supervisor after which a balancer makes one."""

LONG_PATIENCE = 30.0
"""The same for one that has seen a newer balancer's."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a supervisor was made with, in a form that every version can read."""

    born: int
    """Of the balancer that has made it, in milliseconds since 1970."""
    settings: str

    def __str__(self) -> str:
        return f"{self.born} {self.settings}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of a version that told its settings alone: the oldest."""
        born, _, settings = text.partition(" ")
        return cls(int(born), settings) if born.isdecimal() else cls(0, text)

    def outranks(self, other: "Claim") -> bool:
        return self.settings != other.settings and self._rank > other._rank

    @property
    def _rank(self) -> tuple[int, str]:
        return self.born, self.settings


class Succession:
    """As one balancer sees it."""

    def __init__(self, settings: str, *, born: int) -> None:
        self.own = Claim(born, settings)
        self._is_new = True
        """It has not looked yet."""
        self._missing_since: float | None = None
        self._patience = 0.0

    def follows(self, found: Claim) -> bool:
        """Is this one to be followed? Otherwise end it, and look again."""
        # Who has just been started is newer than what is there already, whatever the clocks of two
        # machines say; and as new as the newest that has the same settings.
        least = found.born
        if found.settings != self.own.settings:
            least = found.born + 1 if self._is_new else 0
        self.own = replace(self.own, born=max(self.own.born, least))
        self._is_new = False
        self._missing_since = None
        if self.own.outranks(found):
            self._patience = 0.0
            return False
        self._patience = LONG_PATIENCE if found.outranks(self.own) else PATIENCE
        return True

    def may_make(self, *, now: float) -> bool:
        """There is none. True: make one now."""
        self._is_new = False
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since < self._patience:
            return False
        self._patience = max(self._patience, PATIENCE)  # if that is ended, it was by a newer one
        self._missing_since = None
        return True
