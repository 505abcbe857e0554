"""How models are written for people."""

import pytest

from common.models import HuggingFaceModel, LocalModel, UrlModel
from common.references import describe


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (LocalModel("/models/m.gguf"), "/models/m.gguf"),
        (
            HuggingFaceModel("some/model", "sub/m.gguf", "main"),
            "https://huggingface.co/some/model/blob/main/sub/m.gguf",
        ),
        (UrlModel("https://u:p@host:81/a/m.gguf?key=1#x"), "https://host:81/a/m.gguf"),
        (UrlModel("https://user@host/m%20n.gguf"), "https://host/m%20n.gguf"),
        (UrlModel("http://u:p?x@host:port/m.gguf?key=1"), "host:port/m.gguf"),
        (UrlModel("m.gguf?key=1"), "m.gguf"),
        (UrlModel("u:p@/m.gguf?key=1"), "/m.gguf"),
    ],
)
def test_how_references_are_shown(
    reference: LocalModel | HuggingFaceModel | UrlModel, text: str
) -> None:
    assert describe(reference) == text
