"""A Ray cluster of several nodes on this machine, with the product deployed on it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from product import Command, free_port

from deploy.up import RAY_ENVIRONMENT

PROJECT = Path(__file__).parents[2]

QUICK_LOSSES = {
    # A dead node is noticed within about two seconds; by default it takes ten times as long.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

ENVIRONMENT = {
    **RAY_ENVIRONMENT,
    **QUICK_LOSSES,
    "RAY_AUTH_MODE": "disabled",
    # Else the only proxy would ask the balancer on its own node alone.
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all on loopback
    "PYTHONPATH": str(PROJECT),
}


PATIENCE = 180.0
"""Seconds that anything may take."""


@contextlib.contextmanager
def _limited() -> Generator[Callable[[], None]]:
    end = time.monotonic() + PATIENCE

    def poll() -> None:
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)

    yield poll


@dataclass
class RayCluster:
    """The nodes, and questions to the product on them."""

    command: Command
    port: int
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=120,
            trust_env=False,
            headers={"user-agent": "test"},
        )

    def do(self, name: str, **arguments: Any) -> Any:
        """See ``cluster_host.Host``."""
        assert self.command.process.stdin is not None
        self.command.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.command.process.stdin.flush()
        told = json.loads(self.command.expect('{"'))
        assert "error" not in told, told["error"]
        return told["answer"]

    def node_of(self, actor: str) -> str:
        return next(each["node"] for each in self.do("actors") if each["name"] == actor)

    def kill(self, kind: str) -> int:
        """One of the processes of this class of actors, whichever; returns its number."""
        pid = next(each["pid"] for each in self.do("actors") if kind in each["class"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def agents(self) -> dict[str, int]:
        """The process of each agent of a fleet that has one, by name."""
        return {
            each["name"]: each["pid"] for each in self.do("actors") if each["class"] == "AgentActor"
        }

    def until_nodes(self, condition: Callable[[list[str]], bool]) -> None:
        """Ask Ray for the pools of the nodes that live until this is true of them."""
        with _limited() as poll:
            while not condition(self.do("nodes")):
                poll()

    def until_actors(self, condition: Callable[[list[str]], bool]) -> None:
        """Ask Ray for their names until this is true of them."""
        with _limited() as poll:
            while not condition([each["name"] for each in self.do("actors")]):
                poll()

    def until_replaced(self, before: dict[str, int]) -> None:
        """Until there are as many agents, and none of them is one of these."""

        def are_replaced() -> bool:
            now = self.agents()
            return len(now) >= len(before) and not set(now.values()) & set(before.values())

        with _limited() as poll:
            while not are_replaced():
                poll()

    def until_left(self, node: str) -> None:
        """Until there are agents, and none of them is on this node."""

        def are_elsewhere() -> bool:
            nodes = [each["node"] for each in self.do("actors") if each["class"] == "AgentActor"]
            return bool(nodes) and node not in nodes

        with _limited() as poll:
            while not are_elsewhere():
                poll()

    def until_processing(self, count: int) -> None:
        """Until so many requests run."""
        for state in self._follow("/api/v1/agents/stream"):
            if sum(agent["slots_processing"] for agent in state["agents"]) >= count:
                return

    def fleet(self, name: str) -> dict[str, Any]:
        return self.client.get(f"/api/v1/fleets/{name}").raise_for_status().json()

    def put_fleet(self, name: str, **fleet: Any) -> None:
        self.client.put(f"/api/v1/fleets/{name}", json=fleet).raise_for_status()

    def until_fleet(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Follow the fleet until this is true of it."""
        for state in self._follow("/api/v1/fleets/stream"):
            fleet = state["fleets"].get(name)
            if fleet is not None and condition(fleet):
                return fleet
        raise AssertionError("it follows for ever, or fails")

    def _follow(self, route: str) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        state: dict[str, Any] = {}
        with self.client.stream("GET", route) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    state = json.loads(line.removeprefix("data: "))
                    yield state
                assert time.monotonic() < end, f"it stays like this: {state}"
        raise AssertionError("the stream ended")


@contextlib.contextmanager
def start_cluster(
    environment: Mapping[str, str] | None = None, address: str | None = None
) -> Generator[RayCluster]:
    """One node that runs no agents; add others. ``address``: of a Ray that runs already, instead."""
    port = free_port()
    command = Command(
        str(port),
        *([] if address is None else [address]),
        program=(sys.executable, str(Path(__file__).parent / "cluster_host.py")),
        environment={**ENVIRONMENT, **(environment or {})},
        stdin=subprocess.PIPE,
    )
    try:
        command.expect('"ready"')
        cluster = RayCluster(command, port)
        with cluster.client:
            yield cluster
    finally:
        try:
            command.ended()
        finally:
            command.kill_the_rest()
