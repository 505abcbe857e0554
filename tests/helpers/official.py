"""Requests and answers as OpenAI's own Python package has them."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import httpx2
from openai import BaseModel, OpenAI


def sent(resource: str, answer: Mapping[str, Any], **params: Any) -> bytes:
    """The body that the official client sends for ``create`` of a resource (``chat.completions``);
    it is answered so.
    """
    bodies: list[bytes] = []

    def serve(request: httpx2.Request) -> httpx2.Response:
        bodies.append(request.content)
        return httpx2.Response(200, json=answer)

    with (
        httpx2.Client(transport=httpx2.MockTransport(serve)) as http_client,
        OpenAI(base_url="http://x", api_key="x", http_client=http_client) as client,
    ):
        target: Any = client
        for name in resource.split("."):
            target = getattr(target, name)
        target.create(**params)
    assert len(bodies) == 1
    return bodies[0]


def unknown(model: BaseModel) -> set[str]:
    """Paths of what the official type has no field for: it takes anything else in silence."""
    found = set(model.model_extra or {})
    for name in type(model).model_fields:
        for inner in _models(getattr(model, name)):
            found |= {f"{name}.{path}" for path in unknown(inner)}
    return found


def _models(value: Any) -> Iterable[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _models(each)
