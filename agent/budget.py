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

TRIED_EVERY = 12
"""Passes of one size, a tile or half of one, after which the other is tried. Only neighbours are
compared, since costs rise as a prompt grows longer.
"""

WEIGHT = 0.3
"""Of the newest measurement. For the reason above, the past fades quickly."""


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
        self._tile_ratio = _Average()
        """What a pass of a whole tile costs, by what one of half a tile does."""
        self._small_pass: tuple[bool, float] | None = None
        """The latest of these: was it a whole one, and what did it cost?"""
        self._of_one_size = 0
        """How many of them, up to that one, were of its size."""

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

    def expected(self, *, rows: int, prompt_tokens: int) -> float | None:
        """Seconds of such a pass, by what earlier ones took; None: nobody knows yet."""
        generating = self._row_pass.value if rows else 0.0
        token = self._token.value
        if generating is None or (prompt_tokens and token is None):
            return None
        # Many rows are computed as many prompt tokens are.
        token = token or 0.0
        return max(generating, rows * token) + prompt_tokens * token

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
            self._compare(whole=rows + prompt_tokens > TILE // 2, cost=cost)

    def _compare(self, *, whole: bool, cost: float) -> None:
        before, self._small_pass = self._small_pass, (whole, cost)
        if before is None or before[0] == whole:
            self._of_one_size += 1
            return
        self._of_one_size = 1
        self._tile_ratio.add(cost / before[1] if whole else before[1] / cost)

    def _tile_is_worth_it(self) -> bool:
        if self._small_pass is None:
            return False
        if self._of_one_size >= TRIED_EVERY:
            return not self._small_pass[0]
        return self._tile_ratio.value is not None and self._tile_ratio.value < WORTH_IT
