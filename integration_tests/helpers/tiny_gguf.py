"""Models of a few kilobytes with random weights, as GGUF files (ggml's ``docs/gguf.md``)."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Value: TypeAlias = int | float | bool | str | tuple[str, ...] | tuple[float, ...] | tuple[int, ...]
Tensors: TypeAlias = Mapping[str, NDArray[np.float64]]
"""Written as 32-bit floats."""


def write_gguf(path: Path, values: Mapping[str, Value], tensors: Tensors) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_string(key) + _value(value) for key, value in values.items())
    offset = 0
    data: list[bytes] = []
    for name, weights in tensors.items():
        shape = weights.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        data.append(_padded(weights.astype("<f4").tobytes()))
        offset += len(data[-1])
    path.write_bytes(_padded(head) + b"".join(data))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case tuple():
            kind, items = _items(value)
            return struct.pack("<IIQ", 9, kind, len(value)) + items


def _items(values: tuple[str, ...] | tuple[float, ...] | tuple[int, ...]) -> tuple[int, bytes]:
    items = b""
    kind = 8
    for value in values:
        match value:
            case str():
                items += _string(value)
            case int():
                kind = 5
                items += struct.pack("<i", value)
            case float():
                kind = 6
                items += struct.pack("<f", value)
    return kind, items
