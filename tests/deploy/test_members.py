"""What an agent of a fleet is started with, and why it may have to wait."""

from dataclasses import replace
from typing import Any

import pytest

from balancer.fleets import Fleet, Resources
from deploy.members import agent_settings, generation, why_no_node
from deploy.settings import EngineKind, SupervisorSettings

OWN = SupervisorSettings(code="c1", engine=EngineKind.ECHO, key_file="/keys", tls_pin_text="PEM")


def fleet(**keys: Any) -> Fleet:
    return Fleet.model_validate(keys)


def test_an_agent_of_a_fleet_is_told_what_the_fleet_says() -> None:
    qwen = fleet(slots=2, engine={"threads": 3, "cache_tokens": 7, "longest_gap": 0.5})

    told = agent_settings("qwen-1", "qwen", qwen, ("ws://one:1", "ws://two:2"), OWN)

    assert (told.name, told.fleet, told.balancers) == (
        "qwen-1",
        "qwen",
        ("ws://one:1", "ws://two:2"),
    )
    assert (told.choices.slots, told.choices.threads, told.cache_tokens) == (2, 3, 7)
    assert told.tls_pin_text == "PEM"
    assert (told.longest_gap, told.engine, told.key_file) == (0.5, EngineKind.ECHO, "/keys")


@pytest.mark.parametrize(
    "changed",
    [
        {"slots": 5},
        {"resources": {"gpus": 1}},
        {"engine": {"threads": 2}},
        {"model": {"LocalToAgent": "/m.gguf"}},
    ],
)
def test_agents_are_replaced_when_what_they_were_started_with_has_changed(
    changed: dict[str, Any],
) -> None:
    assert generation(OWN, fleet(**changed)) != generation(OWN, fleet())


def test_agents_stay_when_only_their_number_is_to_be_another() -> None:
    assert generation(OWN, fleet(min=1, max=9, idle_time=5)) == generation(OWN, fleet())


@pytest.mark.parametrize(
    "changed", [{"code": "c2"}, {"key_file": "/others"}, {"tls_pin_text": "C"}]
)
def test_agents_are_replaced_when_what_holds_for_all_has_changed(changed: dict[str, Any]) -> None:
    assert generation(replace(OWN, **changed), fleet()) != generation(OWN, fleet())


def node(**resources: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": resources, "Labels": {"pool": "gpu"}}


@pytest.mark.parametrize(
    ("wanted", "nodes", "reason"),
    [
        (Resources(gpus=1), [node(CPU=4)], "no node has 1 GPU"),
        (
            Resources(cpus=2, gpus=1),
            [node(CPU=4, GPU=1)],
            "the 1 node(s) with 1 GPU, 2 CPUs are full",
        ),
        (Resources(labels={"pool": "cpu"}), [node(CPU=4)], "no node has the label pool=cpu"),
        (Resources(cpus=1), [{**node(CPU=4), "Alive": False}], "no node has 1 CPU"),
    ],
)
def test_the_reason_for_waiting_names_what_is_missing(
    wanted: Resources, nodes: list[dict[str, Any]], reason: str
) -> None:
    assert reason in why_no_node(wanted, nodes)
