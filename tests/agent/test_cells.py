"""The account of KV cells, against one that keeps every single cell."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent.cells import Cells
from common.ids import SequenceId

A, B, C = SequenceId(0), SequenceId(1), SequenceId(2)


def test_what_is_shared_counts_once() -> None:
    cells = Cells(100, shareable=True)
    cells.grow(A, 30)

    cells.share(A, B, 20)
    cells.grow(B, 5)

    assert (cells.used, cells.free) == (35, 65)


def test_what_is_copied_counts_twice() -> None:
    cells = Cells(100, shareable=False)
    cells.grow(A, 30)

    cells.share(A, B, 20)

    assert cells.used == 50


def test_cells_are_free_when_their_last_holder_drops_them() -> None:
    cells = Cells(100, shareable=True)
    cells.grow(A, 30)
    cells.share(A, B, 20)

    cells.drop(A)
    assert cells.used == 20
    cells.drop(B)
    assert cells.used == 0


def test_a_cached_sequence_whose_cells_run_elsewhere_frees_only_its_own() -> None:
    cells = Cells(100, shareable=True)
    cells.grow(A, 30)
    cells.rest(A)
    cells.share(A, B, 20)

    assert (cells.running, cells.cached) == (20, 10)


class Accounts(RuleBasedStateMachine):
    IDS = tuple(SequenceId(n) for n in range(5))

    @initialize(shareable=st.booleans())
    def start(self, shareable: bool) -> None:
        self.cells = Cells(10_000, shareable=shareable)
        self.shareable = shareable
        self.numbers = itertools.count()
        self.held: dict[SequenceId, list[int]] = {n: [] for n in self.IDS}
        self.cached: set[SequenceId] = set()

    @rule(sequence_id=st.sampled_from(IDS), count=st.integers(0, 5))
    def grow(self, sequence_id: SequenceId, count: int) -> None:
        if sequence_id not in self.cached:
            self.cells.grow(sequence_id, count)
            self.held[sequence_id] += itertools.islice(self.numbers, count)

    @rule(source=st.sampled_from(IDS), destination=st.sampled_from(IDS), data=st.data())
    def share(self, source: SequenceId, destination: SequenceId, data: st.DataObject) -> None:
        held = self.held[source]
        if source != destination and held and not self.held[destination]:
            length = data.draw(st.integers(1, len(held)))
            self.cells.share(source, destination, length)
            if self.shareable:
                self.held[destination] = held[:length]
            else:
                self.held[destination] = list(itertools.islice(self.numbers, length))

    @rule(sequence_id=st.sampled_from(IDS))
    def rest(self, sequence_id: SequenceId) -> None:
        if sequence_id not in self.cached and self.held[sequence_id]:
            self.cells.rest(sequence_id)
            self.cached.add(sequence_id)

    @rule(sequence_id=st.sampled_from(IDS))
    def drop(self, sequence_id: SequenceId) -> None:
        self.cells.drop(sequence_id)
        self.cached.discard(sequence_id)
        self.held[sequence_id] = []

    @invariant()
    def both_accounts_agree(self) -> None:
        used = set(itertools.chain(*self.held.values()))
        running = set(
            itertools.chain(*(held for n, held in self.held.items() if n not in self.cached))
        )
        assert (self.cells.used, self.cells.running) == (len(used), len(running))


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
