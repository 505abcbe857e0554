"""The sequence IDs that one llama.cpp context can hold at once. No I/O here.

| an ID is | and it is found in |
|---|---|
| free | ``_free``: its sequence is empty |
| running | ``_running``: a request owns it |
| cached | ``_cached``, least recently used first, with the number of tokens that it keeps |
"""

from common.ids import SequenceId


class SequencePool:
    def __init__(self, size: int) -> None:
        self._free = [SequenceId(n) for n in reversed(range(size))]
        self._running: set[SequenceId] = set()
        self._cached: dict[SequenceId, int] = {}

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def oldest_cached(self) -> SequenceId | None:
        """The one that was not used for the longest time."""
        return next(iter(self._cached), None)

    def acquire(self) -> SequenceId:
        """A sequence ID that nobody else holds. Ask ``has_free`` before."""
        assert self._free, "more sequences asked for than the context holds"
        sequence_id = self._free.pop()
        self._running.add(sequence_id)
        return sequence_id

    def cached_length(self, sequence_id: SequenceId) -> int | None:
        """How many tokens a cached one holds; None if it is not cached."""
        return self._cached.get(sequence_id)

    def rest(self, sequence_id: SequenceId, length: int) -> None:
        """From running to cached, with so many tokens."""
        self._running.remove(sequence_id)
        self._cached[sequence_id] = length

    def expose(self, sequence_id: SequenceId) -> None:
        """The cached one is of no use: the first to go."""
        self._cached = {sequence_id: self._cached.pop(sequence_id), **self._cached}

    def touch(self, sequence_id: SequenceId) -> None:
        """It has been of use. Nothing to do if it is not cached."""
        length = self._cached.pop(sequence_id, None)
        if length is not None:
            self._cached[sequence_id] = length

    def release(self, sequence_id: SequenceId) -> None:
        """From running or cached to free."""
        if sequence_id in self._cached:
            del self._cached[sequence_id]
        else:
            self._running.remove(sequence_id)
        self._free.append(sequence_id)
