"""Embeddings: which documents to feed next, and what becomes of their vectors.

One pass is ``plan`` -> ``Embedder.embed`` -> ``commit`` (or ``fail``). Planning changes nothing that
a failed pass would have to undo. ``submit`` and ``cancel`` come between passes only. No I/O here,
no clock and no model.

| a document is | and it is found in |
|---|---|
| waiting | its request's ``waiting``, in the client's order |
| in the pass that runs | the same place: what a pass takes is always the head of the line |
| over | nowhere: it was ``Embedded``, refused as ``DocumentTooLong``, or its request ended |
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from common.errors import DecodeError, ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    L2,
    Busy,
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
"""Passes that a document may see fail: one in company, one alone (or both alone)."""


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
        """How many tokens one ``embed`` takes at most."""
        ...

    @property
    def most_documents(self) -> int:
        """How many documents one ``embed`` takes at most."""
        ...

    def tokenize(self, text: str) -> list[TokenId]:
        """The text's tokens and those that the model wants around them."""
        ...

    def embed(self, documents: Sequence[Sequence[TokenId]], pooling: Pooling, /) -> list[Vectors]:
        """For each document one vector, or one for each of its tokens with ``Pooling.NONE``.

        Raises ``DecodeError`` if this pass failed, ``RequestError`` if the model cannot pool so.
        """
        ...

    def close(self) -> None:
        """Free what it holds beside the model. Nothing else may be called afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    document_id: str
    tokens: Sequence[TokenId]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    request_id: RequestId
    documents: tuple[TokenizedDocument | DocumentTooLong, ...]
    pooling: Pooling
    normalization: Normalization


def tokenize(frame: Embed, embedder: Embedder) -> EmbeddingRequest:
    """For any thread. Raises ``RequestError`` for a document without a token."""
    documents: list[TokenizedDocument | DocumentTooLong] = []
    limit = embedder.document_limit
    for document in frame.documents:
        tokens = embedder.tokenize(document.text)
        if not tokens:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"document {document.document_id!r} is empty"
            )
        if len(tokens) > limit:
            documents.append(
                DocumentTooLong(frame.request_id, document.document_id, len(tokens), limit)
            )
        else:
            documents.append(TokenizedDocument(document.document_id, tokens))
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


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    request_id: RequestId
    document_id: str
    tokens: Sequence[TokenId]


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents for one pass, at least one, perhaps of several requests."""

    pooling: Pooling
    documents: tuple[PlannedDocument, ...]

    @property
    def tokens(self) -> list[Sequence[TokenId]]:
        return [document.tokens for document in self.documents]


@dataclass(slots=True)
class _Waiting:
    document: TokenizedDocument
    failures: int = 0


@dataclass(slots=True)
class _Request:
    request_id: RequestId
    pooling: Pooling
    normalization: Normalization
    waiting: deque[_Waiting | DocumentTooLong] = field(
        default_factory=deque["_Waiting | DocumentTooLong"]
    )
    embedded_tokens: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.embedded_tokens)


class EmbeddingQueue:
    def __init__(self, *, capacity: int, batch_size: int, most_documents: int) -> None:
        """``capacity``: requests that may wait; ``batch_size``: tokens in one pass at most;
        ``most_documents``: documents in one pass at most.
        """
        self._capacity = capacity
        self._batch_size = batch_size
        self._most_documents = most_documents
        self._requests: dict[RequestId, _Request] = {}

    @property
    def is_idle(self) -> bool:
        """Is there nothing to plan?"""
        return not self._requests

    def submit(self, request: EmbeddingRequest) -> list[Event]:
        """Take the request on; ``Busy`` if too many wait. It is over at once if it is empty."""
        if len(self._requests) >= self._capacity:
            return [Busy(request.request_id)]
        taken = _Request(request.request_id, request.pooling, request.normalization)
        for document in request.documents:
            taken.waiting.append(
                _Waiting(document) if isinstance(document, TokenizedDocument) else document
            )
        self._requests[request.request_id] = taken
        return self._go_on(taken)

    def cancel(self, request_id: RequestId) -> list[Event]:
        """End the request, with what it has used. Nothing to do if it is over already."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        return [Finished(request_id, FinishReason.CANCELLED, request.usage)]

    def plan(self, *, budget: int | None = None) -> Batch | None:
        """Documents for one pass, first come first served; None if there is nothing to do.

        ``budget``: tokens that would be enough, when others wait for the model too. A document is
        never split, so the first one is taken however long it is.

        1. The first document decides how all are pooled.
        2. One that was in a failed pass goes alone. Those are always at the head of the line.
        3. Nobody is overtaken: the first that does not fit ends the batch.
        """
        most_tokens = self._batch_size if budget is None else min(budget, self._batch_size)
        documents: list[PlannedDocument] = []
        pooling: Pooling | None = None
        tokens = 0
        for request in self._requests.values():
            for waiting in request.waiting:
                if isinstance(waiting, DocumentTooLong):
                    continue  # it is told when its turn comes
                document = waiting.document
                if documents:
                    fits = (
                        request.pooling is pooling
                        and tokens + len(document.tokens) <= most_tokens
                        and len(documents) < self._most_documents
                    )
                    if not fits:
                        return _batch(pooling, documents)
                pooling = request.pooling
                tokens += len(document.tokens)
                documents.append(
                    PlannedDocument(request.request_id, document.document_id, document.tokens)
                )
                if waiting.failures:
                    return _batch(pooling, documents)
        return _batch(pooling, documents)

    def commit(self, batch: Batch, vectors: Sequence[Vectors]) -> list[Event]:
        """Take note of the documents' vectors, as the model gave them, in the batch's order."""
        events: list[Event] = []
        for planned, raw in zip(batch.documents, vectors, strict=True):
            request = self._requests.get(planned.request_id)
            if request is None:
                continue  # over: see below
            self._take(request, planned)
            normalized = normalize(raw, request.normalization)
            if not np.isfinite(normalized).all():
                # Once more would give the same.
                events.append(self._failed(planned, "the model gave values that are not finite"))
                continue
            request.embedded_tokens += len(planned.tokens)
            events.append(
                Embedded(
                    request.request_id,
                    planned.document_id,
                    normalized.shape[1],
                    normalized.astype("<f4", copy=False).tobytes(),
                )
            )
            events += self._go_on(request)
        return events

    def fail(self, batch: Batch, error: DecodeError | RequestError) -> list[Event]:
        """The pass failed. What cannot be served ends now; the rest is tried again, each document
        alone, so that only the one that is to blame ends its request.
        """
        events: list[Event] = []
        if isinstance(error, RequestError):
            for request_id in dict.fromkeys(document.request_id for document in batch.documents):
                del self._requests[request_id]
                events.append(Failed(request_id, error.code, error.message))
            return events
        touched = {document.request_id: 0 for document in batch.documents}
        for document in batch.documents:
            touched[document.request_id] += 1
        for request_id, count in touched.items():
            heads = [
                waiting
                for waiting in self._requests[request_id].waiting
                if isinstance(waiting, _Waiting)
            ]
            for waiting in heads[:count]:
                waiting.failures += 1
                if waiting.failures >= MOST_FAILURES:
                    (planned,) = batch.documents  # it went alone
                    events.append(self._failed(planned, str(error)))
        return events

    def _take(self, request: _Request, planned: PlannedDocument) -> None:
        waiting = request.waiting.popleft()
        assert isinstance(waiting, _Waiting), "refused documents leave before others follow"
        assert waiting.document.tokens is planned.tokens

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

    def _failed(self, planned: PlannedDocument, message: str) -> Failed:
        del self._requests[planned.request_id]
        return Failed(
            planned.request_id,
            ErrorCode.DECODE_FAILED,
            f"document {planned.document_id!r} could not be embedded: {message}",
        )


def _batch(pooling: Pooling | None, documents: Sequence[PlannedDocument]) -> Batch | None:
    return None if pooling is None else Batch(pooling, tuple(documents))
