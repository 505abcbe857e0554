"""How balancers come by the one supervisor; the supervisors are real, Ray is played."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_ray import FakeRay, until
from played_members import add_agent, played
from supervised import put_on, supervisor_class

from balancer.balancer import Balancer
from balancer.fleets import Fleet
from balancer.wishes import Wishes
from deploy import beats as beats_module
from deploy import succession
from deploy.beats import HEAD, Beats
from deploy.members import NAMESPACE, agent_settings
from deploy.settings import EngineKind, SupervisorSettings
from deploy.succession import Claim
from deploy.supervisor import NAME

OLD, NEW = (SupervisorSettings(code=code, engine=EngineKind.ECHO) for code in ("old", "new"))
FLEET = Fleet.model_validate({"max": 2})


@pytest.fixture
async def ray(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[FakeRay]:
    ray = FakeRay(monkeypatch)
    put_on(ray, monkeypatch)
    for interval in ("BEAT_INTERVAL", "LOOK_INTERVAL"):
        monkeypatch.setattr(beats_module, interval, 0.01)
    yield ray
    ray.end()


@asynccontextmanager
async def beating(
    name: str,
    settings: SupervisorSettings = NEW,
    *,
    fleets: tuple[str, ...] = ("qwen",),
    is_alone: bool = True,
) -> AsyncGenerator[Balancer]:
    balancer = Balancer(buffer_capacity=2, patience=60.0)
    declared = 1 if settings is OLD else 2
    told = {"fleets": dict.fromkeys(fleets, FLEET), "declared": declared if fleets else 0}
    balancer.want(balancer.stored.model_copy(update=told))
    beats = Beats(
        balancer,
        Wishes(balancer),
        balancer_id=name,
        address=f"ws://{name}:1",
        is_alone=is_alone,
        settings=settings,
        declared=declared,
    )
    running = asyncio.create_task(beats.run())
    try:
        yield balancer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_known(balancer: Balancer, condition: Callable[[], bool]) -> None:
    """Until this is true of what the balancer knows."""
    async with asyncio.timeout(10):
        while not condition():
            await balancer.changes.after(balancer.changes.count)


def supervisor(ray: FakeRay) -> Any:
    return ray.actors[NAME]


async def claim(ray: FakeRay) -> Claim:
    return Claim.parse(await supervisor(ray).settings.remote())


async def test_a_balancer_with_fleets_makes_a_supervisor_and_hears_of_them(ray: FakeRay) -> None:
    async with beating("one") as balancer:
        await until_known(balancer, lambda: "qwen" in balancer.fleet_views)

    assert supervisor(ray).options == {
        "name": NAME,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "resources": HEAD,
    }
    assert (await claim(ray)).settings == repr(NEW)


async def test_one_that_is_there_is_followed(ray: FakeRay) -> None:
    async with beating("one") as first, beating("two") as second:
        await until_known(first, lambda: "qwen" in first.fleet_views)
        await until_known(second, lambda: "qwen" in second.fleet_views)

        assert ray.names == {NAME}
        assert supervisor(ray).instance._registry.addresses == ("ws://one:1", "ws://two:1")


async def test_a_balancer_that_is_alone_and_has_no_fleets_makes_none(ray: FakeRay) -> None:
    async with beating("one", fleets=()):
        await until(lambda: ray.looks > 2)

        assert ray.names == set()


async def test_a_balancer_that_was_alone_finds_the_supervisor_of_one_that_came_later(
    ray: FakeRay,
) -> None:
    async with beating("one", fleets=()) as first:
        await until(lambda: ray.looks > 0)

        async with beating("two") as second:
            await until_known(second, lambda: "qwen" in second.fleet_views)
            await until_known(first, lambda: "qwen" in first.fleet_views)

            registry = supervisor(ray).instance._registry
            assert registry.addresses == ("ws://one:1", "ws://two:1")


async def test_a_balancer_that_is_not_meant_to_be_alone_makes_one_without_fleets(
    ray: FakeRay,
) -> None:
    async with beating("one", fleets=(), is_alone=False):
        await until(lambda: ray.names == {NAME})


async def test_a_supervisor_of_an_older_balancer_is_replaced_and_its_agents_stay(
    ray: FakeRay,
) -> None:
    async with beating("old", OLD) as old:
        add_agent(ray, agent_settings("qwen-1", "qwen", FLEET, (), OLD))
        await until_known(old, lambda: "qwen" in old.fleet_views)
        before = supervisor(ray)

        async with beating("new", NEW) as new:
            await until_known(new, lambda: "qwen" in new.fleet_views)

            assert before.is_dead
            assert (await claim(ray)).settings == repr(NEW)
            assert played(ray, "qwen-1").drains == []
            await until(lambda: len(supervisor(ray).instance._registry.addresses) == 2)


async def test_what_was_put_outlives_the_older_balancers_and_their_supervisor(ray: FakeRay) -> None:
    async with beating("old", OLD) as old:
        told = old.stored.fleets | {"put": FLEET}
        old.want(old.stored.model_copy(update={"fleets": told}).put("fleets/put", at=9))
        await until_known(old, lambda: "put" in old.fleet_views)

    async with beating("new", NEW) as new:
        await until_known(new, lambda: "put" in new.fleet_views)


async def test_the_older_balancer_makes_none_of_its_own_when_its_own_is_ended(
    ray: FakeRay,
) -> None:
    async with beating("old", OLD) as old:
        await until_known(old, lambda: "qwen" in old.fleet_views)
        supervisor(ray).die()
        looks = ray.looks

        await until(lambda: ray.looks > looks + 3)

        assert ray.names == set()
        async with beating("new", NEW) as new:
            await until_known(new, lambda: "qwen" in new.fleet_views)
            assert (await claim(ray)).settings == repr(NEW)


async def test_what_the_older_one_has_made_meanwhile_does_not_stay(ray: FakeRay) -> None:
    async with beating("new", NEW) as new:
        await until_known(new, lambda: "qwen" in new.fleet_views)
        made = (await claim(ray)).declared

        supervisor(ray).die()
        intruder = ray.add(supervisor_class(), OLD, made - 1, name=NAME, namespace=NAMESPACE)
        await until(lambda: intruder.is_dead)
        await until(lambda: NAME in ray.names)

        assert (await claim(ray)).settings == repr(NEW)


async def test_a_supervisor_that_is_lost_is_made_anew_when_nobody_else_does(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "PATIENCE", 0.05)
    async with beating("one") as balancer:
        await until_known(balancer, lambda: "qwen" in balancer.fleet_views)
        before = supervisor(ray)

        before.die()
        await until(lambda: NAME in ray.names)

        assert supervisor(ray) is not before
        await until_known(balancer, lambda: balancer.unsupervised_for is None)


async def test_a_supervisor_that_ray_starts_again_is_followed_again(ray: FakeRay) -> None:
    async with beating("one") as balancer:
        await until_known(balancer, lambda: "qwen" in balancer.fleet_views)
        before = supervisor(ray)

        before.restart()
        registry = before.instance._registry
        await until(lambda: registry.state is not None)

        assert supervisor(ray) is before
        assert (registry.addresses, balancer.unsupervised_for) == (("ws://one:1",), None)


async def test_a_silent_supervisor_is_told_of_once_with_the_whole_cause(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beats_module, "ANSWER_TIMEOUT", 0.01)
    caplog.set_level("INFO", "deploy.beats")
    async with beating("one") as balancer:
        await until_known(balancer, lambda: "qwen" in balancer.fleet_views)
        caplog.clear()

        supervisor(ray).is_silent = True
        await until_known(balancer, lambda: balancer.unsupervised_for is not None)
        looks = ray.looks
        await until(lambda: ray.looks > looks + 2)

        assert [record.message for record in caplog.records] == ["the supervisor does not answer"]
        assert "TimeoutError" in caplog.text
        supervisor(ray).is_silent = False
        await until_known(balancer, lambda: balancer.unsupervised_for is None)
        assert caplog.records[-1].message == "the supervisor answers again"


async def test_a_supervisor_that_hangs_is_started_anew(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats_module, "ANSWER_TIMEOUT", 0.01)
    monkeypatch.setattr(beats_module, "HANGS", 0.05)
    async with beating("one") as balancer:
        await until_known(balancer, lambda: "qwen" in balancer.fleet_views)
        before = supervisor(ray)
        hanging = before.instance

        before.is_silent = True
        await until_known(balancer, lambda: balancer.unsupervised_for is not None)
        await until_known(balancer, lambda: balancer.unsupervised_for is None)

        assert supervisor(ray) is before
        assert before.instance is not hanging


async def test_a_balancer_that_ends_says_so(ray: FakeRay) -> None:
    async with beating("one") as balancer:
        await until_known(balancer, lambda: "qwen" in balancer.fleet_views)
        registry = supervisor(ray).instance._registry

    await until(lambda: registry.addresses == ())
