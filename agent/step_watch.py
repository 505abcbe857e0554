"""Whether the model's thread has come to a standstill. No I/O and no clock here.

A step is one round of the thread, in the main a pass of the model. How long it may go on without
any progress follows what passes have cost, and is generous: a long prompt on a busy CPU takes its
time, and who is slow must never be taken for dead.
"""

from dataclasses import dataclass

FLOOR = 5.0
"""Seconds that any step may take."""

FACTOR = 10.0
"""How many times as long as expected a step may take beyond that: costs rise with the position,
and other programs take the cores away.
"""

UNMEASURED = 60.0
"""Seconds for a step of which nothing is known."""

LONGEST_LOOK = 2.0
"""Seconds that count between two looks, which are one second apart: what is more is no work of the
thread's, for this process did not look either. The machine was suspended, or all of it stopped.
"""

FADING = 0.9
"""What is left of a batch's costs after the next one."""

LOOKS = 2
"""One after another that must find a step too old."""


def step_limit(expected: float | None) -> float:
    """Seconds without progress that a step may take which is expected to take so many as a whole."""
    return UNMEASURED if expected is None else FLOOR + FACTOR * expected


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    began: float
    limit: float
    """Seconds without progress."""


class StepWatch:
    """Looks again and again."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        """The step that ran at the last look, and how far it was."""
        self._age = 0.0
        """Its seconds without progress, then."""
        self._looked: float | None = None
        self._too_old = 0

    def look(self, step: Step | None, *, progress: int, now: float) -> bool:
        """Is it over its limit, now and at the looks before? ``step``: the one that runs, None if
        nothing is to be done. ``progress``: any number that changes while it gets on.
        """
        if step is None:
            self._seen, self._looked, self._too_old = None, now, 0
            return False
        age = self.age(step, progress=progress, now=now)
        self._seen, self._age, self._looked = (step.number, progress), age, now
        self._too_old = self._too_old + 1 if age > step.limit else 0
        return self._too_old >= LOOKS

    def age(self, step: Step, *, progress: int, now: float) -> float:
        """Seconds since its last progress, so far as looks tell."""
        if self._looked is None:
            return now - step.began
        since = min(now - self._looked, LONGEST_LOOK)
        if self._seen is None or self._seen[0] != step.number:
            return min(now - step.began, since)
        if self._seen[1] != progress:
            return 0.0
        return self._age + since


class DocumentCosts:
    """What documents cost that are embedded. One batch of them takes several steps, and nobody tells
    how much each of these does; so any is expected to take as long as the batch.
    """

    def __init__(self) -> None:
        self._token: float | None = None
        """Seconds; what was most lately."""
        self._spent = 0.0

    def began(self) -> None:
        """A new batch."""
        self._spent = 0.0

    def expected(self, tokens: int) -> float | None:
        """Seconds for a batch of so many; None: nobody knows."""
        return None if self._token is None else self._token * tokens

    def spent(self, seconds: float) -> None:
        self._spent += seconds

    def completed(self, tokens: int) -> None:
        """The batch, of so many."""
        self._token = max(self._spent / tokens, FADING * (self._token or 0.0))
