"""What the KV cache holds, and what of it a new prompt can use again. No I/O here.

Puts together the sequence IDs, the account of cells and the index of prefixes, which must always
say the same. Nothing is decided here about requests: that is ``agent.scheduler``'s.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.cells import Cells
from agent.engine import Capacity
from agent.prefixes import PrefixIndex
from agent.sequences import SequencePool
from common.ids import SequenceId, TokenId


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt that a sequence holds, or will hold when it is fed."""

    source: SequenceId
    ready: int
    """So many tokens can be had now."""
    expected: int
    """So many once the source has been fed."""


class KvCache:
    def __init__(self, capacity: Capacity, *, most_cached: int) -> None:
        """``most_cached``: cells that finished sequences may keep."""
        self._shares_part = capacity.shares_part
        self._most_cached = most_cached
        self._pool = SequencePool(capacity.sequences)
        self._index = PrefixIndex()
        self.cells = Cells(capacity.cells, shareable=capacity.shares_cells)

    def acquire(
        self, tokens: Sequence[TokenId], *, salt: str
    ) -> tuple[SequenceId, list[SequenceId]]:
        """An empty sequence for this prompt, and those that had to be dropped for it: forget them
        first. The one that holds the prompt's beginning is the last to be dropped.
        """
        dropped: list[SequenceId] = []
        if not self._pool.has_free:
            _, holders = self._index.match(tokens, salt=salt)
            if (holder := next(filter(self.is_cached, holders), None)) is not None:
                self._pool.touch(holder)
            dropped = self.evict()
        return self._pool.acquire(), dropped

    def admit(self, sequence_id: SequenceId, tokens: Sequence[TokenId], *, salt: str) -> None:
        """These tokens are going to be fed, so others may look forward to them."""
        self._index.insert(sequence_id, tokens, salt=salt)

    def find(
        self,
        tokens: Sequence[TokenId],
        fed: Mapping[SequenceId, int],
        *,
        salt: str,
        whole: Callable[[int], int],
    ) -> Prefix | None:
        """The longest prefix of the prompt that is here. The last token is never part of it:
        it must be fed, so that there is something to sample from.

        ``fed``: how many tokens each running sequence holds.
        """
        length, holders = self._index.match(tokens, salt=salt)
        expected = whole(min(length, len(tokens) - 1))
        best: Prefix | None = None
        for holder in holders:
            held = self._pool.cached_length(holder)
            if not self._shares_part and held != expected:
                continue  # it can be had whole only, and only while it does not grow
            ready = whole(min(fed[holder] if held is None else held, expected))
            if best is None or ready > best.ready:
                best = Prefix(holder, ready, expected)
        return best

    def is_cached(self, sequence_id: SequenceId) -> bool:
        return self._pool.cached_length(sequence_id) is not None

    def rest(
        self, sequence_id: SequenceId, tokens: Sequence[TokenId], *, salt: str
    ) -> list[SequenceId]:
        """A request is over: keep what its sequence holds. Returns what had to be dropped, which
        may be the sequence itself.

        If another one holds the same, it is the first to go, but not yet: llama.cpp would go on in
        its cells at once with what runs, whose cells then are not in the order of their positions any
        more, and attention adds up in the order of cells.
        """
        self._index.remove(sequence_id)
        length, holders = self._index.match(tokens, salt=salt)
        again = next((h for h in holders if length == len(tokens) and self.is_cached(h)), None)
        self._index.insert(sequence_id, tokens, salt=salt)
        self.cells.rest(sequence_id)
        self._pool.rest(sequence_id, len(tokens))
        if again is not None:
            self._pool.touch(again)
            self._pool.expose(sequence_id)
        return self.trim()

    def trim(self) -> list[SequenceId]:
        """Keep no more than may be kept, also of what a running sequence held until now."""
        dropped: list[SequenceId] = []
        while self.cells.cached > self._most_cached:
            dropped += self.evict()
        return dropped

    def empty(self, sequence_id: SequenceId) -> None:
        """The running sequence's cells are given up, its ID is not."""
        self._index.remove(sequence_id)
        self.cells.drop(sequence_id)

    def release(self, sequence_id: SequenceId) -> list[SequenceId]:
        """Cells and ID are given up; returns the sequence, to be forgotten."""
        self.empty(sequence_id)
        self._pool.release(sequence_id)
        return [sequence_id]

    def evict(self) -> list[SequenceId]:
        """Drop the cached sequence that was not used for the longest time; none if none is left."""
        oldest = self._pool.oldest_cached
        return [] if oldest is None else self.release(oldest)
