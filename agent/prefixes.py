"""Which sequence begins with the same tokens as a prompt: a radix tree. No I/O here.

Looking up costs as much as the prompt is long, however many sequences there are; memory is
bounded by the tokens of the sequences that are in it. Each salt has a tree of its own, so that
nothing is ever shared across salts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.ids import SequenceId, TokenId


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens. Every sequence whose tokens pass through it is one of its holders."""

    tokens: list[TokenId]
    parent: "_Node | None"
    children: "dict[TokenId, _Node]" = field(default_factory=dict[TokenId, "_Node"])
    holders: set[SequenceId] = field(default_factory=set[SequenceId])


class PrefixIndex:
    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._ends: dict[SequenceId, tuple[str, _Node]] = {}

    def insert(self, sequence_id: SequenceId, tokens: Sequence[TokenId], *, salt: str) -> None:
        """The sequence holds these tokens, or will soon; it must not be in the index yet."""
        assert sequence_id not in self._ends
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = _Node([], None)
        node.holders.add(sequence_id)
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = _Node(list(tokens[at:]), node)
                node.children[tokens[at]] = child
            else:
                common = _common(tokens, at, child.tokens)
                if common < len(child.tokens):
                    child = _split(child, common)
            child.holders.add(sequence_id)
            at += len(child.tokens)
            node = child
        self._ends[sequence_id] = salt, node

    def remove(self, sequence_id: SequenceId) -> None:
        """Nothing if it is not there."""
        if sequence_id not in self._ends:
            return
        salt, end = self._ends.pop(sequence_id)
        node: _Node | None = end
        while node is not None:
            node.holders.remove(sequence_id)
            if not node.holders:
                if node.parent is None:
                    del self._roots[salt]
                else:
                    del node.parent.children[node.tokens[0]]
            node = node.parent

    def match(self, tokens: Sequence[TokenId], *, salt: str) -> tuple[int, Collection[SequenceId]]:
        """How many tokens at the beginning are the same in some sequence, and in which ones.

        Do not keep the collection: it changes with the index.
        """
        node = self._roots.get(salt)
        if node is None:
            return 0, ()
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common(tokens, at, child.tokens)
            at += common
            node = child
            if common < len(child.tokens):
                break
        return (at, node.holders) if at else (0, ())


def _split(node: _Node, at: int) -> _Node:
    """Cut the node in two; return the upper part."""
    assert node.parent is not None
    upper = _Node(node.tokens[:at], node.parent, {node.tokens[at]: node}, set(node.holders))
    node.parent.children[upper.tokens[0]] = upper
    node.tokens = node.tokens[at:]
    node.parent = upper
    return upper


def _common(tokens: Sequence[TokenId], start: int, other: list[TokenId]) -> int:
    """How many tokens from ``start`` on are those of ``other``. Compares in whole slices."""
    longest = min(len(other), len(tokens) - start)
    if tokens[start : start + longest] == other[:longest]:
        return longest
    low, high = 0, longest  # the first ``low`` are equal, the first ``high`` are not
    while high - low > 1:
        middle = (low + high) // 2
        if tokens[start + low : start + middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
