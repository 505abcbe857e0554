"""Frames of the agent link: any at all, made from their types, and what is nearly one."""

from copy import deepcopy
from functools import cache
from typing import Any, cast

import msgspec
from bodies import places_in
from hypothesis import strategies as st
from msgspec import inspect

from common.ids import RequestId
from common.messages import Embedded, Event, ToAgent, ToBalancer, encode

LARGEST = 2**63 - 1


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """All values of a type that a frame may have, within its bounds."""
    return _values(inspect.type_info(kind))


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType(cls=cls):
            return _structs(cls)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_values, types))
        case inspect.VarTupleType(item_type=item):
            return st.lists(_values(item), max_size=3).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(_values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=3)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cast("Any", cls))
        case inspect.IntType(ge=least, le=most):
            return _integers(-LARGEST - 1 if least is None else least, most or LARGEST)
        case inspect.FloatType(ge=least):
            return st.floats(least, allow_nan=False)  # which is not equal to itself
        case inspect.StrType(min_length=shortest, max_length=longest):
            return st.text(min_size=shortest or 0, max_size=min(longest or 5, 5))
        case inspect.BytesType():
            return st.binary(max_size=9)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():
            return st.none() | st.integers(0, 9) | st.text(max_size=3)
        case _:
            raise AssertionError(f"a frame has a field of a kind that is new here: {kind}")


def _integers(least: int, most: int) -> st.SearchStrategy[int]:
    small = st.integers(max(least, -2), min(most, 9))
    return small | small | st.sampled_from([least, most]) | st.integers(least, most)


def _embedded(request_id: str, document_id: str, dimensions: int, count: int) -> Embedded:
    return Embedded(RequestId(request_id), document_id, dimensions, bytes(4 * dimensions * count))


@cache
def _structs(cls: type[Any]) -> st.SearchStrategy[Any]:
    if cls is Embedded:
        names = st.text(max_size=5)
        return st.builds(_embedded, names, names, st.integers(1, 3), st.integers(1, 3))
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)
    needed = {field.name: _values(field.type) for field in kind.fields if field.required}
    others = {field.name: _values(field.type) for field in kind.fields if not field.required}
    return st.fixed_dictionaries(needed, optional=others).map(lambda fields: cls(**fields))


to_agent: st.SearchStrategy[ToAgent] = values_of(ToAgent)
to_balancer: st.SearchStrategy[ToBalancer] = values_of(ToBalancer)
events: st.SearchStrategy[Event] = values_of(Event)


ENCODABLE = st.integers(-(2**63), 2**64 - 1)
"""What MessagePack can carry."""

ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 2**31, 2**63, 2**64 - 1, -(2**63)]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(ENCODABLE, max_size=2),
    st.dictionaries(st.text(max_size=3), ENCODABLE, max_size=2),
    st.just(msgspec.msgpack.Ext(5, b"x")),
    st.datetimes(timezones=st.timezones(), allow_imaginary=False),
)


@st.composite
def nearly_frames(draw: st.DrawFn, frames: st.SearchStrategy[Any]) -> bytes:
    """A frame with a few fields anywhere in it gone, replaced, nested, or of another frame."""
    frame = deepcopy(msgspec.msgpack.decode(encode(draw(frames))))
    for _ in range(draw(st.integers(1, 3))):
        if not (places := places_in(frame)):
            break
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "drop", "nest", "other", "repeat"])):
            case "drop":
                del holder[key]
            case "nest":
                holder[key] = draw(st.sampled_from([[holder[key]], {"x": holder[key]}]))
            case "other":
                holder[key] = msgspec.msgpack.decode(encode(draw(frames)))
            case "repeat" if isinstance(holder, list):
                items = cast("list[Any]", holder)
                items += deepcopy(items)
            case _:
                holder[key] = draw(ODD)
    return msgspec.msgpack.encode(frame)


@st.composite
def broken_frames(draw: st.DrawFn, frames: st.SearchStrategy[Any]) -> bytes:
    """A frame's bytes, some of them changed, gone, new or in another place."""
    data = bytearray(encode(draw(frames)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "change", "cut", "insert", "move"])):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 9))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case _:
                piece = data[at : at + 9]
                to = draw(st.integers(0, len(data)))
                data[to:to] = piece
    return bytes(data)
