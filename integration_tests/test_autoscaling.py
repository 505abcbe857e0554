"""Nodes come because agents have no place, and go when the agents have gone: Ray's autoscaler, with nodes that
are processes here.
"""

from collections.abc import Generator

import pytest
from autoscaling import start_autoscaling
from cluster import RayCluster, start_cluster

ROUTE = "/api/v1/continue_from_raw_prompt"
FLEET = {"max": 2, "slots": 2, "resources": {"cpus": 1}, "idle_time": 1}


@pytest.fixture(scope="module")
def cluster() -> Generator[RayCluster]:
    with start_autoscaling(cpus=1, most=2) as address, start_cluster(address=address) as cluster:
        cluster.do("deploy", settings={"agent_port": 0, "engine": "echo"})
        yield cluster


def test_a_request_at_zero_brings_an_agent_and_its_node_and_both_go_again(
    cluster: RayCluster,
) -> None:
    cluster.put_fleet("echo", **FLEET)
    assert cluster.do("nodes") == ["balancers"]

    answer = cluster.client.post(ROUTE, json={"raw_prompt": "Hi", "max_tokens": 2})

    assert '"Done"' in answer.text
    assert cluster.do("nodes").count("bought") == 1
    (agent,) = cluster.until_fleet("echo", lambda now: now["ready"] == 1)["agents"]
    assert agent["seconds"]["node"] > agent["seconds"]["load"]
    cluster.until_fleet("echo", lambda now: now["seen"] == 0)
    cluster.until_nodes(lambda pools: pools == ["balancers"])


def test_room_for_an_agent_is_there_before_it_is_wanted_if_it_is_asked_for(
    cluster: RayCluster,
) -> None:
    cluster.put_fleet("echo", **FLEET, spare_nodes=1)

    cluster.until_nodes(lambda pools: "bought" in pools)

    assert cluster.fleet("echo")["seen"] == 0
    cluster.client.delete("/api/v1/fleets/echo").raise_for_status()
    cluster.until_nodes(lambda pools: pools == ["balancers"])
