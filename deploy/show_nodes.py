"""``headrace nodes``: have the nodes that the file of ``ray up`` declares joined the cluster?

Ray is asked on the head: over ``ray exec`` from where ``ray up`` was typed, or where this runs.
Workers that are missing on premises are looked at over ssh, all at once.
"""

import asyncio
import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from common.errors import HeadraceError
from deploy.nodes import (
    NODE_TYPE,
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
    missing_workers,
    read_cluster,
    report,
)
from deploy.terminal import plain

LOOK_INTERVAL = 2.0

HEAD_TIMEOUT = 90.0
"""Seconds for ``ray exec``, with the start of Python and of Ray's driver on the head."""

CONNECT_TIMEOUT = 5.0

LOOK_TIMEOUT = 30.0
"""Seconds for all that is looked up on one node."""

AT_ONCE = 32
"""Nodes that are looked at."""

MARK = "headrace-found"

# As Ray runs its own commands there: in a login shell, which may print what it likes.
LOOK = (
    f'echo "{MARK} version $(ray --version 2>/dev/null)"; '
    f"ps -eo args= | sed -n 's,^[^ ]*/raylet .*--gcs-address=\\([^ ]*\\).*,{MARK} cluster \\1,p'"
)

ClusterFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CLUSTER.yaml]",
        help="The file that ray up was given. Without it the nodes that have joined are listed.",
    ),
]
Here = Annotated[
    bool,
    typer.Option("--here", help="Ask the Ray of this machine, not the file's head over ssh."),
]
Wait = Annotated[
    float, typer.Option("--wait", min=0, max=86400, help="Seconds until all must be there.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, on one line.")]


def show_nodes(
    file: Path | None, *, here: bool, wait: float, as_json: bool, console: Console
) -> int:
    """The exit status: 1 if nodes are missing. Raises ``HeadraceError``."""
    if file is None:
        _print_cluster(ask_here(), as_json=as_json, console=console)
        return 0
    declared = read_file(file)
    end = time.monotonic() + wait
    while True:
        cluster = ask_here() if here else ask_head(file)
        addresses = {name: _resolve(name) for name in declared.workers}
        missing = missing_workers(declared, addresses, cluster)
        told = look_for(declared, addresses, cluster, missing)
        if told.is_complete or time.monotonic() + LOOK_INTERVAL > end:
            break
        time.sleep(LOOK_INTERVAL)
    if as_json:
        print(json.dumps(asdict(told)))  # noqa: T201
    else:
        _print_report(told, console)
    return 0 if told.is_complete else 1


def read_file(file: Path) -> Declared:
    try:
        return read_cluster(yaml.safe_load(file.read_text()))
    except OSError as error:
        raise HeadraceError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError, ClusterFileError) as error:
        raise HeadraceError(f"{file}: {' '.join(str(error).split())}") from error


def look_for(
    declared: Declared, addresses: Mapping[str, str], cluster: Cluster, missing: Iterable[str]
) -> Report:
    return report(declared, addresses, cluster, asyncio.run(look_at(missing, declared.access)))


def ask_here() -> Cluster:
    """The Ray that ``RAY_ADDRESS`` names or that ``ray start`` has started on this machine."""
    from deploy.up import running_ray

    address = running_ray()
    if address is None:
        raise HeadraceError("no Ray runs on this machine")
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        try:
            gcs: str = ray.get_runtime_context().gcs_address
            nodes = tuple(_node(each) for each in ray.nodes())
            return Cluster(version=ray.__version__, address=gcs, nodes=nodes)
        finally:
            ray.shutdown()
    except (RayError, RuntimeError, OSError, ValueError) as error:
        raise HeadraceError(f"Ray does not tell: {' '.join(str(error).split())}") from error


def _node(told: Mapping[str, Any]) -> Node:
    return Node(
        address=told["NodeManagerAddress"],
        is_alive=told["Alive"],
        is_head="node:__internal_head__" in told["Resources"],
        type=told.get("Labels", {}).get(NODE_TYPE, ""),
        death=told.get("DeathReasonMessage") or "",
    )


def ask_head(file: Path) -> Cluster:
    """Over ssh, as Ray does it."""
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "exec", str(file), "headrace nodes --json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HEAD_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HeadraceError(f"the head does not answer within {HEAD_TIMEOUT:g} s") from error
    for line in done.stdout.splitlines():
        if line.startswith('{"version"'):
            return parse_cluster(line)
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    # `ray exec` ends with the whole ssh command.
    told = [
        line for line in said if line and not line.startswith(("ssh -", "Error: Command failed"))
    ]
    reason = told[-1] if told else f"status {done.returncode}"
    raise HeadraceError(f"the head does not tell which nodes it has: {reason}")


def parse_cluster(line: str) -> Cluster:
    """What ``headrace nodes --json`` prints."""
    try:
        told = json.loads(line)
        nodes = tuple(Node(**each) for each in told["nodes"])
        return Cluster(version=told["version"], address=told["address"], nodes=nodes)
    except (ValueError, TypeError, KeyError) as error:
        raise HeadraceError(f"the head has another version of headrace: {error}") from error


async def look_at(names: Iterable[str], access: Access) -> dict[str, Finding]:
    places = asyncio.Semaphore(AT_ONCE)

    async def look(name: str) -> Finding:
        async with places:
            return await _look(name, access)

    names = tuple(names)
    found = await asyncio.gather(*(look(name) for name in names))
    return dict(zip(names, found, strict=True))


async def _look(name: str, access: Access) -> Finding:
    ssh = shutil.which("ssh")
    if ssh is None:
        return Refused("there is no ssh command on this machine")
    options = _ssh_options(access)
    target = name if access.user is None else f"{access.user}@{name}"
    if access.proxy is None:
        silence = await _knock(ssh, options, target)
        if silence is not None:
            return Silent(silence)
    status, out, err = await _run(
        ssh, *options, target, "bash", "--login", "-ic", shlex.quote(LOOK)
    )
    found = [line.split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith(MARK)]
    if not found:
        last = next((line for line in reversed(err.splitlines()) if line.strip()), "")
        return Refused(last.strip() or f"it ended with status {status}")
    return _seen(found)


def _seen(found: Iterable[list[str]]) -> Seen:
    version: str | None = None
    clusters: list[str] = []
    for kind, *rest in found:
        if kind == "version" and rest:
            version = rest[0].rsplit(maxsplit=1)[-1]  # ray, version 2.60.0
        elif kind == "cluster" and rest:
            clusters.append(rest[0].strip())
    return Seen(version, tuple(clusters))


async def _knock(ssh: str, options: Iterable[str], target: str) -> str | None:
    """Why nothing answers where ssh should, which its own configuration says; None: it does."""
    _, out, _ = await _run(ssh, "-G", *options, target)
    pairs = (line.partition(" ") for line in out.splitlines())
    told = {key: value for key, _, value in pairs}
    if told.get("proxyjump", "none") != "none" or told.get("proxycommand", "none") != "none":
        return None
    host, port = told.get("hostname", target.rpartition("@")[2]), told.get("port", "22")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        return f"no answer from {host}, port {port} (ssh), within {CONNECT_TIMEOUT:g} s"
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        return f"{host}, port {port} (ssh): {reason or error}"
    writer.close()
    return None


def _ssh_options(access: Access) -> list[str]:
    options = [
        "-o", "BatchMode=yes",
        "-o", f"ConnectTimeout={CONNECT_TIMEOUT:g}",
        # As Ray does it, whose nodes get new keys under old addresses. No secret is sent.
        "-o", "StrictHostKeyChecking=no",
        "-o", "UserKnownHostsFile=/dev/null",
        "-o", "LogLevel=ERROR",
    ]  # fmt: skip
    if access.key is not None:
        options += ["-i", str(Path(access.key).expanduser())]
    if access.proxy is not None:
        options += ["-o", f"ProxyCommand={access.proxy}"]
    return options


async def _run(*command: str) -> tuple[int, str, str]:
    """Status, output and errors; one that does not end is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LOOK_TIMEOUT):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, "", f"no end within {LOOK_TIMEOUT:g} s"
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def _resolve(name: str) -> str:
    """Ray's nodes tell their IP address."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name  # it will be told that it cannot be reached


def _print_cluster(cluster: Cluster, *, as_json: bool, console: Console) -> None:
    if as_json:
        print(json.dumps(asdict(cluster)))  # noqa: T201
        return
    for node in cluster.nodes:
        state = "alive" if node.is_alive else f"dead: {node.death}"
        words = [node.address, *(["head"] if node.is_head else []), node.type, state]
        _say(console, "  ".join(word for word in words if word))


def _print_report(told: Report, console: Console) -> None:
    for absent in told.absent:
        _say(console, f"{absent.node}: {absent.reason}")
    rest = "" if told.is_complete else "; not all that should be there"
    _say(console, f"nodes that have joined: {told.joined}{rest}")


def _say(console: Console, line: str) -> None:
    console.print(Text(plain(line)), soft_wrap=True)
