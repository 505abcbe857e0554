"""How the balancer did in the last minutes, one sample every two seconds, for charts. No I/O here."""

from collections import deque
from dataclasses import dataclass, field, replace

INTERVAL = 2.0
"""Seconds between two samples."""

MOST_SAMPLES = 300


@dataclass(slots=True)
class Totals:
    """Since the balancer's start."""

    tokens: int = 0
    """That were told to clients."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of those of the prompts, what agents held already."""
    requests: int = 0
    """That are over, however they ended."""
    failures: int = 0
    """Those of them that ended with an error."""


@dataclass(frozen=True, slots=True)
class Load:
    """At one moment."""

    buffered: int
    running: int
    slots: int
    slots_busy: int
    agents: int


@dataclass(frozen=True, slots=True)
class Sample:
    number: int
    at: float
    """Seconds since 1970."""
    totals: Totals
    load: Load
    first_token: float | None
    """Mean seconds to the first token of those that got theirs since the sample before; None: none."""


@dataclass(slots=True)
class History:
    totals: Totals = field(default_factory=Totals)
    samples: deque[Sample] = field(default_factory=lambda: deque[Sample](maxlen=MOST_SAMPLES))
    _number: int = 0
    _first_tokens: int = 0
    _first_token_seconds: float = 0.0

    def got_first_token(self, seconds: float) -> None:
        """A request, so long after its arrival."""
        self._first_tokens += 1
        self._first_token_seconds += seconds

    def sample(self, load: Load, *, at: float) -> None:
        count, seconds = self._first_tokens, self._first_token_seconds
        mean = seconds / count if count else None
        self._first_tokens, self._first_token_seconds = 0, 0.0
        self._number += 1
        self.samples.append(Sample(self._number, at, replace(self.totals), load, mean))
