"""How many prompt tokens a pass may feed while streams run. No I/O and no clock here.

Every token of a prompt makes the pass longer, and the pass is the gap between two tokens of each
running stream. So the budget follows what the passes have cost: as much as fits into the longest
gap that is wanted, but never so little that feeding becomes inefficient.
"""

SMALLEST = 64
"""llama.cpp's kernels for prompts work on tiles of this many rows: fewer cost nearly as much."""

WEIGHT = 0.3
"""Of the newest measurement. Costs rise as a prompt grows longer, so the past fades quickly."""


class PromptBudget:
    def __init__(self, *, longest_gap: float, batch_size: int) -> None:
        """``longest_gap``: seconds that a pass may take while streams run, if that can be had."""
        self._longest_gap = longest_gap
        self._batch_size = batch_size
        self._row_pass = 0.0
        """Seconds of a pass that only generates."""
        self._token_cost: float | None = None
        """Seconds that each prompt token adds to a pass."""

    def tokens(self, rows: int) -> int:
        """For the next pass, in which ``rows`` streams generate a token each."""
        room = self._batch_size - rows
        if rows == 0:
            return room
        if self._token_cost is None:
            return min(SMALLEST, room)
        wanted = (self._longest_gap - self._row_pass) / self._token_cost
        tiles = max(1, int(wanted / SMALLEST))
        return min(tiles * SMALLEST, room)

    def measured(self, *, seconds: float, rows: int, prompt_tokens: int) -> None:
        """What a pass has cost."""
        if prompt_tokens == 0:
            self._row_pass += WEIGHT * (seconds - self._row_pass)
        elif prompt_tokens >= SMALLEST // 2:
            generating = self._row_pass if rows else 0.0
            cost = max(seconds - generating, seconds / 10) / prompt_tokens
            if self._token_cost is None:
                self._token_cost = cost
            else:
                self._token_cost += WEIGHT * (cost - self._token_cost)
