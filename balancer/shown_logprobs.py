"""Which tokens' log probabilities belong to the text that a client is shown. No I/O here.

Text comes later than its tokens, or never: what could become a stop text or a mark is held back.
"""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections import deque
from dataclasses import dataclass

from common.messages import Logprobs

_Decoder = getincrementaldecoder("utf-8")


@dataclass(slots=True)
class _Waiting:
    logprobs: Logprobs
    rest: str
    """What it adds to the answer and has not been shown yet."""
    is_told: bool = False


class ShownLogprobs:
    """Of one answer. ``take`` each token, then say what is ``shown``."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._decoder: IncrementalDecoder = _Decoder(errors="replace")

    def take(self, logprobs: Logprobs) -> None:
        text = self._decoder.decode(logprobs.chosen.piece)
        self._waiting.append(_Waiting(logprobs, text))

    def shown(self, text: str) -> list[Logprobs]:
        """The tokens that made this text, each told once; those that were passed over are hidden."""
        told: list[Logprobs] = []
        while self._waiting and text:
            token = self._waiting[0]
            length = _common(token.rest, text)
            if token.rest and not length:
                self._waiting.popleft()  # a part of a mark, or white space that is not shown
                continue
            if not token.is_told:
                token.is_told = True
                told.append(token.logprobs)
            is_all = token.rest.endswith(text[:length])
            text = text[length:]
            if is_all:
                self._waiting.popleft()
            else:
                token.rest = token.rest[length:]
        return told


def _common(rest: str, text: str) -> int:
    """How many characters the two share: at the beginning of ``text``, and at the beginning of
    ``rest`` or, if its beginning is hidden, at its end.
    """
    if rest.startswith(text):
        return len(text)
    for start in range(len(rest)):
        if text.startswith(rest[start:]):
            return len(rest) - start
    return 0
