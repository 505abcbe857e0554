"""A BERT of a few kilobytes with random weights, written as a GGUF file.

Its vectors mean nothing, but llama.cpp runs it as it runs any encoder: no KV cache, each token sees
all others, each document in one piece.
"""

from pathlib import Path

import numpy as np
from tiny_gguf import Tensors, Value, write_gguf

TRAINED = 320
"""Tokens of one document at most; more than the embedder gives to llama.cpp at once."""

DIMENSIONS = 32
WORDS = ("red", "blue", "green", "cat", "dog", "bird", "sings", "sleeps")

_INNER, _LAYERS, _HEADS = 64, 2, 4
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TOKENS = (*_SPECIAL, *(f"\u2581{word}" for word in WORDS))


def write_tiny_bert(path: Path, *, with_head: bool = False) -> None:
    """``with_head``: it can rank."""
    write_gguf(path, _values(with_head=with_head), _tensors(with_head=with_head))


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


def _tensors(*, with_head: bool) -> Tensors:
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
    tensors = {name: chance.normal(0, 0.3, shape) for name, shape in shapes.items()}
    for norm in norms:
        tensors[f"{norm}.weight"] = np.ones(width)
        tensors[f"{norm}.bias"] = np.zeros(width)
    return tensors
