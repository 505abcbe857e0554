"""The sequence IDs that one llama.cpp context can hold at once. No I/O here."""

from common.ids import SequenceId


class SequencePool:
    def __init__(self, size: int) -> None:
        self._free = [SequenceId(n) for n in reversed(range(size))]
        self._taken: set[SequenceId] = set()

    def acquire(self) -> SequenceId:
        """A sequence ID that nobody else holds. The caller knows that there is one."""
        assert self._free, "more sequences asked for than the context holds"
        sequence_id = self._free.pop()
        self._taken.add(sequence_id)
        return sequence_id

    def release(self, sequence_id: SequenceId) -> None:
        self._taken.remove(sequence_id)
        self._free.append(sequence_id)
