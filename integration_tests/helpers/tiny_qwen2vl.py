"""A Qwen2-VL of a few kilobytes with random weights, as a GGUF file.

It babbles, but its positions are those of its family: three for each token, and an image takes
fewer of them than it has tokens. Its vocabulary is the bytes.
"""

from pathlib import Path

import numpy as np
from tiny_gguf import Tensors, Value, write_gguf

WIDTH = 64
TRAINED = 1024
PIXELS_PER_TOKEN = 28

_INNER, _LAYERS, _HEADS, _KV_HEADS = 128, 2, 4, 2
_HEAD = WIDTH // _HEADS
_END = "<|im_end|>"


def write_tiny_qwen2vl(path: Path) -> None:
    write_gguf(path, _values(), _tensors())


def _letters() -> tuple[str, ...]:
    """How byte-level tokenizers write the bytes: as themselves if they can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {byte: chr(byte) for byte in seen}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(unseen)}
    return tuple(letters[byte] for byte in range(256))


def _values() -> dict[str, Value]:
    tokens = (*_letters(), "th", _END)
    name = "qwen2vl"
    return {
        "general.architecture": name,
        f"{name}.block_count": _LAYERS,
        f"{name}.context_length": TRAINED,
        f"{name}.embedding_length": WIDTH,
        f"{name}.feed_forward_length": _INNER,
        f"{name}.attention.head_count": _HEADS,
        f"{name}.attention.head_count_kv": _KV_HEADS,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{name}.rope.freq_base": 10000.0,
        f"{name}.rope.dimension_sections": (2, 3, 3, 0),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": (1,) * (len(tokens) - 1) + (3,),
        "tokenizer.ggml.merges": ("t h",),
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tensors() -> Tensors:
    chance = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (258, WIDTH),
        "output.weight": (258, WIDTH),
    }
    ones = ["output_norm.weight"]
    for layer in range(_LAYERS):
        block = f"blk.{layer}"
        for part, heads in (("q", _HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            shapes[f"{block}.attn_{part}.weight"] = (heads * _HEAD, WIDTH)
            shapes[f"{block}.attn_{part}.bias"] = (heads * _HEAD,)
        shapes[f"{block}.attn_output.weight"] = (WIDTH, WIDTH)
        shapes[f"{block}.ffn_gate.weight"] = shapes[f"{block}.ffn_up.weight"] = (_INNER, WIDTH)
        shapes[f"{block}.ffn_down.weight"] = (WIDTH, _INNER)
        ones += [f"{block}.attn_norm.weight", f"{block}.ffn_norm.weight"]
    tensors = {name: chance.normal(0, 0.3, shape) for name, shape in shapes.items()}
    return tensors | {name: np.ones(WIDTH) for name in ones}
