from balancer.openai_models import model_object
from common.messages import Described


def test_a_model_is_told_with_what_its_file_says_of_its_sizes() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": "8192",
        "llama.embedding_length": "576",
        "llama.vocab_size": "many",
    }

    told = model_object(
        ["m", "m.gguf"], created=5, described=Described(metadata, None, context=4096)
    )

    assert told == {
        "id": "m",
        "object": "model",
        "created": 5,
        "owned_by": "headrace",
        "aliases": ["m.gguf"],
        "meta": {"n_ctx": 4096, "n_ctx_train": 8192, "n_embd": 576},
    }


def test_of_a_model_that_nobody_serves_only_its_names_are_known() -> None:
    assert "meta" not in model_object(["m"], created=5, described=None)
