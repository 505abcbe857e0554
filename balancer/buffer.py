"""Requests that wait for a slot: bounded in number and bytes, each with a deadline; inside a priority class
first in, first out.

No I/O here: ``now`` is an argument, in seconds of a clock that only goes forward.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from balancer.terms import Priority, Terms
from common.ids import RequestId


@dataclass(slots=True)
class Waiting:
    request_id: RequestId
    arrival: int
    """Those that came later have larger numbers."""
    terms: Terms
    since: float
    """When it began to wait, or was last taken from an agent."""
    deadline: float
    kin: str | None = None
    """Its answer has begun: only an agent of this fingerprint can go on with it."""
    losses: int = 0
    """Agents that were lost with it in a row, before it got any further."""
    moves: int = 0
    """How often it was taken from its agent."""


class Buffer:
    def __init__(self, *, capacity: int, patience: float, most_bytes: int | None = None) -> None:
        """``capacity``: how many may wait (0: none). ``patience``: seconds that each may wait.
        ``most_bytes``: of all together; None: any.
        """
        self.capacity = capacity
        self.most_bytes = most_bytes
        self.bytes = 0
        """Of all that wait."""
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

    def has_room_for(self, terms: Terms) -> bool:
        """In bytes."""
        return self.most_bytes is None or self.bytes + terms.size <= self.most_bytes

    @property
    def next_deadline(self) -> float | None:
        return min((waiting.deadline for waiting in self), default=None)

    def push(self, waiting: Waiting) -> None:
        assert not self.is_full, "ask first"
        assert self.has_room_for(waiting.terms), "ask first"
        self.bytes += waiting.terms.size
        self._classes[waiting.terms.priority][waiting.request_id] = waiting

    def push_back(self, waiting: Waiting) -> None:
        """Put a request that had its turn already before those of its class that came later, which is
        nearly always at the head, even if the buffer is full: it was accepted once and is not turned
        away now.
        """
        self.bytes += waiting.terms.size
        others = self._classes[waiting.terms.priority]
        earlier = list(takewhile(lambda each: each.arrival < waiting.arrival, others.values()))
        others[waiting.request_id] = waiting
        for each in reversed([*earlier, waiting]):
            others.move_to_end(each.request_id, last=False)

    def discard(self, request_id: RequestId) -> bool:
        """Remove the request; False if it does not wait here."""
        for waiting in self._classes.values():
            if found := waiting.pop(request_id, None):
                self.bytes -= found.terms.size
                return True
        return False

    def expire(self, *, now: float) -> list[Waiting]:
        """Remove and return the requests whose deadline has come, in their order."""
        expired = [waiting for waiting in self if waiting.deadline <= now]
        for waiting in expired:
            self.discard(waiting.request_id)
        return expired
