"""How far an agent's start is, and how long each part of it took. No I/O and no clock here."""

from common.models import Phase


class Phases:
    def __init__(self, *, started: float) -> None:
        """``started``: when the agent's process was started."""
        self.phase = Phase.PROCESS
        self._since = started
        self._seconds: dict[Phase, float] = {}
        self._is_over = False

    @property
    def seconds(self) -> dict[Phase, float]:
        """Of the start, by phases that are over. What was entered more than once, since something
        went wrong, is added up.
        """
        return dict(self._seconds)

    def enter(self, phase: Phase, *, now: float) -> None:
        """The agent is in this phase now, perhaps as before. Its start ends when it serves for the
        first time, or is asked to go; what it does later is not counted.
        """
        if phase is self.phase:
            return
        if not self._is_over:
            spent = max(0.0, now - self._since)
            self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + spent
            self._is_over = phase in (Phase.READY, Phase.DRAINING)
        self.phase = phase
        self._since = now
