"""Several requests of one client, which it waits for together."""

from collections import deque
from collections.abc import Mapping

from balancer.balancer import Balancer
from balancer.exchange import Exchange, Told
from balancer.terms import ANY, Terms
from common.ids import RequestId


class Batch:
    """Submitted as soon as it is made, some at once and the others as those end. Read it to its end,
    or ``cancel``.
    """

    def __init__(
        self,
        balancer: Balancer,
        frames: Mapping[RequestId, bytes],
        terms: Terms = ANY,
        *,
        at_once: int,
    ) -> None:
        """``frames``: encoded, by their requests' ids."""
        self.name = next(iter(frames), "")
        """What the whole is called: the first request's id."""
        self._balancer = balancer
        self._terms = terms
        self._exchange = Exchange(len(frames))
        self._waiting = deque(frames.items())
        self._running: set[RequestId] = set()
        while self._waiting and len(self._running) < at_once:
            self._begin()

    @property
    def is_empty(self) -> bool:
        """Is there nothing to read at this moment?"""
        return self._exchange.is_empty

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._running

    def __aiter__(self) -> "Batch":
        return self

    async def __anext__(self) -> Told:
        told = await anext(self._exchange)
        if told.is_last:
            self._running.discard(told.event.request_id)
            if self._waiting:
                self._begin()
        return told

    def cancel(self) -> None:
        """What is not over. In one act: one that waits must not begin because another one stops."""
        self._waiting.clear()
        while self._running:
            self._balancer.cancel(self._running.pop())

    def _begin(self) -> None:
        request_id, frame = self._waiting.popleft()
        self._running.add(request_id)
        self._balancer.submit(request_id, frame, self._terms, exchange=self._exchange)
