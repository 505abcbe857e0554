"""Which nodes are missing, and why, as tables."""

import re

import pytest

from deploy.nodes import (
    Absent,
    Access,
    Cluster,
    ClusterFileError,
    Declared,
    Finding,
    Node,
    Refused,
    Report,
    Seen,
    Silent,
    explain,
    missing_workers,
    read_cluster,
    report,
)

GCS = "10.0.0.1:6379"
HEAD = Node("10.0.0.1", is_alive=True, is_head=True)
HERE = Seen("2.60.0", (GCS,))


def cluster(*nodes: Node) -> Cluster:
    return Cluster("2.60.0", GCS, (HEAD, *nodes))


@pytest.mark.parametrize(
    ("file", "declared"),
    [
        (
            {"provider": {"type": "local", "head_ip": "a", "worker_ips": ["b", "c"]}},
            Declared(workers=("b", "c"), least=2),
        ),
        (
            {
                "provider": {"type": "local", "worker_ips": ["b", "c"]},
                "min_workers": 1,
                "auth": {"ssh_user": "u", "ssh_private_key": "~/k", "ssh_proxy_command": "p"},
            },
            Declared(workers=("b", "c"), least=1, access=Access("u", "~/k", "p")),
        ),
        (  # as it is found on the head
            {
                "provider": {"type": "local", "worker_ips": ["b", "c"]},
                "available_node_types": {"local.cluster.node": {"min_workers": 1}},
                "head_node_type": "local.cluster.node",
            },
            Declared(workers=("b", "c"), least=1),
        ),
        (
            {
                "provider": {"type": "aws"},
                "available_node_types": {"head": {}, "cpu": {"min_workers": 2}, "gpu": {}},
                "head_node_type": "head",
            },
            Declared(types={"cpu": 2}),
        ),
    ],
)
def test_what_is_declared_is_read(file: object, declared: Declared) -> None:
    assert read_cluster(file) == declared


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (None, "the file"),
        ({}, "provider"),
        ({"provider": {"type": "local"}}, "worker_ips"),
        ({"provider": {"type": "local", "worker_ips": "b"}}, "worker_ips"),
        ({"provider": {"type": "local", "worker_ips": []}, "min_workers": "x"}, "min_workers"),
        ({"provider": {"type": "aws"}, "available_node_types": {"a": 1}}, "a is not a mapping"),
    ],
)
def test_another_file_is_refused_by_name(file: object, named: str) -> None:
    with pytest.raises(ClusterFileError, match=named):
        read_cluster(file)


def test_a_worker_is_known_by_its_address_whatever_it_is_called() -> None:
    declared = Declared(workers=("box-1", "10.0.0.3", "10.0.0.4"), least=3)
    there = cluster(Node("10.0.0.2", is_alive=True), Node("10.0.0.4", is_alive=False))

    assert missing_workers(declared, {"box-1": "10.0.0.2"}, there) == ("10.0.0.3", "10.0.0.4")


LOST = Node("10.0.0.2", is_alive=False, death="health check failed")


@pytest.mark.parametrize(
    ("finding", "nodes", "reason"),
    [
        (Silent("timed out"), (), "cannot be reached: timed out"),
        (Refused("Permission denied"), (), "ssh is refused: Permission denied"),
        (Seen(None, (GCS,)), (), "Ray is not installed"),
        (Seen("2.59.0", (GCS,)), (), "has Ray 2.59.0, the head 2.60.0"),
        (Seen("2.60.0"), (), "Ray does not run there$"),
        (Seen("2.60.0"), (LOST,), "does not run there; it had joined: health check failed"),
        (Seen("2.60.0", ("10.9.9.9:6379",)), (), "another cluster, that of 10.9.9.9:6379"),
        (HERE, (LOST,), "the head has lost it; it had joined: health check failed"),
        (HERE, (), "names this cluster"),
        (Seen("2.60.0", ("10.9.9.9:6379", GCS)), (), "names this cluster"),
    ],
)
def test_the_first_reason_that_holds_is_told(
    finding: Finding, nodes: tuple[Node, ...], reason: str
) -> None:
    assert re.search(reason, explain(finding, "10.0.0.2", cluster(*nodes)))


def test_all_that_is_declared_is_there() -> None:
    declared = Declared(workers=("10.0.0.2",), least=1)

    told = report(declared, {}, cluster(Node("10.0.0.2", is_alive=True)), {})

    assert told == Report(joined=2, absent=(), is_complete=True)


def test_fewer_workers_than_addresses_are_enough_where_the_file_says_so() -> None:
    declared = Declared(workers=("10.0.0.2", "10.0.0.3"), least=1)

    told = report(
        declared, {}, cluster(Node("10.0.0.2", is_alive=True)), {"10.0.0.3": Silent("timed out")}
    )

    assert told == Report(
        2, (Absent("10.0.0.3", "cannot be reached: timed out"),), is_complete=True
    )


def test_too_few_nodes_of_a_type_are_named_by_it() -> None:
    declared = Declared(types={"cpu": 2, "gpu": 1})
    nodes = [
        Node("10.0.0.2", is_alive=True, type="cpu"),
        Node("10.0.0.3", is_alive=False, type="cpu"),
        Node("10.0.0.4", is_alive=True, type="gpu"),
    ]

    told = report(declared, {}, cluster(*nodes), {})

    assert not told.is_complete
    (absent,) = told.absent
    assert absent.node == "cpu"
    assert absent.reason.startswith("1 of at least 2 have joined")
