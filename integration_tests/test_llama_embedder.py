"""Embeddings by llama.cpp: the real small model, which is causal, and a tiny encoder."""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_bert import DIMENSIONS, TRAINED, write_tiny_bert

from agent.embedding import EmbeddingQueue, Vectors, tokenize
from agent.llama_embedder import PORTION, LlamaEmbedder
from agent.llama_library import lib, start_library
from agent.llama_progress import NodeCounter
from common.errors import DecodeError, ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import L2, Document, DocumentTooLong, Embed, Embedded, Finished, Pooling
from deploy.model import default_model

BATCH_SIZE = 1024

CAT = "The cat sat on the mat."
KITTEN = "A kitten was sitting on the carpet."
STOCKS = "Stock markets fell sharply today, by 3%. " * 5

Open = Callable[..., LlamaEmbedder]


@pytest.fixture(scope="module")
def open_embedder() -> Generator[Open]:
    start_library()
    opened: list[tuple[Any, LlamaEmbedder]] = []

    def open_embedder(path: Path, batch_size: int = BATCH_SIZE) -> LlamaEmbedder:
        model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        assert model is not None
        embedder = LlamaEmbedder(model, threads=1, batch_size=batch_size, counter=NodeCounter())
        opened.append((model, embedder))
        return embedder

    yield open_embedder
    for model, embedder in opened:
        embedder.close()
        lib.llama_model_free(model)


@pytest.fixture(scope="module")
def causal(open_embedder: Open) -> LlamaEmbedder:
    return open_embedder(default_model())


@pytest.fixture(scope="module")
def encoder(open_embedder: Open, tmp_path_factory: pytest.TempPathFactory) -> LlamaEmbedder:
    path = tmp_path_factory.mktemp("models") / "encoder.gguf"
    write_tiny_bert(path)
    return open_embedder(path)


@pytest.fixture(scope="module")
def ranker(open_embedder: Open, tmp_path_factory: pytest.TempPathFactory) -> LlamaEmbedder:
    path = tmp_path_factory.mktemp("models") / "ranker.gguf"
    write_tiny_bert(path, with_head=True)
    return open_embedder(path)


def embed(embedder: LlamaEmbedder, *texts: str, pooling: Pooling = Pooling.LAST) -> list[Vectors]:
    return compute(embedder, [embedder.tokenize(text) for text in texts], pooling)


def compute(
    embedder: LlamaEmbedder,
    documents: Sequence[Sequence[TokenId]],
    pooling: Pooling = Pooling.LAST,
    *,
    most_tokens: int | None = None,
) -> list[Vectors]:
    """All documents, in passes of at most ``most_tokens``."""
    embedder.begin(documents, pooling)
    vectors: list[Vectors] = []
    while len(vectors) < len(documents):
        vectors += embedder.advance(most_tokens)
    return vectors


def similarity(one: Vectors, other: Vectors) -> float:
    """The least cosine of two documents' vectors."""
    products = (one * other).sum(axis=1)
    return float((products / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)).min())


def test_what_means_the_same_is_near(causal: LlamaEmbedder) -> None:
    cat, kitten, stocks = embed(causal, CAT, KITTEN, STOCKS, pooling=Pooling.MEAN)

    assert similarity(cat, kitten) > similarity(cat, stocks) + 0.1


def test_the_same_text_gives_the_same_vector(causal: LlamaEmbedder) -> None:
    (before,) = embed(causal, CAT)
    embed(causal, STOCKS, KITTEN)

    assert np.array_equal(embed(causal, CAT)[0], before)


@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST])
def test_company_does_not_change_a_vector(causal: LlamaEmbedder, pooling: Pooling) -> None:
    """But for rounding: where a document begins in the KV cache decides in which order attention
    adds up, and weights of four bits make much of little. Other text would be much further away.
    """
    texts = (STOCKS, KITTEN, CAT, KITTEN * 15, CAT)

    together = embed(causal, *texts, pooling=pooling)

    for text, vectors in zip(texts, together, strict=True):
        (alone,) = embed(causal, text, pooling=pooling)
        assert vectors.shape == alone.shape
        assert similarity(vectors, alone) > 0.99


def test_without_pooling_each_token_has_a_vector(causal: LlamaEmbedder) -> None:
    tokens = causal.tokenize(STOCKS)

    (vectors,) = compute(causal, [tokens], Pooling.NONE)

    assert vectors.shape == (len(tokens), 576)
    assert np.array_equal(vectors[-1:], embed(causal, STOCKS)[0])
    assert np.array_equal(vectors[:1], embed(causal, STOCKS, pooling=Pooling.CLS)[0])


def test_a_model_that_names_no_pooling_is_not_pooled(causal: LlamaEmbedder) -> None:
    """As llama.cpp has it."""
    (vectors,) = embed(causal, CAT, pooling=Pooling.UNSPECIFIED)

    assert len(vectors) == len(causal.tokenize(CAT))


def test_a_document_in_several_portions_is_one(causal: LlamaEmbedder) -> None:
    """Its beginning is seen from its end."""
    tokens = (causal.tokenize(STOCKS) * 30)[: PORTION + 3]
    other = [*causal.tokenize(CAT), *tokens[7:]]

    (last,) = compute(causal, [tokens], Pooling.LAST)
    (changed,) = compute(causal, [other], Pooling.LAST)

    assert not np.array_equal(last, changed)


def test_a_long_document_is_embedded(causal: LlamaEmbedder) -> None:
    tokens = (causal.tokenize(STOCKS) * 30)[:992]

    (vectors,) = compute(causal, [tokens], Pooling.NONE)

    assert vectors.shape == (992, 576)
    assert np.isfinite(vectors).all()
    (beginning,) = compute(causal, [tokens[:100]], Pooling.NONE)
    assert similarity(vectors[:100], beginning) > 0.99


def test_small_passes_give_the_same_vectors(causal: LlamaEmbedder) -> None:
    documents = [causal.tokenize(text) for text in (STOCKS, CAT, KITTEN)]

    whole = compute(causal, documents, Pooling.MEAN)
    cut = compute(causal, documents, Pooling.MEAN, most_tokens=7)

    for vectors, others in zip(whole, cut, strict=True):
        assert similarity(vectors, others) > 0.99


def test_a_batch_that_was_given_up_leaves_nothing_behind(causal: LlamaEmbedder) -> None:
    (before,) = embed(causal, CAT)
    causal.begin([causal.tokenize(STOCKS)], Pooling.LAST)
    assert causal.advance(10) == []

    assert np.array_equal(embed(causal, CAT)[0], before)


def test_a_batch_of_exactly_the_limit_is_embedded(open_embedder: Open) -> None:
    small = open_embedder(default_model(), batch_size=64)
    tokens = (small.tokenize(STOCKS) * 2)[:64]

    assert compute(small, [tokens], Pooling.LAST)[0].shape == (1, 576)
    assert len(compute(small, [tokens[:1]] * small.most_documents, Pooling.LAST)) == 64
    assert len(compute(small, [tokens[:40], tokens[:24]], Pooling.LAST)) == 2


@pytest.mark.parametrize("lengths", [[65], [40, 25], [1] * 65, [0]])
def test_what_would_harm_the_process_is_refused(open_embedder: Open, lengths: list[int]) -> None:
    small = open_embedder(default_model(), batch_size=64)

    with pytest.raises(DecodeError):
        compute(small, [[TokenId(5)] * length for length in lengths], Pooling.LAST)


def test_a_token_that_does_not_exist_fails_and_is_survived(causal: LlamaEmbedder) -> None:
    (before,) = embed(causal, CAT)
    with pytest.raises(DecodeError, match="could not embed"):
        compute(causal, [causal.tokenize(CAT), [TokenId(10**6)]], Pooling.LAST)

    assert np.array_equal(embed(causal, CAT)[0], before)


@pytest.mark.parametrize("name", ["causal", "encoder"])
def test_rank_without_a_head_is_refused_by_name(request: pytest.FixtureRequest, name: str) -> None:
    embedder: LlamaEmbedder = request.getfixturevalue(name)

    with pytest.raises(
        RequestError, match="Rank needs a model with a classification head"
    ) as error:
        embed(embedder, "red cat", pooling=Pooling.RANK)

    assert error.value.code is ErrorCode.NOT_SUPPORTED


def test_a_queue_embeds_what_fits_and_refuses_the_rest_by_name(causal: LlamaEmbedder) -> None:
    documents = (
        Document("short", CAT),
        Document("limit", "a" + " a" * (BATCH_SIZE - 1)),
        Document("beyond", "a" + " a" * BATCH_SIZE),
        Document("last", CAT),
    )
    frame = Embed(
        request_id=RequestId("r"), documents=documents, pooling=Pooling.LAST, normalization=L2()
    )
    queue = EmbeddingQueue(
        capacity=1, batch_size=causal.batch_size, most_documents=causal.most_documents
    )

    events = queue.submit(tokenize(frame, causal, longest_piece=64, vocabulary_size=100_000))
    while batch := queue.plan():
        events += queue.commit(compute(causal, batch.tokens, batch.pooling))

    short, limit, beyond, last, end = events
    assert beyond == DocumentTooLong(RequestId("r"), "beyond", BATCH_SIZE + 1, BATCH_SIZE)
    for event, document_id in ((short, "short"), (limit, "limit"), (last, "last")):
        assert isinstance(event, Embedded)
        assert event.document_id == document_id
        (vector,) = event.vectors
        assert np.linalg.norm(vector) == pytest.approx(1)
    assert isinstance(end, Finished)
    assert end.usage.prompt_tokens == BATCH_SIZE + 2 * len(causal.tokenize(CAT))


# Encoders


def test_an_encoder_sees_the_whole_document_from_each_token(encoder: LlamaEmbedder) -> None:
    cat, bird = embed(encoder, "red cat sleeps", "red cat sings", pooling=Pooling.CLS)

    assert cat.shape == (1, DIMENSIONS)
    assert similarity(cat, bird) < 0.999


def test_an_encoder_gets_the_tokens_that_it_wants_around_a_text(encoder: LlamaEmbedder) -> None:
    beginning, *words, end = encoder.tokenize("red cat")

    assert (beginning, len(words), end) == (2, 2, 3)


@pytest.mark.parametrize("most_tokens", [None, 1, 20])
@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST])
def test_documents_of_an_encoder_do_not_mix(
    encoder: LlamaEmbedder, pooling: Pooling, most_tokens: int | None
) -> None:
    texts = ("red cat", "blue dog " * 140, "bird sings", "green bird " * 140, "red cat")
    documents = [encoder.tokenize(text) for text in texts]

    together = compute(encoder, documents, pooling, most_tokens=most_tokens)

    for text, vectors in zip(texts, together, strict=True):
        (alone,) = embed(encoder, text, pooling=pooling)
        assert np.allclose(vectors, alone, atol=1e-4)


def test_an_encoder_takes_what_it_was_trained_for_and_no_more(encoder: LlamaEmbedder) -> None:
    assert encoder.document_limit == TRAINED
    word = TokenId(5)

    assert compute(encoder, [[word] * TRAINED], Pooling.MEAN)[0].shape == (1, DIMENSIONS)
    with pytest.raises(DecodeError, match=f"{TRAINED + 1} tokens is too long"):
        compute(encoder, [[word] * (TRAINED + 1)], Pooling.MEAN)


def test_the_models_own_pooling_is_taken_if_none_is_named(
    encoder: LlamaEmbedder, ranker: LlamaEmbedder
) -> None:
    (mean,) = embed(encoder, "red cat", pooling=Pooling.MEAN)
    (score,) = embed(ranker, "red cat", pooling=Pooling.RANK)

    assert np.array_equal(embed(encoder, "red cat", pooling=Pooling.UNSPECIFIED)[0], mean)
    assert np.array_equal(embed(ranker, "red cat", pooling=Pooling.UNSPECIFIED)[0], score)


def test_a_model_with_a_head_ranks_and_embeds_by_turns(
    encoder: LlamaEmbedder, ranker: LlamaEmbedder
) -> None:
    """But for the head, both have the same weights."""
    texts = ("red cat", "blue dog " * 140, "bird sings")
    (before,) = embed(ranker, "red cat", pooling=Pooling.MEAN)

    scores = embed(ranker, *texts, pooling=Pooling.RANK)

    assert [score.shape for score in scores] == [(1, 1)] * 3
    assert len({float(score[0, 0]) for score in scores}) == 3
    for text, score in zip(texts, scores, strict=True):
        assert np.allclose(embed(ranker, text, pooling=Pooling.RANK)[0], score, atol=1e-4)
    (after,) = embed(ranker, "red cat", pooling=Pooling.MEAN)
    assert np.array_equal(after, before)
    assert np.array_equal(after, embed(encoder, "red cat", pooling=Pooling.MEAN)[0])
