"""What a request asks of the buffer and the dispatcher. No I/O here."""

import enum
from dataclasses import dataclass


class Priority(enum.StrEnum):
    """Higher ones are dispatched first, each class in the order of arrival."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Terms:
    model: str | None = None
    """One of the names of the model that must serve it; None: any."""
    priority: Priority = Priority.NORMAL
    deadline: float | None = None
    """Seconds until it must be answered in full; None: it may wait as long as others do."""
    size: int = 0
    """Bytes that it takes while it waits."""


ANY = Terms()
