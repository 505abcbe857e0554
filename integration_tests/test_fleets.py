"""Fleets on a Ray cluster of several nodes: from zero and back to it, with nodes, balancers and supervisors
that are killed, and with a new version of the project put in place. Real Ray, the echo engine.
"""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import PATIENCE, PROJECT, RayCluster, start_cluster

from deploy.fleet_picture import Series, to_text

ROUTE = "/api/v1/continue_from_raw_prompt"
SETTINGS = {"agent_port": 0, "engine": "echo", "buffer_size": 500}
FLEET = {"max": 4, "slots": 2, "resources": {"cpus": 1}, "idle_time": 2}


@pytest.fixture(scope="module")
def cluster() -> Generator[RayCluster]:
    """Two nodes for balancers, two with room for two agents each."""
    with start_cluster({"HEADRACE_ECHO_PACE": "0.02"}) as cluster:
        cluster.do("add", num_cpus=0, labels={"pool": "balancers"})
        for name in ("a", "b"):
            cluster.do("add", num_cpus=2, labels={"pool": name})
        cluster.do("deploy", settings=SETTINGS, replicas=2)
        yield cluster


@pytest.fixture
def fleet(cluster: RayCluster) -> Generator[str]:
    """One of its own for each test, gone at the end."""
    cluster.put_fleet("echo", **FLEET)
    yield "echo"
    cluster.client.delete("/api/v1/fleets/echo").raise_for_status()
    cluster.until_actors(lambda names: not any("agent-echo" in name for name in names))


@dataclass
class Answers:
    """Of many clients at once."""

    cluster: RayCluster
    texts: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    asked: int = 0
    begun: int = 0
    """Those of which something has come."""

    async def ask(self, client: httpx.AsyncClient, length: int) -> None:
        body = {"raw_prompt": "x" * length, "max_tokens": length, "sampling": {"ignore_eos": True}}
        text = ""
        self.asked += 1
        try:
            async with client.stream("POST", ROUTE, json=body) as response:
                async for line in response.aiter_lines():
                    if response.status_code != 200 or "Error" in (message := json.loads(line)):
                        self.problems.append(line)
                        return
                    told = message["Response"]["response"]["GeneratedToken"]
                    self.begun += not text
                    text += told.get("ContentToken", "")
                    if "Done" in told:
                        self.texts.append(text)
                        return
            self.problems.append("it ended without a word")
        except httpx.HTTPError as error:
            self.problems.append(repr(error))

    async def keep_asking(
        self, client: httpx.AsyncClient, length: int, is_enough: asyncio.Event
    ) -> None:
        """Once, and then again and again."""
        while True:
            await self.ask(client, length)
            if is_enough.is_set():
                return

    async def ask_all(self, lengths: list[int]) -> None:
        async with self.client() as client, asyncio.TaskGroup() as group:
            for length in lengths:
                group.create_task(self.ask(client, length))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=str(self.cluster.client.base_url),
            timeout=120,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )


@contextlib.asynccontextmanager
async def recorded(
    answers: Answers, client: httpx.AsyncClient, fleet: str
) -> AsyncGenerator[Series]:
    """Grows by what is so each time that the fleet's stream says something."""
    series = Series([], [], [], [])

    async def record() -> None:
        async with client.stream("GET", "/api/v1/fleets/stream") as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    told = json.loads(line.removeprefix("data: "))["fleets"]
                    series.add(
                        time.monotonic(),
                        # One balancer may not know yet what the other has been told.
                        agents=told[fleet]["ready"] if fleet in told else 0,
                        waiting=answers.asked - answers.begun,
                        served=len(answers.texts),
                    )

    async with asyncio.TaskGroup() as group:
        task = group.create_task(record())
        yield series
        task.cancel()


async def test_a_burst_at_zero_is_served_from_several_nodes_and_the_agents_go_again(
    cluster: RayCluster, fleet: str
) -> None:
    answers = Answers(cluster)
    is_grown = asyncio.Event()

    async with answers.client() as client, recorded(answers, client, fleet) as series:
        async with asyncio.TaskGroup() as group:
            for n in range(100):
                group.create_task(answers.keep_asking(client, 10 + n % 20, is_grown))
            told = await asyncio.to_thread(
                cluster.until_fleet, fleet, lambda now: now["ready"] == now["wanted"] == 4
            )
            nodes = [
                await asyncio.to_thread(cluster.node_of, f"headrace-agent-{agent['name']}")
                for agent in told["agents"]
            ]
            is_grown.set()
        await asyncio.to_thread(cluster.until_fleet, fleet, lambda now: now["seen"] == 0)

    seconds = series.times[-1] - series.times[0]
    print(f"\n{to_text(series, title=f'from zero and back in {seconds:.0f} s')}")  # noqa: T201
    assert answers.problems == []
    assert len(answers.texts) == answers.asked
    assert set(map(len, answers.texts)) == set(range(10, 30))
    assert {"node", "process", "download", "load"} <= set(told["agents"][0]["seconds"])
    assert (len(nodes), len(set(nodes))) == (4, 2)


async def test_a_node_that_dies_fails_no_request_and_its_agents_come_back_elsewhere(
    cluster: RayCluster, fleet: str
) -> None:
    cluster.put_fleet(fleet, **{**FLEET, "min": 3, "idle_time": 600})
    cluster.until_fleet(fleet, lambda now: now["ready"] == 3)
    victim = cluster.node_of("headrace-agent-echo-1")
    answers = Answers(cluster)
    async with answers.client() as client, asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(answers.ask(client, 200))
        await asyncio.to_thread(cluster.until_processing, 6)

        await asyncio.to_thread(cluster.do, "kill_node", node=victim)
        new = await asyncio.to_thread(cluster.do, "add", num_cpus=2, labels={"pool": "a"})

    assert answers.problems == []
    assert list(map(len, answers.texts)) == [200] * 12
    cluster.until_fleet(fleet, lambda now: now["ready"] == now["wanted"] >= 3)
    nodes = {cluster.node_of(f"headrace-agent-echo-{n}") for n in (1, 2, 3)}
    assert victim not in nodes
    assert new in nodes


async def test_agents_leave_a_node_that_is_to_go_and_no_request_fails(
    cluster: RayCluster, fleet: str
) -> None:
    cluster.put_fleet(fleet, **{**FLEET, "min": 3, "idle_time": 600})
    cluster.until_fleet(fleet, lambda now: now["ready"] == 3)
    leaving = cluster.node_of("headrace-agent-echo-1")
    answers = Answers(cluster)
    async with answers.client() as client, asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(answers.ask(client, 200))
        await asyncio.to_thread(cluster.until_processing, 6)

        await asyncio.to_thread(cluster.do, "drain_node", node=leaving)
        await asyncio.to_thread(cluster.do, "add", num_cpus=2, labels={"pool": "a"})

    assert answers.problems == []
    assert list(map(len, answers.texts)) == [200] * 6
    cluster.until_left(leaving)
    cluster.until_fleet(fleet, lambda now: now["ready"] == now["wanted"] == now["seen"])
    cluster.do("kill_node", node=leaving)


async def test_another_supervisor_finds_the_agents_and_nobody_notices(
    cluster: RayCluster, fleet: str
) -> None:
    cluster.put_fleet(fleet, **{**FLEET, "min": 3, "idle_time": 600})
    cluster.until_fleet(fleet, lambda now: now["ready"] == 3)
    before, departures = cluster.agents(), cluster.do("departures")
    answers = Answers(cluster)
    async with answers.client() as client, asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(answers.ask(client, 400))
        await asyncio.to_thread(cluster.until_processing, 6)

        await asyncio.to_thread(cluster.kill, "Supervisor")
        cluster.put_fleet(fleet, **{**FLEET, "min": 4, "idle_time": 600})
        await asyncio.to_thread(cluster.until_fleet, fleet, lambda now: now["ready"] == 4)

    assert answers.problems == []
    assert cluster.do("departures") == departures
    after = cluster.agents()
    assert {name: after[name] for name in before} == before


async def test_what_two_balancers_are_told_at_the_same_time_is_known_to_both(
    cluster: RayCluster,
) -> None:
    names = {f"told-{n}" for n in range(12)}
    answers = Answers(cluster)
    async with answers.client() as client:

        async def each(method: str, **body: Any) -> None:
            asked = (client.request(method, f"/api/v1/fleets/{name}", **body) for name in names)
            for answer in await asyncio.gather(*asked):
                answer.raise_for_status()

        async def known() -> list[set[str]]:
            """To whichever balancer Serve asks, each time."""
            asked = await asyncio.gather(*(client.get("/api/v1/fleets") for _ in range(16)))
            return [names & told.json()["fleets"].keys() for told in asked]

        async with asyncio.timeout(PATIENCE):
            await each("PUT", json={"max": 0})
            while await known() != [names] * 16:
                pass
            await each("DELETE")
            while any(await known()):
                pass


async def test_a_balancer_that_is_killed_loses_only_its_own_connections(
    cluster: RayCluster, fleet: str
) -> None:
    cluster.put_fleet(fleet, **{**FLEET, "min": 4, "idle_time": 600})
    cluster.until_fleet(fleet, lambda now: now["ready"] == 4)
    answers = Answers(cluster)
    async with answers.client() as client, asyncio.TaskGroup() as group:
        # Serve gives each request to either of two. One may be what is left of following a stream.
        while min(await asyncio.to_thread(cluster.do, "ongoing")) < 2:
            for _ in range(4):
                group.create_task(answers.ask(client, 200))
            await asyncio.to_thread(cluster.until_processing, min(answers.asked, 8))

        await asyncio.to_thread(cluster.kill, "BalancerReplica")

    served, lost = len(answers.texts), len(answers.problems)
    assert served + lost == answers.asked
    assert 0 < lost < answers.asked
    assert all("the balancer was lost" in problem for problem in answers.problems)
    again = Answers(cluster)
    await again.ask_all([20] * 16)
    assert again.problems == []


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """Another copy of the project, with a change in it."""
    for package in ("agent", "balancer", "common", "deploy"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / package, tmp_path / package, ignore=ignored)
    with (tmp_path / "common" / "ids.py").open("a") as file:
        file.write("# The next version.\n")
    return tmp_path


async def test_a_new_version_takes_over_without_a_failed_request(
    cluster: RayCluster, fleet: str, next_version: Path
) -> None:
    cluster.put_fleet(fleet, **{**FLEET, "min": 2, "max": 2, "idle_time": 600})
    cluster.until_fleet(fleet, lambda now: now["ready"] == 2)
    before = cluster.agents()
    answers = Answers(cluster)
    is_updated = asyncio.Event()
    async with answers.client() as client, asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(answers.keep_asking(client, 30, is_updated))
        await asyncio.to_thread(
            cluster.do, "deploy", settings=SETTINGS, replicas=2, path=str(next_version)
        )
        await asyncio.to_thread(cluster.until_replaced, before)
        is_updated.set()

    assert answers.problems == []
    assert len(answers.texts) > 20


def test_a_fleet_without_a_fitting_node_says_so_and_is_served_when_one_comes(
    cluster: RayCluster,
) -> None:
    """B52."""
    cluster.put_fleet("late", **FLEET, model={"LocalToAgent": "/models/late.gguf"})
    cluster.put_fleet(
        "late", **{**FLEET, "resources": {"cpus": 1, "labels": {"pool": "late"}}, "min": 2}
    )
    told = cluster.until_fleet("late", lambda now: "pool=late" in (now["reason"] or ""))
    assert [each["phase"] for each in told["agents"]] == ["node", "node"]
    started: dict[str, Any] = cluster.agents()

    cluster.do("add", num_cpus=1, labels={"pool": "late"})

    told = cluster.until_fleet("late", lambda now: now["ready"] == 1)
    assert (told["wanted"], told["starting"]) == (2, 1)
    assert "full" in next(each["problem"] for each in told["agents"] if each["problem"])
    assert len(cluster.agents()) == len(started) + 1
    cluster.client.delete("/api/v1/fleets/late").raise_for_status()
