"""How far a model is, on a terminal and elsewhere."""

import io
import threading
from pathlib import Path

import pytest
from commands import on_terminal
from file_server import FileServer, stall_after
from played import Until
from rich.console import Console

from balancer.balancer import Balancer
from balancer.link import AgentListener
from deploy.load_bars import LoadBars, Row, load_row
from deploy.overview import Agent, Download

CTRL_C = "\x03"


def fetching(current: int, total: int | None = 100_000_000) -> Row:
    agent = Agent(
        id="a", name="one", state="downloading", download=Download("m.gguf", current, total)
    )
    return load_row(agent)


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def test_where_there_is_no_terminal_each_tenth_is_a_line(output: io.StringIO) -> None:
    with LoadBars(Console(file=output, width=80)) as bars:
        for millions in range(26):
            bars.show([fetching(millions * 1_000_000)])
        bars.show([load_row(Agent(id="a", name="one", state="loading"))])
        bars.show([load_row(Agent(id="a", name="one", state="loading"))])

    assert output.getvalue().splitlines() == [
        "one: fetching m.gguf, 0% of 100 MB",
        "one: fetching m.gguf, 10% of 100 MB",
        "one: fetching m.gguf, 20% of 100 MB",
        "one: loading the model",
    ]


def test_a_file_of_unknown_size_is_told_by_what_has_come(output: io.StringIO) -> None:
    with LoadBars(Console(file=output, width=80)) as bars:
        bars.show([fetching(1_000_000, None)])
        bars.show([fetching(2_000_000, None)])

    assert output.getvalue() == "one: fetching m.gguf, 1 MB\n"


def test_a_terminal_has_a_bar_for_each_agent_and_is_left_clean(output: io.StringIO) -> None:
    console = Console(file=output, width=100, force_terminal=True, _environ={"TERM": "xterm"})
    with LoadBars(console) as bars:
        bars.show([fetching(50_000_000), load_row(Agent(id="b", name="two", state="loading"))])
        bars.show([fetching(75_000_000)])

    shown = output.getvalue()
    assert "75% of 100 MB" in shown
    assert "\u2501" in shown
    assert shown.endswith("\x1b[2K")  # the last line is taken away


def test_names_cannot_steer_the_terminal(output: io.StringIO) -> None:
    agent = Agent(
        id="a", name="[red]x\x1b[2J", state="downloading", download=Download("\x1b]0;m", 1)
    )

    with LoadBars(Console(file=output, width=100)) as bars:
        bars.show([load_row(agent)])

    assert output.getvalue() == "[red]x\ufffd[2J: fetching \ufffd]0;m, 1 B\n"


async def test_an_agent_by_hand_shows_on_its_terminal_how_far_its_model_is(
    balancer: Balancer, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    listener = AgentListener(balancer)
    url = f"ws://127.0.0.1:{await listener.start('127.0.0.1', 0)}"
    let_go = threading.Event()
    with FileServer() as server:
        server.publish("/m.gguf", b"GGUF".ljust(1_000_000, b"\0"))
        server.plan("/m.gguf", stall_after(500_000, until=let_go, begun=threading.Event()))
        options = ("--name", "mine", "--model", server.url("/m.gguf"))
        async with on_terminal("agent", "--balancer", url, *options) as terminal:
            await terminal.shows("fetching m.gguf, 50% of 1 MB")
            await terminal.shows("phase=download")  # the log is shown too
            let_go.set()
            await until(lambda: any(agent.status.issues for agent in balancer.agents))

            terminal.type(CTRL_C)
            assert await terminal.ended() == 0
    await listener.stop()
