"""Which supervisor stays while balancers of several versions are there. No I/O here; ``now`` is an argument.

There can be one supervisor only, and it is to have the settings that were declared last, with the start or
the deployment. Each balancer looks at every supervisor that it is about to follow:

| what it finds | what it does |
|---|---|
| one with its own settings, or with some that were declared later | follows it |
| one with settings that were declared before its own | ends it, makes its own |
| none, for the first time, or after it has ended one | makes one |
| none any more | waits: a newer balancer may have ended it, to make its own; then it makes one |

Whatever the older ones make meanwhile, the newest ends it when it comes across it, and nobody ends what the
newest makes.
"""

from dataclasses import dataclass
from typing import Self

PATIENCE = 5.0
"""Seconds without a supervisor after which a balancer makes one."""

LONG_PATIENCE = 30.0
"""The same for one that has seen a newer balancer's."""


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """What a supervisor was made with, in a form that every version can read."""

    declared: int
    """When, in milliseconds since 1970."""
    settings: str

    def __str__(self) -> str:
        return f"{self.declared} {self.settings}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of a version that told its settings alone: the oldest."""
        declared, _, settings = text.partition(" ")
        return cls(int(declared), settings) if declared.isdecimal() else cls(0, text)

    def outranks(self, other: "Claim") -> bool:
        return self.settings != other.settings and self > other


class Succession:
    """As one balancer sees it."""

    def __init__(self, own: Claim) -> None:
        self.own = own
        self._missing_since: float | None = None
        self._patience = 0.0

    def follows(self, found: Claim) -> bool:
        """Is this one to be followed? Otherwise end it, and look again."""
        self._missing_since = None
        if self.own.outranks(found):
            self._patience = 0.0
            return False
        self._patience = LONG_PATIENCE if found.outranks(self.own) else PATIENCE
        return True

    def may_make(self, *, now: float) -> bool:
        """There is none. True: make one now."""
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since < self._patience:
            return False
        self._patience = max(self._patience, PATIENCE)  # if that is ended, it was by a newer one
        self._missing_since = None
        return True
