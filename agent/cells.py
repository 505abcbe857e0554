"""Which sequence holds how many KV cells, cells that several share counted once. No I/O here.

Sequences share cells only from their beginning on, so what they hold is a forest: a node is a run
of cells, and a sequence holds the path from a root to its own node.

A sequence is *running* while its request is active, else *cached*: its cells could be had for
the asking. A cell is running if any sequence that holds it is.
"""

from dataclasses import dataclass

from common.ids import SequenceId


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive cells, held by the same sequences."""

    parent: "_Run | None"
    length: int
    holders: int = 0
    running: int = 0
    """How many of the holders are running."""


class Cells:
    def __init__(self, capacity: int, *, shareable: bool) -> None:
        """``shareable``: False if the model must copy what a sequence takes over from another."""
        self.capacity = capacity
        self._shareable = shareable
        self._ends: dict[SequenceId, _Run] = {}
        self._cached: set[SequenceId] = set()
        self.used = 0
        self.running = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def cached(self) -> int:
        """Cells that only cached sequences hold."""
        return self.used - self.running

    def grow(self, sequence_id: SequenceId, count: int) -> None:
        """A running sequence has been fed so many tokens more."""
        assert sequence_id not in self._cached
        if count == 0:
            return
        end = self._ends.get(sequence_id)
        if end is None or end.holders > 1:
            end = self._ends[sequence_id] = _Run(end, 0, holders=1, running=1)
        end.length += count
        self.used += count
        self.running += count

    def share(self, source: SequenceId, destination: SequenceId, length: int) -> None:
        """The destination, running and empty until now, holds the source's first cells too."""
        assert destination not in self._ends
        assert destination not in self._cached
        if not self._shareable:
            self.grow(destination, length)
            return
        end = self._cut(source, length)
        self._ends[destination] = end
        self._count(end, holders=1, running=1)

    def rest(self, sequence_id: SequenceId) -> None:
        """From running to cached."""
        assert sequence_id not in self._cached
        self._cached.add(sequence_id)
        self._count(self._ends.get(sequence_id), holders=0, running=-1)

    def drop(self, sequence_id: SequenceId) -> None:
        """The sequence is empty now: running or cached before, and running if it is fed again."""
        running = 0 if sequence_id in self._cached else -1
        self._cached.discard(sequence_id)
        self._count(self._ends.pop(sequence_id, None), holders=-1, running=running)

    def _count(self, end: _Run | None, *, holders: int, running: int) -> None:
        run = end
        while run is not None:
            was_used, was_running = run.holders > 0, run.running > 0
            run.holders += holders
            run.running += running
            self.used += run.length * ((run.holders > 0) - was_used)
            self.running += run.length * ((run.running > 0) - was_running)
            run = run.parent

    def _cut(self, sequence_id: SequenceId, length: int) -> _Run:
        """The node that ends exactly after the sequence's first ``length`` cells."""
        path: list[_Run] = []
        run: _Run | None = self._ends[sequence_id]
        while run is not None:
            path.append(run)
            run = run.parent
        start = 0
        for run in reversed(path):
            if start + run.length >= length:
                break
            start += run.length
        else:
            raise AssertionError("more cells than the sequence holds")
        if start + run.length == length:
            return run
        upper = _Run(run.parent, length - start, run.holders, run.running)
        run.parent = upper
        run.length -= upper.length
        return upper
