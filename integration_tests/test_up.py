"""The main job as a newcomer does it, and its end."""

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from product import STOP_TIMEOUT, Command, Up, folders_in_use, free_port, start_up

CONVERSATION = {
    "add_generation_prompt": True,
    "conversation_history": [{"role": "user", "content": "Count from one to fifty."}],
    "enable_thinking": False,
    "max_tokens": 40,
    # Rounding depends on who shares a pass, so the model would not always end at the same place.
    "sampling": {"temperature": 0, "penalty_repeat": 1, "penalty_presence": 0, "ignore_eos": True},
}
ROUTE = "/api/v1/continue_from_conversation_history"


@dataclass
class Stream:
    """One client that reads to the end, and when it read what."""

    up: Up
    body: dict[str, Any]
    times: list[float] = field(default_factory=list[float])
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def read(self) -> None:
        with self.up.client.stream("POST", ROUTE, json=self.body) as response:
            for line in response.iter_lines():
                self.messages.append(json.loads(line))
                self.times.append(time.monotonic())

    @property
    def results(self) -> list[dict[str, Any]]:
        return [m["Response"]["response"]["GeneratedToken"] for m in self.messages]

    @property
    def text(self) -> str:
        return "".join(result.get("ContentToken", "") for result in self.results)


def test_what_it_prints_is_true(up: Up) -> None:
    printed = "\n".join(up.command.lines)

    assert f"headrace is ready at {up.address}" in printed
    assert "model   SmolLM2-135M-Instruct.Q4_1.gguf" in printed
    assert "slots   4, on 1 agent" in printed
    assert f"openai  {up.address}/v1" in printed
    assert f"headrace agent --balancer {up.balancer}" in printed


def test_the_printed_curl_line_streams_tokens(up: Up) -> None:
    (line,) = (line for line in up.command.lines if line.startswith("curl "))

    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=True, timeout=120
    )

    messages = [json.loads(line) for line in done.stdout.splitlines()]
    results = [message["Response"]["response"]["GeneratedToken"] for message in messages]
    assert len(results) > 10
    assert all("ContentToken" in result for result in results[:-1])
    usage = results[-1]["Done"]["usage"]
    assert usage["prompt_tokens"] > 10
    assert usage["content_tokens"] <= 100


def test_health(up: Up) -> None:
    assert up.client.get("/health").text == "OK"


def test_tokens_arrive_one_by_one_and_four_streams_run_at_the_same_time(up: Up) -> None:
    streams = [Stream(up, CONVERSATION) for _ in range(4)]
    threads = [threading.Thread(target=stream.read) for stream in streams]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert max(stream.times[0] for stream in streams) < min(stream.times[-1] for stream in streams)
    for stream in streams:
        assert "Done" in stream.results[-1]
        assert stream.results[-1]["Done"]["usage"]["content_tokens"] == 40
        assert len(set(stream.times)) > 20, "tokens came in a lump"
    assert all(stream.text.strip() for stream in streams)


def test_a_client_that_is_killed_frees_its_slot_while_the_others_go_on(up: Up) -> None:
    body = {**CONVERSATION, "max_tokens": 400, "stop": []}
    others = [Stream(up, body) for _ in range(3)]
    threads = [threading.Thread(target=stream.read) for stream in others]
    for thread in threads:
        thread.start()
    victim = subprocess.Popen(
        ["curl", "-sN", f"{up.address}{ROUTE}", "-d", json.dumps(body)], stdout=subprocess.PIPE
    )
    assert victim.stdout is not None
    victim.stdout.readline()  # it streams
    up.until(lambda agents: agents[0]["slots_processing"] == 4)

    victim.kill()

    up.until(lambda agents: agents[0]["slots_processing"] < 4)
    assert all(thread.is_alive() for thread in threads), "none of the others has ended first"
    for thread in threads:
        thread.join()
    assert all("Done" in stream.results[-1] for stream in others)
    victim.wait()
    victim.stdout.close()


def test_more_requests_than_slots_are_all_served(up: Up) -> None:
    streams = [Stream(up, {**CONVERSATION, "max_tokens": 5}) for _ in range(10)]
    threads = [threading.Thread(target=stream.read) for stream in streams]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all("Done" in stream.results[-1] for stream in streams)


def test_the_same_seed_gives_the_same_text_whatever_is_cached(up: Up) -> None:
    body = {
        "raw_prompt": "In a small house at the edge of a large forest, long ago, there lived a",
        "max_tokens": 30,
        "sampling": {"temperature": 1.5, "ignore_eos": True},
    }

    def ask(seed: int | None) -> tuple[str, int]:
        response = up.client.post("/api/v1/continue_from_raw_prompt", json={**body, "seed": seed})
        messages = [json.loads(line)["Response"] for line in response.text.splitlines()]
        results = [message["response"]["GeneratedToken"] for message in messages]
        text = "".join(result.get("ContentToken", "") for result in results)
        return text, results[-1]["Done"]["usage"]["cached_prompt_tokens"]

    ask(None)
    assert ask(None)[1] > 10
    texts = {ask(7)[0] for _ in range(3)}
    assert len(texts) == 1
    assert ask(8)[0] not in texts
    assert ask(7)[1] == 0


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers(up: Up) -> None:
    response = up.client.post(
        "/api/v1/continue_from_raw_prompt", json={"raw_prompt": "word " * 9000, "max_tokens": 5}
    )

    error = response.json()["Error"]["error"]
    assert error["code"] == 400
    assert "context_length_exceeded" in error["description"]
    assert "8192" in error["description"]


def test_clients_cannot_set_serves_own_timeout(up: Up) -> None:
    with up.client.stream(
        "POST", ROUTE, json=CONVERSATION, headers={"x-request-timeout-seconds": "0.01"}
    ) as response:
        lines = list(response.iter_lines())

    assert response.status_code == 200
    assert "Done" in lines[-1]


def test_status_shows_agents_slots_and_buffer(up: Up) -> None:
    command = Command("status", "--port", str(up.port))

    assert command.ended() == 0
    command.expect("buffered requests: 0")
    assert any("agent-1" in line and "4" in line and "ready" in line for line in command.lines)


def test_a_port_in_use_is_one_clear_line(up: Up) -> None:
    command = Command("up", "--port", str(up.port), "--engine", "echo")

    assert command.ended() == 1
    command.expect(f"headrace: cannot listen on 127.0.0.1, port {up.port}: Address already in use")


Stop = Callable[[Command], int]


def terminate(command: Command) -> int:
    return command.stop(signal.SIGTERM)


def ctrl_c(command: Command) -> int:
    return command.stop_group(signal.SIGINT)


def terminate_group(command: Command) -> int:
    return command.stop_group(signal.SIGTERM)


def folders() -> set[Path]:
    return set(Path("/tmp").glob("headrace-*"))


def until_tidy(before: set[Path]) -> None:
    """Wait until each folder that has come since is of another product, which runs."""
    deadline = time.monotonic() + STOP_TIMEOUT
    while left := folders() - before - folders_in_use():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


@pytest.mark.parametrize("stop", [terminate, ctrl_c, terminate_group])
def test_stopping_ends_streams_with_a_message_and_leaves_nothing_behind(stop: Stop) -> None:
    before = folders()
    with start_up("--agents", "0", "--buffer-timeout", "600") as up:
        waiting = subprocess.Popen(
            ["curl", "-sN", f"{up.address}{ROUTE}", "-d", json.dumps(CONVERSATION)],
            stdout=subprocess.PIPE,
            text=True,
        )
        up.until_buffered(1)
        own = up.command.folders()

        status = stop(up.command)
        answer, _ = waiting.communicate(timeout=30)

        assert status == 0
        assert json.loads(answer)["Error"]["error"]["code"] == 503
        assert up.command.processes() == []
        assert [folder.exists() for folder in own] == [False]
        until_tidy(before)
        assert up.command.lines[up.command.lines.index("Ctrl-C stops it.") + 1 :] == [
            "stopping ..."
        ]


LONG = {
    "model": "default",
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
}


@contextmanager
def long_story(up: Up) -> Generator[Iterator[str]]:
    """The lines of an answer that goes on for seconds; the first has come."""
    body = {**LONG, "model": up.client.get("/v1/models").json()["data"][0]["id"]}
    with up.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def test_what_runs_is_finished_before_it_stops() -> None:
    before = folders()
    with start_up() as up, long_story(up) as story:
        up.command.process.send_signal(signal.SIGINT)
        up.command.expect("what runs is finished first")
        own = up.command.folders()

        refused = up.client.post(ROUTE, json=CONVERSATION)
        health = up.client.get("/health")
        *_, last, end = story

        assert "Error" in refused.json()
        assert health.status_code == 503
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert end == "data: [DONE]"
        assert up.command.ended() == 0
        assert up.command.processes() == []
        assert [folder.exists() for folder in own] == [False]
        until_tidy(before)


def test_a_second_signal_stops_it_now() -> None:
    before = folders()
    with start_up() as up, long_story(up) as story:
        up.command.process.send_signal(signal.SIGINT)
        up.command.expect("what runs is finished first")
        own = up.command.folders()

        assert up.command.stop(signal.SIGINT) == 0

        assert (
            json.loads(list(story)[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        )
        assert up.command.processes() == []
        assert [folder.exists() for folder in own] == [False]
        until_tidy(before)


@pytest.mark.parametrize(
    ("moment", "stop"),
    [
        ("starting Ray ...", ctrl_c),
        ("starting the balancer ...", terminate_group),
        ("loading the model ...", ctrl_c),
    ],
)
def test_stopping_while_it_starts_leaves_nothing_behind(moment: str, stop: Stop) -> None:
    before = folders()
    command = Command("up", "--port", str(free_port()), "--agent-port", str(free_port()))
    try:
        command.expect(moment)

        assert stop(command) == 0
        assert command.processes() == []
        until_tidy(before)
    finally:
        command.kill_the_rest()


def test_what_is_killed_hard_tidies_up_by_itself() -> None:
    before = folders()
    with start_up("--agents", "0") as up:
        up.command.process.kill()

        deadline = time.monotonic() + STOP_TIMEOUT
        while up.command.processes() and time.monotonic() < deadline:
            time.sleep(0.1)

        assert up.command.processes() == []
        until_tidy(before)


def test_a_port_that_is_taken_while_it_starts_is_named() -> None:
    port = free_port()
    command = Command("up", "--port", str(free_port()), "--agent-port", str(port))
    try:
        command.expect("starting Ray ...")
        with socket.create_server(("127.0.0.1", port)):
            line = command.expect("headrace: the balancer did not start")

        assert f"'127.0.0.1', {port}" in line
        assert "address already in use" in line
        assert command.ended() == 1
        assert command.processes() == []
    finally:
        command.kill_the_rest()


def test_a_model_that_will_not_load_is_one_clear_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    ports = ["--port", str(free_port()), "--agent-port", str(free_port())]
    command = Command("up", "--model", str(broken), *ports)
    try:
        assert command.ended() == 1
        line = command.expect("headrace: an agent could not start")
        assert str(broken) in line
        assert command.processes() == []
    finally:
        command.kill_the_rest()
