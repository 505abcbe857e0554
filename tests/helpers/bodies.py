"""JSON that clients may send: any at all, and what is nearly a request."""

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""On a machine that others use, too."""


def body(**keys: Any) -> bytes:
    return json.dumps(keys).encode()


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 1e308])
    | st.floats()
    | st.text(max_size=5)
    | st.just("\ud83d")  # half a character, which JSON can write
    | st.sampled_from(["text", "function", "user", "auto", "none", "required", "json_schema"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "function", "name", "text", "schema"])
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@st.composite
def nearly(draw: st.DrawFn, bodies: Sequence[dict[str, Any]]) -> Any:
    """One of the bodies, with one or a few keys anywhere in it gone, added, replaced or nested."""
    body = deepcopy(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        if not body:
            break
        holder, key = draw(st.sampled_from(places_in(body)))
        match draw(
            st.sampled_from(["like", "like", "drop", "drop", "replace", "list", "dict", "add"])
        ):
            case "like":
                holder[key] = draw(_like(holder[key]))
            case "drop":
                del holder[key]
            case "list":
                holder[key] = [holder[key]]
            case "dict":
                holder[key] = {draw(st.text(max_size=3)): holder[key]}
            case "add" if isinstance(holder, dict):
                added = draw(st.sampled_from(sorted(_keys(bodies))) | st.text(max_size=3))
                holder[added] = draw(json_values)
            case _:
                holder[key] = draw(json_values)
    return body


def _like(value: Any) -> st.SearchStrategy[Any]:
    """Others of its type, which may be allowed in its place, too."""
    match value:
        case bool():
            return st.booleans()
        case int() | float():
            return st.integers(0, 20) | st.floats(0, 1) | st.integers()
        case str():
            return st.text(max_size=9)
        case dict():
            return st.dictionaries(st.text(max_size=3), json_values, max_size=2)
        case _:
            return st.none()


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """All keys in it, and what they are keys of."""
    places: list[tuple[Any, Any]] = []
    match value:
        case dict():
            steps = list(cast("dict[Any, Any]", value).items())
        case list():
            steps = list(enumerate(cast("list[Any]", value)))
        case _:
            return places
    for key, inner in steps:
        places += [(value, key), *places_in(inner)]
    return places


def _keys(value: Any) -> set[str]:
    return {key for _, key in places_in(value) if isinstance(key, str)}
