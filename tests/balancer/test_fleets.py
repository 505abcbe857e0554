"""Fleets as operators write them, and whose the waiting requests are."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from balancer.fleets import Fleet
from common.models import EngineChoices, KvLayout, LocalModel

ONE = Fleet.model_validate({"model": {"LocalToAgent": "/models/one.gguf"}})
TWO = Fleet.model_validate({"model": {"LocalToAgent": "/models/two.gguf"}})
DESIRED = Fleet()


def test_a_fleet_without_a_word_has_one_agent_at_most_and_the_desired_model() -> None:
    fleet = Fleet.model_validate_json("{}")

    assert (fleet.min, fleet.max, fleet.slots) == (0, 1, 4)
    assert fleet.reference(LocalModel("/m.gguf")) == LocalModel("/m.gguf")
    assert ONE.reference(LocalModel("/m.gguf")) == LocalModel("/models/one.gguf")


def test_what_is_said_of_the_engine_becomes_the_choices_of_its_agents() -> None:
    fleet = Fleet.model_validate(
        {"slots": 2, "engine": {"n_gpu_layers": -1, "kv_layout": "separate"}}
    )

    assert fleet.engine.engine_choices(fleet.slots) == EngineChoices(slots=2, n_gpu_layers=-1)
    assert fleet.engine.kv_layout is KvLayout.SEPARATE


@pytest.mark.parametrize(
    "body",
    [
        {"min": 2, "max": 1},
        {"min": -1},
        {"max": 1025},
        {"slots": 0},
        {"idle_time": 0},
        {"idle_time": float("inf")},
        {"grow_at_slot_use": 0},
        {"grow_at_slot_use": 1.01},
        {"grow_when_waiting": 0},
        {"resources": {"cpus": -1}},
        {"resources": {"labels": {"pool": ""}}},
        {"resources": {"labels": {"pool": "?? x"}}},
        {"resources": {"labels": {"pool": "!in(a,b)"}}},
        {"resources": {"labels": {"bad/label!": "x"}}},
        {"resources": {"labels": {"po ol": "x"}}},
        {"resources": {"gpus": 1.5}},
        {"resources": {"cpus": 1e-5}},
        {"resources": {"memory": 1}},
        {"model": {"LocalToAgent": 1}},
        {"model": "None"},
        {"replicas": 1},
    ],
)
def test_what_cannot_be_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Fleet.model_validate(body)


def test_a_fleet_is_the_same_after_a_way_through_json() -> None:
    text = ONE.model_dump_json(by_alias=True)

    assert Fleet.model_validate_json(text) == ONE
    assert json.loads(text)["model"] == {"LocalToAgent": "/models/one.gguf"}


@pytest.mark.parametrize(
    "resources",
    [
        {"gpus": 0.25},
        {"cpus": 1.5},
        {"gpus": 2},
        {"labels": {"ray.io/market-type": "spot", "a": "B_1.x"}},
    ],
)
def test_what_ray_can_place_by_is_taken(resources: dict[str, Any]) -> None:
    assert Fleet.model_validate({"resources": resources}).resources.words
