"""A Ray whose autoscaler adds nodes, which are processes on this machine: Ray's own ``fake_multinode``.

Ray's ``AutoscalingCluster`` would end every Ray on the machine (``ray stop --force``), so the head is
started here, by itself.
"""

import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from cluster import ENVIRONMENT, PATIENCE
from product import Command, free_port
from ray.autoscaler._private import fake_multi_node

HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""The only name that the provider knows for it."""

HEAD_TYPE = "ray.head.default"
"""So is this one, of its type."""

UNUSED: dict[str, Any] = {
    "auth": {},
    "docker": {},
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
}

MEMORY = 80 * 2**20


def _config(address: str, *, cpus: int, most: int) -> dict[str, Any]:
    worker = {
        "resources": {"CPU": cpus, "object_store_memory": MEMORY},
        "labels": {"pool": "bought"},
        "node_config": {},
        "min_workers": 0,
        "max_workers": most,
    }
    return {
        **UNUSED,
        "cluster_name": "fake",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": HEAD,
            "gcs_address": address,
        },
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: {
                "resources": {"CPU": 0},
                "labels": {"pool": "balancers"},
                "node_config": {},
                "max_workers": 0,
            },
            "worker": worker,
        },
    }


@contextlib.contextmanager
def start_autoscaling(*, cpus: int, most: int) -> Generator[str]:
    """A head without room, and an autoscaler that adds up to ``most`` nodes with ``cpus`` each when
    there is demand, and takes them away when they have been idle for three seconds. Its address.
    """
    port = free_port()
    with _example(), tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        config = Path(folder) / "cluster.yaml"
        address = f"127.0.0.1:{port}"
        config.write_text(json.dumps(_config(address, cpus=cpus, most=most)))
        command = Command(
            *("start", "--head", "--block", f"--port={port}", "--num-cpus=0"),
            *("--node-ip-address=127.0.0.1", "--include-dashboard=false"),
            *(f"--object-store-memory={MEMORY}", f"--temp-dir={folder}"),
            *("--labels=pool=balancers", f"--autoscaling-config={config}", "--disable-usage-stats"),
            program=(str(Path(sys.executable).parent / "ray"),),
            environment={
                **ENVIRONMENT,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": HEAD,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
            },
        )
        try:
            command.expect("Ray runtime started")
            _until_it_listens(port)
            yield address
        finally:
            command.kill_the_rest()  # stopped in order it takes half a minute
            command.ended()


def _until_it_listens(port: int) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        assert time.monotonic() < end, "Ray does not listen"


@contextlib.contextmanager
def _example() -> Generator[None]:
    """Ray 2.60 reads a file of its own that its wheel has not. What is in it does not matter here."""
    path = Path(fake_multi_node.__path__[0]) / "example.yaml"
    if path.exists():
        yield
        return
    path.write_text(json.dumps(_config("127.0.0.1:6379", cpus=1, most=1)))
    try:
        yield
    finally:
        path.unlink()
