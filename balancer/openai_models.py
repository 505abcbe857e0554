"""``/v1/models``. No I/O here."""

from collections.abc import Mapping, Sequence

from balancer.openai_results import Json
from common.messages import Described

SIZES = {
    "n_ctx_train": "context_length",
    "n_embd": "embedding_length",
    "n_vocab": "vocab_size",
}
"""llama.cpp's names, and what a model's file has them under, behind its architecture."""


def model_object(names: Sequence[str], *, created: int, described: Described | None) -> Json:
    """``names``: at least one. ``described``: None if nobody serves it yet."""
    told: Json = {
        "id": names[0],
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "aliases": list(names[1:]),
    }
    if described is not None and described.metadata is not None:
        told["meta"] = {"n_ctx": described.context, **_sizes(described.metadata)}
    return told


def _sizes(metadata: Mapping[str, str]) -> dict[str, int]:
    architecture = metadata.get("general.architecture", "")
    found = {name: metadata.get(f"{architecture}.{key}", "") for name, key in SIZES.items()}
    return {name: int(text) for name, text in found.items() if text.isdecimal()}
