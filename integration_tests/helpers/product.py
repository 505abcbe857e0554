"""The running product, seen from outside: commands, their output, and questions over HTTP."""

import contextlib
import json
import os
import queue
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

HEADRACE = str(Path(sys.executable).parent / "headrace")

START_TIMEOUT = 120.0
STOP_TIMEOUT = 60.0

FOLDER = re.compile(r"/tmp/headrace-\w+")
"""Where a product keeps what is temporary."""


_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_own = range(20_000 + _worker, 32_000, _workers)
_ports = iter(random.SystemRandom().sample(_own, len(_own)))
"""Not those that systems give to whoever asks for any (Linux: from 32768 on). Ray asks for many, and
would now and then take one before it is used. Nor those of tests that run at the same time.
"""


def free_port() -> int:
    """Another one each time."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("all have been used")


def folders_in_use() -> set[Path]:
    """The temporary folders of all products that run, which their command lines name."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= set(FOLDER.findall((process / "cmdline").read_text()))
    return {Path(name) for name in found}


class Command:
    """A ``headrace`` command that runs, and all that it has started."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        program: tuple[str, ...] = (HEADRACE,),
        stdin: int | None = None,
    ) -> None:
        """``environment``: what it has beside ours. ``stdin``: as ``subprocess`` takes it; a pipe is
        closed by ``ended``, which must be called then.
        """
        self.mark = f"HEADRACE_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [*program, *arguments],
            # A Ray of its own.
            env={**os.environ, "RAY_ADDRESS": "local", **(environment or {}), name: value},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that its group can be signalled and not ours
        )
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=[self.process.stdout], daemon=True)
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self.lines.append(line.rstrip("\n"))
                self._new.put(self.lines[-1])
        self._new.put(None)

    def expect(self, text: str) -> str:
        """Wait for a line with this text in it."""
        while True:
            line = self._new.get(timeout=START_TIMEOUT)
            assert line is not None, f"ended without {text!r}: {self.lines}"
            if text in line:
                return line

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()

    def stop_group(self, number: signal.Signals) -> int:
        """As a terminal's Ctrl-C does it, or ``timeout``."""
        os.killpg(self.process.pid, number)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end and all of its output; return its status."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        status = self.process.wait(STOP_TIMEOUT)
        self._reader.join(STOP_TIMEOUT)
        return status

    def processes(self) -> list[str]:
        """The command lines of all that it has started and that still runs."""
        return [line for _, line in self.running()]

    def running(self) -> list[tuple[int, str]]:
        """The same, with their numbers."""
        found: list[tuple[int, str]] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_text().replace("\0", " ")
                    found.append((int(folder.name), line))
        return found

    def folders(self) -> set[Path]:
        """Where it keeps what is temporary, as long as it runs."""
        return {Path(name) for name in FOLDER.findall(" ".join(self.processes()))}

    def kill_the_rest(self) -> None:
        """Whatever a failed test has left: only what carries our mark, and Ray's folders, which the
        first process would have removed.
        """
        folders = self.folders()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)


@dataclass
class Up:
    """A running ``headrace up``, and questions to it."""

    command: Command
    port: int
    agent_port: int
    key: str | None = None
    """For management."""
    tls: ssl.SSLContext | None = None
    """None: it does not speak TLS."""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.open_client(self.key)

    def open_client(self, key: str | None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(
            base_url=self.address,
            headers=headers,
            verify=self.tls or True,
            timeout=120,
            trust_env=False,
        )

    @property
    def address(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def balancer(self) -> str:
        """Where agents dial in."""
        return f"{'ws' if self.tls is None else 'wss'}://127.0.0.1:{self.agent_port}"

    def agents(self) -> list[dict[str, Any]]:
        return self.client.get("/api/v1/agents").raise_for_status().json()["agents"]

    def processing(self) -> int:
        return sum(agent["slots_processing"] for agent in self.agents())

    def follow(self, route: str = "/api/v1/agents/stream") -> Iterator[dict[str, Any]]:
        """The states of a stream, as they come."""
        with self.client.stream("GET", route) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def until(self, condition: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Follow the agents until this is true of them; return them."""
        for state in self.follow():
            if condition(state["agents"]):
                return state["agents"]
        raise AssertionError("the stream ended")

    def until_buffered(self, count: int) -> None:
        """Wait until this many requests wait for a slot."""
        for state in self.follow("/api/v1/buffered_requests/stream"):
            if state["buffered_requests_current"] == count:
                return


@contextlib.contextmanager
def start_up(
    *options: str,
    port: int = 0,
    agent_port: int = 0,
    key: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Generator[Up]:
    """``headrace up`` with these options, on ports that are free; stopped at the end. ``key`` and
    ``tls``: what it wants of those who manage it.
    """
    port, agent_port = port or free_port(), agent_port or free_port()
    command = Command("up", "--port", str(port), "--agent-port", str(agent_port), *options)
    try:
        command.expect("Ctrl-C stops it.")
        up = Up(command, port, agent_port, key, tls)
        with up.client:
            yield up
    finally:
        try:
            if command.process.poll() is None:
                command.stop()
        finally:
            command.kill_the_rest()
