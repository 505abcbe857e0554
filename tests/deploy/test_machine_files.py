"""The Dockerfile and the unit of systemd: that they fit the tree, and the product."""

import configparser
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.up import RAY_ENVIRONMENT

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/headrace-agent.service"


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, rest) for name, _, rest in pairs]


def test_everything_that_the_image_copies_is_there() -> None:
    sources = [
        source
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]

    assert {"common", "balancer", "agent", "deploy", "deploy/constraints.txt"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)


def test_each_stage_is_made_before_it_is_used_for_every_accelerator() -> None:
    arguments: dict[str, str] = {}
    for accelerator in ("cpu", "cuda"):
        stages: list[str] = []
        for name, rest in instructions():
            if name == "ARG" and not stages:
                key, _, value = rest.partition("=")
                arguments[key] = value
            elif name == "FROM":
                told = string.Template(rest).substitute(arguments, ACCELERATOR=accelerator)
                base, _, stage = told.split()
                assert base in stages or re.fullmatch(r"[a-z/]+:[\w.-]+", base)
                stages.append(stage)
            elif copied := re.match(r"--from=(\S+)", rest):
                assert copied[1] in stages
        assert {f"build-{accelerator}", f"run-{accelerator}", "build", "run"} <= set(stages)
        assert stages[-1] == "run"


def test_the_image_is_run_by_a_user_without_rights() -> None:
    users = [rest for name, rest in instructions() if name == "USER"]

    assert users == ["10001"]
    assert "--uid 10001" in (ROOT / "deploy/Dockerfile").read_text()


def test_all_that_the_image_installs_is_pinned() -> None:
    installs = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]

    assert len(installs) == 2
    assert all("--constraint deploy/constraints.txt" in each for each in installs)


def test_the_image_has_the_environment_that_up_gives_its_own_ray() -> None:
    told = dict(
        pair.split("=", 1)
        for name, rest in instructions()
        if name == "ENV"
        for pair in rest.split()
        if pair.startswith("RAY_")
    )

    assert told == RAY_ENVIRONMENT


def unit() -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(UNIT)
    return {name: dict(parser[name]) for name in parser.sections()}


def test_the_agent_has_time_to_drain_before_it_is_killed() -> None:
    service = unit()["Service"]

    drain = re.search(r"--drain-timeout (\d+)", service["ExecStart"])

    assert drain is not None
    assert int(service["TimeoutStopSec"]) >= int(drain[1]) + 10
    # The keeper is told, and tells its agent; told twice, the agent would not drain.
    assert service["KillMode"] == "mixed"
    assert service["KillSignal"] == "SIGTERM"


def test_the_agent_is_started_again_for_ever_and_has_no_key_in_its_arguments() -> None:
    told = unit()

    assert told["Service"]["Restart"] == "always"
    assert told["Unit"]["StartLimitIntervalSec"] == "0"
    assert "EnvironmentFile" in told["Service"]
    assert "key" not in told["Service"]["ExecStart"].lower()


def test_the_command_of_the_unit_has_these_options() -> None:
    (command,) = re.findall(r"^ExecStart=\S+ (.*)$", UNIT.read_text(), re.MULTILINE)
    options = re.findall(r"--[a-z-]+", command)

    done = subprocess.run(
        [sys.executable, "-c", "from deploy.cli import main; main()", "agent", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert options
    assert all(f" {option} " in done.stdout for option in options)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    text = UNIT.read_text()
    copy.write_text(text.replace("/opt/headrace/venv/bin/headrace", sys.executable))

    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
