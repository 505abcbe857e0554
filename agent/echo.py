"""An engine without a model, for tests and demonstrations: it says the prompt back, then ends.

Its tokens are the bytes of UTF-8, so that it also shows how characters are put together again.
It keeps its KV cache cell by cell and asserts that all it is told to do can be done and that each
sequence holds what its request needs, so the scheduler is checked by every test that uses it.
No I/O here.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agent.embedding import Vectors, pool
from agent.engine import Capacity, Chunk, Decoded, Guidance, Sampler, Vision
from common.errors import DecodeError, ErrorCode, RequestError
from common.ids import SequenceId, TokenId
from common.messages import Pooling, Sampling

END = TokenId(256)

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class ByteVocabulary:
    beginning: TokenId | None = None
    size = END + 1
    longest_piece = 1
    special_texts: Mapping[str, str] = {"bos_token": "", "eos_token": "", "nl_token": "\n"}

    def tokenize(self, text: str) -> list[TokenId]:
        return [TokenId(byte) for byte in text.encode()]

    def piece(self, token: TokenId) -> bytes:
        return b"" if token == END else bytes([token])

    def written(self, token: TokenId) -> bytes:
        return self.piece(token)

    def is_end(self, token: TokenId) -> bool:
        return token == END


class EchoEmbedder:
    """A token's vector is the byte and a one."""

    document_limit = 512
    batch_size = 512
    most_documents = 8

    def tokenize(self, text: str) -> list[TokenId]:
        return [TokenId(byte) for byte in text.encode()]

    def begin(self, documents: Sequence[Sequence[TokenId]], pooling: Pooling, /) -> None:
        if pooling is Pooling.RANK:
            raise RequestError(ErrorCode.NOT_SUPPORTED, "the echo engine ranks nothing")
        assert sum(map(len, documents)) <= self.batch_size
        assert len(documents) <= self.most_documents
        self._pooling = Pooling.LAST if pooling is Pooling.UNSPECIFIED else pooling
        self._open = [list(tokens) for tokens in documents]
        self._read = 0
        """Tokens of the first open document that have been computed."""

    def advance(self, most_tokens: int | None, /) -> list[Vectors]:
        left = self.batch_size if most_tokens is None else most_tokens
        assert left > 0
        complete: list[Vectors] = []
        while self._open and left:
            tokens = self._open[0]
            count = min(left, len(tokens) - self._read)
            left -= count
            self._read += count
            if self._read == len(tokens):
                vectors = np.array([[token, 1] for token in tokens], np.float32)
                complete.append(pool(vectors, self._pooling))
                del self._open[0]
                self._read = 0
        return complete

    def close(self) -> None:
        pass


@dataclass(slots=True)
class EchoSampler:
    prompt: Sequence[TokenId]
    repeats: bool
    """Begin again instead of ending."""
    said: list[TokenId] = field(default_factory=list[TokenId])

    def sample(self) -> TokenId:
        words = [token for token in self.prompt if token >= 0]  # images cannot be said
        if words and (len(self.said) < len(words) or self.repeats):
            token = words[len(self.said) % len(words)]
            self.said.append(token)
            return token
        return END


@dataclass(frozen=True, slots=True)
class _Cell:
    number: int
    token: TokenId


class EchoEngine:
    def __init__(
        self,
        *,
        slots: int,
        context: int,
        sequences: int | None = None,
        cells: int | None = None,
        batch_size: int = 512,
        shares_cells: bool = True,
        shares_part: bool = True,
    ) -> None:
        self.vocabulary = ByteVocabulary()
        self.vision: Vision | None = None
        self.progress = 0
        self.embedder = EchoEmbedder()
        self.chat_template: str | None = CHAT_TEMPLATE
        self.fingerprint = "echo"
        self.metadata: Mapping[str, str] = {"general.architecture": "echo"}
        self.capacity = Capacity(
            slots=slots,
            sequences=2 * slots if sequences is None else sequences,
            context=context,
            cells=slots * context if cells is None else cells,
            batch_size=batch_size,
            shares_cells=shares_cells,
            shares_part=shares_part,
        )
        self._samplers: dict[SequenceId, EchoSampler] = {}
        self._held: dict[SequenceId, list[_Cell]] = {}
        self._numbers = itertools.count()

    def sampler(
        self,
        prompt: Sequence[TokenId],
        sampling: Sampling,
        constraint: Guidance | None,
        logprobs: int | None,
        resumed: Sequence[TokenId] = (),
        /,
    ) -> Sampler:
        if constraint is not None or logprobs is not None:
            raise RequestError(
                ErrorCode.NOT_SUPPORTED, "the echo engine has neither grammars nor probabilities"
            )
        return EchoSampler(prompt, sampling.ignore_eos, list(resumed))

    def start(self, sequence_id: SequenceId, sampler: Sampler, /) -> None:
        assert isinstance(sampler, EchoSampler)
        assert sequence_id not in self._samplers, "the sequence was not stopped"
        assert sequence_id not in self._held, "the sequence was not forgotten"
        self._samplers[sequence_id] = sampler

    def stop(self, sequence_id: SequenceId, /) -> None:
        del self._samplers[sequence_id]

    def share(self, source: SequenceId, destination: SequenceId, length: int, /) -> bool:
        assert destination not in self._held, "the sequence was not forgotten"
        held = self._held[source]
        assert 0 < length <= len(held), "more than there is"
        if length < len(held) and not self.capacity.shares_part:
            return False
        self._held[destination] = [
            cell if self.capacity.shares_cells else self._cell(cell.token) for cell in held[:length]
        ]
        return True

    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        assert chunks, "an empty pass"
        fed = sum(len(chunk.tokens) for chunk in chunks)
        if (run := chunks[0].image) is not None:
            assert len(chunks) == 1, "an image goes alone"
            position = chunks[0].position
            if run.divisible:
                assert run.start <= position < position + fed <= run.end
                assert fed <= self.capacity.batch_size
            else:
                assert (position, fed) == (run.start, run.length), "an image goes whole"
        else:
            assert fed <= self.capacity.batch_size
            assert all(token >= 0 for chunk in chunks for token in chunk.tokens), "of an image"
        if self.used + fed > self.capacity.cells:
            raise DecodeError("no room in the KV cache")
        tokens: dict[SequenceId, TokenId] = {}
        for chunk in chunks:
            held = self._held.setdefault(chunk.sequence_id, [])
            assert chunk.position == len(held), "positions must not skip"
            held += [self._cell(token) for token in chunk.tokens]
            assert len(held) <= self.capacity.context
            if chunk.wants_token:
                sampler = self._samplers[chunk.sequence_id]
                wanted = [*sampler.prompt, *sampler.said]
                assert [cell.token for cell in held] == wanted, "the sequence holds other tokens"
                tokens[chunk.sequence_id] = sampler.sample()
        return Decoded(tokens)

    def forget(self, sequence_id: SequenceId, /) -> None:
        self._held.pop(sequence_id, None)

    def close(self) -> None:
        self._samplers.clear()
        self._held.clear()

    @property
    def used(self) -> int:
        """Cells that hold something."""
        return len({cell.number for held in self._held.values() for cell in held})

    def _cell(self, token: TokenId) -> _Cell:
        return _Cell(next(self._numbers), token)
