"""The agents of fleets while Ray does what it does: places, loses, restarts and forgets them."""

import asyncio
from typing import Any

import pytest
from fake_ray import FakeRay, until
from played_members import PlayedActor, add_agent, played, played_class

from balancer.fleet_beats import SeenAgent
from balancer.fleet_sight import Sight
from balancer.fleets import Fleet
from common.models import Phase
from deploy import members as members_module
from deploy.members import (
    LONGEST_DRAIN,
    NAMESPACE,
    PREFIX,
    Members,
    agent_settings,
    draining_nodes,
    kill_all,
)
from deploy.settings import EngineKind, SupervisorSettings

OWN = SupervisorSettings(code="c1", engine=EngineKind.ECHO)
FLEET = Fleet.model_validate({"max": 2, "resources": {"cpus": 2, "labels": {"pool": "a"}}})
BALANCERS = ("ws://one:1", "ws://two:2")


class Ends:
    """What a supervisor is told."""

    def __init__(self) -> None:
        self.told = asyncio.Queue[tuple[str, str]]()

    def __call__(self, sight: Sight, reason: str) -> None:
        self.told.put_nowait((sight.name, reason))

    async def next(self) -> tuple[str, str]:
        async with asyncio.timeout(10):
            return await self.told.get()


@pytest.fixture
async def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay(monkeypatch)
    monkeypatch.setattr(members_module, "AgentActor", played_class(ray))
    return ray


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
async def members(ray: FakeRay, ends: Ends) -> Members:
    return Members(OWN, ends)


def phases(members: Members) -> dict[str, Phase]:
    now = asyncio.get_running_loop().time()
    return {sight.name: sight.member(now=now).phase for sight in members.sights}


def settings(name: str, **more: Any) -> Any:
    return agent_settings(name, name.rpartition("-")[0], FLEET, more.get("balancers", ()), OWN)


async def test_an_agent_is_started_with_what_its_fleet_says_where_there_is_room(
    ray: FakeRay, members: Members
) -> None:
    ray.has_room = False
    members.dial(BALANCERS)

    members.start("qwen-1", "qwen", FLEET, "g1")

    assert phases(members) == {"qwen-1": Phase.NODE}
    actor = ray.actors[PREFIX + "qwen-1"]
    assert actor.options | {"name": "", "scheduling_strategy": ""} == {
        "name": "",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 2.0,
        "num_gpus": 0.0,
        "label_selector": {"pool": "a"},
        "scheduling_strategy": "",
    }
    assert actor.arguments == (settings("qwen-1", balancers=BALANCERS), "g1")
    actor.place()
    await until(lambda: phases(members) == {"qwen-1": Phase.PROCESS})


async def test_those_that_are_there_are_found_with_what_they_say(
    ray: FakeRay, members: Members
) -> None:
    add_agent(ray, settings("qwen-1"), "g1")
    ray.add(PlayedActor, settings("qwen-9"), name=PREFIX + "qwen-9", namespace="others")
    ray.add(PlayedActor, settings("one-1"), name="something-else", namespace=NAMESPACE)

    await members.find()

    assert [(each.name, each.fleet, each.generation) for each in members.sights] == [
        ("qwen-1", "qwen", "g1")
    ]
    assert phases(members) == {"qwen-1": Phase.READY}  # it may be serving


async def test_those_that_do_not_answer_are_waited_for_a_while_and_left_as_they_are(
    ray: FakeRay, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "FIND_TIMEOUT", 0.01)
    add_agent(ray, settings("qwen-1"), "g1").is_silent = True

    await members.find()

    assert [(each.name, each.fleet, each.generation) for each in members.sights] == [
        ("qwen-1", "qwen", "")
    ]


async def test_links_of_those_that_are_found_stay_until_the_balancers_are_known(
    ray: FakeRay, members: Members
) -> None:
    add_agent(ray, settings("qwen-1"))
    await members.find()
    assert played(ray, "qwen-1").dialled == []

    members.dial(BALANCERS)
    members.dial(BALANCERS)
    await until(lambda: played(ray, "qwen-1").dialled != [])

    assert played(ray, "qwen-1").dialled == [BALANCERS]


async def test_an_agent_that_drains_is_told_so_and_gone_when_it_has_ended(
    ray: FakeRay, members: Members, ends: Ends
) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")
    await until(lambda: phases(members) == {"qwen-1": Phase.PROCESS})

    members.drain("qwen-1")
    await until(lambda: played(ray, "qwen-1").drains == [LONGEST_DRAIN])
    assert phases(members) == {"qwen-1": Phase.DRAINING}
    played(ray, "qwen-1").over.set()

    assert await ends.next() == ("qwen-1", "it was stopped")
    assert (members.sights, ray.names) == ([], set())


async def test_an_agent_that_is_stopped_is_killed_at_once(
    ray: FakeRay, members: Members, ends: Ends
) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")

    members.stop("qwen-1")

    assert ray.names == set()
    assert (await ends.next())[0] == "qwen-1"
    assert members.sights == []


async def test_all_are_stopped_whatever_they_do(ray: FakeRay, members: Members) -> None:
    add_agent(ray, settings("qwen-1"))
    await members.find()
    ray.has_room = False
    members.start("qwen-2", "qwen", FLEET, "g1")

    await members.stop_all()

    assert (members.sights, ray.names) == ([], set())


async def test_an_agent_that_ends_by_itself_is_told_of_with_the_reason(
    ray: FakeRay, members: Members, ends: Ends
) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")
    await until(lambda: phases(members) == {"qwen-1": Phase.PROCESS})
    played(ray, "qwen-1").reason = "the model is broken"

    played(ray, "qwen-1").over.set()

    assert await ends.next() == ("qwen-1", "the model is broken")
    assert ray.names == set()


async def test_an_agent_whose_actor_dies_is_told_of(
    ray: FakeRay, members: Members, ends: Ends
) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")

    ray.actors[PREFIX + "qwen-1"].die()

    name, reason = await ends.next()
    assert (name, members.sights) == ("qwen-1", [])
    assert reason.startswith("its actor died: The actor died")


async def test_an_agent_that_ray_starts_again_is_the_same_one_and_dials_the_balancers_of_now(
    ray: FakeRay, members: Members
) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")
    await until(lambda: phases(members) == {"qwen-1": Phase.PROCESS})
    members.dial(BALANCERS)

    ray.actors[PREFIX + "qwen-1"].restart()
    await until(lambda: played(ray, "qwen-1").dialled == [BALANCERS])

    assert phases(members) == {"qwen-1": Phase.PROCESS}


async def test_an_agent_that_ray_starts_again_while_it_was_to_go_is_ended(
    ray: FakeRay, members: Members, ends: Ends
) -> None:
    """The new process would not know that it is to go."""
    members.start("qwen-1", "qwen", FLEET, "g1")
    await until(lambda: phases(members) == {"qwen-1": Phase.PROCESS})
    members.drain("qwen-1")

    ray.actors[PREFIX + "qwen-1"].restart()

    assert (await ends.next())[0] == "qwen-1"
    assert (members.sights, ray.names) == ([], set())


class Broken(PlayedActor):
    """It fails in a way that nobody has thought of."""

    async def ended(self) -> str:
        raise RuntimeError


async def test_an_error_while_an_agent_is_watched_leaves_nothing_behind(
    ray: FakeRay, members: Members, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ray.add(Broken, settings("qwen-1"), name=PREFIX + "qwen-1", namespace=NAMESPACE)

    await members.find()

    assert await ends.next() == ("qwen-1", "the supervisor lost sight of it: RuntimeError")
    assert (members.sights, ray.names) == ([], set())
    assert [record.exc_info is not None for record in caplog.records][:1] == [True]


async def test_an_agent_that_cannot_be_killed_is_taken_off_the_list(
    ray: FakeRay, members: Members, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")
    await until(lambda: phases(members) == {"qwen-1": Phase.PROCESS})
    ray.kill_fails = True

    played(ray, "qwen-1").over.set()

    assert await ends.next() == ("qwen-1", "it was stopped")
    assert members.sights == []
    assert "Ray cannot be reached" in caplog.text


async def test_agents_leave_a_node_that_is_to_go_and_are_told_once(
    ray: FakeRay, members: Members
) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")
    ray.has_room = False
    members.start("qwen-2", "qwen", FLEET, "g1")
    actor = ray.actors[PREFIX + "qwen-2"]
    actor.place()
    actor.instance.node = "node-2"
    await until(lambda: set(phases(members).values()) == {Phase.PROCESS})

    for _ in range(2):
        members.leave({"node-2", "node-3"})
    await until(lambda: played(ray, "qwen-2").drains != [])

    assert phases(members) == {"qwen-1": Phase.PROCESS, "qwen-2": Phase.DRAINING}
    assert (played(ray, "qwen-1").drains, played(ray, "qwen-2").drains) == ([], [LONGEST_DRAIN])


def test_a_ray_that_does_not_say_which_nodes_are_to_go_names_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members_module, "ray_state", object())

    assert draining_nodes() == ()


async def test_what_the_balancers_see_of_an_agent_counts(ray: FakeRay, members: Members) -> None:
    members.start("qwen-1", "qwen", FLEET, "g1")

    members.see({"qwen-1": SeenAgent(name="qwen-1", phase=Phase.READY)})

    assert phases(members) == {"qwen-1": Phase.READY}


async def test_agents_that_nobody_keeps_can_be_killed_by_their_names(ray: FakeRay) -> None:
    add_agent(ray, settings("qwen-1"))
    ray.add(PlayedActor, settings("qwen-9"), name=PREFIX + "qwen-9", namespace="others")

    assert kill_all() == [PREFIX + "qwen-1"]
    assert ray.names == {PREFIX + "qwen-9"}
