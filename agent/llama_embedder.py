"""Embeddings by llama.cpp: a second context over a model that is loaded already.

llama.cpp gives one vector a token and ``agent.embedding`` pools them, so that one context serves
all poolings but ``Rank``, where the model's own classification head is a part of the computation.

With embeddings on, llama.cpp also computes and keeps the logits of every token that it is given
(``output_reserve`` in ``src/llama-context.cpp``): for 2,048 tokens and a vocabulary of 150,000 that
would be 1.2 GB. So it is given small portions, a pass each, wherever the model allows that.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from agent.embedding import Vectors, pool
from agent.llama_library import because, forget_messages, lib, tokenize
from agent.llama_progress import NodeCounter
from common.errors import DecodeError, ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Pooling

PORTION = 256
"""Tokens that one pass computes, unless a document must be computed whole and has more."""

MOST_DOCUMENTS = 64
MOST_DOCUMENTS_WITH_STATE = 4
"""Where each sequence has a state of its own, which takes memory even when it is empty."""

_POOLINGS = {
    0: Pooling.NONE,
    1: Pooling.MEAN,
    2: Pooling.CLS,
    3: Pooling.LAST,
    4: Pooling.RANK,
}
"""By llama.cpp's numbers, ``enum llama_pooling_type``."""

_NUMBERS = {pooling: number for number, pooling in _POOLINGS.items()}
_UNSPECIFIED = -1

Row: TypeAlias = tuple[int, int, TokenId]
"""Which document, where in it, and the token."""


@dataclass(frozen=True, slots=True)
class _Traits:
    pooling: Pooling
    """The model's own. llama.cpp takes ``NONE`` where the file does not name one."""
    whole: bool
    """Each token sees those that follow, so a document must be computed in one piece."""
    has_head: bool


class _Job:
    """A batch of documents, and how far it is."""

    def __init__(self, documents: Sequence[Sequence[TokenId]], pooling: Pooling) -> None:
        self.pooling = pooling
        self.sizes = [len(tokens) for tokens in documents]
        self._rows: list[Row] = [
            (document, position, token)
            for document, tokens in enumerate(documents)
            for position, token in enumerate(tokens)
        ]
        """What is not computed yet."""
        self._completed = 0
        self._vectors: list[Vectors] = []
        """Of tokens whose documents are not completed."""

    def take(self, most: int, *, whole: bool) -> list[Row]:
        """The next rows: so many, or the next documents, at least one, that have no more."""
        count = most
        if whole:
            first = self._rows[0][0]
            sums = list(accumulate(self.sizes[first:]))
            count = max((each for each in sums if each <= most), default=sums[0])
        taken = self._rows[:count]
        del self._rows[:count]
        return taken

    def complete(self, vectors: Vectors) -> Iterator[Vectors]:
        """Add the vectors of the rows that were computed; gives those of whole documents."""
        self._vectors.append(vectors)
        while self._completed < len(self.sizes):
            size = self.sizes[self._completed]
            if sum(map(len, self._vectors)) < size:
                return
            joined = np.concatenate(self._vectors)
            self._vectors = [joined[size:]]
            self._completed += 1
            yield joined[:size]


class LlamaEmbedder:
    def __init__(self, model: Any, *, threads: int, batch_size: int, counter: NodeCounter) -> None:
        """``model``: llama.cpp's handle, which must outlive this. Costs nothing until ``begin``.

        ``batch_size``: tokens in one batch at most, and so in one document. ``counter``: of what is
        computed.
        """
        assert batch_size > 0
        self._model = model
        self._vocab: Any = lib.llama_model_get_vocab(model)
        self._add_special = _has_special_tokens(self._vocab)
        self._threads = threads
        self._counter = counter
        self._traits: _Traits | None = None
        self._job: _Job | None = None
        self._context: Any = None
        self._pooling = Pooling.NONE
        """Of the context: ``NONE`` or ``RANK``."""
        self._batch: Any = None
        self.batch_size = batch_size
        trained: int = lib.llama_model_n_ctx_train(model)
        self.document_limit = min(batch_size, trained) if trained > 0 else batch_size
        has_state = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        most = MOST_DOCUMENTS_WITH_STATE if has_state else MOST_DOCUMENTS
        self._portion = min(PORTION, self.document_limit)
        # llama.cpp wants room for an output of each sequence, whatever it is given.
        self.most_documents = min(most, self._portion)

    def tokenize(self, text: str) -> list[TokenId]:
        """Safe to use from any thread."""
        return tokenize(self._vocab, text, add_special=self._add_special)

    def begin(self, documents: Sequence[Sequence[TokenId]], pooling: Pooling, /) -> None:
        """The first call opens the context, which takes memory and some tenths of a second."""
        self._check(documents)
        forget_messages()
        traits = self._learn()
        if pooling is Pooling.UNSPECIFIED:
            pooling = traits.pooling
        if pooling is Pooling.RANK and not traits.has_head:
            # Without one, llama.cpp would return a piece of the last token's vector.
            raise RequestError(
                ErrorCode.NOT_SUPPORTED,
                "pooling type Rank needs a model with a classification head; this one has none",
            )
        self._use(Pooling.RANK if pooling is Pooling.RANK else Pooling.NONE, traits)
        self._clear()
        self._job = _Job(documents, pooling)

    def advance(self, most_tokens: int | None, /) -> list[Vectors]:
        """For ``RANK``, a document's vector is as many scores as the model's head gives."""
        job = self._job
        assert job is not None
        whole = self._learn().whole
        most = self._portion if most_tokens is None else min(most_tokens, self._portion)
        rows = job.take(most, whole=whole)
        if whole:
            self._clear()  # the context has room for one portion
        self._compute(rows)
        if job.pooling is Pooling.RANK:
            return self._scores(rows, job)
        dimensions: int = lib.llama_model_n_embd_out(self._model)
        values = lib.llama_get_embeddings(self._context)
        if not values:
            raise DecodeError(f"llama.cpp gave no embeddings{because()}")
        # A copy: the next portion is written to the same place.
        vectors = np.ctypeslib.as_array(values, (len(rows), dimensions)).copy()
        return [pool(tokens, job.pooling) for tokens in job.complete(vectors)]

    def close(self) -> None:
        if self._context is not None:
            lib.llama_free(self._context)
            self._context = None
        if self._batch is not None:
            lib.llama_batch_free(self._batch)
            self._batch = None

    def _check(self, documents: Sequence[Sequence[TokenId]]) -> None:
        """What llama.cpp would end the process for, or answer with nonsense."""
        longest = max(map(len, documents), default=0)
        if longest > self.document_limit:
            raise DecodeError(
                f"a document of {longest} tokens is too long: the limit is {self.document_limit}"
            )
        if sum(map(len, documents)) > self.batch_size or len(documents) > self.most_documents:
            raise DecodeError(
                f"too much at once: the limits are {self.batch_size} tokens "
                f"and {self.most_documents} documents"
            )
        if not documents or not all(documents):
            raise DecodeError("a document has no tokens")

    # Contexts

    def _learn(self) -> _Traits:
        """Some traits are in the file, others in llama.cpp's code; a context knows them all."""
        if self._traits is None:
            probe = self._open(_UNSPECIFIED, tokens=self._portion, portion=self._portion)
            try:
                pooling = _POOLINGS.get(lib.llama_pooling_type(probe), Pooling.NONE)
                self._traits = _Traits(
                    pooling,
                    whole=(
                        lib.llama_model_has_encoder(self._model)
                        or not lib.llama_get_memory(probe)
                        or not lib.llama_get_causal_attn(probe)
                    ),
                    # Converters mark models that have a head by one of these.
                    has_head=pooling is Pooling.RANK
                    or lib.llama_model_cls_label(self._model, 0) is not None,
                )
            finally:
                lib.llama_free(probe)
        return self._traits

    def _use(self, pooling: Pooling, traits: _Traits) -> None:
        """Have a context with this pooling. There is one at a time, since each takes memory."""
        if self._context is not None and self._pooling is pooling:
            return
        self.close()
        self._pooling = pooling
        if traits.whole:
            # It is emptied after each portion.
            tokens = portion = self.document_limit
        else:
            tokens, portion = self.batch_size, self._portion
        self._context = self._open(_NUMBERS[pooling], tokens=tokens, portion=portion)
        self._batch = lib.llama_batch_init(portion, 0, 1)

    def _open(self, pooling: int, *, tokens: int, portion: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = tokens
        params.n_batch = portion
        params.n_ubatch = portion
        params.n_seq_max = self.most_documents
        params.n_threads = self._threads
        params.n_threads_batch = self._threads
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = pooling
        params.no_perf = True
        self._counter.count_for(params)
        context = lib.llama_init_from_model(self._model, params)
        if context is None:
            raise DecodeError(f"no memory for embeddings of {tokens} tokens{because()}")
        return context

    def _clear(self) -> None:
        memory = lib.llama_get_memory(self._context)
        if memory:
            lib.llama_memory_clear(memory, ctypes.c_bool(False))

    # Computation

    def _compute(self, rows: Sequence[Row]) -> None:
        batch = self._batch
        for at, (document, position, token) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = document
            batch.logits[at] = 1
        batch.n_tokens = len(rows)
        by_encoder = lib.llama_model_has_encoder(self._model)
        compute = lib.llama_encode if by_encoder else lib.llama_decode
        self._counter.start_over()
        code: int = compute(self._context, batch)
        if code != 0:
            raise DecodeError(f"llama.cpp could not embed: code {code}{because()}")

    def _scores(self, rows: Sequence[Row], job: _Job) -> list[Vectors]:
        count: int = lib.llama_model_n_cls_out(self._model)
        scores: list[Vectors] = []
        for document, position, _ in rows:
            if position == job.sizes[document] - 1:
                values = lib.llama_get_embeddings_seq(self._context, document)
                if not values:
                    raise DecodeError(f"llama.cpp gave no scores{because()}")
                scores.append(np.ctypeslib.as_array(values, (1, count)).copy())
        return scores


def _has_special_tokens(vocab: Any) -> bool:
    """Those that llama.cpp would put around a text; it ends the process if one is missing."""
    word_pieces = lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_WPM
    needed: list[int] = []
    if word_pieces or lib.llama_vocab_get_add_bos(vocab):
        needed.append(lib.llama_vocab_bos(vocab))
    if word_pieces or lib.llama_vocab_get_add_sep(vocab):
        needed.append(lib.llama_vocab_sep(vocab))
    if lib.llama_vocab_get_add_eos(vocab):
        needed.append(lib.llama_vocab_eos(vocab))
    return all(token >= 0 for token in needed)
