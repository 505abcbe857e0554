"""An agent's process dies, hangs or is stopped, or its keeper is: what is left, and what comes back."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from linked import PlayedBalancer
from product import HEADRACE, Command, Up, free_port, start_up
from websockets.sync.server import ServerConnection, serve

from common.messages import REFUSED, Join
from common.models import EngineChoices
from deploy.keeper import AgentError, Keeper
from deploy.settings import AgentSettings, EngineKind, to_line

ROUTE = "/api/v1/continue_from_raw_prompt"
HERE = Path(__file__).parent
HELPERS = [HERE / "helpers", HERE.parent / "tests" / "helpers"]


def with_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes that are started: they find the modules that are here for tests."""
    for folder in HELPERS:
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture(scope="module")
def empty() -> Generator[Up]:
    """A product without agents of its own."""
    with start_up("--agents", "0", "--buffer-timeout", "60") as up:
        yield up


@contextmanager
def agent(up: Up, *options: str) -> Generator[Command]:
    command = Command("agent", "--balancer", up.balancer, "--name", "kept", *options)
    try:
        ready(up)
        yield command
    finally:
        command.kill_the_rest()
        command.ended()
        gone(up)


def ready(up: Up, *, before: str = "") -> str:
    """Wait for the agent's slots; return its ID, which is not that of the one before."""
    linked = up.until(lambda agents: any(a["slots_total"] and a["id"] != before for a in agents))
    return next(a["id"] for a in linked if a["slots_total"] and a["id"] != before)


def gone(up: Up) -> None:
    up.until(lambda agents: agents == [])


def ask(up: Up, prompt: str) -> "subprocess.Popen[bytes]":
    """A client of its own process."""
    body = json.dumps({"raw_prompt": prompt, "max_tokens": 5})
    return subprocess.Popen(["curl", "-s", f"{up.address}{ROUTE}", "-d", body])


def children(process_id: int) -> list[int]:
    """Those of its main thread, which is the one that starts agents here."""
    return [
        int(child)
        for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    ]


def parent(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


@asynccontextmanager
async def kept(keeper: Keeper) -> AsyncGenerator[asyncio.Task[None]]:
    running = asyncio.create_task(keeper.run())
    try:
        yield running
    finally:
        keeper.stop()
        await asyncio.wait({running})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_killed_or_stopped_comes_back(empty: Up, number: signal.Signals) -> None:
    with agent(empty, "--slots", "2") as command:
        before = ready(empty)
        (child,) = children(command.process.pid)

        os.kill(child, number)

        ready(empty, before=before)
        assert children(command.process.pid) != [child]
        answer = empty.client.post(ROUTE, json={"raw_prompt": "Once", "max_tokens": 3})
        assert "Done" in answer.text.splitlines()[-1]
        assert command.stop() == 0


async def test_an_agent_whose_model_hangs_comes_back(
    empty: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B28."""
    with_helpers(monkeypatch)
    settings = AgentSettings((empty.balancer,), "kept", EngineKind.ECHO, EngineChoices(slots=2))
    keeper = Keeper(to_line(settings), module="hanging_agent")
    measured = {"raw_prompt": "a prompt that tells what a pass takes", "max_tokens": 100}

    async with kept(keeper):
        before = await asyncio.to_thread(ready, empty)
        child = keeper.pid
        answer = await asyncio.to_thread(empty.client.post, ROUTE, json=measured)
        assert "Done" in answer.text.splitlines()[-1]

        client = ask(empty, "?")
        try:
            await asyncio.to_thread(ready, empty, before=before)
        finally:
            client.kill()
            client.wait()

        assert keeper.pid not in {child, None}
    await asyncio.to_thread(gone, empty)


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_left_when_the_keeper_is_killed(empty: Up, *, stopped: bool) -> None:
    with agent(empty, "--engine", "echo") as command:
        (child,) = children(command.process.pid)
        if stopped:
            os.kill(child, signal.SIGSTOP)

        command.process.kill()

        gone(empty)
        command.ended()  # whose output the agent's process shares
        assert command.processes() == []


KEEP = """
import asyncio, sys
from deploy.keeper import Keeper
asyncio.run(Keeper(sys.argv[1].encode()).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped process stays")
def test_a_stopped_agent_in_the_group_of_its_keeper_dies_with_it(empty: Up) -> None:
    """Where no manager and no terminal would see to it."""
    settings = AgentSettings((empty.balancer,), "kept", EngineKind.ECHO, EngineChoices(slots=2))
    line = to_line(settings).decode()
    keeper = subprocess.Popen([sys.executable, "-c", KEEP, line], start_new_session=True)
    try:
        ready(empty)
        (child,) = children(keeper.pid)
        os.kill(child, signal.SIGSTOP)

        keeper.kill()
        keeper.wait()

        while _line(Path(f"/proc/{child}")):
            pass  # soon
    finally:
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
    gone(empty)


def test_an_agent_of_the_product_has_a_process_of_its_own_and_comes_back_too() -> None:
    with start_up("--engine", "echo") as up:
        before = ready(up)
        child = agent_process(up.command)
        keeper = parent(child)

        os.kill(child, signal.SIGKILL)
        before = ready(up, before=before)
        second = agent_process(up.command)
        assert parent(second) == keeper

        os.kill(second, signal.SIGSTOP)
        os.kill(keeper, signal.SIGKILL)  # by Ray, or by the system when memory is short
        ready(up, before=before)
        assert parent(agent_process(up.command)) != keeper


def agent_process(command: Command) -> int:
    """The process of the only agent."""
    (found,) = (
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _has(folder, command.mark) and "deploy.agent_process" in _line(folder)
    )
    return found


def _has(folder: Path, mark: str) -> bool:
    try:
        return mark.encode() in (folder / "environ").read_bytes()
    except OSError:
        return False


def _line(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text()
    except OSError:
        return ""


def test_ctrl_c_twice_ends_it_at_once(empty: Up) -> None:
    with agent(empty, "--threads", "1") as command:
        body = {"raw_prompt": "Once", "max_tokens": 3000, "sampling": {"ignore_eos": True}}
        with empty.client.stream("POST", ROUTE, json=body) as answer:
            next(answer.iter_lines())
            (child,) = children(command.process.pid)
            assert os.getpgid(child) != command.process.pid
            os.killpg(command.process.pid, signal.SIGINT)
            command.expect("draining")
            os.killpg(command.process.pid, signal.SIGINT)

            assert command.ended() == 0
        command.expect("ended: 1000")  # the link: it has taken leave
        assert command.processes() == []


def test_an_agent_that_is_stopped_cannot_hold_up_the_end(
    empty: Up,
) -> None:
    with agent(empty, "--engine", "echo") as command:
        (child,) = children(command.process.pid)
        os.kill(child, signal.SIGSTOP)

        assert command.stop() == 0
        assert command.processes() == []


def test_it_can_be_ended_while_it_starts() -> None:
    command = Command("agent", "--balancer", f"ws://127.0.0.1:{free_port()}", "--engine", "echo")
    try:
        command.expect("no link to")

        assert command.stop() == 0
        assert command.processes() == []
    finally:
        command.kill_the_rest()


def test_one_that_the_balancer_refuses_is_one_clear_line() -> None:
    def refuse(socket: ServerConnection) -> None:
        socket.close(REFUSED, "not you")

    with serve(refuse, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.socket.getsockname()[1]
        command = Command("agent", "--balancer", f"ws://127.0.0.1:{port}", "--engine", "echo")
        try:
            assert command.ended() == 1
            assert command.lines[-1] == "headrace: not you"
            assert command.processes() == []
        finally:
            command.kill_the_rest()


async def test_what_ends_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.keeping.FIRST_DELAY", 0.0)
    keeper = Keeper(b"{}", module="there_is_none")

    with pytest.raises(AgentError, match="again and again, at last: its status was 1"):
        await keeper.run()


def test_an_agent_drains_although_nobody_reads_what_it_says(empty: Up) -> None:
    reading, writing = os.pipe()
    arguments = [HEADRACE, "agent", "--balancer", empty.balancer, "--engine", "echo"]
    process = subprocess.Popen(arguments, stdout=writing, stderr=writing)
    os.close(writing)
    try:
        ready(empty)
        os.close(reading)
        process.send_signal(signal.SIGINT)

        process.wait(30)
        gone(empty)
    finally:
        process.kill()


async def test_a_keeper_that_is_stopped_in_the_pause_before_a_start_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has heard of the process that ended, and there is none to be told."""
    with_helpers(monkeypatch)
    settings = AgentSettings(("no address",), "kept", EngineKind.ECHO, EngineChoices(slots=2))
    keeper = Keeper(to_line(settings), module="ends_badly")
    said: list[str] = []

    with told(lambda line: (said.append(line), keeper.stop())):
        await keeper.run()

    assert "started again" in said[0]


@contextmanager
def told(hear: Callable[[str], object]) -> Generator[None]:
    """Every line of keepers' logs."""

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            hear(record.getMessage())

    reader = Reader()
    logging.getLogger("deploy.keeper").addHandler(reader)
    try:
        yield
    finally:
        logging.getLogger("deploy.keeper").removeHandler(reader)


async def test_an_agent_dials_whom_its_keeper_names_also_when_it_is_started_again() -> None:
    one, two = PlayedBalancer(), PlayedBalancer()
    first, second = await one.start(), await two.start()
    settings = AgentSettings(("ws://127.0.0.1:9",), "kept", EngineKind.ECHO, EngineChoices(slots=2))
    keeper = Keeper(to_line(settings))
    keeper.dial([first])

    async with kept(keeper):
        link = await one.link()
        joined = await link.frame()
        assert isinstance(joined, Join)
        keeper.dial([first, second])
        other = await two.link()
        joined_there = await other.frame()
        assert isinstance(joined_there, Join)
        assert joined_there.agent_id == joined.agent_id
        keeper.dial([second])
        await link.socket.wait_closed()
        assert link.socket.close_code == 1000

        assert keeper.pid is not None
        os.kill(keeper.pid, signal.SIGKILL)
        heir = await (await two.link()).frame()
        assert isinstance(heir, Join)
        assert heir.agent_id != joined.agent_id
        assert one.is_deserted
    for balancer in (one, two):
        await balancer.stop()


async def test_an_agent_that_does_not_read_what_it_is_told_is_killed_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_helpers(monkeypatch)
    settings = AgentSettings((), "kept", EngineKind.ECHO, EngineChoices(slots=2))
    keeper = Keeper(to_line(settings), module="reads_nothing")
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if "started again" in line:
            keeper.stop()

    with told(hear):
        running = asyncio.create_task(keeper.run())
        await asyncio.sleep(0)
        for n in range(1000):
            keeper.dial([f"ws://host-{n}-{'x' * 100}:1"])
        await running

    assert said[0] == "the agent does not read what it is told and is killed"
    assert "it does not read" in said[-1]


ENDING = """
import asyncio, os, signal
from deploy.keeper import ignore_stop_signals

async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, print)
    ignore_stop_signals(loop)

asyncio.run(main())
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
"""


def test_one_more_signal_to_a_keeper_that_ends_changes_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", ENDING], check=False).returncode == 0
