"""Which documents go into a pass, and what each request is told."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.echo import EchoEmbedder
from agent.embedding import (
    Batch,
    EmbeddingQueue,
    EmbeddingRequest,
    TokenizedDocument,
    Vectors,
    normalize,
    pool,
    tokenize,
)
from common.errors import DecodeError, ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    L2,
    Busy,
    Document,
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

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))
BROKEN = DecodeError("told to fail")
UNCHANGED = Unchanged()


def rows(*vectors: Sequence[float]) -> Vectors:
    return np.array(vectors, dtype=np.float32)


def document(name: str, tokens: int) -> TokenizedDocument:
    return TokenizedDocument(name, [TokenId(n) for n in range(tokens)])


def request(
    request_id: RequestId,
    *documents: TokenizedDocument | DocumentTooLong,
    pooling: Pooling = Pooling.LAST,
    normalization: Normalization = UNCHANGED,
) -> EmbeddingRequest:
    return EmbeddingRequest(request_id, documents, pooling, normalization)


def queue(*, capacity: int = 8, batch_size: int = 10, most_documents: int = 4) -> EmbeddingQueue:
    return EmbeddingQueue(capacity=capacity, batch_size=batch_size, most_documents=most_documents)


def planned(waiting: EmbeddingQueue) -> Batch:
    batch = waiting.plan()
    assert batch is not None
    return batch


def names(batch: Batch) -> list[str]:
    return [document.document_id for document in batch.documents]


def succeed(waiting: EmbeddingQueue) -> list[Event]:
    """All of the batch in one pass; a document's vector is its length."""
    return waiting.commit([rows([len(tokens)]) for tokens in planned(waiting).tokens])


def commit(waiting: EmbeddingQueue, *vectors: Vectors) -> list[Event]:
    planned(waiting)
    return waiting.commit(vectors)


def fail(waiting: EmbeddingQueue) -> list[Event]:
    planned(waiting)
    return waiting.fail(BROKEN)


def embedded(request_id: RequestId, name: str, tokens: int) -> Embedded:
    """The tests' vectors say how many tokens there are."""
    return Embedded(request_id, name, 1, np.array([tokens], "<f4").tobytes(), tokens)


def finished(request_id: RequestId, tokens: int) -> Finished:
    return Finished(request_id, FinishReason.STOP, Usage(prompt_tokens=tokens))


@pytest.mark.parametrize(
    ("pooling", "vectors"),
    [
        (Pooling.NONE, [[1, 2], [3, 4], [8, 0]]),
        (Pooling.MEAN, [[4, 2]]),
        (Pooling.CLS, [[1, 2]]),
        (Pooling.LAST, [[8, 0]]),
    ],
)
def test_pooling(pooling: Pooling, vectors: list[list[float]]) -> None:
    assert pool(rows([1, 2], [3, 4], [8, 0]), pooling).tolist() == vectors


@pytest.mark.parametrize(
    ("normalization", "vectors"),
    [
        (Unchanged(), [[3, 4], [0, 0]]),
        (L2(), [[0.6, 0.8], [0, 0]]),
        (RmsNorm(0.0), [[3 / math.sqrt(12.5), 4 / math.sqrt(12.5)], [0, 0]]),
        (RmsNorm(3.5), [[0.75, 1], [0, 0]]),
    ],
)
def test_normalization_is_of_each_vector(
    normalization: Normalization, vectors: list[list[float]]
) -> None:
    assert normalize(rows([3, 4], [0, 0]), normalization) == pytest.approx(np.array(vectors))


def test_large_values_can_be_normalized() -> None:
    """Their squares are beyond single precision."""
    assert normalize(rows([3e30, 4e30]), L2()) == pytest.approx(np.array([[0.6, 0.8]]))


def test_a_document_that_is_too_long_is_known_before_its_turn() -> None:
    frame = Embed(
        request_id=R1,
        documents=(Document("a", "x" * 512), Document("b", "x" * 513)),
        pooling=Pooling.MEAN,
        normalization=L2(),
    )

    fits, refused = tokenize(frame, EchoEmbedder(), longest_piece=1, vocabulary_size=1000).documents

    assert isinstance(fits, TokenizedDocument)
    assert refused == DocumentTooLong(R1, "b", 513, 512)


def test_a_document_that_cannot_fit_is_not_tokenized() -> None:
    frame = Embed(request_id=R1, documents=(Document("a", "x" * 5200),), pooling=Pooling.MEAN)

    refused = tokenize(frame, EchoEmbedder(), longest_piece=10, vocabulary_size=1000).documents

    assert refused == (DocumentTooLong(R1, "a", 520, 512),)


def test_a_document_without_tokens_is_refused_by_name() -> None:
    documents = (Document("a", ""), Document("b", "x"))
    frame = Embed(request_id=R1, documents=documents, pooling=Pooling.MEAN)

    refused, fits = tokenize(frame, EchoEmbedder(), longest_piece=1, vocabulary_size=1000).documents

    assert refused == DocumentFailed(R1, "a", "it is empty")
    assert isinstance(fits, TokenizedDocument)


def test_requests_share_a_batch_and_nobody_is_overtaken() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 4), document("b", 3)))
    waiting.submit(request(R2, document("c", 2), document("d", 2), document("e", 1)))

    first = planned(waiting)  # "e" would fit, but "d" is before it
    assert names(first) == ["a", "b", "c"]
    assert succeed(waiting) == [
        embedded(R1, "a", 4),
        embedded(R1, "b", 3),
        finished(R1, 7),
        embedded(R2, "c", 2),
    ]
    second = planned(waiting)
    assert names(second) == ["d", "e"]
    assert succeed(waiting) == [
        embedded(R2, "d", 2),
        embedded(R2, "e", 1),
        finished(R2, 5),
    ]
    assert waiting.is_idle
    assert waiting.plan() is None


def test_a_batch_has_no_more_documents_than_it_may() -> None:
    waiting = queue(most_documents=2)
    waiting.submit(request(R1, document("a", 1), document("b", 1), document("c", 1)))

    assert names(planned(waiting)) == ["a", "b"]


def test_a_batch_takes_as_many_passes_as_it_needs() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 1), document("b", 5)))
    batch = planned(waiting)

    assert waiting.commit([rows([1])]) == [embedded(R1, "a", 1)]
    assert waiting.plan() is batch
    assert waiting.commit([]) == []
    waiting.submit(request(R2, document("c", 1)))
    assert waiting.plan() is batch
    assert waiting.commit([rows([5])]) == [embedded(R1, "b", 5), finished(R1, 6)]
    assert names(planned(waiting)) == ["c"]


def test_a_batch_that_nobody_wants_any_more_is_given_up() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 5)))
    waiting.submit(request(R2, document("b", 1)))
    batch = planned(waiting)

    waiting.cancel(R2)
    assert waiting.plan() is batch
    waiting.cancel(R1)
    assert waiting.plan() is None
    waiting.submit(request(R1, document("again", 5)))
    assert names(planned(waiting)) == ["again"]


def test_a_request_is_not_told_of_an_earlier_one_with_its_id() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("old", 5)))
    waiting.submit(request(R2, document("b", 1)))
    batch = planned(waiting)
    waiting.cancel(R1)
    waiting.submit(request(R1, document("new", 5)))

    assert waiting.commit([rows([5]), rows([1])]) == [embedded(R2, "b", 1), finished(R2, 1)]
    assert waiting.plan() is not batch
    assert names(planned(waiting)) == ["new"]


def test_what_a_cancelled_request_wanted_is_not_computed_to_its_end() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("long", 8)))
    waiting.submit(request(R2, document("b", 1)))
    assert names(planned(waiting)) == ["long", "b"]

    waiting.cancel(R1)

    assert names(planned(waiting)) == ["b"]


def test_documents_that_are_pooled_differently_do_not_share_a_batch() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 1), pooling=Pooling.MEAN))
    waiting.submit(request(R2, document("b", 1), pooling=Pooling.LAST))

    first = planned(waiting)
    assert (first.pooling, names(first)) == (Pooling.MEAN, ["a"])
    succeed(waiting)
    second = planned(waiting)
    assert (second.pooling, names(second)) == (Pooling.LAST, ["b"])


def test_each_request_is_normalized_as_it_asks() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 1), normalization=L2()))
    waiting.submit(request(R2, document("b", 1)))

    events = commit(waiting, rows([0, 5]), rows([0, 5]))

    vectors = [event.vectors for event in events if isinstance(event, Embedded)]
    assert vectors == [[[0, 1]], [[0, 5]]]


def test_all_vectors_of_a_document_come_in_one_event() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 2), pooling=Pooling.NONE))

    event, _ = commit(waiting, rows([1, 2], [3, 4]))

    assert isinstance(event, Embedded)
    assert event.vectors == [[1, 2], [3, 4]]


def test_refusals_come_in_their_documents_order() -> None:
    waiting = queue()
    too_long = [DocumentTooLong(R1, name, 99, 10) for name in "abc"]
    a, c, d = too_long
    told = waiting.submit(request(R1, a, document("b", 1), c, d))

    assert told == [a]
    assert succeed(waiting) == [embedded(R1, "b", 1), c, d, finished(R1, 1)]


@pytest.mark.parametrize("documents", [(), (DocumentTooLong(R1, "a", 99, 10),)])
def test_a_request_with_nothing_to_embed_is_over_at_once(
    documents: tuple[DocumentTooLong, ...],
) -> None:
    waiting = queue()

    assert waiting.submit(request(R1, *documents)) == [*documents, finished(R1, 0)]
    assert waiting.is_idle


def test_a_cancelled_request_leaves_the_line_to_the_others() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 6), document("b", 6)))
    waiting.submit(request(R2, document("c", 6)))
    succeed(waiting)

    told = waiting.cancel(R1)

    assert told == [Finished(R1, FinishReason.CANCELLED, Usage(prompt_tokens=6))]
    assert names(planned(waiting)) == ["c"]
    assert waiting.cancel(R1) == []


def test_the_line_is_bounded() -> None:
    waiting = queue(capacity=1)
    waiting.submit(request(R1, document("a", 1)))

    assert waiting.submit(request(R2, document("b", 1))) == [Busy(R2)]
    assert waiting.cancel(R2) == []


def test_after_a_failure_each_document_goes_alone_and_only_the_bad_one_fails() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 1), document("bad", 2), document("b", 1)))
    waiting.submit(request(R2, document("c", 3)))
    waiting.submit(request(R3, document("later", 9)))

    assert fail(waiting) == []
    assert succeed(waiting) == [embedded(R1, "a", 1)]
    assert names(planned(waiting)) == ["bad"]
    assert fail(waiting) == [DocumentFailed(R1, "bad", "told to fail")]
    assert succeed(waiting) == [embedded(R1, "b", 1), finished(R1, 2)]
    assert succeed(waiting) == [embedded(R2, "c", 3), finished(R2, 3)]
    assert names(planned(waiting)) == ["later"]


def test_a_failure_does_not_touch_what_was_completed_before() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 1), document("b", 1), document("c", 1)))

    assert commit(waiting, rows([1])) == [embedded(R1, "a", 1)]
    assert fail(waiting) == []
    assert names(planned(waiting)) == ["b"]


def test_a_document_that_was_alone_is_tried_once_more() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 1)))

    assert fail(waiting) == []
    assert succeed(waiting) == [embedded(R1, "a", 1), finished(R1, 1)]


def test_what_the_model_cannot_do_ends_the_requests_that_ask_for_it() -> None:
    waiting = queue()
    for request_id in (R1, R2):
        waiting.submit(request(request_id, document("a", 1), pooling=Pooling.RANK))
    waiting.submit(request(R3, document("b", 1)))
    planned(waiting)

    told = waiting.fail(RequestError(ErrorCode.NOT_SUPPORTED, "no head"))

    assert told == [Failed(r, ErrorCode.NOT_SUPPORTED, "no head") for r in (R1, R2)]
    assert names(planned(waiting)) == ["b"]


def test_values_that_are_no_numbers_are_never_sent() -> None:
    waiting = queue()
    waiting.submit(request(R1, document("a", 1), document("b", 1)))
    waiting.submit(request(R2, document("c", 1)))

    told = commit(waiting, rows([math.nan]), rows([1]), rows([1]))

    assert isinstance(told[0], DocumentFailed)
    assert told[0].document_id == "a"
    assert told[1:] == [
        embedded(R1, "b", 1),
        finished(R1, 1),
        embedded(R2, "c", 1),
        finished(R2, 1),
    ]


@given(
    sizes=st.lists(st.lists(st.integers(1, 14), max_size=5), max_size=6),
    outcomes=st.lists(st.none() | st.integers(0, 2), max_size=60),
    cancelled=st.sets(st.integers(0, 5)),
)
def test_every_request_ends_once_whatever_fails(
    sizes: list[list[int]], outcomes: list[int | None], cancelled: set[int]
) -> None:
    """Sizes above 10 are too long. A pass fails (None) or completes so many documents; when
    ``outcomes`` are used up, all that are open.
    """
    waiting = queue()
    told: list[Event] = []
    for n, lengths in enumerate(sizes):
        request_id = RequestId(str(n))
        documents = (
            document(str(at), length)
            if length <= 10
            else DocumentTooLong(request_id, str(at), length, 10)
            for at, length in enumerate(lengths)
        )
        told += waiting.submit(request(request_id, *documents))
    scripted = iter(outcomes)
    passes = 0
    while batch := waiting.plan():
        passes += 1
        assert 0 < sum(map(len, batch.tokens)) <= 10
        assert len(batch.documents) <= 4
        completed = next(scripted, 4)
        if completed is None:
            told += waiting.fail(BROKEN)
        else:
            sizes_left = [len(each.document.tokens) for _, each in batch.open]
            told += waiting.commit([rows([size]) for size in sizes_left[:completed]])
        if passes in cancelled:
            told += waiting.cancel(RequestId(str(passes)))

    assert waiting.is_idle
    assert passes <= len(outcomes) + 2 * sum(map(len, sizes))
    for n, lengths in enumerate(sizes):
        *before, end = (event for event in told if event.request_id == str(n))
        assert isinstance(end, Finished)
        order: list[int] = []
        embedded_tokens = 0
        for event in before:
            assert isinstance(event, Embedded | DocumentTooLong | DocumentFailed)
            order.append(int(event.document_id))
            length = lengths[order[-1]]
            assert isinstance(event, DocumentTooLong) == (length > 10)
            if isinstance(event, Embedded):
                assert event.vectors == [[length]]
                embedded_tokens += length
        assert order == list(range(len(before)))
        assert end.usage.prompt_tokens == embedded_tokens
        if end.reason is FinishReason.STOP:
            assert len(before) == len(lengths)


def test_a_document_may_be_tokens() -> None:
    documents = (
        Document("a", "", (TokenId(97), TokenId(98))),
        Document("b", "", (TokenId(1000),)),
    )
    frame = Embed(request_id=R1, documents=documents, pooling=Pooling.MEAN)

    fits, refused = tokenize(frame, EchoEmbedder(), longest_piece=1, vocabulary_size=1000).documents

    assert fits == TokenizedDocument("a", (TokenId(97), TokenId(98)))
    assert refused == DocumentFailed(R1, "b", "the model has no token 1000")
