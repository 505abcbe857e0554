import json
from typing import Any

import pytest
from pydantic import ValidationError

from balancer.desired_state import (
    AgentOverrides,
    BalancerDesiredState,
    InferenceParameters,
    agent_state,
)
from common.messages import Sampling
from common.models import AgentDesiredState, CacheType, EngineChoices, HuggingFaceModel

DEFAULTS: dict[str, Any] = {
    "n_batch": 2048,
    "context_size": 8192,
    "embedding_batch_size": 256,
    "enable_embeddings": False,
    "image_resize_to_fit": 1024,
    "k_cache_dtype": "F16",
    "v_cache_dtype": "F16",
    "min_p": 0.05,
    "n_gpu_layers": 0,
    "penalty_frequency": 0.0,
    "penalty_last_n": -1,
    "penalty_presence": 0.8,
    "penalty_repeat": 1.1,
    "pooling_type": "Last",
    "temperature": 0.8,
    "top_k": 80,
    "top_p": 0.8,
}

STATE: dict[str, Any] = {
    "chat_template_override": {"content": "{{ messages }}"},
    "inference_parameters": DEFAULTS,
    "model": {"HuggingFace": {"filename": "f", "repo_id": "o/r", "revision": "main"}},
    "multimodal_projection": "None",
    "use_chat_template_override": True,
}


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    parsed = BalancerDesiredState.model_validate_json(json.dumps(state))
    return json.loads(parsed.model_dump_json(by_alias=True))


def test_the_defaults_are_the_published_ones_but_for_the_kv_cache() -> None:
    defaults = json.loads(BalancerDesiredState.defaults().model_dump_json(by_alias=True))

    assert defaults == {
        "chat_template_override": None,
        "inference_parameters": DEFAULTS,
        "model": "None",
        "multimodal_projection": "None",
        "use_chat_template_override": False,
    }


@pytest.mark.parametrize(
    "model",
    [
        "None",
        {"LocalToAgent": "/m.gguf"},
        {"Url": {"url": "http://x/m.gguf"}},
        {"Url": {"url": "http://x/m.gguf", "sha256": "ab" * 32}},
        STATE["model"],
    ],
)
def test_what_was_put_comes_back(model: Any) -> None:
    assert round_trip({**STATE, "model": model}) == {**STATE, "model": model}


def test_the_template_override_may_be_absent() -> None:
    without = {key: value for key, value in STATE.items() if key != "chat_template_override"}

    state = round_trip({**without, "use_chat_template_override": False})

    assert state["chat_template_override"] is None


def test_a_template_that_is_to_be_used_and_is_not_there_is_the_models_own() -> None:
    state = BalancerDesiredState.model_validate({**STATE, "chat_template_override": None})

    assert state.use_chat_template_override
    assert state.applicable.chat_template_override is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_resize_to_fit", 0),
        ("embedding_batch_size", 0),
        ("n_batch", -1),
        ("k_cache_dtype", "Q3"),
        ("temperature", float("nan")),
        ("penalty_repeat", 0),
        ("min_p", 1e39),
        ("n_gpu_layers", 2**31),
    ],
)
def test_bad_parameters_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        round_trip({**STATE, "inference_parameters": {**DEFAULTS, key: value}})


@pytest.mark.parametrize("key", DEFAULTS)
def test_every_parameter_must_be_given(key: str) -> None:
    missing = {name: value for name, value in DEFAULTS.items() if name != key}

    with pytest.raises(ValidationError):
        round_trip({**STATE, "inference_parameters": missing})


@pytest.mark.parametrize(
    "model",
    [
        "Some",
        {},
        {"LocalToAgent": 1},
        {"Url": {"url": "x", "y": 1}},
        {"Url": {"url": "x", "sha256": "AB"}},
    ],
)
def test_unknown_models_are_refused(model: Any) -> None:
    with pytest.raises(ValidationError):
        round_trip({**STATE, "model": model})


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError):
        round_trip({**STATE, "more": 1})


def test_requests_are_sampled_as_the_parameters_say() -> None:
    parameters = InferenceParameters.model_validate({**DEFAULTS, "temperature": 0.1, "top_k": 3})

    assert parameters.sampling == Sampling(temperature=0.1, top_k=3)


def test_agents_are_told_what_is_applicable() -> None:
    state = BalancerDesiredState.model_validate(STATE)

    assert agent_state(state, AgentOverrides(), "one", ()) == AgentDesiredState(
        model=HuggingFaceModel("o/r", "f", "main"),
        chat_template="{{ messages }}",
        choices=EngineChoices(
            context_size=8192,
            n_batch=2048,
            n_gpu_layers=0,
            k_cache_dtype=CacheType.F16,
            v_cache_dtype=CacheType.F16,
        ),
    )
    assert json.loads(state.applicable.model_dump_json(by_alias=True)) == {
        key: value for key, value in STATE.items() if key != "use_chat_template_override"
    }


def test_a_template_that_is_not_to_be_used_is_not_applicable() -> None:
    state = BalancerDesiredState.model_validate({**STATE, "use_chat_template_override": False})

    assert state.applicable.chat_template_override is None
    assert agent_state(state, AgentOverrides(), "one", ()).chat_template is None


def test_overrides_by_name_go_before_those_by_label() -> None:
    overrides = AgentOverrides.model_validate(
        {
            "overrides": [
                {"name": "big", "slots": 16},
                {"label": "gpu", "slots": 8, "n_gpu_layers": -1, "tensor_split": [3, 1]},
                {"label": "gpu", "n_gpu_layers": 20},
                {"label": "cpu", "threads": 3},
            ]
        }
    )

    assert overrides.choices("big", ["gpu"]) == EngineChoices(
        slots=16, n_gpu_layers=20, tensor_split=(3.0, 1.0)
    )
    assert overrides.choices("small", ["cpu"]) == EngineChoices(threads=3)
    assert overrides.choices(None, []) == EngineChoices()


@pytest.mark.parametrize(
    "override",
    [
        {"slots": 2},
        {"name": "a", "label": "b"},
        {"name": "a", "slots": 0},
        {"name": "a", "heat": 1},
        {"name": "a", "flash_attention": "maybe"},
    ],
)
def test_bad_overrides_are_refused(override: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AgentOverrides.model_validate({"overrides": [override]})
