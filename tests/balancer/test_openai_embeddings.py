import json
import math
import struct
from base64 import b64decode
from typing import Any

import pytest
from bodies import PATIENT, body, json_values, nearly
from hypothesis import given
from hypothesis import strategies as st
from official import sent, unknown
from openai.types import CreateEmbeddingResponse
from openai.types.embedding_create_params import EmbeddingCreateParams

from balancer.exchange import Told
from balancer.native_requests import embed, encode_request
from balancer.openai_embeddings import MOST_DOCUMENTS, EmbeddingAnswer, EmbeddingRequest
from balancer.openai_errors import ParameterError, parameters_of, parse, refusal
from common.errors import RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    L2,
    Document,
    DocumentFailed,
    DocumentTooLong,
    Embedded,
    Event,
    Finished,
    FinishReason,
    Pooling,
    Usage,
    decode_to_agent,
)

R = RequestId("r")
ANSWER: dict[str, Any] = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [1.0]}],
    "model": "m",
    "usage": {"prompt_tokens": 1, "total_tokens": 1},
}


NOTHING: list[Any] = []


def read(**keys: Any) -> EmbeddingRequest:
    return parse(EmbeddingRequest, body(**{"input": "Hi", **keys}))


def tokens(name: str, *given_tokens: int) -> Document:
    return Document(name, "", tuple(map(TokenId, given_tokens)))


@pytest.mark.parametrize(
    ("said", "documents"),
    [
        ("Hi", [Document("0", "Hi")]),
        (["Hi"], [Document("0", "Hi")]),
        (["a", "b", "a"], [Document("0", "a"), Document("1", "b"), Document("2", "a")]),
        ([5, 0, 6], [tokens("0", 5, 0, 6)]),
        ([[5, 6]], [tokens("0", 5, 6)]),
        ([[5], [6, 7]], [tokens("0", 5), tokens("1", 6, 7)]),
        (["a", [5]], [Document("0", "a"), tokens("1", 5)]),
    ],
)
def test_input_is_text_or_tokens_or_several_of_them(said: Any, documents: list[Document]) -> None:
    data = sent("embeddings", ANSWER, model="m", input=said)

    assert parse(EmbeddingRequest, data).documents == tuple(documents)


@pytest.mark.parametrize(
    ("keys", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [NOTHING]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [True]}, "input[0]"),
        ({"input": ["a", None, "b"]}, "input[1]"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [5, "a"]}, "input[1]"),
        ({"input": [[5], [5, -1]]}, "input[1][1]"),
        ({"input": ["a"] * (MOST_DOCUMENTS + 1)}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"user": 5}, "user"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(keys: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        read(**keys)

    assert caught.value.parameter == parameter


def test_all_that_the_official_package_can_say_is_known() -> None:
    assert set(EmbeddingCreateParams.__annotations__) <= set(EmbeddingRequest.model_fields)


def embedded(name: int, *vector: float) -> Embedded:
    return Embedded(R, str(name), len(vector), struct.pack(f"<{len(vector)}f", *vector))


def finished(prompt_tokens: int) -> Finished:
    return Finished(R, FinishReason.STOP, Usage(prompt_tokens=prompt_tokens))


def answer(params: EmbeddingRequest, *events: Event) -> dict[str, Any]:
    collected = EmbeddingAnswer(params, "m")
    for event in events:
        collected.take(Told("agent", event))
    return json.loads(json.dumps(collected.object(), allow_nan=False))


def vectors(params: EmbeddingRequest, *events: Event) -> list[Any]:
    return [each["embedding"] for each in answer(params, *events, finished(1))["data"]]


def test_vectors_come_in_the_order_of_the_input_whoever_was_first() -> None:
    events = [embedded(1, 0.0, 1.0), finished(3), embedded(10, 0.5, 0.5), embedded(0, 1.0, 0.0)]

    told = answer(read(input=["a"] * 11), *events, finished(4))

    assert told == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.0]},
            {"object": "embedding", "index": 1, "embedding": [0.0, 1.0]},
            {"object": "embedding", "index": 10, "embedding": [0.5, 0.5]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert unknown(CreateEmbeddingResponse.model_validate(told, strict=True)) == set()


singles = st.floats(width=32, allow_nan=False, allow_infinity=False)


@PATIENT
@given(st.lists(singles, min_size=1, max_size=9), st.none() | st.integers(1, 9))
def test_base64_says_the_same_as_numbers(vector: list[float], dimensions: int | None) -> None:
    event = embedded(0, *vector)
    if dimensions is not None:
        dimensions = min(dimensions, len(vector))

    (numbers,) = vectors(read(dimensions=dimensions), event)
    (written,) = vectors(read(dimensions=dimensions, encoding_format="base64"), event)

    assert b64decode(written) == struct.pack(f"<{len(numbers)}f", *numbers)
    assert len(numbers) == dimensions or numbers == vector


def test_numbers_are_told_unless_asked_otherwise() -> None:
    event = embedded(0, 0.5)

    assert vectors(read(), event) == vectors(read(encoding_format="float"), event) == [[0.5]]
    assert vectors(read(encoding_format="base64"), event) == ["AAAAPw=="]


@PATIENT
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=9).filter(
        lambda vector: abs(vector[0]) > 0.01
    ),
    st.data(),
)
def test_what_is_left_of_a_cut_vector_has_length_one(
    vector: list[float], data: st.DataObject
) -> None:
    dimensions = data.draw(st.integers(1, len(vector) - 1))

    (left,) = vectors(read(dimensions=dimensions), embedded(0, *vector))

    length = math.hypot(*vector[:dimensions])
    assert math.hypot(*left) == pytest.approx(1)
    assert left == pytest.approx([value / length for value in vector[:dimensions]], abs=1e-6)


def test_a_vector_that_is_not_cut_is_left_as_it_is() -> None:
    event = embedded(0, 2.0, 0.0)

    assert vectors(read(dimensions=2), event) == [[2.0, 0.0]]


def test_what_is_left_of_a_vector_may_be_nothing() -> None:
    assert vectors(read(dimensions=1), embedded(0, 0.0, 1.0)) == [[0.0]]


def test_more_dimensions_than_there_are_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"'dimensions' is 3, .* have 2") as caught:
        vectors(read(dimensions=3), embedded(0, 0.0, 1.0))

    assert caught.value.parameter == "dimensions"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("Hi", "input"),
        ([5, 6], "input"),
        (["Hi"], "input[0]"),
        ([[5, 6]], "input[0]"),
    ],
)
@pytest.mark.parametrize(
    ("event", "code", "message"),
    [
        (
            DocumentTooLong(R, "0", tokens=900, limit=512),
            "context_length_exceeded",
            "this input has 900 tokens, the limit is 512",
        ),
        (DocumentFailed(R, "0", "no"), "invalid_value", "this input cannot be embedded: no"),
    ],
)
def test_an_input_that_cannot_be_embedded_is_named(
    said: Any, named: str, event: Event, code: str, message: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        answer(read(input=said), event)

    told = refusal(caught.value, parameters_of("input"))
    error = {"message": message, "type": "invalid_request_error", "param": named, "code": code}
    assert (told.status, told.body) == (400, {"error": error})


def test_of_several_inputs_the_one_at_fault_is_named() -> None:
    with pytest.raises(ParameterError) as caught:
        answer(read(input=["a"] * 12), embedded(1, 1.0), DocumentFailed(R, "11", "no"))

    assert caught.value.parameter == "input[11]"


FULL: list[dict[str, Any]] = [
    {
        "model": "m",
        "input": ["a", "b"],
        "encoding_format": "base64",
        "dimensions": 5,
        "user": "me",
    },
    {"input": [[5, 6], [7]]},
    {"input": [5, 6]},
]


def outcome(data: bytes) -> int | None:
    """How many documents it has, in a frame that can travel; None: it is refused."""
    try:
        documents = parse(EmbeddingRequest, data).documents
        made = encode_request(embed(documents, R, pooling=Pooling.MEAN, normalization=L2()))
    except RequestError as error:
        told = refusal(error)
        json.dumps(told.body, allow_nan=False)
        assert told.status == 400
        return None
    assert decode_to_agent(made) is not None
    return len(documents)


def test_the_bodies_that_are_changed_below_are_taken() -> None:
    assert [outcome(body(**full)) for full in FULL] == [2, 2, 1]


@PATIENT
@given(nearly(FULL) | json_values)
def test_what_is_nearly_a_request_is_taken_or_refused(almost: Any) -> None:
    outcome(json.dumps(almost).encode())
