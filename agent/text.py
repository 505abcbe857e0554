"""From token bytes to text that may be shown: whole characters only, and never a stop text.

No I/O here. Cost is linear in what is fed: only the tail that is held back is looked at again.
"""

import codecs
from collections.abc import Sequence


class TextStream:
    """One request's text. ``feed`` until ``stopped``; else ``flush`` once at the end."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: str = ""
        self.stopped = False
        """A stop text has appeared; it and all that follows it stay hidden."""

    def feed(self, piece: bytes) -> str:
        """Take the next token's bytes; return what can be shown now, perhaps nothing."""
        return self._show(self._decoder.decode(piece))

    def flush(self) -> str:
        """The stream ends here: return what was held back. An unfinished character shows as U+FFFD."""
        shown = self._show(self._decoder.decode(b"", final=True))
        held: str = self._held
        self._held = ""
        return shown + ("" if self.stopped else held)

    def _show(self, text: str) -> str:
        if not self._stop or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        starts = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self._held = ""
            return text[: min(starts)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` could be the beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
