import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from pydantic import BaseModel, ValidationError

from balancer.bodies import check_size
from balancer.desired_state import AgentOverrides, BalancerDesiredState
from balancer.limits import MOST_KEYS
from balancer.native_requests import GenerateEmbeddingBatchParams, SocketRequest
from balancer.openai_chat import ChatRequest
from balancer.openai_completions import CompletionRequest
from balancer.openai_embeddings import EmbeddingRequest
from balancer.openai_responses import ResponsesRequest
from balancer.openai_tokens import ChatToTokenize, ContentToTokenize, TokensToText
from common.errors import ErrorCode, RequestError

MODELS = [
    AgentOverrides, BalancerDesiredState, SocketRequest, GenerateEmbeddingBatchParams, ChatRequest,
    CompletionRequest, EmbeddingRequest, ResponsesRequest, ChatToTokenize, ContentToTokenize,
    TokensToText,
]  # fmt: skip


def sequences(schema: Any) -> Iterator[dict[str, Any]]:
    """All lists and tuples of any length in pydantic's inner schema whose items are checked."""
    match schema:
        case {"type": "list" | "tuple" as kind, **keys}:
            items = keys.get("items_schema", {"type": "any"})
            many = kind == "list" or "variadic_item_index" in keys
            if many and items not in ({"type": "any"}, [{"type": "any"}]):
                yield cast("dict[str, Any]", schema)
            yield from sequences(items)
        case dict():
            for value in cast("dict[str, Any]", schema).values():
                yield from sequences(value)
        case list() | tuple():
            for value in cast("list[Any]", schema):
                yield from sequences(value)
        case _:
            pass


@pytest.mark.parametrize("model", MODELS)
def test_of_a_list_only_the_first_fault_is_looked_for(model: type[BaseModel]) -> None:
    """Else a few megabytes of faults would hold up everybody."""
    found = list(sequences(model.__pydantic_core_schema__))

    assert [schema for schema in found if not schema.get("fail_fast")] == []


def test_a_list_of_faults_is_one_fault() -> None:
    body = json.dumps({"messages": [{"role": "user"}] * 3})

    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(body)

    assert caught.value.error_count() == 1


def keys(count: int) -> bytes:
    return json.dumps({f"k{n}": n for n in range(count)}).encode()


def test_a_body_with_too_many_keys_is_refused() -> None:
    check_size(keys(MOST_KEYS))
    with pytest.raises(RequestError) as caught:
        check_size(keys(MOST_KEYS + 1))

    assert caught.value.code is ErrorCode.BODY_TOO_LARGE


@pytest.mark.parametrize(
    "text",
    [
        ":" * (MOST_KEYS + 1),
        '":' * (MOST_KEYS + 1),
        "\\" * 9 + ":" * (MOST_KEYS + 1),
    ],
)
def test_what_stands_in_a_text_is_no_key(text: str) -> None:
    check_size(json.dumps({"content": text}).encode())


@pytest.mark.parametrize("end", [b"", b"\\", b'\\"', b'"'])
def test_a_text_that_never_ends_is_still_one_text(end: bytes) -> None:
    check_size(b'"' + b'\\":' * (MOST_KEYS + 1) + end)
