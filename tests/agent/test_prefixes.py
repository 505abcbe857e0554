"""The index of prefixes, against one that compares with everything."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent.prefixes import PrefixIndex
from common.ids import SequenceId, TokenId

A, B = SequenceId(0), SequenceId(1)


def tokens(text: str) -> list[TokenId]:
    return [TokenId(ord(c)) for c in text]


def test_the_longest_common_beginning_is_found() -> None:
    index = PrefixIndex()
    index.insert(A, tokens("the cat sat"), salt="")
    index.insert(B, tokens("the dog"), salt="")

    assert index.match(tokens("the cat ran"), salt="") == (8, {A})
    assert index.match(tokens("the bird"), salt="") == (4, {A, B})
    assert index.match(tokens("a bird"), salt="") == (0, ())


def test_removing_one_leaves_what_another_holds_too() -> None:
    index = PrefixIndex()
    index.insert(A, tokens("the cat"), salt="")
    index.insert(B, tokens("the cat"), salt="")

    index.remove(A)

    assert index.match(tokens("the cat"), salt="") == (7, {B})


def test_each_salt_has_its_own() -> None:
    index = PrefixIndex()
    index.insert(A, tokens("the cat"), salt="a")

    assert index.match(tokens("the cat"), salt="b") == (0, ())


class Indexes(RuleBasedStateMachine):
    IDS = tuple(SequenceId(n) for n in range(6))
    TEXTS = st.text("ab", max_size=12)
    SALTS = st.sampled_from(["", "x"])

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.held: dict[SequenceId, tuple[str, str]] = {}

    @rule(sequence_id=st.sampled_from(IDS), text=TEXTS, salt=SALTS)
    def insert(self, sequence_id: SequenceId, text: str, salt: str) -> None:
        if sequence_id not in self.held:
            self.index.insert(sequence_id, tokens(text), salt=salt)
            self.held[sequence_id] = salt, text

    @rule(sequence_id=st.sampled_from(IDS))
    def remove(self, sequence_id: SequenceId) -> None:
        self.index.remove(sequence_id)
        self.held.pop(sequence_id, None)

    @rule(text=TEXTS, salt=SALTS)
    def match(self, text: str, salt: str) -> None:
        common = {
            n: next((i for i in range(len(text)) if other[i : i + 1] != text[i]), len(text))
            for n, (salt_of, other) in self.held.items()
            if salt_of == salt
        }
        longest = max(common.values(), default=0)

        length, holders = self.index.match(tokens(text), salt=salt)

        assert length == longest
        assert set(holders) == {n for n, count in common.items() if count == longest and longest}

    @invariant()
    def nothing_is_kept_of_what_was_removed(self) -> None:
        if not self.held:
            assert vars(PrefixIndex()) == vars(self.index)


TestIndexes = Indexes.TestCase
TestIndexes.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
