"""The files of ``deploy/`` as an operator uses them, on a Ray that was started before."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from product import free_port
from ray_started import StartedRay, start_ray

SERVE_FILE = Path(__file__).parents[1] / "deploy" / "serve.yaml"


@pytest.fixture(scope="module")
def started_ray() -> Generator[StartedRay]:
    with start_ray(role="balancer", pool="cpu") as started:
        yield started


def with_values(file: dict[str, Any], port: int) -> dict[str, Any]:
    """Only what a machine without models and without a second node needs changed."""
    file["http_options"]["port"] = port
    (application,) = file["applications"]
    arguments = application["args"]
    arguments["engine"] = "echo"
    arguments["fleets"]["cpu"]["model"] = {"LocalToAgent": "/echo.gguf"}
    return file


def test_what_is_deployed_from_the_file_starts_an_agent_for_the_first_request(
    started_ray: StartedRay, tmp_path: Path
) -> None:
    port = free_port()
    copy = tmp_path / "serve.yaml"
    copy.write_text(yaml.safe_dump(with_values(yaml.safe_load(SERVE_FILE.read_text()), port)))

    done = started_ray.run("serve", "deploy", str(copy))

    assert done.returncode == 0, done.stdout + done.stderr
    import time

    t = time.time()
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        while time.time() < t + 60:
            try:
                r = client.get("/health")
                print(time.time() - t, r.status_code)
                if r.status_code == 200:
                    break
            except httpx.HTTPError as error:
                print(error)
            time.sleep(1)
        print(started_ray.run("serve", "status").stdout)
        r = client.post("/v1/chat/completions", json=body)
        print(time.time() - t, r.status_code, r.text)
        print(client.get("/api/v1/fleets").text)
    import subprocess
    f = started_ray.environment["RAY_TMPDIR"]
    print(subprocess.run(f"tail -n 60 {f}/ray/session_latest/logs/serve/replica*; tail -n 30 {f}/ray/session_latest/logs/worker*err; ls {f}/ray/session_latest/logs", shell=True, capture_output=True, text=True).stdout[-9000:])
    assert 0
