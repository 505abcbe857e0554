"""When an agent's process is to be killed, and when it is started again. No I/O and no clock here.

Silence is counted in ticks of the keeper's own, one a second, so that a machine that was suspended
or stopped as a whole kills nobody.
"""

from typing import TypeAlias

import msgspec

FIRST_PATIENCE = 60
"""Ticks until the first beat: a process starts, and imports much, on a busy machine."""

LOADING_PATIENCE = 20
"""Ticks without a beat while no model serves: some libraries are loaded with the interpreter's lock
held.
"""

PATIENCE = 5
"""Ticks without a beat while a model serves."""

FIRST_DELAY = 0.2
LONGEST_DELAY = 10.0

WELL = 60
"""Beats of one process that serves, after which earlier ends are forgotten."""

MOST_RESTARTS = 20
"""One after another, none of which has served well."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The agent's loop runs, and its model makes progress; sent once a second or more often."""

    serves: bool
    """A model is loaded and serves."""


class Over(msgspec.Struct, frozen=True, tag=True):
    """The agent ends with an error; the last thing it says."""

    reason: str
    is_final: bool
    """To start it again would not help."""


Report: TypeAlias = Beat | Over
"""What an agent's process tells its keeper, a line of JSON each."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new, finish what runs for so many seconds, end."""

    seconds: float


class Dial(msgspec.Struct, frozen=True, tag=True):
    """Keep links to the balancers at these addresses, and to no others."""

    addresses: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now."""


Command: TypeAlias = Dial | Drain | Stop
"""What a keeper tells its agent's process, a line of JSON each."""


class Silence:
    """How long one process has been silent."""

    def __init__(self) -> None:
        self._left = FIRST_PATIENCE
        self.has_spoken = False

    def beat(self, beat: Beat) -> None:
        self.has_spoken = True
        self._left = PATIENCE if beat.serves else LOADING_PATIENCE

    def tick(self) -> bool:
        """A second has passed; True: it has been silent for too long."""
        self._left -= 1
        return self._left <= 0


class Restarts:
    """Whether a process that has ended is started again, and how soon."""

    def __init__(self) -> None:
        self._in_vain = 0
        """Processes in a row that have not served well."""
        self._beats = 0

    def beat(self, beat: Beat) -> None:
        """Of the present process."""
        self._beats += beat.serves
        if self._beats >= WELL:
            self._in_vain = 0

    def ended(self) -> float | None:
        """Seconds to wait before the next start; None: it is given up."""
        self._beats = 0
        self._in_vain += 1
        if self._in_vain > MOST_RESTARTS:
            return None
        return min(FIRST_DELAY * 2 ** (self._in_vain - 1), LONGEST_DELAY)
