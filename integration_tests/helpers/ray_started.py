"""A Ray that an operator has started: ``ray start``, with a folder and ports of its own."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from product import START_TIMEOUT, Command, free_port

from deploy.up import RAY_ENVIRONMENT

BESIDE_PYTHON = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class StartedRay:
    environment: dict[str, str]
    """Of whoever is to find it, and may talk to it."""

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of Ray's, of Serve's or of ours, to its end."""
        program, *arguments = command
        return subprocess.run(
            [str(BESIDE_PYTHON / program), *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
            check=False,
        )


@contextmanager
def start_ray(environment: Mapping[str, str], **labels: str) -> Generator[StartedRay]:
    """One node on the loopback interface, with a dashboard, for which a token is wanted."""
    folder = tempfile.mkdtemp(prefix="hr-")  # short: Ray makes sockets below it
    port, dashboard, client = free_port(), free_port(), free_port()
    told = {
        **RAY_ENVIRONMENT,
        **environment,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_TMPDIR": folder,
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "HOME": folder,  # no file of the user's is read or written
    }
    command = Command(
        *("start", "--head", "--block", "--num-cpus=4", "--object-store-memory=83886080"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client}"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        f"--dashboard-agent-listen-port={free_port()}",
        f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
        # Ray puts the folder that it is started in before all others where its processes look for
        # modules: not that of our sources, which would hide another version.
        program=("env", f"--chdir={folder}", str(BESIDE_PYTHON / "ray")),
        environment=told,
    )
    try:
        command.expect("--block")
        yield StartedRay(told)
    finally:
        command.kill_the_rest()  # asked to stop, Ray may take half a minute
        command.ended()
        shutil.rmtree(folder, ignore_errors=True)
