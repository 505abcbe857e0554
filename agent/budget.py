"""How many prompt tokens a pass may feed while streams run. No I/O and no clock here.

Every token of a prompt makes the pass longer, and the pass is the gap between two tokens of each
running stream. So the budget follows what the passes have cost: as much as fits into the longest
gap that is wanted, in whole tiles, and half a tile where nothing fits.

The streams' own rows count: llama.cpp's attention on a CPU works on tiles of 64 rows, and a row
beyond a tile costs nearly as much as a tile once a prompt is long. A pass of less than a tile has
another, slower kernel, so that then a whole tile may cost hardly more than half of one. Whether it
is so is tried now and then, since nothing else tells.
"""

TILE = 64
"""Rows of a pass: prompt tokens, and one for each stream."""

WORTH_IT = 1.85
"""A tile is fed instead of a half if it costs less than so many times as much."""

TRIED_EVERY = 8
"""Passes of half a tile between two tries with a whole one."""

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
        self._small_passes = (_Average(), _Average())
        """Seconds that prompts add to a pass of half a tile, and of a whole one."""
        self._since_tried = 0

    def tokens(self, rows: int) -> int:
        """For the next pass, in which ``rows`` streams generate a token each."""
        if rows == 0:
            return self._batch_size
        tiles = 0
        if self._token.value is not None:
            left = self._longest_gap - (self._row_pass.value or 0.0)
            tiles = int((left / self._token.value + rows) / TILE)
        size = (TILE if self._tile_is_worth_it() else TILE // 2) if tiles < 1 else tiles * TILE
        while size - rows < TILE // 4:  # many streams: still feed something
            size += TILE // 2
        return min(size, self._batch_size) - rows

    def measured(self, *, seconds: float, rows: int, prompt_tokens: int) -> None:
        """What a pass has cost."""
        if prompt_tokens == 0:
            self._row_pass.add(seconds)
            return
        if prompt_tokens < TILE // 4:
            return  # what few tokens cost says nothing of many
        generating = (self._row_pass.value or 0.0) if rows else 0.0
        cost = max(seconds - generating, seconds / 10)
        self._token.add(cost / prompt_tokens)
        if rows and rows + prompt_tokens <= TILE:
            whole = rows + prompt_tokens > TILE // 2
            self._small_passes[whole].add(cost)
            self._since_tried = 0 if whole else self._since_tried + 1

    def _tile_is_worth_it(self) -> bool:
        half, whole = (average.value for average in self._small_passes)
        if self._since_tried >= TRIED_EVERY:
            return True
        return half is not None and whole is not None and whole < WORTH_IT * half
