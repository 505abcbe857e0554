"""The command line: what is refused, and how. What it starts is in integration_tests/."""

import subprocess
import sys
from pathlib import Path

import pytest


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from deploy.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up", "--port", "many"], "--port"),
        (["up", "--port", "70000"], "--port"),
        (["up", "--port", "8062"], "--agent-port"),
        (["up", "--slots", "0"], "--slots"),
        (["up", "--agents", "-1"], "--agents"),
        (["up", "--context", "1"], "--context"),
        (["up", "--threads", "0"], "--threads"),
        (["up", "--engine", "steam"], "--engine"),
        (["up", "--model", "/nowhere.gguf"], "/nowhere.gguf: No such file"),
        (["up", "--model", "ftp://host/a.gguf"], "neither a path nor the address"),
        (["up", "--state", "redis://host"], "--state"),
        (["up", "--state", f"file://{Path(__file__)}"], "not a desired state"),
        (["up", "--allow-origin", "chat.example"], "--allow-origin"),
        (["up", "--allow-origin", "https://chat.example/path"], "--allow-origin"),
        (["up", "--inference-keys", "/nowhere"], "/nowhere: No such file"),
        (["up", "--inference-keys", str(Path(__file__))], "the key in line"),
        (["up", "--tensor-split", "1,x"], "--tensor-split"),
        (["up", "--tensor-split", "0,0"], "--tensor-split"),
        (["up", "--k-cache-dtype", "Q9"], "--k-cache-dtype"),
        (["up", "--host", "somewhere"], "--host"),
        (["up", "--host", "0.0.0.0"], "--insecure"),
        (["up", "--buffer-timeout", "0"], "--buffer-timeout"),
        (["up", "extra"], "extra"),
        (["up", "--nope"], "--nope"),
        (["agent", "--balancer", "localhost"], "--balancer"),
        (["agent", "--balancer", "ws://127.0.0.1:99999"], "--balancer"),
        (["agent", "--balancer", "ws://a..b:80"], "--balancer"),
        (["agent", "--balancer", "ws://"], "--balancer"),
        (["agent", "--name", "a\nb"], "--name"),
        (["agent", "--label", ""], "--label"),
        (["agent", "--model", str(Path(__file__))], "not a GGUF file"),
        (["nope"], "nope"),
    ],
)
def test_a_bad_value_gets_one_line_and_status_2(arguments: list[str], named: str) -> None:
    done = headrace(*arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("headrace: ")
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr


def test_status_without_a_balancer_is_one_line() -> None:
    done = headrace("status", "--port", "1")

    assert done.returncode == 1
    assert done.stderr.startswith("headrace: no answer from a balancer at http://127.0.0.1:1")
    assert len(done.stderr.splitlines()) == 1


def test_help_names_the_commands() -> None:
    done = headrace("--help")

    assert done.returncode == 0
    assert all(command in done.stdout for command in ("up", "agent", "status"))
