"""The files of ``deploy/`` as an operator uses them, on a Ray that was started before."""

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from product import START_TIMEOUT, free_port
from ray_started import StartedRay, start_ray

SERVE_FILE = Path(__file__).parents[1] / "deploy" / "serve.yaml"

QUESTION = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


@pytest.fixture(scope="module")
def started_ray() -> Generator[StartedRay]:
    with start_ray(role="balancer", pool="cpu") as started:
        yield started


def with_values(file: dict[str, Any], *, port: int, keys: Path) -> dict[str, Any]:
    """Only what a machine without models needs changed."""
    file["http_options"]["port"] = port
    (application,) = file["applications"]
    arguments = application["args"]
    arguments["keys"] = str(keys)
    arguments["engine"] = "echo"
    arguments["fleets"]["cpu"]["model"] = {"LocalToAgent": "/echo.gguf"}
    return file


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


def test_what_is_deployed_from_the_file_starts_an_agent_for_the_first_request(
    started_ray: StartedRay, tmp_path: Path
) -> None:
    port = free_port()
    keys = tmp_path / "keys"
    made = started_ray.run("headrace", "keys", "--output", str(keys))
    copy = tmp_path / "serve.yaml"
    file = with_values(yaml.safe_load(SERVE_FILE.read_text()), port=port, keys=keys)
    copy.write_text(yaml.safe_dump(file))

    deployed = started_ray.run("serve", "deploy", str(copy))

    assert made.returncode == 0, made.stderr
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    (key,) = (line.split()[1] for line in keys.read_text().splitlines() if "inference " in line)
    address = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=address, trust_env=False, timeout=START_TIMEOUT) as client:
        until_it_serves(client)
        without_key = client.post("/v1/chat/completions", json=QUESTION)
        answer = client.post(
            "/v1/chat/completions", json=QUESTION, headers={"authorization": f"Bearer {key}"}
        )
    assert without_key.status_code == 401
    assert "Hello" in answer.json()["choices"][0]["message"]["content"]


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
