"""``headrace agent``: a plain process, without Ray, joins a running balancer, drains and dies."""

import json
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from product import Command, Up, start_up

ROUTE = "/api/v1/continue_from_raw_prompt"
BODY = {"raw_prompt": "Once upon a time", "max_tokens": 200}


@pytest.fixture(scope="module")
def empty() -> Generator[Up]:
    """A product without agents of its own."""
    with start_up("--agents", "0", "--buffer-size", "2", "--buffer-timeout", "60") as up:
        yield up


@pytest.fixture(scope="module")
def impatient() -> Generator[Up]:
    """The same, where nobody waits for long."""
    with start_up("--agents", "0", "--buffer-timeout", "0.5") as up:
        yield up


@contextmanager
def agent(up: Up, name: str, *options: str) -> Generator[Command]:
    command = Command("agent", "--balancer", up.balancer, "--name", name, "--slots", "2", *options)
    try:
        up.until(lambda agents: any(a["name"] == name and a["slots_total"] for a in agents))
        yield command
    finally:
        command.kill_the_rest()
        command.ended()
        up.until(lambda agents: all(a["name"] != name for a in agents))


def ask(up: Up, **changes: object) -> subprocess.Popen[str]:
    """A client of its own process, whose output is the answer."""
    return subprocess.Popen(
        ["curl", "-sN", f"{up.address}{ROUTE}", "-d", json.dumps({**BODY, **changes})],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_it_joins_and_gets_work(empty: Up) -> None:
    with agent(empty, "by-hand"):
        lines = empty.client.post(ROUTE, json={**BODY, "max_tokens": 5}).text.splitlines()

    assert json.loads(lines[0])["Response"]["generated_by"] == "by-hand"
    assert "Done" in lines[-1]


def test_a_request_that_waits_is_served_when_an_agent_joins(empty: Up) -> None:
    client = ask(empty, max_tokens=5)
    empty.until_buffered(1)

    with agent(empty, "late"):
        output, _ = client.communicate(timeout=60)

    assert "Done" in output.splitlines()[-1]


def test_ctrl_c_finishes_what_runs_and_takes_nothing_new(empty: Up) -> None:
    with agent(empty, "draining") as command:
        running = ask(empty)
        assert running.stdout is not None
        first = running.stdout.readline()
        command.process.send_signal(signal.SIGINT)
        command.expect("draining")
        empty.until(lambda agents: agents[0]["slots_total"] == 0)
        late = ask(empty, max_tokens=5)

        output, _ = running.communicate(timeout=60)
        assert command.ended() == 0

    assert "Done" in (first + output).splitlines()[-1]
    with agent(empty, "next"):
        output, _ = late.communicate(timeout=60)
    assert json.loads(output.splitlines()[0])["Response"]["generated_by"] == "next"


def test_a_killed_agent_disappears_and_what_it_had_begun_ends_with_an_error_if_nobody_goes_on(
    impatient: Up,
) -> None:
    with agent(impatient, "victim") as command:
        client = ask(impatient)
        assert client.stdout is not None
        client.stdout.readline()

        command.process.kill()
        killed = time.monotonic()
        impatient.until(lambda agents: agents == [])
        gone = time.monotonic()
        output, _ = client.communicate(timeout=60)

    assert gone - killed < 3.0, "the promise to operators"
    error = json.loads(output.splitlines()[-1])["Error"]["error"]
    assert (error["code"], "agent" in error["description"]) == (502, True)


def test_what_a_killed_agent_had_not_begun_is_served_by_another(empty: Up) -> None:
    with agent(empty, "victim", "--threads", "1") as command:
        client = ask(empty, raw_prompt="word " * 1000, max_tokens=2)  # seconds to its first token
        empty.until(lambda agents: agents[0]["slots_processing"] == 1)
        command.process.kill()
        empty.until(lambda agents: agents == [])

        with agent(empty, "heir"):
            output, _ = client.communicate(timeout=120)

    assert json.loads(output.splitlines()[0])["Response"]["generated_by"] == "heir"
    assert "Done" in output.splitlines()[-1]


def test_what_still_runs_when_the_drain_is_over_goes_on_elsewhere(empty: Up) -> None:
    with agent(empty, "leaving", "--drain-timeout", "0") as command:
        client = ask(empty, sampling={"ignore_eos": True})
        assert client.stdout is not None
        first = client.stdout.readline()
        with agent(empty, "staying"):
            command.process.send_signal(signal.SIGINT)
            assert command.ended() == 0
            rest, _ = client.communicate(timeout=120)

    told = [json.loads(line)["Response"] for line in (first + rest).splitlines()]
    assert told[0]["generated_by"] == "leaving"
    assert told[-1]["generated_by"] == "staying"
    done = told[-1]["response"]["GeneratedToken"]["Done"]
    assert done["usage"]["content_tokens"] == BODY["max_tokens"]


def test_too_many_waiting_requests_are_refused_with_503(empty: Up) -> None:
    waiting = [ask(empty, max_tokens=2) for _ in range(2)]
    empty.until_buffered(2)

    refused = empty.client.post(ROUTE, json=BODY)

    assert refused.json()["Error"]["error"]["code"] == 503
    with agent(empty, "relief"):
        outputs = [client.communicate(timeout=60)[0] for client in waiting]
    assert all("Done" in output.splitlines()[-1] for output in outputs)


def test_nobody_waits_longer_than_the_buffer_allows(impatient: Up) -> None:
    answer = impatient.client.post(ROUTE, json=BODY)

    assert answer.json()["Error"]["error"] == {
        "code": 504,
        "description": "no slot became free in time",
    }
    buffered = impatient.client.get("/api/v1/buffered_requests")
    assert buffered.json() == {"buffered_requests_current": 0}


def test_an_agent_reconnects_to_a_balancer_that_comes_back() -> None:
    with start_up("--agents", "0") as first:
        command = Command(
            "agent", "--balancer", first.balancer, "--engine", "echo", "--name", "loyal"
        )
        first.until(lambda agents: [a["name"] for a in agents] == ["loyal"])
        first.command.stop()

    with start_up("--agents", "0", port=first.port, agent_port=first.agent_port) as second:
        second.until(lambda agents: [a["name"] for a in agents] == ["loyal"])
        assert command.stop(signal.SIGTERM) == 0
