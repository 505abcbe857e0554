"""The files of ``ray up``: what Ray's own check says of them, and what they promise."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray_checks import check_cluster

from deploy.nodes import read_cluster
from deploy.up import RAY_ENVIRONMENT

ROOT = Path(__file__).parents[2]
AWS = "deploy/cluster.aws.yaml"
LOCAL = "deploy/cluster.local.yaml"
FILES = [AWS, LOCAL]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def start_commands(config: dict[str, Any]) -> list[str]:
    commands = (*config["head_start_ray_commands"], *config["worker_start_ray_commands"])
    return [command for command in commands if "ray start" in command]


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_it(name: str) -> None:
    check_cluster(read(name))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (AWS, {"head_node_typ": "head"}),
        (LOCAL, {"setup_comands": []}),
        (AWS, {"available_node_types": {"head": {"resources": {"CPU": 0.5}, "node_config": {}}}}),
    ],
)
def test_ray_refuses_what_it_does_not_know(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_cluster(read(name) | change)


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_is_copied_is_there(name: str) -> None:
    own = {"dist", "keys", "~/.ray/auth_token"}  # the operator makes them, as the file says first

    sources = set(read(name)["file_mounts"].values())

    assert own < sources
    assert all((ROOT / source).is_file() for source in sources - own)


@pytest.mark.parametrize("name", FILES)
def test_no_secret_is_in_it_and_the_dashboard_is_for_the_node_alone(name: str) -> None:
    config = read(name)

    head, worker = start_commands(config)

    assert "--dashboard-host=127.0.0.1" in head
    assert "RAY_AUTH_TOKEN" not in yaml.safe_dump(config)
    assert all('HEADRACE_KEYS="$(cat ~/headrace/keys)"' in each for each in (head, worker))


def test_nodes_have_the_environment_that_up_gives_its_own_ray() -> None:
    lines = (ROOT / "deploy/ray.env").read_text().splitlines()

    told = dict(line.split("=", 1) for line in lines if not line.startswith("#"))

    assert told == {"RAY_AUTH_MODE": "token", **RAY_ENVIRONMENT}


def test_the_version_that_is_installed_is_this_one() -> None:
    project = (ROOT / "pyproject.toml").read_text()

    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)

    assert (ROOT / "deploy/version").read_text().strip() == version


def test_no_agent_is_put_on_the_head() -> None:
    assert all("--num-cpus=0" in start_commands(read(name))[0] for name in FILES)
    assert read(AWS)["available_node_types"]["head"]["resources"] == {"CPU": 0}


def test_all_machines_of_ones_own_are_declared_and_workers_on_aws_start_from_zero() -> None:
    assert read_cluster(read(LOCAL)).least == len(read(LOCAL)["provider"]["worker_ips"])
    assert read_cluster(check_cluster(read(LOCAL))) == read_cluster(read(LOCAL))
    assert read_cluster(check_cluster(read(AWS))).types == {}


def test_workers_of_ones_own_are_started_by_the_autoscaler_that_can() -> None:
    """What ``ray up`` puts before the command is the other one."""
    head, _ = start_commands(read(LOCAL))

    assert head.index("RAY_enable_autoscaler_v2=0") < head.index("ray start")
