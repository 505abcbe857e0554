"""The running product: real Ray, real sockets, the real small model.

One ``headrace up`` serves most tests; those that need another start their own with ``start_up``.
The sampler's tests share the real model's vocabulary.
"""

import gc
from collections.abc import Generator
from typing import Any

import pytest
from product import Up, start_up
from sampling import CONTEXT, FewTokens

from agent.llama_library import LlamaVocabulary, lib, start_library
from agent.llama_sampler import LlamaSamplers
from deploy.model import default_model

LONGEST = (
    "test_up",
    "test_panel",
    "test_swaps",
    "test_agent_process",
    "test_serve_failures",
    "test_keeper",
    "test_chaos",
    "test_nothing_leaks",
    "test_fleets",
)
"""Modules that take minutes: they come first, so that none is still running alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def up() -> Generator[Up]:
    with start_up("--slots", "4") as up:
        yield up


@pytest.fixture(scope="module")
def model() -> Generator[Any]:
    """The vocabulary of the real model, without its weights."""
    start_library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(default_model()).encode(), params)
    yield model
    gc.collect()
    lib.llama_model_free(model)


@pytest.fixture(scope="module")
def vocabulary(model: Any) -> LlamaVocabulary:
    return LlamaVocabulary(model)


@pytest.fixture(scope="module")
def samplers(model: Any, vocabulary: LlamaVocabulary) -> LlamaSamplers:
    return LlamaSamplers(model, vocabulary, context=CONTEXT)


@pytest.fixture(scope="module")
def few(model: Any) -> LlamaSamplers:
    return LlamaSamplers(model, FewTokens(model), context=CONTEXT)
