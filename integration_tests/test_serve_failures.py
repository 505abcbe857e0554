"""Parts of Ray Serve are killed under the running product: the balancer's replica, the controller, the
proxy. Clients are told, nothing leaks, and all is back.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI
from product import Up, start_up
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

REPLICA, CONTROLLER, PROXY = "ray::ServeReplica", "ray::ServeController", "ray::ProxyActor"

PROMPT = "x" * 12_000
"""Said back by the echo engine: some seconds of tokens."""

RAW = {"raw_prompt": PROMPT, "max_tokens": 25_000, "sampling": {"ignore_eos": True}}
RAW_ROUTE = "/api/v1/continue_from_raw_prompt"
LOST = "the balancer was lost, or cannot be reached: send the request again"
GIVEN_UP = b"the answer was not read; it has been given up"
NATIVE_ERROR = {"code": 503, "description": LOST}
OPENAI_ERROR = {"message": LOST, "type": "server_error", "param": None, "code": "balancer_lost"}


@pytest.fixture(scope="module")
def up() -> Generator[Up]:
    options = ("--engine", "echo", "--slots", "8", "--context", "30000", "--buffer-timeout", "600")
    with start_up(*options) as up:
        yield up


def find(up: Up, title: str) -> int | None:
    """The process of this product that calls itself so; None: there is none just now."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_named = (folder / "cmdline").read_text().startswith(title)
            if is_named and up.command.mark.encode() in (folder / "environ").read_bytes():
                return int(folder.name)
    return None


def kill(up: Up, title: str, number: signal.Signals = signal.SIGKILL) -> int:
    process = find(up, title)
    assert process is not None
    os.kill(process, number)
    return process


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def is_idle(up: Up) -> bool:
    """All agents are linked with all slots free."""
    try:
        agents = up.agents()
    except httpx.HTTPError:
        return False
    return bool(agents) and all(a["slots_total"] and not a["slots_processing"] for a in agents)


@dataclass
class Answer:
    """Of a request that is read on a thread of its own."""

    up: Up
    path: str
    body: dict[str, Any]
    status: int | None = None
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    text: str = ""
    begun: threading.Event = field(default_factory=threading.Event)

    def read(self) -> "Answer":
        """Raises ``httpx.HTTPError`` if it is cut."""
        with (
            httpx.Client(base_url=self.up.address, timeout=None, trust_env=False) as client,
            client.stream("POST", self.path, json=self.body) as response,
        ):
            self.status, self.headers = response.status_code, response.headers
            for part in response.iter_text():
                self.text += part
                self.begun.set()
        return self

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class Clients:
    """Many at once."""

    def __init__(self, up: Up, threads: ThreadPoolExecutor) -> None:
        self._up = up
        self._threads = threads

    def ask(self, path: str, body: dict[str, Any]) -> tuple[Answer, Future[Answer]]:
        answer = Answer(self._up, path, body)
        return answer, self._threads.submit(answer.read)

    def stream(self, path: str, body: dict[str, Any]) -> Future[Answer]:
        """One that has begun."""
        answer, reading = self.ask(path, body)
        answer.begun.wait()
        return reading


@pytest.fixture
def clients(up: Up) -> Generator[Clients]:
    with ThreadPoolExecutor(16) as threads:
        yield Clients(up, threads)


def openai_body(**more: Any) -> dict[str, Any]:
    body = {"max_tokens": 25_000, "ignore_eos": True, "stream": True}
    return {**body, "messages": [{"role": "user", "content": PROMPT}], **more}


def read_socket(up: Up, begun: threading.Event) -> None:
    """Ask for tokens over a websocket. Raises ``ConnectionClosedError`` at its end."""
    request = {"id": "r", "request": {"ContinueFromRawPrompt": RAW}}
    with connect(f"ws://127.0.0.1:{up.port}/api/v1/inference_socket", proxy=None) as client:
        client.send(json.dumps({"Request": request}))
        while True:
            client.recv()
            begun.set()


def test_when_the_balancer_dies_each_stream_ends_with_an_error_and_it_is_back(
    up: Up, clients: Clients
) -> None:
    native = [clients.stream(RAW_ROUTE, RAW) for _ in range(2)]
    chat = clients.stream("/v1/chat/completions", openai_body())
    text = {"prompt": PROMPT, "max_tokens": 25_000, "ignore_eos": True, "stream": True}
    completion = clients.stream("/v1/completions", text)
    wanted = {"input": PROMPT, "stream": True, "max_output_tokens": 25_000}
    response = clients.stream("/v1/responses", wanted)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(read_socket, up, begun)
        begun.wait()
        _, whole = clients.ask("/v1/chat/completions", openai_body(stream=False))
        up.until(lambda agents: agents[0]["slots_processing"] == 7)

        kill(up, REPLICA)

        for stream in native:
            last = json.loads(stream.result().lines[-1])
            assert last["Error"]["error"] == NATIVE_ERROR
            first = json.loads(stream.result().lines[0])
            assert last["Error"]["request_id"] == first["Response"]["request_id"]
        for stream in (chat, completion):
            last_line = stream.result().text.removesuffix("\n\n").rpartition("\n")[2]
            assert json.loads(last_line.removeprefix("data: ")) == {"error": OPENAI_ERROR}
        name, data = response.result().lines[-3:-1]
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["code"] == "balancer_lost"
        closed = closing.exception()
        assert isinstance(closed, ConnectionClosedError)
        assert closed.rcvd is not None
        assert (closed.rcvd.code, closed.rcvd.reason) == (1012, LOST)
        assert whole.result().status == 503
        assert whole.result().headers["retry-after"] == "5"
        assert json.loads(whole.result().text) == {"error": OPENAI_ERROR}
    until(lambda: is_idle(up))


def test_the_official_client_sees_the_error(up: Up) -> None:
    with OpenAI(base_url=f"{up.address}/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=25_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)

        kill(up, REPLICA)

        with pytest.raises(APIError, match="the balancer was lost"):
            list(stream)
    until(lambda: is_idle(up))


def test_the_desired_state_outlives_the_balancers_process(up: Up) -> None:
    route = "/api/v1/balancer_desired_state"
    state = up.client.get(route).raise_for_status().json()
    state["inference_parameters"]["temperature"] = 0.25
    up.client.put(route, json=state).raise_for_status()

    kill(up, REPLICA)
    until(lambda: is_idle(up))

    assert up.client.get(route).raise_for_status().json() == state


def test_a_request_that_comes_while_there_is_no_balancer_waits_for_the_next(
    up: Up, clients: Clients
) -> None:
    old = kill(up, REPLICA)
    until(lambda: find(up, REPLICA) != old)

    answer = clients.stream(RAW_ROUTE, {"raw_prompt": "hello", "max_tokens": 20}).result()

    assert "Done" in answer.lines[-1]
    until(lambda: is_idle(up))


def test_a_balancer_that_stands_still_is_found_and_replaced(up: Up, clients: Clients) -> None:
    stream = clients.stream(RAW_ROUTE, RAW)

    old = kill(up, REPLICA, signal.SIGSTOP)

    assert json.loads(stream.result().lines[-1])["Error"]["error"] == NATIVE_ERROR
    until(lambda: find(up, REPLICA) not in {old, None})
    until(lambda: is_idle(up))


def test_when_the_controller_dies_nobody_notices_and_it_can_replace_the_balancer_again(
    up: Up, clients: Clients
) -> None:
    stream = clients.stream(RAW_ROUTE, {"raw_prompt": PROMPT, "max_tokens": 8_000})

    old = kill(up, CONTROLLER)
    short = clients.stream(RAW_ROUTE, {"raw_prompt": "hello", "max_tokens": 20})
    assert "Done" in short.result().lines[-1]
    until(lambda: find(up, CONTROLLER) not in {old, None})

    assert "Done" in stream.result().lines[-1]
    kill(up, REPLICA)
    until(lambda: is_idle(up))


def test_when_the_proxy_dies_its_requests_are_cancelled_and_it_is_back(
    up: Up, clients: Clients
) -> None:
    streams = [clients.stream(RAW_ROUTE, RAW) for _ in range(3)]
    streams.append(clients.stream("/v1/chat/completions", openai_body()))
    _, whole = clients.ask("/v1/chat/completions", openai_body(stream=False))
    begun = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(read_socket, up, begun)
        begun.wait()
        up.until(lambda agents: agents[0]["slots_processing"] == 6)

        kill(up, PROXY)

        # No process is left that could say more.
        for cut in (*streams, whole):
            assert isinstance(cut.exception(), httpx.TransportError)
        assert isinstance(closing.exception(), ConnectionClosedError)
    until(lambda: is_idle(up))
    short = clients.stream(RAW_ROUTE, {"raw_prompt": "hello", "max_tokens": 20})
    assert "Done" in short.result().lines[-1]


def memory(up: Up) -> int:
    """Of the proxy and the balancer, in bytes."""
    pages = 0
    for title in (PROXY, REPLICA):
        process = find(up, title)
        assert process is not None
        pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def deaf(up: Up) -> Generator[socket.socket]:
    """A connection whose client has hardly room for what comes."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with client:
        client.connect(("127.0.0.1", up.port))
        yield client


def test_a_client_that_reads_nothing_costs_no_memory_and_loses_its_slots(up: Up) -> None:
    before = memory(up)
    body = json.dumps({**RAW, "n": 8}).encode()
    head = f"POST {RAW_ROUTE} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with deaf(up) as client:
        client.sendall(head.encode() + body)
        up.until(lambda agents: agents[0]["slots_processing"] == 8)

        until(lambda: is_idle(up))

        assert memory(up) - before < 30 * 2**20

        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        received = b""
        while part := client.recv(2**16):
            received = received[-1000:] + part
        # It is told, if it reads before its connection is given up too.
        assert GIVEN_UP in received or not received.endswith(b"0\r\n\r\n")


def test_a_websocket_that_reads_nothing_loses_its_slots(up: Up) -> None:
    address = f"ws://127.0.0.1:{up.port}/api/v1/inference_socket"
    with (
        deaf(up) as raw,
        # It reads ahead a little, and then does not even hear a good-bye. Compressed, a great deal
        # of the same letter would fit into the system's buffers.
        connect(
            address, sock=raw, proxy=None, compression=None, ping_interval=None, close_timeout=0
        ) as client,
    ):
        for name in "abcd":  # a long one, which is in each message, so that less is to be generated
            request = {"id": name * 1000, "request": {"ContinueFromRawPrompt": {**RAW, "n": 2}}}
            client.send(json.dumps({"Request": request}))
        up.until(lambda agents: agents[0]["slots_processing"] == 8)

        until(lambda: is_idle(up))
