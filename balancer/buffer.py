"""Requests that wait for a slot: first in, first out, bounded in number, each with a deadline.

No I/O here: ``now`` is an argument, in seconds of a clock that only goes forward.
"""

from collections import OrderedDict

from common.ids import RequestId


class Buffer:
    def __init__(self, *, capacity: int, patience: float) -> None:
        """``capacity``: how many may wait (0: none). ``patience``: seconds that each may wait."""
        self.capacity = capacity
        self.patience = patience
        self._deadlines: OrderedDict[RequestId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def is_full(self) -> bool:
        return len(self._deadlines) >= self.capacity

    @property
    def next_deadline(self) -> float | None:
        return min(self._deadlines.values(), default=None)

    def push(self, request_id: RequestId, *, now: float) -> None:
        assert not self.is_full, "ask first"
        self._deadlines[request_id] = now + self.patience

    def push_back(self, request_id: RequestId, *, deadline: float) -> None:
        """Put a request that had its turn already at the head, even if the buffer is full: it was
        accepted once and is not turned away now.
        """
        self._deadlines[request_id] = deadline
        self._deadlines.move_to_end(request_id, last=False)

    def pop(self) -> tuple[RequestId, float]:
        """The request that has waited longest, and its deadline."""
        return self._deadlines.popitem(last=False)

    def discard(self, request_id: RequestId) -> bool:
        """Remove the request; False if it does not wait here."""
        return self._deadlines.pop(request_id, None) is not None

    def expire(self, *, now: float) -> list[RequestId]:
        """Remove and return the requests whose deadline has come, oldest first."""
        expired = [
            request_id for request_id, deadline in self._deadlines.items() if deadline <= now
        ]
        for request_id in expired:
            del self._deadlines[request_id]
        return expired
