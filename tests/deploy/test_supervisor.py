"""The supervisor with agents and a Ray that are played; what it decides, ``balancer.fleet_plan`` does."""

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from fake_ray import FakeActor, FakeRay, until
from played_members import PlayedActor, add_agent, played
from supervised import Reserved, put_on, supervisor_class

from balancer.desired_state import BalancerDesiredState
from balancer.fleet_beats import Answer, Beat, SeenAgent
from balancer.fleets import Fleet
from balancer.state_store import StoredState
from common.models import Phase
from deploy import supervisor as supervisor_module
from deploy import up
from deploy.members import NAMESPACE, PREFIX, agent_settings, generation
from deploy.settings import EngineKind, SupervisorSettings
from deploy.succession import Claim
from deploy.supervisor import NAME

OWN = SupervisorSettings(code="c1", engine=EngineKind.ECHO)
FLEET = Fleet.model_validate({"min": 1, "max": 2})


@pytest.fixture
async def ray(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[FakeRay]:
    ray = FakeRay(monkeypatch)
    yield ray
    ray.end()


@pytest.fixture(autouse=True)
async def reserved(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Reserved:
    monkeypatch.setattr(supervisor_module, "LOOK_INTERVAL", 0.01)
    return put_on(ray, monkeypatch)


def start(ray: FakeRay) -> FakeActor:
    return ray.add(supervisor_class(), OWN, 7, name=NAME, namespace=NAMESPACE)


async def beat(supervisor: Any, *agents: SeenAgent, fleet: Fleet = FLEET) -> Answer:
    """One of the only balancer; it says what it wants each time."""
    stored = StoredState(
        balancer_desired_state=BalancerDesiredState.defaults(), fleets={"qwen": fleet}, declared=1
    )
    told = Beat(
        balancer_id="b",
        address="ws://b:1",
        digest=stored.digest,
        state=stored.model_dump_json(by_alias=True),
        agents=agents,
    )
    answer = await supervisor.beat.remote(msgspec.json.encode(told))
    return msgspec.json.decode(answer, type=Answer)


def ready(name: str) -> SeenAgent:
    return SeenAgent(name=name, phase=Phase.READY, slots=4)


def agents(ray: FakeRay) -> set[str]:
    return {name.removeprefix(PREFIX) for name in ray.names if name.startswith(PREFIX)}


async def test_it_says_what_it_was_made_with_and_by_whom(ray: FakeRay) -> None:
    assert await start(ray).settings.remote() == str(Claim(7, repr(OWN)))


async def test_what_balancers_want_is_started_and_reported(ray: FakeRay) -> None:
    supervisor = start(ray)

    await beat(supervisor)
    await until(lambda: bool(supervisor.instance._views))

    assert agents(ray) == {"qwen-1"}
    answer = await beat(supervisor)
    assert [each.name for each in answer.fleets["qwen"].agents] == ["qwen-1"]
    assert ray.actors[PREFIX + "qwen-1"].arguments[0].balancers == ("ws://b:1",)


async def test_another_supervisor_takes_over_the_agents_that_are_there(ray: FakeRay) -> None:
    settings = agent_settings("qwen-1", "qwen", FLEET, (), OWN)
    add_agent(ray, settings, generation(OWN, FLEET))
    supervisor = start(ray)
    await beat(supervisor, ready("qwen-1"))
    await until(lambda: bool(supervisor.instance._views))

    answer = await beat(supervisor, ready("qwen-1"))

    assert [each.phase for each in answer.fleets["qwen"].agents] == [Phase.READY]
    assert agents(ray) == {"qwen-1"}


async def test_an_agent_that_ray_refuses_to_start_is_reported(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such resource")

    supervisor = start(ray)
    monkeypatch.setattr(supervisor_module.Members, "start", refuse)

    await beat(supervisor)

    def is_reported() -> bool:
        views = supervisor.instance._views
        return bool(views) and "no such resource" in (views["qwen"].report.reason or "")

    await until(is_reported)
    assert not supervisor.is_dead


async def test_agents_on_a_node_that_is_to_go_are_told_to_and_others_are_started(
    ray: FakeRay,
) -> None:
    supervisor = start(ray)
    await beat(supervisor)
    await until(lambda: agents(ray) == {"qwen-1"})
    await until(lambda: ray.actors[PREFIX + "qwen-1"].instance is not None)
    await beat(supervisor, ready("qwen-1"))

    ray.draining = {"node-1"}
    await beat(supervisor, ready("qwen-1"))
    await until(lambda: played(ray, "qwen-1").drains != [])

    await beat(supervisor, ready("qwen-1"))
    await until(lambda: "qwen-2" in agents(ray))
    assert "qwen-1" in agents(ray)  # it may go on with what runs there


async def test_in_the_end_all_agents_are_stopped_and_reserved_nodes_given_back(
    ray: FakeRay, reserved: Reserved
) -> None:
    supervisor = start(ray)
    spare = Fleet.model_validate({"min": 1, "max": 2, "spare_nodes": 1, "resources": {"cpus": 2}})
    await beat(supervisor, fleet=spare)
    await until(lambda: agents(ray) == {"qwen-1"} and reserved != [])
    assert {"CPU": 2.0} in reserved[-1]["bundles"]

    await supervisor.shut_down.remote()

    assert agents(ray) == set()
    assert reserved[-1] == {"bundles": [], "bundle_label_selectors": []}


async def test_without_any_balancer_it_ends_its_agents_and_then_itself_for_good(
    ray: FakeRay, reserved: Reserved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "ORPHANED", -1.0)
    add_agent(ray, agent_settings("qwen-1", "qwen", FLEET, (), OWN))

    supervisor = start(ray)
    await until(lambda: supervisor.is_dead)

    assert ray.names == set()
    assert reserved[-1]["bundles"] == []


async def test_an_error_in_its_loop_ends_its_process(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray starts another; this one would answer for ever and do nothing."""
    ended = asyncio.Queue[int]()
    monkeypatch.setattr(os, "_exit", ended.put_nowait)

    def fail(*_: Any) -> None:
        raise RuntimeError("nobody has thought of this")

    monkeypatch.setattr(supervisor_module.Members, "see", fail)
    await beat(start(ray))

    async with asyncio.timeout(10):
        assert await ended.get() == 1
    assert "nobody has thought of this" in caplog.text


async def test_a_supervisor_that_is_ended_in_order_is_not_started_again(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    supervisor = start(ray)
    await beat(supervisor)

    await supervisor.shut_down.remote()

    assert ended == []


async def test_up_ends_agents_with_their_supervisor(ray: FakeRay) -> None:
    add_agent(ray, agent_settings("qwen-1", "qwen", FLEET, (), OWN))
    supervisor = start(ray)
    await beat(supervisor, ready("qwen-1"))

    await up.end_fleets()

    assert ray.names == set()


async def test_up_ends_agents_whose_supervisor_does_not_answer(
    ray: FakeRay, reserved: Reserved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "FLEETS_TIMEOUT", 0.01)
    add_agent(ray, agent_settings("qwen-1", "qwen", FLEET, (), OWN))
    ray.add(PlayedActor, None, name=PREFIX + "qwen-1-of-others", namespace="others")
    start(ray).is_silent = True

    await up.end_fleets()
    await until(lambda: ray.names == {PREFIX + "qwen-1-of-others"})

    assert reserved[-1]["bundles"] == []


async def test_up_ends_agents_whose_supervisor_is_just_being_restarted(ray: FakeRay) -> None:
    add_agent(ray, agent_settings("qwen-1", "qwen", FLEET, (), OWN))
    supervisor = start(ray)
    supervisor.is_silent = True
    ending = asyncio.create_task(up.end_fleets())
    await until(lambda: supervisor.has_calls)

    supervisor.restart()

    await ending
    await until(lambda: ray.names == set())


async def test_up_ends_agents_that_nobody_keeps(ray: FakeRay) -> None:
    add_agent(ray, agent_settings("qwen-1", "qwen", FLEET, (), OWN))

    await up.end_fleets()

    await until(lambda: ray.names == set())
