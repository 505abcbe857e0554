"""Requests that wait for a slot: bounded in number, each with a deadline; inside a priority class
first in, first out.

No I/O here: ``now`` is an argument, in seconds of a clock that only goes forward.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from balancer.terms import Priority, Terms
from common.ids import RequestId


@dataclass(slots=True)
class Waiting:
    request_id: RequestId
    terms: Terms
    deadline: float
    kin: str | None = None
    """Its answer has begun: only an agent of this fingerprint can go on with it."""
    losses: int = 0
    """Agents that were lost while they served it."""
    moves: int = 0
    """The same, and those that gave it back when it had begun."""


class Buffer:
    def __init__(self, *, capacity: int, patience: float) -> None:
        """``capacity``: how many may wait (0: none). ``patience``: seconds that each may wait."""
        self.capacity = capacity
        self.patience = patience
        self._classes = {priority: OrderedDict[RequestId, Waiting]() for priority in Priority}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Waiting]:
        """In the order in which they should be dispatched."""
        for waiting in self._classes.values():
            yield from waiting.values()

    @property
    def is_full(self) -> bool:
        return len(self) >= self.capacity

    @property
    def next_deadline(self) -> float | None:
        return min((waiting.deadline for waiting in self), default=None)

    def push(self, waiting: Waiting) -> None:
        assert not self.is_full, "ask first"
        self._classes[waiting.terms.priority][waiting.request_id] = waiting

    def push_back(self, waiting: Waiting) -> None:
        """Put a request that had its turn already at the head of its class, even if the buffer is
        full: it was accepted once and is not turned away now.
        """
        others = self._classes[waiting.terms.priority]
        others[waiting.request_id] = waiting
        others.move_to_end(waiting.request_id, last=False)

    def set_deadlines(self, deadline: float) -> None:
        """Of all that have none of their own."""
        for waiting in self:
            if waiting.terms.deadline is None:
                waiting.deadline = deadline

    def discard(self, request_id: RequestId) -> bool:
        """Remove the request; False if it does not wait here."""
        return any(waiting.pop(request_id, None) is not None for waiting in self._classes.values())

    def expire(self, *, now: float) -> list[Waiting]:
        """Remove and return the requests whose deadline has come, in their order."""
        expired = [waiting for waiting in self if waiting.deadline <= now]
        for waiting in expired:
            self.discard(waiting.request_id)
        return expired
