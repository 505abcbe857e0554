"""The command line: what is refused, and how. What it starts is in integration_tests/."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from balancer.keys import read_keys


def headrace(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from deploy.cli import main; main()", *arguments],
        env={**os.environ, **(environment or {})},
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
        (["up", "--keys", "/nowhere"], "/nowhere: No such file"),
        (["up", "--keys", str(Path(__file__))], f"{__file__}: line 1 is not ROLE KEY"),
        (["up", "--tls-cert", "/nowhere"], "'--tls-key'"),
        (["up", "--tls-key", "/nowhere"], "'--tls-cert'"),
        (["up", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "/nowhere: No such file"),
        (["up", "--tensor-split", "1,x"], "--tensor-split"),
        (["up", "--tensor-split", "0,0"], "--tensor-split"),
        (["up", "--k-cache-dtype", "Q9"], "--k-cache-dtype"),
        (["up", "--host", "somewhere"], "--host"),
        (["up", "--host", "0.0.0.0"], "--insecure"),
        (["up", "--buffer-timeout", "0"], "--buffer-timeout"),
        (["up", "--log-format", "xml"], "--log-format"),
        (["up", "--traces", "collector:4318"], "--traces"),
        (["up", "--log-file", "/nowhere/log"], "--log-file"),
        (["agent", "--log-format", "xml"], "--log-format"),
        (["up", "extra"], "extra"),
        (["up", "--nope"], "--nope"),
        (["agent", "--balancer", "localhost"], "--balancer"),
        (["agent", "--balancer", "ws://127.0.0.1:99999"], "--balancer"),
        (["agent", "--balancer", "ws://a..b:80"], "--balancer"),
        (["agent", "--balancer", "ws://"], "--balancer"),
        (["agent", "--balancer", "ws://127.0.0.1:1", "--balancer", "there"], "'there'"),
        (["agent", "--name", "a\nb"], "--name"),
        (["agent", "--label", ""], "--label"),
        (["agent", "--key-file", "/nowhere"], "/nowhere: No such file"),
        (["agent", "--tls-ca", str(Path(__file__))], __file__),
        (["status", "--key-file", str(Path(__file__))], "--key-file"),
        (["bench", "--key-file", "/nowhere"], "/nowhere: No such file"),
        (["keys", "--output", "/nowhere/keys"], "/nowhere/keys: No such file"),
        (["keys", "--output", __file__], f"{__file__}: File exists"),
        (["agent", "--model", str(Path(__file__))], "not a GGUF file"),
        (["keys", "--output", "/nowhere/keys", "--json"], "--json"),
        (["swap", "ftp://host/a.gguf"], "MODEL"),
        (["swap", "/a.gguf", "--projector", "ftp://host/a.gguf"], "--projector"),
        (["scale", "small"], "--min"),
        (["scale", "small", "--min", "-1"], "--min"),
        (["chat", "--temperature", "nan", "Hi"], "--temperature"),
        (["chat", "--max-tokens", "0", "Hi"], "--max-tokens"),
        (["top", "--port", "0"], "--port"),
        (["drain"], "AGENT"),
        (["bench", "--json", "/nowhere/a.json"], "--json"),
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


@pytest.mark.parametrize(
    "option", [("--slots", "4"), ("--kv-layout", "separate"), ("--n-gpu-layers", "3")]
)
def test_what_only_agents_that_are_always_there_have_is_refused_where_there_are_none(
    option: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "fleets.yaml"
    file.write_text("a: {}")

    done = headrace("up", "--fleets", str(file), *option)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"'{option[0]}': it is for agents that are always there, see --agents" in done.stderr


@pytest.mark.parametrize("told", [("--agents", "2"), ()])
def test_what_is_said_of_agents_that_are_always_there_may_stand_beside_fleets(
    told: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "fleets.yaml"
    file.write_text("a: {}")
    options = ("--slots", "4") if told else ("--engine", "echo")

    done = headrace("up", "--fleets", str(file), *told, *options, "--allow-origin", "none")

    assert done.returncode == 2
    assert "--allow-origin" in done.stderr  # which is looked at last


def test_a_bad_file_of_fleets_gets_one_line(tmp_path: Path) -> None:
    file = tmp_path / "fleets.yaml"
    file.write_text("a: {maximum: 3}")

    done = headrace("up", "--fleets", str(file))

    assert done.returncode == 2
    assert done.stderr == (
        f"headrace: Invalid value for '--fleets': {file}: a.maximum:"
        " Extra inputs are not permitted\n"
    )


KEYS_LINE = "inference key-of-some-client\n"


def test_keys_in_the_environment_are_looked_at_like_a_file() -> None:
    done = headrace("up", "--host", "0.0.0.0", environment={"HEADRACE_KEYS": "agent short"})

    assert done.returncode == 2
    assert "HEADRACE_KEYS: the key in line 1 is not" in done.stderr
    assert "short" not in done.stderr


def test_an_address_that_others_reach_wants_keys_for_every_role(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEYS_LINE)

    done = headrace("up", "--host", "0.0.0.0", "--keys", str(file))

    assert done.returncode == 2
    assert "others can reach 0.0.0.0, and there is no key for management, agent:" in done.stderr


def test_keys_that_are_made_can_be_read_by_up_and_by_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "keys"

    written = headrace("keys", "--output", str(file))
    printed = headrace("keys")

    assert (written.returncode, printed.returncode) == (0, 0)
    assert (written.stdout, written.stderr) == ("", "")
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_keys(file.read_text()).missing == read_keys(printed.stdout).missing == ()
    assert file.read_text() != printed.stdout


def test_keys_can_be_had_as_json() -> None:
    done = headrace("keys", "--json")

    told = json.loads(done.stdout)
    assert (done.returncode, list(told)) == (0, ["inference", "management", "agent"])
    assert len(set(told.values())) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["top"],
        ["top", "--json"],
        ["explain", "r"],
        ["drain", "one"],
        ["undrain", "one"],
        ["cancel", "r"],
        ["swap", "/m.gguf"],
        ["scale", "small", "--max", "1"],
        ["chat", "Hi"],
    ],
)
def test_without_a_balancer_a_command_is_one_line(arguments: list[str]) -> None:
    done = headrace(*arguments, "--port", "1")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("headrace: no answer from a balancer at http://127.0.0.1:1")
    assert len(done.stderr.splitlines()) == 1


COMMANDS = {
    "up", "agent", "keys", "nodes", "status", "top", "explain", "drain", "undrain", "cancel",
    "swap", "scale", "chat", "bench",
}  # fmt: skip


def test_help_names_the_commands() -> None:
    done = headrace("--help")

    assert done.returncode == 0
    named = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert named >= COMMANDS


def completed(words: str, **more: str) -> list[str]:
    """What bash is offered for the last of these words."""
    told = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), **more}
    done = subprocess.run(
        [sys.executable, "-c", AS_HEADRACE],
        env={**os.environ, "_HEADRACE_COMPLETE": "complete_bash", **told},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


AS_HEADRACE = "import sys; sys.argv[0] = 'headrace'; from deploy.cli import main; main()"


def test_a_shell_completes_commands_and_options() -> None:
    assert completed("headrace dr") == ["drain"]
    assert completed("headrace swap --proj") == ["--projector"]


def test_names_that_nobody_tells_are_not_completed() -> None:
    """No balancer is at the default address, or one that wants another key."""
    key = {"HEADRACE_MANAGEMENT_KEY": "key-that-nobody-knows"}

    assert completed("headrace drain no-such-agen", **key) == []
    assert completed("headrace scale no-such-flee", **key) == []


def test_the_script_for_a_shell_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_HEADRACE, "--show-completion", "bash"],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert "_HEADRACE_COMPLETE=complete_bash" in done.stdout
