"""A multimodal projector with random weights that fits the small model, as a GGUF file.

What it tells of an image means nothing, but is different for different images, and llama.cpp runs
it as it runs any. Two kinds: ``mlp`` (LLaVA's: an image is one piece, with nothing around it) and
``idefics3`` (SmolVLM's: pieces with tokens of text between them).
"""

from pathlib import Path

import numpy as np
from tiny_gguf import Tensors, Value, write_gguf

MODEL_WIDTH = 576
"""Of SmolLM2-135M."""

SIDE = 56
"""Of the square that images are scaled to."""

PATCH = 14
TOKENS = (SIDE // PATCH) ** 2
"""Of one image: 16."""

_WIDTH, _INNER, _HEADS, _LAYERS = 32, 64, 2, 2


def write_tiny_projector(
    path: Path, *, kind: str = "mlp", model_width: int = MODEL_WIDTH, side: int = SIDE
) -> None:
    write_gguf(path, _values(kind, model_width, side), _tensors(kind, model_width, side))


def _values(kind: str, model_width: int, side: int) -> dict[str, Value]:
    return {
        "general.architecture": "clip",
        "general.file_type": 0,
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": True,
        "clip.vision.image_size": side,
        "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": _WIDTH,
        "clip.vision.feed_forward_length": _INNER,
        "clip.vision.block_count": _LAYERS,
        "clip.vision.projection_dim": model_width,
        "clip.vision.attention.head_count": _HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
        "clip.vision.image_mean": (0.5, 0.5, 0.5),
        "clip.vision.image_std": (0.5, 0.5, 0.5),
        "clip.vision.projector.scale_factor": 2,
        "clip.vision.preproc_image_size": 2 * side,
    }


def _tensors(kind: str, model_width: int, side: int) -> Tensors:
    chance = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (_WIDTH, 3, PATCH, PATCH),
        "v.position_embd.weight": ((side // PATCH) ** 2, _WIDTH),
    }
    for layer in range(_LAYERS):
        block = f"v.blk.{layer}"
        shapes |= {f"{block}.attn_{name}.weight": (_WIDTH, _WIDTH) for name in ("q", "k", "v", "out")}
        shapes[f"{block}.ffn_up.weight"] = (_INNER, _WIDTH)
        shapes[f"{block}.ffn_down.weight"] = (_WIDTH, _INNER)
    if kind == "mlp":
        shapes |= {"mm.0.weight": (_INNER, _WIDTH), "mm.2.weight": (model_width, _INNER)}
    else:
        shapes["mm.model.fc.weight"] = (model_width, 4 * _WIDTH)
    tensors = {name: chance.normal(0, 0.2, shape) for name, shape in shapes.items()}
    norms = [f"v.blk.{layer}.{name}" for layer in range(_LAYERS) for name in ("ln1", "ln2")]
    biases = {norm: _WIDTH for norm in norms}
    for layer in range(_LAYERS):
        block = f"v.blk.{layer}"
        biases |= {f"{block}.attn_{name}": _WIDTH for name in ("q", "k", "v", "out")}
        biases |= {f"{block}.ffn_up": _INNER, f"{block}.ffn_down": _WIDTH}
    if kind == "mlp":
        biases |= {"mm.0": _INNER, "mm.2": model_width}
    else:
        norms.append("v.post_ln")
        biases["v.post_ln"] = _WIDTH
    tensors |= {f"{norm}.weight": np.ones(_WIDTH) for norm in norms}
    tensors |= {f"{name}.bias": np.zeros(size) for name, size in biases.items()}
    return tensors
