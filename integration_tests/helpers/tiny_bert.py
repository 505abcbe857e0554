"""A BERT of a few kilobytes with random weights, written as a GGUF file.

Its vectors mean nothing, but llama.cpp runs it as it runs any encoder: no KV cache, each token sees
all others, each document in one piece. The format is described in ggml's ``docs/gguf.md``.
"""

import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TRAINED = 320
"""Tokens of one document at most; more than the embedder gives to llama.cpp at once."""

DIMENSIONS = 32
WORDS = ("red", "blue", "green", "cat", "dog", "bird", "sings", "sleeps")

_INNER, _LAYERS, _HEADS = 64, 2, 4
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TOKENS = (*_SPECIAL, *(f"\u2581{word}" for word in WORDS))

Value: TypeAlias = int | float | bool | str | tuple[str, ...]


def write_tiny_bert(path: Path, *, with_head: bool = False) -> None:
    """``with_head``: it can rank."""
    tensors = _tensors(with_head=with_head)
    values = _values(with_head=with_head)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_string(key) + _value(value) for key, value in values.items())
    offset = 0
    for name, weights in tensors.items():
        shape = weights.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        offset += weights.nbytes
    padding = bytes(-len(head) % 32)
    path.write_bytes(head + padding + b"".join(w.tobytes() for w in tensors.values()))


def _values(*, with_head: bool) -> dict[str, Value]:
    mean, rank = 1, 4
    return {
        "general.architecture": "bert",
        "bert.block_count": _LAYERS,
        "bert.context_length": TRAINED,
        "bert.embedding_length": DIMENSIONS,
        "bert.feed_forward_length": _INNER,
        "bert.attention.head_count": _HEADS,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.attention.causal": False,
        "bert.pooling_type": rank if with_head else mean,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": _TOKENS,
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,  # so spelt in the format
        "tokenizer.ggml.mask_token_id": 4,
    }


def _tensors(*, with_head: bool) -> dict[str, NDArray[np.float32]]:
    chance = np.random.default_rng(1)
    width = DIMENSIONS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(_TOKENS), width),
        "token_types.weight": (2, width),
        "position_embd.weight": (TRAINED, width),
    }
    norms = ["token_embd_norm"]
    for layer in range(_LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.attn_{name}.weight": (width, width) for name in "qkv"}
        shapes[f"{block}.attn_output.weight"] = (width, width)
        shapes[f"{block}.ffn_up.weight"] = (_INNER, width)
        shapes[f"{block}.ffn_down.weight"] = (width, _INNER)
        norms += [f"{block}.attn_output_norm", f"{block}.layer_output_norm"]
    if with_head:
        shapes |= {"cls.weight": (width, width), "cls.output.weight": (1, width)}
    tensors = {name: chance.normal(0, 0.3, shape).astype("<f4") for name, shape in shapes.items()}
    for norm in norms:
        tensors[f"{norm}.weight"] = np.ones(width, "<f4")
        tensors[f"{norm}.bias"] = np.zeros(width, "<f4")
    return tensors


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
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
