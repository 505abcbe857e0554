"""Which of a cluster's declared nodes have joined it, and why the others have not. No I/O here.

Declared is what the file of ``ray up`` says: on premises the address of each worker, elsewhere how
many nodes of each type there are at least. ``ray up`` itself sees to the head only; workers are
started by the autoscaler later, and what goes wrong with them stands in its log.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, assert_never

from common.errors import HeadraceError

NODE_TYPE = "ray.io/node-group"
"""The label by which a node of Ray says what type of the file it is."""


class ClusterFileError(HeadraceError):
    """The file is none that ``ray up`` takes."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a node is reached by ssh."""

    user: str | None = None
    key: str | None = None
    proxy: str | None = None
    """A command; the node cannot be reached directly then."""


@dataclass(frozen=True, slots=True)
class Declared:
    workers: tuple[str, ...] = ()
    """Addresses or names, on premises."""
    least: int = 0
    """So many of those workers must be there."""
    types: Mapping[str, int] = field(default_factory=dict[str, int])
    """Elsewhere: how many nodes of each type are there at least, without the head."""
    access: Access = Access()


@dataclass(frozen=True, slots=True)
class Node:
    """As Ray tells of it."""

    address: str
    is_alive: bool
    is_head: bool = False
    type: str = ""
    death: str = ""
    """Why it is not alive, in Ray's words."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What Ray says."""

    version: str
    address: str
    """``HOST:PORT`` of its GCS."""
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing can be reached where ssh should listen."""

    error: str


@dataclass(frozen=True, slots=True)
class Refused:
    """There is somebody, but ssh does not let us in."""

    error: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found on the node."""

    version: str | None
    """Of Ray; None: there is no ``ray`` command."""
    clusters: tuple[str, ...] = ()
    """For each raylet that runs there, the address of the GCS that it was told."""


Finding: TypeAlias = Silent | Refused | Seen


@dataclass(frozen=True, slots=True)
class Absent:
    node: str
    """The address of a worker, or the type of which there are too few."""
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    joined: int
    """Nodes that are alive, with the head."""
    absent: tuple[Absent, ...]
    is_complete: bool


def read_cluster(file: object) -> Declared:
    """``file``: the YAML that was read. Raises ``ClusterFileError``."""
    top = _mapping(file, "the file")
    provider = _mapping(top.get("provider"), "provider")
    access = _access(_mapping(top.get("auth") or {}, "auth"))
    types = _mapping(top.get("available_node_types") or {}, "available_node_types")
    if provider.get("type") != "local":
        head = top.get("head_node_type")
        least = {name: _least(each, name) for name, each in types.items() if name != head}
        return Declared(types={name: n for name, n in least.items() if n}, access=access)
    workers = provider.get("worker_ips")
    if not isinstance(workers, Sequence) or isinstance(workers, str):
        raise ClusterFileError("provider.worker_ips is no list of addresses")
    names = tuple(str(each) for each in workers)
    told = top.get("min_workers")
    if told is None and types:  # on the head: as Ray has filled it in
        told = _least(next(iter(types.values())), "the type")
    least = len(names) if told is None else _count(told, "min_workers")
    return Declared(workers=names, least=min(least, len(names)), access=access)


def missing_workers(
    declared: Declared, addresses: Mapping[str, str], cluster: Cluster
) -> tuple[str, ...]:
    """Those that have not joined. ``addresses``: the IP address of each by its name."""
    there = {node.address for node in cluster.nodes if node.is_alive}
    return tuple(name for name in declared.workers if addresses.get(name, name) not in there)


def report(
    declared: Declared,
    addresses: Mapping[str, str],
    cluster: Cluster,
    findings: Mapping[str, Finding],
) -> Report:
    """``findings``: for each of the ``missing_workers``."""
    absent = [
        Absent(name, explain(findings[name], addresses.get(name, name), cluster))
        for name in missing_workers(declared, addresses, cluster)
    ]
    short = _short_types(declared.types, cluster.nodes)
    return Report(
        joined=sum(node.is_alive for node in cluster.nodes),
        absent=(*absent, *short),
        is_complete=not short and len(declared.workers) - len(absent) >= declared.least,
    )


def explain(finding: Finding, address: str, cluster: Cluster) -> str:
    """Why a worker has not joined; the first of these that holds:

    1. it cannot be reached; 2. ssh does not let us in; 3. there is no Ray; 4. it is another
    version, which cannot join; 5. Ray does not run; 6. it is part of another cluster; 7. it was
    part of this one and was lost; 8. none of these.
    """
    match finding:
        case Silent(error):
            return f"cannot be reached: {error}"
        case Refused(error):
            return f"ssh is refused: {error}"
        case Seen(version=None):
            return "Ray is not installed there, or not found by a login shell"
        case Seen(version, clusters):
            if version != cluster.version:
                return f"has Ray {version}, the head {cluster.version}"
            if not clusters:
                return f"Ray does not run there{_death(address, cluster.nodes)}"
            others = [each for each in clusters if each != cluster.address]
            if len(others) == len(clusters):
                return f"belongs to another cluster, that of {', '.join(others)}"
            if lost := _death(address, cluster.nodes):
                return f"Ray runs there, but the head has lost it{lost}"
            return (
                "Ray runs there and names this cluster; it may have another address than "
                f"{address}, or ports are closed (its log: /tmp/ray/session_latest/logs/raylet.out)"
            )
        case _:
            assert_never(finding)


def _short_types(types: Mapping[str, int], nodes: Iterable[Node]) -> list[Absent]:
    there = Counter(node.type for node in nodes if node.is_alive and not node.is_head)
    return [
        Absent(
            name,
            f"{there[name]} of at least {least} have joined; why, says the autoscaler's log on the "
            "head (ray monitor)",
        )
        for name, least in types.items()
        if there[name] < least
    ]


def _death(address: str, nodes: Iterable[Node]) -> str:
    """The last one that had this address."""
    deaths = [node.death for node in nodes if node.address == address and not node.is_alive]
    return f"; it had joined: {deaths[-1] or 'no reason is known'}" if deaths else ""


def _access(auth: Mapping[str, Any]) -> Access:
    return Access(
        user=auth.get("ssh_user"),
        key=auth.get("ssh_private_key"),
        proxy=auth.get("ssh_proxy_command"),
    )


def _least(node_type: object, name: str) -> int:
    return _count(_mapping(node_type, name).get("min_workers", 0), f"min_workers of {name}")


def _count(value: object, what: str) -> int:
    if not isinstance(value, int) or value < 0:
        raise ClusterFileError(f"{what} is no number of nodes: {value!r}")
    return value


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ClusterFileError(f"{what} is not a mapping, as ray up wants it")
    return value
