"""The life of one request on this agent. No I/O here.

Its tokens are those of the prompt and, behind them, those generated so far: what has to be fed is
the same whether a request begins or is resumed. The phase is not stored, it follows from the
counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.engine import ImageRun
from agent.output import OutputStream
from common.ids import RequestId, SequenceId, TokenId
from common.messages import Note, TokenClass, Usage


@dataclass(slots=True, eq=False)
class ActiveRequest:
    request_id: RequestId
    sequence_id: SequenceId
    arrival: int
    """Older requests have smaller numbers; kept when the request is paused."""
    tokens: list[TokenId]
    prompt_length: int
    max_tokens: int
    output: OutputStream
    marks: Mapping[TokenId, bytes]
    """The texts of control tokens that the output needs."""
    salt: str
    shares: bool
    """May it begin with what other sequences hold?"""
    images: tuple[ImageRun, ...] = ()
    """In the prompt, in their order."""
    resumed: int = 0
    """How many tokens of the answer were generated elsewhere."""
    fed: int = 0
    """How many tokens the sequence holds, which is also the next position."""
    cached: int = 0
    """How many tokens of the prompt another sequence held already."""
    failures: int = 0
    """Failed decodes that it took part in."""
    alone_until: int = 0
    """It is fed alone up to here, since a decode failed that had this much of it."""

    waits_for: Note | None = None
    """What has been told of why it waits."""

    @property
    def remaining(self) -> int:
        """Tokens to be fed before the next one can be sampled; at least 1."""
        return len(self.tokens) - self.fed

    @property
    def image(self) -> ImageRun | None:
        """What has to be fed next, if it is an image or the rest of one."""
        return next((image for image in self.images if image.start <= self.fed < image.end), None)

    @property
    def ahead(self) -> int:
        """So many tokens of one kind follow, of text or of an image, of which any number may be fed;
        0: an image that must be fed whole.
        """
        if (image := self.image) is not None:
            return image.end - self.fed if image.divisible else 0
        starts = (image.start for image in self.images if image.start > self.fed)
        return next(starts, len(self.tokens)) - self.fed

    def whole(self, length: int) -> int:
        """So many of the first tokens, or fewer where that would cut an image in two: only whole ones
        are shared.
        """
        cut = (image.start for image in self.images if image.start < length < image.end)
        return next(cut, length)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def is_new(self) -> bool:
        """Nothing has been generated here yet."""
        return self.generated == self.resumed

    @property
    def is_generating(self) -> bool:
        """Everything but the newest token has been fed."""
        return self.generated > 0 and self.remaining == 1

    @property
    def is_suspect(self) -> bool:
        return self.fed < self.alone_until

    @property
    def usage(self) -> Usage:
        counts = self.output.counts
        return Usage(
            prompt_tokens=self.prompt_length,
            cached_prompt_tokens=self.cached,
            content_tokens=counts[TokenClass.CONTENT],
            reasoning_tokens=counts[TokenClass.REASONING],
            tool_call_tokens=counts[TokenClass.TOOL_CALL],
            undeterminable_tokens=counts[TokenClass.UNDETERMINABLE],
            input_image_tokens=sum(image.length for image in self.images),
        )
