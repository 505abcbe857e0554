"""Embeddings: which documents to feed next, and what becomes of their vectors.

Documents are taken on in batches, and a batch is computed in as many passes as it takes, so that
streams get their turn while a long document is read. One pass is ``plan`` -> ``Embedder.begin``, if
the batch is a new one -> ``Embedder.advance`` -> ``commit`` (or ``fail``). ``submit`` and ``cancel``
come between passes only. No I/O here, no clock and no model.

| a document is | and it is found in |
|---|---|
| waiting | its request's ``waiting``, in the client's order |
| in the batch that runs | the same place: what a batch takes is always the head of the line |
| over | nowhere: it was ``Embedded``, ``DocumentTooLong`` or ``DocumentFailed``, or its request ended |
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from common.errors import DecodeError, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    L2,
    Busy,
    DocumentFailed,
    DocumentTooLong,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Normalization,
    Pooling,
    RmsNorm,
    Unchanged,
    Usage,
)

Vectors: TypeAlias = NDArray[np.float32]
"""Vector after vector: (vectors, dimensions)."""

MOST_FAILURES = 2
"""Batches that a document may see fail: one in company, one alone (or both alone)."""


class Embedder(Protocol):
    """A loaded model. One thread owns it; only ``tokenize`` and ``document_limit`` may be used
    from others.
    """

    @property
    def document_limit(self) -> int:
        """How many tokens one document may have."""
        ...

    @property
    def batch_size(self) -> int:
        """How many tokens one batch has at most."""
        ...

    @property
    def most_documents(self) -> int:
        """How many documents one batch has at most."""
        ...

    def tokenize(self, text: str) -> list[TokenId]:
        """The text's tokens and those that the model wants around them."""
        ...

    def begin(self, documents: Sequence[Sequence[TokenId]], pooling: Pooling, /) -> None:
        """Take on a batch. What was not finished of the last one is dropped.

        Raises ``DecodeError`` if that failed, ``RequestError`` if the model cannot pool so.
        """
        ...

    def advance(self, most_tokens: int | None, /) -> list[Vectors]:
        """Compute on: no more than ``most_tokens`` if that can be had, None for as many as are
        good. Returns, for each document that this completed, in their order, one vector, or one for
        each of its tokens with ``Pooling.NONE``.

        Raises ``DecodeError``: then nothing is left but to begin again.
        """
        ...

    def close(self) -> None:
        """Free what it holds beside the model. Nothing else may be called afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    document_id: str
    tokens: Sequence[TokenId]
    """At least one."""


Refusal: TypeAlias = DocumentTooLong | DocumentFailed
"""Of one document; it is told when the document's turn comes."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    request_id: RequestId
    documents: tuple[TokenizedDocument | Refusal, ...]
    pooling: Pooling
    normalization: Normalization


def tokenize(
    frame: Embed, embedder: Embedder, *, longest_piece: int, vocabulary_size: int
) -> EmbeddingRequest:
    """For any thread. ``longest_piece``: how many bytes of text one token covers at most."""
    documents: list[TokenizedDocument | Refusal] = []
    limit = embedder.document_limit
    for document in frame.documents:
        document_id = document.document_id
        # Millions of tokens take seconds to count, only to be refused: others wait meanwhile.
        least = len(document.text) // longest_piece
        if least > limit:
            documents.append(DocumentTooLong(frame.request_id, document_id, least, limit))
            continue
        tokens = document.tokens
        if tokens is None:
            tokens = embedder.tokenize(document.text)
        wrong = next((token for token in tokens if not 0 <= token < vocabulary_size), None)
        if wrong is not None:
            message = f"the model has no token {wrong}"
            documents.append(DocumentFailed(frame.request_id, document_id, message))
        elif not tokens:
            documents.append(DocumentFailed(frame.request_id, document_id, "it is empty"))
        elif len(tokens) > limit:
            documents.append(DocumentTooLong(frame.request_id, document_id, len(tokens), limit))
        else:
            documents.append(TokenizedDocument(document_id, tokens))
    return EmbeddingRequest(frame.request_id, tuple(documents), frame.pooling, frame.normalization)


def pool(tokens: Vectors, pooling: Pooling) -> Vectors:
    """From a document's vectors, one a token, to what is asked for: (1 or tokens, dimensions).

    ``pooling`` is neither ``UNSPECIFIED``, which the model's file decides, nor ``RANK``, which the
    model itself computes.
    """
    match pooling:
        case Pooling.NONE:
            return tokens
        case Pooling.MEAN:
            return tokens.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
        case Pooling.CLS:
            return tokens[:1]
        case Pooling.LAST:
            return tokens[-1:]
        case Pooling.UNSPECIFIED | Pooling.RANK:
            raise AssertionError(f"{pooling} is not for us to decide")
        case _:
            assert_never(pooling)


def normalize(vectors: Vectors, normalization: Normalization) -> Vectors:
    """Each vector by itself; one of zeros stays so."""
    # In double precision, since squares of single ones overflow early.
    wide = vectors.astype(np.float64)
    match normalization:
        case Unchanged():
            return vectors
        case L2():
            length = np.sqrt((wide**2).sum(axis=1, keepdims=True))
        case RmsNorm(epsilon):
            length = np.sqrt((wide**2).mean(axis=1, keepdims=True) + epsilon)
        case _:
            assert_never(normalization)
    return (wide / np.where(length > 0, length, 1)).astype(np.float32)


@dataclass(slots=True, eq=False)
class _Waiting:
    document: TokenizedDocument
    failures: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    request_id: RequestId
    pooling: Pooling
    normalization: Normalization
    waiting: deque[_Waiting | Refusal]
    embedded_tokens: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.embedded_tokens)


class Batch:
    """Documents that are computed together, at least one, perhaps of several requests."""

    def __init__(self, documents: Sequence[tuple[_Request, _Waiting]]) -> None:
        self.open = deque(documents)
        """Those that are not completed, in their order."""
        self.pooling = documents[0][0].pooling
        self.documents = [waiting.document for _, waiting in documents]

    @property
    def tokens(self) -> list[Sequence[TokenId]]:
        return [document.tokens for document in self.documents]


class EmbeddingQueue:
    def __init__(self, *, capacity: int, batch_size: int, most_documents: int) -> None:
        """``capacity``: requests that may wait; ``batch_size``: tokens in one batch at most;
        ``most_documents``: documents in one batch at most.
        """
        self._capacity = capacity
        self._batch_size = batch_size
        self._most_documents = most_documents
        self._requests: dict[RequestId, _Request] = {}
        self._batch: Batch | None = None

    @property
    def is_idle(self) -> bool:
        """Is there nothing to plan?"""
        return not self._requests

    def submit(self, request: EmbeddingRequest) -> list[Event]:
        """Take the request on; ``Busy`` if too many wait. It is over at once if it is empty."""
        if len(self._requests) >= self._capacity:
            return [Busy(request.request_id)]
        taken = _Request(
            request.request_id,
            request.pooling,
            request.normalization,
            deque(
                _Waiting(document) if isinstance(document, TokenizedDocument) else document
                for document in request.documents
            ),
        )
        self._requests[request.request_id] = taken
        return self._go_on(taken)

    def cancel(self, request_id: RequestId) -> list[Event]:
        """End the request, with what it has used. Nothing to do if it is over already."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        return [Finished(request_id, FinishReason.CANCELLED, request.usage)]

    def plan(self) -> Batch | None:
        """The batch to go on with, the same one as before as long as somebody wants its next
        document; None if there is nothing to do.
        """
        batch = self._batch
        if batch is None or not batch.open or not self._is_wanted(batch.open[0][0]):
            documents = self._next_documents()
            self._batch = Batch(documents) if documents else None
        return self._batch

    def commit(self, vectors: Sequence[Vectors]) -> list[Event]:
        """Take note of the next documents' vectors, as the model gave them, in the batch's order."""
        assert self._batch is not None
        events: list[Event] = []
        for raw in vectors:
            request, waiting = self._batch.open.popleft()
            if not self._is_wanted(request):
                continue
            assert request.waiting[0] is waiting, "a batch takes the head of the line"
            normalized = normalize(raw, request.normalization)
            if np.isfinite(normalized).all():
                request.waiting.popleft()
                request.embedded_tokens += len(waiting.document.tokens)
                events.append(
                    Embedded(
                        request.request_id,
                        waiting.document.document_id,
                        normalized.shape[1],
                        normalized.astype("<f4", copy=False).tobytes(),
                        len(waiting.document.tokens),
                    )
                )
            else:  # once more would give the same
                message = "the model gave values that are not finite"
                request.waiting[0] = _refusal(request, waiting, message)
            events += self._go_on(request)
        return events

    def fail(self, error: DecodeError | RequestError) -> list[Event]:
        """The rest of the batch failed. What cannot be served ends now; the rest is tried again,
        each document alone, so that only the one that is to blame is refused.
        """
        assert self._batch is not None
        failed = [(request, each) for request, each in self._batch.open if self._is_wanted(request)]
        self._batch = None
        events: list[Event] = []
        if isinstance(error, RequestError):
            for request_id in dict.fromkeys(request.request_id for request, _ in failed):
                del self._requests[request_id]
                events.append(Failed(request_id, error.code, error.message))
            return events
        for request, waiting in failed:
            waiting.failures += 1
            if waiting.failures >= MOST_FAILURES:  # so it went alone, and is at the head
                request.waiting[0] = _refusal(request, waiting, str(error))
                events += self._go_on(request)
        return events

    def _next_documents(self) -> list[tuple[_Request, _Waiting]]:
        """First come, first served.

        1. The first document decides how all are pooled.
        2. One that was in a failed batch goes alone. Those are always at the head of the line.
        3. Nobody is overtaken: the first that does not fit ends the batch.
        """
        taken: list[tuple[_Request, _Waiting]] = []
        tokens = 0
        for request in self._requests.values():
            for waiting in request.waiting:
                if not isinstance(waiting, _Waiting):
                    continue  # it is told when its turn comes
                tokens += len(waiting.document.tokens)
                if taken and not (
                    request.pooling is taken[0][0].pooling
                    and tokens <= self._batch_size
                    and len(taken) < self._most_documents
                ):
                    return taken
                taken.append((request, waiting))
                if waiting.failures:
                    return taken
        return taken

    def _is_wanted(self, request: _Request) -> bool:
        return self._requests.get(request.request_id) is request

    def _go_on(self, request: _Request) -> list[Event]:
        """Tell what is known without the model: refusals whose turn has come, and the end."""
        events: list[Event] = []
        while request.waiting:
            head = request.waiting[0]
            if isinstance(head, _Waiting):
                return events
            events.append(head)
            request.waiting.popleft()
        del self._requests[request.request_id]
        events.append(Finished(request.request_id, FinishReason.STOP, request.usage))
        return events


def _refusal(request: _Request, waiting: _Waiting, message: str) -> DocumentFailed:
    return DocumentFailed(request.request_id, waiting.document.document_id, message)
