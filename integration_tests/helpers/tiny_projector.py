"""A multimodal projector with random weights that fits the small model, as a GGUF file.

What it tells of an image means nothing, but is different for different images, and llama.cpp runs
it as it runs any. Kinds: ``mlp`` (LLaVA's: an image is one piece, with nothing around it, or with
``tiles`` several), ``gemma3`` (whose model has the tokens of an image attend to each other),
``idefics3`` (SmolVLM's, which needs tokens that the small model does not have) and
``qwen2vl_merger`` (for models whose positions have several dimensions).
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
    path: Path,
    *,
    kind: str = "mlp",
    tiles: bool = False,
    model_width: int = MODEL_WIDTH,
    side: int = SIDE,
) -> None:
    values = _values(kind, model_width, side)
    if tiles:
        values["clip.vision.image_grid_pinpoints"] = (side, 2 * side, 2 * side, 2 * side)
    write_gguf(path, values, _tensors(kind, model_width, side))


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
        shapes |= {
            f"{block}.attn_{name}.weight": (_WIDTH, _WIDTH) for name in ("q", "k", "v", "out")
        }
        shapes[f"{block}.ffn_up.weight"] = (_INNER, _WIDTH)
        shapes[f"{block}.ffn_down.weight"] = (_WIDTH, _INNER)
    match kind:
        case "mlp":
            shapes |= {"mm.0.weight": (_INNER, _WIDTH), "mm.2.weight": (model_width, _INNER)}
        case "idefics3":
            shapes["mm.model.fc.weight"] = (model_width, 4 * _WIDTH)
        case "gemma3":
            shapes["mm.input_projection.weight"] = (_WIDTH, model_width)
        case "qwen2vl_merger":
            del shapes["v.position_embd.weight"]
            shapes["v.patch_embd.weight.1"] = (_WIDTH, 3, PATCH, PATCH)
            shapes["mm.0.weight"] = (4 * _WIDTH, 4 * _WIDTH)
            shapes["mm.2.weight"] = (model_width, 4 * _WIDTH)
        case _:
            raise ValueError(kind)
    tensors = {name: chance.normal(0, 0.2, shape) for name, shape in shapes.items()}
    norms = [f"v.blk.{layer}.{name}" for layer in range(_LAYERS) for name in ("ln1", "ln2")]
    biases = dict.fromkeys(norms, _WIDTH)
    for layer in range(_LAYERS):
        block = f"v.blk.{layer}"
        biases |= {f"{block}.attn_{name}": _WIDTH for name in ("q", "k", "v", "out")}
        biases |= {f"{block}.ffn_up": _INNER, f"{block}.ffn_down": _WIDTH}
    if kind == "mlp":
        biases |= {"mm.0": _INNER, "mm.2": model_width}
    else:
        norms.append("v.post_ln")
        biases["v.post_ln"] = _WIDTH
    if kind == "gemma3":
        norms.append("mm.soft_emb_norm")
    if kind == "qwen2vl_merger":
        biases |= {"mm.0": 4 * _WIDTH, "mm.2": model_width}
    tensors |= {f"{norm}.weight": np.ones(_WIDTH) for norm in norms}
    tensors |= {f"{name}.bias": np.zeros(size) for name, size in biases.items()}
    return tensors
