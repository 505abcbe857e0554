"""The published client, ``paddler-client==4.0.0``, works here unchanged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from product import Up

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "paddler-client.txt"


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of an environment of the client's own, kept between runs while its pins stay."""
    venv = HERE.parent / ".venv-paddler"
    stamp = venv / "stamp"
    python = venv / "bin" / "python"
    wanted = sys.version + REQUIREMENTS.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", REQUIREMENTS], check=True)
        stamp.write_text(wanted)
    return python


@pytest.fixture(scope="module")
def seen(python: Path, up: Up) -> dict[str, Any]:
    """What a session of the client has seen."""
    script = HERE / "helpers" / "paddler_session.py"
    done = subprocess.run(
        [python, script, up.address], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_health(seen: dict[str, Any]) -> None:
    assert seen["health"] == ["OK", "OK"]


@pytest.mark.parametrize("kind", ["http_chat", "socket_chat", "socket_raw"])
def test_generation(seen: dict[str, Any], kind: str) -> None:
    told = seen[kind]

    assert set(told["kinds"][:-1]) == {"content_token"}
    assert told["kinds"][-1] == "done"
    assert told["text"].strip()
    assert told["generated_by"] == ["agent-1"]
    assert 0 < told["completion_tokens"] <= 12


def test_an_error_is_a_message_that_the_client_knows(seen: dict[str, Any]) -> None:
    assert seen["too_long"]["kinds"] == ["server_error"]
    assert "context_length_exceeded" in seen["too_long"]["error"]


def test_agents(seen: dict[str, Any]) -> None:
    (agent,) = seen["agents"]

    assert (agent["name"], agent["slots_total"], agent["issues"]) == ("agent-1", 4, [])
    assert seen["agents_stream"] == ["agent-1"]


def test_buffered_requests(seen: dict[str, Any]) -> None:
    assert (seen["buffered"], seen["buffered_stream"]) == (0, 0)


def test_the_desired_state_makes_the_round_trip(seen: dict[str, Any]) -> None:
    assert seen["desired_state_round_trip"] is True


def test_metrics(seen: dict[str, Any]) -> None:
    assert 'headrace_slots{agent="agent-1"} 4.0' in seen["metrics"].splitlines()
