"""How fast this agent is, by phase. No I/O and no clock here.

llama.cpp's own counters take every batch of more than one token for prompt work, so passes are
timed here. A pass that only feeds prompts counts for the prefill rate; one in which any stream
generates counts for the decode rate, whatever else it feeds. Old passes fade.
"""

FADING = 0.97
"""What is left of a pass's weight after the next one of its phase."""


class Rate:
    """A count per second, or per pass."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._weight = 0.0

    def add(self, amount: float, weight: float) -> None:
        self._amount = self._amount * FADING + amount
        self._weight = self._weight * FADING + weight

    @property
    def value(self) -> float | None:
        """None: nothing has been measured."""
        return self._amount / self._weight if self._weight > 0 else None


class Rates:
    def __init__(self) -> None:
        self._prefill = Rate()
        self._decode = Rate()
        self._concurrency = Rate()
        self._seconds = Rate()
        self._tokens = Rate()

    def measured(self, *, seconds: float, rows: int, prompt_tokens: int) -> None:
        self._seconds.add(seconds, 1.0)
        self._tokens.add(rows + prompt_tokens, 1.0)
        if rows:
            self._decode.add(rows, seconds)
            self._concurrency.add(rows, 1.0)
        elif prompt_tokens:
            self._prefill.add(prompt_tokens, seconds)

    @property
    def prefill(self) -> float | None:
        """Prompt tokens a second."""
        return self._prefill.value

    @property
    def decode(self) -> float | None:
        """Generated tokens a second, of all streams together."""
        return self._decode.value

    @property
    def concurrency(self) -> float | None:
        """Streams that generate in one pass, on average."""
        return self._concurrency.value

    @property
    def step_seconds(self) -> float | None:
        """That a pass took, on average."""
        return self._seconds.value

    @property
    def step_tokens(self) -> float | None:
        """That were fed in a pass, on average."""
        return self._tokens.value
