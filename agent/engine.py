"""What the decode loop needs from a model. ``agent.llama`` is the real one, ``agent.echo`` needs none."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from agent.embedding import Embedder
from common.errors import ErrorCode, RequestError
from common.ids import SequenceId, TokenId
from common.messages import Constraint, Logprobs, Sampling


class Encoding(Protocol):
    """What a piece of an image has become for the model, in place of tokens of text."""


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Consecutive tokens of a prompt that stand for a piece of an image.

    They are negative, and the same only for the same piece of the same image. They are fed with
    nothing else, and all at once unless they are divisible.
    """

    start: int
    """In the prompt."""
    length: int
    encoding: Encoding
    divisible: bool = False
    """False: they attend to each other, also to those behind them."""

    @property
    def end(self) -> int:
        return self.start + self.length


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, to be fed in one pass."""

    sequence_id: SequenceId
    position: int
    """Of the first token; the sequence holds exactly this many already."""
    tokens: Sequence[TokenId]
    wants_token: bool
    """True: sample the token that follows the last one."""
    image: ImageRun | None = None
    """What the tokens stand for, or are a part of; then the chunk is alone in its pass."""


class SamplerPlace(enum.StrEnum):
    """Where llama.cpp's samplers run, for requests whose samplers could run in either place."""

    AUTO = "auto"
    """In the context if the model's output is computed on a GPU, else on the host."""
    CONTEXT = "context"
    HOST = "host"


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
    def size(self) -> int:
        """How many tokens there are: they are 0 to ``size`` - 1."""
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

    def written(self, token: TokenId) -> bytes:
        """The same, but control tokens by their names."""
        ...

    def is_end(self, token: TokenId) -> bool:
        """Does the token end a generation?"""
        ...


class Picture(Protocol):
    """An image of which only the size is known until its pixels are needed."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, in pixels."""
        ...

    def pixels(self) -> bytes:
        """Rows from the top, three bytes each: red, green, blue. Raises ``RequestError``."""
        ...


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """A prompt of text and images."""

    tokens: list[TokenId]
    images: tuple[ImageRun, ...] = ()
    """In their order."""


class Vision(Protocol):
    """Images to tokens. Safe to use from any thread."""

    @property
    def longest_run(self) -> int:
        """Tokens in one piece of an image at most."""
        ...

    def read(
        self,
        texts: Sequence[str],
        pictures: Sequence[Picture],
        *,
        proceed: Callable[[int], None],
    ) -> MixedPrompt:
        """``texts``: what stands before, between and behind the images: one more than these.
        ``proceed``: called with the number of the prompt's tokens before each image, which may take
        long; it raises what ends the reading.

        Raises ``RequestError`` for an image that cannot be read or has too many tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a loaded model can hold. Every limit that the scheduler keeps comes from here."""

    slots: int
    """Requests that may run at once."""
    sequences: int
    """Sequences that may hold something at once, cached ones too; their ids are 0 to this - 1."""
    context: int
    """Tokens that one sequence can hold: prompt and generated together."""
    cells: int
    """Tokens that all sequences together can hold; at least ``context``."""
    batch_size: int
    """Tokens of text that one ``decode`` takes at most; at least ``sequences``."""
    shares_cells: bool = True
    """False: what one sequence takes over from another is copied and counts twice."""
    shares_part: bool = True
    """False: only the whole of what a sequence holds can be taken over (recurrent models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """What a whole answer has to follow, from its first token to its end."""

    grammar: str
    """In llguidance's dialect of Lark."""
    schemas: tuple[tuple[str, str], ...] = ()
    """The JSON schemas that are in it, each behind the name to tell when it cannot be used."""
    never: tuple[str, ...] = ()
    """Marks that readers find wherever they stand: no string in JSON may hold them."""
    code: ErrorCode
    """Of what it was made of, if that cannot be used."""
    noun: str
    """For what it was made of."""
    otherwise: "AnswerGrammar | None" = None
    """What to follow if this cannot be used."""


Guidance: TypeAlias = Constraint | AnswerGrammar


class Sampler(Protocol):
    """How one request's tokens are chosen, and what that remembers of the tokens so far."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came of a pass, for each sequence that wanted a token: one of ``tokens``, ``refused``."""

    tokens: Mapping[SequenceId, TokenId]
    logprobs: Mapping[SequenceId, Logprobs] = field(default_factory=dict[SequenceId, Logprobs])
    """Of those that asked for it."""
    refused: Mapping[SequenceId, RequestError] = field(
        default_factory=dict[SequenceId, RequestError]
    )
    """No token could be chosen, for the reason given; the other sequences are not affected."""


class Engine(Protocol):
    """A loaded model. One thread owns it; only ``vocabulary``, ``vision``, ``capacity``, ``progress``,
    ``sampler`` and what ``embedder`` says of itself may be used from others.
    """

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def vision(self) -> Vision | None:
        """None: the model knows nothing of images."""
        ...

    @property
    def embedder(self) -> Embedder:
        """The same model, for embeddings."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for the same model, and for no other."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's own template, in Jinja."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the model's file says of itself."""
        ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def progress(self) -> int:
        """Changes while a pass, or one of the embedder's, gets on, if the engine can tell."""
        ...

    def sampler(
        self,
        prompt: Sequence[TokenId],
        sampling: Sampling,
        constraint: Guidance | None,
        logprobs: int | None,
        resumed: Sequence[TokenId] = (),
        /,
    ) -> Sampler:
        """For one request, whose prompt may have tokens that stand for images. ``resumed``: how its
        answer begins, as chosen elsewhere.

        Raises ``RequestError`` if it cannot be done as asked.
        """
        ...

    def start(self, sequence_id: SequenceId, sampler: Sampler, /) -> None:
        """From now on the sequence's tokens are chosen by this sampler, until ``stop``."""
        ...

    def stop(self, sequence_id: SequenceId, /) -> None:
        """The sampler is not needed any more; the sequence keeps what it holds."""
        ...

    def share(self, source: SequenceId, destination: SequenceId, length: int, /) -> bool:
        """Let the destination, empty until now, hold the source's first ``length`` tokens too.

        False: it cannot be done, and the destination is empty.
        """
        ...

    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        """Feed the chunks and sample.

        Raises ``DecodeError``: then none of these sequences is to be relied on, ``forget`` them.
        """
        ...

    def forget(self, sequence_id: SequenceId, /) -> None:
        """Empty the sequence. Its sampler, if it has one, stays."""
        ...

    def close(self) -> None:
        """Free the model. Nothing else may be called afterwards."""
        ...
