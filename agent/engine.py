"""What the decode loop needs from a model. ``agent.llama`` is the real one, ``agent.echo`` needs none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.ids import SequenceId, TokenId
from common.messages import Sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence, to be fed in one pass."""

    sequence_id: SequenceId
    position: int
    """Of the first token; the sequence holds exactly this many already."""
    tokens: Sequence[TokenId]
    wants_token: bool
    """True: sample the token that follows the last one."""


class Vocabulary(Protocol):
    """Text to tokens and back. Safe to use from any thread."""

    @property
    def beginning(self) -> TokenId | None:
        """What every prompt must start with, if anything."""
        ...

    @property
    def special_texts(self) -> Mapping[str, str]:
        """What chat templates may name: ``bos_token``, ``eos_token``, ``nl_token``."""
        ...

    @property
    def longest_piece(self) -> int:
        """How many bytes of text one token covers at most."""
        ...

    def tokenize(self, text: str) -> list[TokenId]:
        """The text's tokens and nothing added; the names of special tokens are recognised."""
        ...

    def piece(self, token: TokenId) -> bytes:
        """The token's bytes, perhaps only a part of a character; empty for control tokens."""
        ...

    def is_end(self, token: TokenId) -> bool:
        """Does the token end a generation?"""
        ...


class Engine(Protocol):
    """A loaded model. One thread owns it; only ``vocabulary`` may be used from others."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def chat_template(self) -> str | None:
        """The model's own template, in Jinja."""
        ...

    @property
    def slots(self) -> int:
        """How many sequences it can hold at once; their ids are 0 to ``slots`` - 1."""
        ...

    @property
    def context(self) -> int:
        """How many tokens one sequence can hold: prompt and generated together."""
        ...

    @property
    def batch_size(self) -> int:
        """How many tokens one ``decode`` takes at most."""
        ...

    def start(
        self, sequence_id: SequenceId, prompt: Sequence[TokenId], sampling: Sampling, /
    ) -> None:
        """The sequence, empty until now, will be fed this prompt and sampled like this."""
        ...

    def decode(self, chunks: Sequence[Chunk], /) -> Mapping[SequenceId, TokenId]:
        """Feed the chunks; return the sampled token of each sequence that wants one.

        Raises ``DecodeError``: then none of these sequences is to be relied on, ``forget`` them.
        """
        ...

    def forget(self, sequence_id: SequenceId, /) -> None:
        """Empty the sequence, so that its id can be used again."""
        ...

    def close(self) -> None:
        """Free the model. Nothing else may be called afterwards."""
        ...
