"""How many prompt tokens a pass may feed while streams run. No I/O and no clock here.

Every token of a prompt makes the pass longer, and the pass is the gap between two tokens of each
running stream. So the budget follows what the passes have cost: as much as fits into the longest
gap that is wanted, in whole tiles, and one tile where nothing fits.

Two tiles instead of one may cost hardly more: llama.cpp's attention on a CPU has a faster kernel
from 64 rows on, which counts once a prompt is long. Then two are fed; whether it is so is tried
now and then, since nothing else tells.
"""

TILE = 32
"""Prompt tokens. Fewer are hardly ever cheaper."""

WORTH_IT = 1.5
"""Two tiles are fed instead of one if they cost less than so many times as much."""

TRIED_EVERY = 8
"""Passes of one tile between two tries with two."""

WEIGHT = 0.3
"""Of the newest measurement. Costs rise as a prompt grows longer, so the past fades quickly."""


class _Average:
    """Of measurements that fade; None before the first one."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, measured: float) -> None:
        self.value = (
            measured if self.value is None else self.value + WEIGHT * (measured - self.value)
        )


class PromptBudget:
    def __init__(self, *, longest_gap: float, batch_size: int) -> None:
        """``longest_gap``: seconds that a pass may take while streams run, if that can be had."""
        self._longest_gap = longest_gap
        self._batch_size = batch_size
        self._row_pass = _Average()
        """Seconds of a pass that only generates."""
        self._token = _Average()
        """Seconds that each prompt token adds to a pass."""
        self._tiles = (_Average(), _Average())
        """Seconds that one tile adds, and two."""
        self._since_tried = 0

    def tokens(self, rows: int) -> int:
        """For the next pass, in which ``rows`` streams generate a token each."""
        room = self._batch_size - rows
        if rows == 0:
            return room
        tiles = 1
        if self._token.value is not None:
            left = self._longest_gap - (self._row_pass.value or 0.0)
            tiles = max(1, int(left / self._token.value / TILE))
        if tiles == 1 and self._two_are_worth_it():
            tiles = 2
        return min(tiles * TILE, room)

    def measured(self, *, seconds: float, rows: int, prompt_tokens: int) -> None:
        """What a pass has cost."""
        if prompt_tokens == 0:
            self._row_pass.add(seconds)
            return
        if prompt_tokens <= TILE // 2:
            return  # what few tokens cost says nothing of many
        generating = (self._row_pass.value or 0.0) if rows else 0.0
        cost = max(seconds - generating, seconds / 10)
        self._token.add(cost / prompt_tokens)
        if prompt_tokens <= 2 * TILE:
            two = prompt_tokens > TILE
            self._tiles[two].add(cost)
            self._since_tried = 0 if two else self._since_tried + 1

    def _two_are_worth_it(self) -> bool:
        one, two = (average.value for average in self._tiles)
        if self._since_tried >= TRIED_EVERY:
            return True
        return one is not None and two is not None and two < WORTH_IT * one
