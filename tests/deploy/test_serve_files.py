"""serve.yaml and rayservice.yaml: known to Serve at every level, and settings of ours."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray_checks import DEPLOYMENT, IMPORT_PATH, check_serve

from deploy.settings import CLIENT_PORT, BalancerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"


def serve_file() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "serve.yaml").read_text())


def service() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())


def service_file() -> dict[str, Any]:
    return yaml.safe_load(service()["spec"]["serveConfigV2"])


@pytest.mark.parametrize("read", [serve_file, service_file])
def test_serve_knows_every_key(read: Any) -> None:
    check_serve(read())


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ((), "bogus"),
        (("http_options",), "http_options.bogus"),
        (("logging_config",), "bogus"),
        (("applications", 0), "applications.bogus"),
        (("applications", 0, "deployments", 0), "applications.deployments.bogus"),
        (
            ("applications", 0, "deployments", 0, "ray_actor_options"),
            "applications.deployments.ray_actor_options.bogus",
        ),
    ],
)
def test_a_wrong_key_is_found_at_every_level(path: tuple[Any, ...], named: str) -> None:
    config = serve_file()
    inner: Any = config
    for step in path:
        inner = inner[step]
    inner["bogus"] = 1

    with pytest.raises((AssertionError, ValidationError), match=named):
        check_serve(config)


@pytest.mark.parametrize("read", [serve_file, service_file])
def test_the_arguments_are_settings_of_the_balancer(read: Any) -> None:
    (application,) = read()["applications"]

    settings = BalancerSettings.model_validate(application["args"])

    assert settings.agent_host == "node"
    assert set(settings.fleets) == {"cpu", "gpu"}
    assert all(fleet.min == 0 for fleet in settings.fleets.values())


def test_a_wrong_argument_is_refused() -> None:
    (application,) = serve_file()["applications"]

    with pytest.raises(ValidationError, match="bufer_size"):
        BalancerSettings.model_validate(application["args"] | {"bufer_size": 1})


@pytest.mark.parametrize("read", [serve_file, service_file])
def test_what_it_names_is_there(read: Any) -> None:
    config = read()

    (application,) = config["applications"]
    (deployment,) = application["deployments"]

    assert application["import_path"] == IMPORT_PATH
    assert deployment["name"] == DEPLOYMENT.name
    assert config["http_options"]["port"] == CLIENT_PORT


def test_no_stream_is_cut_by_a_time_limit_of_serve() -> None:
    assert "request_timeout_s" not in serve_file()["http_options"]


def test_on_kubernetes_it_is_the_same_but_for_the_address_that_it_listens_on() -> None:
    config, on_kubernetes = serve_file(), service_file()

    assert on_kubernetes["http_options"].pop("host") == "0.0.0.0"
    assert config["http_options"].pop("host") == "127.0.0.1"
    assert on_kubernetes == config


def test_groups_of_pods_have_the_labels_that_are_asked_for() -> None:
    cluster = service()["spec"]["rayClusterConfig"]
    (application,) = service_file()["applications"]
    (deployment,) = application["deployments"]
    fleets = BalancerSettings.model_validate(application["args"]).fleets

    head = cluster["headGroupSpec"]["labels"]
    groups = [group["labels"] for group in cluster["workerGroupSpecs"]]

    assert head == deployment["ray_actor_options"]["label_selector"]
    assert groups == [fleet.resources.labels for fleet in fleets.values()]


def test_pods_want_a_token_and_have_the_keys_from_a_secret() -> None:
    cluster = service()["spec"]["rayClusterConfig"]

    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    environments = [
        variable
        for group in groups
        for container in group["template"]["spec"]["containers"]
        for variable in container["env"]
    ]

    assert cluster["authOptions"] == {"mode": "token"}
    assert [each["name"] for each in environments] == ["HEADRACE_KEYS"] * len(groups)
    assert all("secretKeyRef" in each["valueFrom"] for each in environments)


def test_the_versions_of_ray_are_the_same() -> None:
    version = service()["spec"]["rayClusterConfig"]["rayVersion"]

    assert f"ray=={version}" in (DEPLOY / "constraints.txt").read_text().splitlines()


def test_no_agent_is_put_on_the_head() -> None:
    cluster = service()["spec"]["rayClusterConfig"]

    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
