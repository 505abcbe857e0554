"""The files of ``deploy/`` as an operator uses them, on a Ray that was started before."""

import json
import shutil
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from product import START_TIMEOUT, free_port
from ray_started import StartedRay, start_ray

ROOT = Path(__file__).parents[1]
SERVE_FILE = ROOT / "deploy" / "serve.yaml"

QUESTION = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


KEYS = {role: f"the-only-key-for-{role}" for role in ("inference", "management", "agent")}


@pytest.fixture(scope="module")
def started_ray() -> Generator[StartedRay]:
    keys = "\n".join(f"{role} {key}" for role, key in KEYS.items())
    environment = {"HEADRACE_KEYS": keys, "HEADRACE_ECHO_PACE": "0.05"}
    with start_ray(environment, role="balancer", pool="cpu") as started:
        yield started


@dataclass
class Operator:
    ray: StartedRay
    copy: Path
    port: int = field(default_factory=free_port)

    def deploy(self, most: int, **environment: str) -> None:
        """The file, with only the values changed that a machine without models cannot have, and the
        ``max`` of its fleet.
        """
        file = yaml.safe_load(SERVE_FILE.read_text())
        file["http_options"]["port"] = self.port
        (application,) = file["applications"]
        if environment:
            application["runtime_env"] = {"env_vars": environment}
        arguments = application["args"]
        arguments["engine"] = "echo"
        fleet = arguments["fleets"]["cpu"]
        fleet["model"] = {"LocalToAgent": "/echo.gguf"}
        fleet["resources"]["cpus"] = 1  # a second one finds room beside it
        fleet["max"] = most
        self.copy.write_text(yaml.safe_dump(file))
        done = self.ray.run("serve", "deploy", str(self.copy))
        assert done.returncode == 0, done.stdout + done.stderr

    def client(self, role: str | None) -> httpx.Client:
        headers = {} if role is None else {"authorization": f"Bearer {KEYS[role]}"}
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers=headers,
            trust_env=False,
            timeout=START_TIMEOUT,
        )

    def fleet(self) -> dict[str, Any]:
        with self.client("management") as client:
            return client.get("/api/v1/fleets/cpu").raise_for_status().json()

    def agents(self) -> list[tuple[str, str]]:
        return [(agent["name"], agent["phase"]) for agent in self.fleet()["agents"]]


@dataclass
class Asking:
    """A client who asks again and again, until told to stop."""

    client: httpx.Client
    statuses: list[int] = field(default_factory=list[int])
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.is_over.is_set():
            response = self.client.post("/v1/chat/completions", json=QUESTION)
            self.statuses.append(response.status_code)


def until_it_serves(client: httpx.Client) -> None:
    """Serve answers 503 until a replica runs."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:  # the proxy does not listen yet
            pass
        time.sleep(0.1)
    raise AssertionError("no replica has come")


def test_a_fleet_starts_with_the_first_request_and_an_upgrade_fails_none(
    started_ray: StartedRay, tmp_path: Path
) -> None:
    operator = Operator(started_ray, tmp_path / "serve.yaml")
    operator.deploy(2)
    with operator.client("inference") as client, operator.client(None) as stranger:
        until_it_serves(client)

        without_key = stranger.post("/v1/chat/completions", json=QUESTION)
        answer = client.post("/v1/chat/completions", json=QUESTION)

        assert without_key.status_code == 401
        assert "Hello" in answer.json()["choices"][0]["message"]["content"]
        assert [name for name, _ in operator.agents()] == ["cpu-1"]

        asking = Asking(client)
        thread = threading.Thread(target=asking.run)
        thread.start()
        try:
            operator.deploy(3, PYTHONPATH=str(another_version(tmp_path / "another")))
            deadline = time.monotonic() + START_TIMEOUT
            while operator.agents() != [("cpu-2", "ready")] and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            asking.is_over.set()
            thread.join()

    assert operator.agents() == [("cpu-2", "ready")]
    assert operator.fleet()["fleet"]["max"] == 3
    assert len(asking.statuses) > 10
    assert set(asking.statuses) == {200}


def another_version(folder: Path) -> Path:
    for package in ("common", "balancer", "agent", "deploy"):
        shutil.copytree(ROOT / package, folder / package)
    with (folder / "common" / "ids.py").open("a") as file:
        file.write("# another version\n")
    return folder


def test_nodes_that_have_not_joined_are_named_with_the_reason(
    started_ray: StartedRay, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    workers = ["127.0.0.1", "127.0.0.2"]  # the first is the node that runs
    provider = {"type": "local", "head_ip": "127.0.0.1", "worker_ips": workers}
    file.write_text(json.dumps({"cluster_name": "c", "provider": provider}))

    done = started_ray.run("headrace", "nodes", str(file), "--here", "--json")

    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert told["joined"] == 1
    assert [absent["node"] for absent in told["absent"]] == ["127.0.0.2"]
    assert "cannot be reached" in told["absent"][0]["reason"]


def test_all_nodes_are_there(started_ray: StartedRay, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    provider = {"type": "local", "head_ip": "127.0.0.1", "worker_ips": ["127.0.0.1"]}
    file.write_text(json.dumps({"cluster_name": "c", "provider": provider}))

    done = started_ray.run("headrace", "nodes", str(file), "--here")

    assert (done.returncode, done.stdout) == (0, "nodes that have joined: 1\n")
