"""Who may use this agent's slots. The agent owns them: what the balancer believes is a guess.

No I/O here. A request holds its slot from the moment its frame arrives, so also while its prompt
is rendered and tokenized, until its last event has been handed to the link.
"""

from common.ids import RequestId


class Admission:
    def __init__(self) -> None:
        self.slots = 0
        """How many requests may run; 0 while no model is loaded."""
        self.draining = False
        self._holders: set[RequestId] = set()

    @property
    def processing(self) -> int:
        return len(self._holders)

    @property
    def is_idle(self) -> bool:
        return not self._holders

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self._holders

    def admit(self, request_id: RequestId) -> bool:
        """Take a slot; False if there is none, then the caller must answer ``Busy``."""
        if self.draining or len(self._holders) >= self.slots or request_id in self._holders:
            return False
        self._holders.add(request_id)
        return True

    def release(self, request_id: RequestId) -> None:
        self._holders.discard(request_id)
