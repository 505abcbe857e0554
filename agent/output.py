"""One request's answer, token by token: what may be shown, the tool calls in it, and how much it was.

No I/O, no clock. ``agent.output_parser`` takes the text apart.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from agent.output_parser import OutputParser, Run, Told
from agent.text import TextStream
from common.messages import Segment, TokenClass, ToolCallDelta, ToolCallResult


@dataclass(frozen=True, slots=True)
class Output:
    segments: tuple[Segment, ...] = ()
    """May be shown now. No text is empty, and marks are not in it."""
    results: tuple[ToolCallResult, ...] = ()
    """Of the sections of tool calls that have just closed."""
    calls: tuple[ToolCallDelta, ...] = ()
    """More of the calls that are being written."""


class OutputStream:
    """One answer, token by token. ``feed`` until ``stopped``; ``flush`` once at the end."""

    def __init__(
        self, parser: OutputParser, *, stop: Sequence[str] = (), is_calls: bool = False
    ) -> None:
        """``is_calls``: the answer must be calls, so that nothing in it is content."""
        self._parser = parser
        self._is_calls = is_calls
        self._characters = TextStream()
        self._visible = TextStream(stop)
        self._has_stop = any(stop)
        self._counts = dict.fromkeys(TokenClass, 0)
        self._read = 0
        """Characters, of those that whole tokens have made so far."""
        self._settled = 0
        """How many of these have got their class."""
        self._pending: deque[list[int]] = deque()
        """Where tokens begin whose class is not settled, and how many begin there."""

    @property
    def stopped(self) -> bool:
        """A stop text has appeared; it and all that follows it stay hidden."""
        return self._visible.stopped

    @property
    def counts(self) -> Mapping[TokenClass, int]:
        """Tokens by class. A token counts to the class of its first character; what is not settled
        yet counts as if the stream ended here.
        """
        counts = dict(self._counts)
        counts[self._parser.token_class] += sum(count for _, count in self._pending)
        return counts

    def feed(self, piece: bytes) -> Output:
        """Take the next token's bytes: perhaps a part of a character, perhaps none."""
        if self._pending and self._pending[-1][0] == self._read:
            self._pending[-1][1] += 1
        else:
            self._pending.append([self._read, 1])
        text = self._characters.feed(piece)
        self._read += len(text)
        return self._take(self._parser.feed(self._without_stop(text)))

    def flush(self, *, is_cut: bool = False) -> Output:
        """The stream ends here: what was held back is told, and open sections are closed. ``is_cut``:
        the model would have gone on.
        """
        text = self._without_stop(self._characters.flush())
        if self._has_stop:
            text += self._visible.flush()
        told = self._parser.feed(text)
        last = self._parser.flush(is_cut=is_cut)
        return self._take(
            Told(
                [*told.runs, *last.runs],
                [*told.results, *last.results],
                (*told.calls, *last.calls),
            )
        )

    def _without_stop(self, text: str) -> str:
        return self._visible.feed(text.encode()) if self._has_stop else text

    def _is_hidden(self, run: Run) -> bool:
        """White space before a call, or the beginning of a mark that was cut."""
        return self._is_calls and run.token_class in (TokenClass.CONTENT, TokenClass.UNDETERMINABLE)

    def _take(self, told: Told) -> Output:
        for run in told.runs:
            self._settled += run.length
            while self._pending and self._pending[0][0] < self._settled:
                self._counts[run.token_class] += self._pending.popleft()[1]
        runs = (run for run in told.runs if run.text and not self._is_hidden(run))
        shown = groupby(runs, key=lambda run: run.token_class)
        segments = [
            Segment(token_class, "".join(run.text for run in group)) for token_class, group in shown
        ]
        return Output(tuple(segments), tuple(told.results), told.calls)
