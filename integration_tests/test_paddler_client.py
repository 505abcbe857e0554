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
FOLDER = HERE.parent / "tests" / "balancer" / "golden"
GOLDEN: dict[str, Any] = {
    **json.loads((FOLDER / "results.json").read_text()),
    **json.loads((FOLDER / "results_python_client.json").read_text()),
}
"""All that it is ever sent."""


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
        [python, script, up.address],
        input=json.dumps(GOLDEN),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
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


def test_another_model_is_loaded_when_it_is_wanted_and_there(seen: dict[str, Any]) -> None:
    assert seen["agent_of_another_model"] is True
    assert seen["issues"] == [{"ModelFileDoesNotExist": {"model_path": "/models/nope.gguf"}}]


def test_an_agents_model_and_template(seen: dict[str, Any]) -> None:
    assert seen["metadata"]["general.architecture"] == "llama"
    assert seen["no_template"] is None
    assert seen["template"] == "{{ messages[0].content }}"
    assert seen["unknown_agent"] == 404


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("bad_tool", "server_error"),
        ("bad_grammar", "grammar_initialization_failed"),
        ("thinking_with_grammar", "grammar_incompatible_with_thinking"),
    ],
)
def test_what_is_wrong_with_a_request_is_told(seen: dict[str, Any], case: str, kind: str) -> None:
    assert seen[case] == [kind]


def test_embeddings(seen: dict[str, Any]) -> None:
    assert seen["embeddings_not_enabled"] == 501
    assert seen["embedding_kinds"] == ["embedding", "embedding", "embedding_error"]
    assert seen["embedding_lengths"] == {"a": 576, "b": 576}
    assert "'long'" in seen["embedding_error"]
    disabled = seen["generation_disabled"]
    assert disabled["kinds"] == ["server_error"]
    assert "disabled while embeddings are enabled" in disabled["error"]


def test_every_message_that_it_is_sent_can_be_parsed(seen: dict[str, Any]) -> None:
    assert {name: len(kinds) for name, kinds in seen["golden"].items()} == {
        name: len(messages) for name, messages in GOLDEN.items()
    }
    assert seen["golden"]["generation disabled"] == ["server_error"]
