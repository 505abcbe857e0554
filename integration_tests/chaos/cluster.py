"""What is struck: a running product without agents of its own, and agents behind bad network."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.agents import ECHO_PACE
from integration_tests.chaos.network import Passage
from integration_tests.helpers.product import Command, Up

SLOTS = 4
PACE = 0.02
"""Seconds that a pass of an echo agent takes."""

WATCH_PAUSE = 0.2
BACK_TIMEOUT = 60.0
"""Seconds until an agent must serve again."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of a process: what must not grow."""

    kilobytes: int
    descriptors: int


def footprint(pid: int) -> Footprint:
    """Raises ``OSError`` if it has gone."""
    folder = Path("/proc") / str(pid)
    pages = int((folder / "statm").read_text().split()[1])
    descriptors = sum(1 for _ in (folder / "fd").iterdir())
    return Footprint(pages * os.sysconf("SC_PAGE_SIZE") // 1024, descriptors)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in (Path("/proc") / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def lives(pid: int) -> bool:
    """Does it run, and is no zombie?"""
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def send(pid: int, number: signal.Signals) -> None:
    """Nothing if it has gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class ChaosAgent:
    """``headrace agent``, which dials in through a passage of its own."""

    def __init__(self, name: str, passage: Passage, options: list[str]) -> None:
        self.name = name
        self.passage = passage
        self._options = options
        self._command: Command | None = None
        self.starts = 0

    def start(self) -> None:
        balancer = f"ws://127.0.0.1:{self.passage.port}"
        self._command = Command(
            *("agent", "--balancer", balancer, "--name", self.name, *self._options),
            environment={ECHO_PACE: str(PACE)},
        )
        self.starts += 1

    @property
    def command(self) -> Command:
        assert self._command is not None
        return self._command

    @property
    def pid(self) -> int:
        """Of the process that runs the model: the keeper's child, or where there is no keeper the
        command itself.
        """
        of_keeper = children(self.command.process.pid)
        return of_keeper[0] if of_keeper else self.command.process.pid

    @property
    def has_keeper(self) -> bool:
        return self.pid != self.command.process.pid

    def revive(self) -> None:
        """Start it again if the whole command has ended, as a keeper would not let it."""
        if self.command.process.poll() is not None:
            self.command.ended()
            self.start()

    def end(self) -> None:
        if self._command is None:
            return
        try:
            if self._command.process.poll() is None:
                self._command.stop()
        finally:
            self._command.kill_the_rest()


class Cluster:
    """The product, the agents, and what the balancer says of them, followed all the time."""

    def __init__(self, up: Up, agents: list[ChaosAgent], http: httpx.AsyncClient) -> None:
        self.up = up
        self.agents = agents
        self.http = http
        self.linked: list[dict[str, Any]] = []
        """The newest that the balancer has said."""
        self.overfull: list[str] = []
        """Each time that an agent had more requests than slots."""
        self._told = asyncio.Event()

    def ids(self, name: str) -> set[str]:
        """Of the processes that have served under this name and are linked now."""
        return {agent["id"] for agent in self.linked if agent["name"] == name}

    def serves(self, name: str) -> bool:
        """Has it one link, and slots?"""
        mine = [agent for agent in self.linked if agent["name"] == name]
        return len(mine) == 1 and mine[0]["slots_total"] == SLOTS

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until this is true of what the balancer says; False: it is not, after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._told.clear()
                    await self._told.wait()
                return True
        return False

    async def follow(self) -> None:
        """Without end."""
        while True:
            with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
                await self._follow_once()
            self.linked = []
            await asyncio.sleep(WATCH_PAUSE)

    async def _follow_once(self) -> None:
        async with self.http.stream("GET", "/api/v1/agents/stream") as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                self.linked = json.loads(line.removeprefix("data: "))["agents"]
                for agent in self.linked:
                    if agent["slots_processing"] > agent["slots_total"] > 0:
                        self.overfull.append(
                            f"{agent['name']} ran {agent['slots_processing']} of {agent['slots_total']}"
                        )
                self._told.set()

    def find(self, words: str) -> list[int]:
        """The processes of ``headrace up`` with these words in their command line."""
        mark = self.up.command.mark.encode()
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_meant = words.encode() in (folder / "cmdline").read_bytes()
                if is_meant and mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found


REPLICA = "ray::ServeReplica:headrace"
PROXY = "ray::ProxyActor"
CONTROLLER = "ray::ServeController"


@asynccontextmanager
async def cluster(up: Up, *, agents: int, seed: int, engine: str) -> AsyncGenerator[Cluster]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=up.address, timeout=300, trust_env=False, limits=limits)
        )
        made: list[ChaosAgent] = []
        for number in range(agents):
            name = f"chaos-{number + 1}"
            chance = random.Random(f"network of {name} of {seed}")
            passage = await stack.enter_async_context(Passage(up.agent_port, chance).open())
            agent = ChaosAgent(
                name, passage, ["--engine", engine, "--slots", str(SLOTS), "--threads", "1"]
            )
            stack.push_async_callback(asyncio.to_thread, agent.end)
            agent.start()
            made.append(agent)
        running = Cluster(up, made, http)
        following = asyncio.create_task(running.follow())
        stack.callback(following.cancel)
        all_serve = await running.until(
            lambda: all(running.serves(agent.name) for agent in made), BACK_TIMEOUT
        )
        assert all_serve, f"not all agents came: {running.linked}"
        yield running
