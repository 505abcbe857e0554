"""A Ray cluster of several nodes on this machine, kept by this process: see ``cluster.py``.

It reads commands from standard input and writes answers to standard output, a line of JSON each. It
ends with its input, and all nodes with it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray as untyped_ray
from ray import serve as untyped_serve
from ray._private import state as untyped_state
from ray.cluster_utils import Cluster

from deploy.app import BalancerReplica, most_ongoing
from deploy.settings import BalancerSettings
from deploy.up import APPLICATION

ray: Any = untyped_ray
serve: Any = untyped_serve
state: Any = untyped_state

BALANCERS = "balancers"
"""The label of the pool of nodes that they run on."""

NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


class Host:
    def __init__(self, http_port: int, address: str | None) -> None:
        """``address``: of a Ray that runs; None: it is started here."""
        os.chdir("/")  # Ray has its workers look for modules in the present folder first
        self._cluster: Any = None
        if address is None:
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 0, "labels": {"pool": BALANCERS}, **NODE},
            )
            address = self._cluster.address
        self._nodes: dict[str, Any] = {}
        ray.init(address=address, log_to_driver=False, namespace=APPLICATION)
        serve.start(
            proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http_port}
        )

    def add(self, **options: Any) -> str:
        node = self._cluster.add_node(**NODE, **options)
        self._nodes[node.node_id] = node
        return node.node_id

    def kill_node(self, node: str) -> None:
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)

    def drain_node(self, node: str) -> None:
        """As an operator does, there."""
        options = {
            "address": ray.get_runtime_context().gcs_address,
            "node-id": node,
            "reason": "DRAIN_NODE_REASON_PREEMPTION",
            "reason-message": "maintenance",
            "deadline-remaining-seconds": "600",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        program = Path(sys.executable).with_name("ray")
        subprocess.run([program, "drain-node", *words], check=True, capture_output=True)

    def deploy(self, settings: dict[str, Any], replicas: int = 1, path: str | None = None) -> None:
        """``path``: of another copy of the project; None: of this one."""
        told = BalancerSettings.model_validate(settings)
        environment = {"env_vars": {"PYTHONPATH": path}} if path else {}
        replica: Any = BalancerReplica
        application = replica.options(
            num_replicas=replicas,
            max_ongoing_requests=most_ongoing(told.limits),
            max_replicas_per_node=1,
            ray_actor_options={
                "num_cpus": 0,
                "label_selector": {"pool": BALANCERS},
                "runtime_env": environment,
            },
        ).bind(told, int(time.time() * 1000))
        serve.run(application, name=APPLICATION, route_prefix="/")

    def nodes(self) -> list[str]:
        """The pools of those that live."""
        return [node["Labels"].get("pool", "") for node in ray.nodes() if node["Alive"]]

    def departures(self) -> int:
        """How often a balancer has lost the link of an agent, by its log."""
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())
        return sum(file.read_text().count(" left: ") for file in folder.glob("worker-*.err"))

    def actors(self) -> list[dict[str, Any]]:
        """Those that live: name, node and process."""
        table: dict[str, dict[str, Any]] = state.actors()
        return [
            {
                "name": each["Name"],
                "class": each["ActorClassName"],
                "node": each["Address"]["NodeID"],
                "pid": each["Pid"],
            }
            for each in table.values()
            if each["State"] == "ALIVE"
        ]

    def ongoing(self) -> list[int]:
        """How many requests each balancer has, by Serve's own count."""
        names = [each["name"] for each in self.actors() if "BalancerReplica" in each["class"]]
        replicas = [ray.get_actor(name, namespace="serve") for name in names]
        return ray.get([replica.get_num_ongoing_requests.remote() for replica in replicas])

    def end(self) -> None:
        serve.shutdown()
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    host = Host(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            answer = {"answer": getattr(host, name)(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    host.end()


if __name__ == "__main__":
    main()
