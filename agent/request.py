"""The life of one request on this agent: ingesting its prompt, then generating.

The phase is not stored, it follows from the counts. No I/O here.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from agent.text import TextStream
from common.ids import RequestId, SequenceId, TokenId
from common.messages import Usage


class Phase(enum.Enum):
    INGESTING = enum.auto()
    GENERATING = enum.auto()


@dataclass(slots=True)
class ActiveRequest:
    request_id: RequestId
    sequence_id: SequenceId
    prompt: Sequence[TokenId]
    max_tokens: int
    text: TextStream
    fed: int = 0
    """How many tokens the model has seen, which is also the next position."""
    generated: int = 0
    last_token: TokenId | None = None

    @property
    def phase(self) -> Phase:
        return Phase.INGESTING if self.fed < len(self.prompt) else Phase.GENERATING

    @property
    def length(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt) + self.generated

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.prompt), content_tokens=self.generated)
