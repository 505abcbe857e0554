"""What top shows fits the window, and nothing in it steers the terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from deploy.overview import StatusView
from deploy.top_view import Window, fit, top_view

AGENT: dict[str, Any] = {
    "id": "a1", "name": "one", "state": "ready", "slots": 4, "slots_busy": 2, "model": "small",
    "application": "Applied",
    "figures": {
        "cells_total": 1000, "cells_running": 200, "cells_cached": 300,
        "prompt_tokens_fed": 10, "prompt_tokens_cached": 30,
        "prefill_rate": 1234.5, "decode_rate": 41.25,
    },
}  # fmt: skip
FETCHING: dict[str, Any] = {
    "id": "a2", "name": "two", "state": "downloading",
    "download": {"filename": "m.gguf", "current": 30, "total": 120},
}  # fmt: skip
TOLD: dict[str, Any] = {
    "agents": {"a1": AGENT, "a2": FETCHING},
    "fleets": {
        "small": {"fleet": {"min": 0, "max": 3}, "wanted": 2, "ready": 1, "waiting": 5, "reason": "no node"}
    },
    "requests": {
        "r1": {
            "id": "r1", "state": "running", "arrived": 95.0, "waited": 0.25, "agent": "one",
            "tokens": 17, "prompt_tokens": 120, "cached_tokens": 80,
        },
        "r2": {"id": "r2", "state": "waiting", "arrived": 98.0, "why": "all slots are taken"},
        "r0": {"id": "r0", "state": "over", "arrived": 90.0, "outcome": "stop", "ended": 3.0},
    },
    "errors": {"1": {"at": 40.0, "code": "buffer_full", "message": "no room", "count": 7}},
    "history": {
        "1": {"at": 96.0, "tokens": 0},
        "2": {"at": 98.0, "tokens": 20, "first_token": 0.5},
        "3": {"at": 100.0, "tokens": 60},
    },
    "balancer": {
        "buffer": {"waiting": 1, "capacity": 128, "bytes": 2048},
        "requests": {"waiting": 1, "running": 1, "cancelling": 0, "over": {"stop": 9}},
        "model": {"wish_number": 1, "desired": "/m/small.gguf", "models": []},
        "about": {"version": "1.2.3", "started": 40.0, "accepts": True},
    },
}  # fmt: skip


def shown(told: dict[str, Any], *, width: int = 120, height: int = 40, **more: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    view = StatusView.of(told)
    console.print(top_view(view, Window(width, height), url="http://b:1", now=100.0, **more))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_head_tells_of_the_balancer_as_a_whole() -> None:
    assert shown(TOLD)[:4] == [
        "headrace 1.2.3  http://b:1  up 60 s",
        "agents 1 ready of 2   slots 2 of 4 ■■□□   buffer 1 of 128 (2 kB)",
        "requests 1 running 1 waiting   over stop 9",
        "15.0 tokens/s ▄█   first token after 0.50 s   model small.gguf",
    ]


def test_there_is_a_table_of_each_kind() -> None:
    assert shown(TOLD)[4:] == [
        "",
        "agent  state                   slots     tokens/s  prompt/s   KV  cached  model",
        "one    ready                   ■■□□ 2/4      41.2      1234  50%     75%  small",
        "two    fetching 25% of m.gguf   0/0",
        "",
        "fleet  ready  wanted  limits  waiting  why",
        "small      1       2     0-3        5  no node",
        "",
        "request  state      age  waited  tokens           prompt  agent  why",
        "r1       running  5.0 s  0.25 s      17  120 (80 cached)  one",
        "r2       waiting  2.0 s               0                          all slots are taken",
        "",
        "error            when  times  agent  message",
        "buffer_full  60 s ago      7         no room",
        "",
        "over  outcome   took  waited  first  tokens  prompt  agent",
        "r0    stop     3.0 s                      0",
    ]


@pytest.mark.parametrize("height", range(5, 60, 3))
@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_every_window(width: int, height: int) -> None:
    many = {f"a{n}": {**AGENT, "id": f"a{n}", "name": f"agent-{n}"} for n in range(30)}
    running = {f"r{n}": {"id": f"r{n}", "state": "running", "arrived": 1.0} for n in range(30)}

    lines = shown({**TOLD, "agents": many, "requests": running}, width=width, height=height)

    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_in_a_narrow_window_ids_and_reasons_are_cut_and_numbers_stay() -> None:
    request = {
        "id": 32 * "f", "state": "running", "arrived": 80.0, "waited": 0.25, "agent": "agent-1",
        "tokens": 17, "prompt_tokens": 300, "cached_tokens": 200, "why": "all slots are taken",
    }  # fmt: skip

    (row,) = [line for line in shown({"requests": {"r": request}}, width=80) if "fff" in line]

    assert row.split()[1:] == ["running", "20", "s", "0.25", "s", "17", "300", "(200", "cached)", "agent-1"]  # fmt: skip


def test_what_is_left_out_is_counted() -> None:
    many = {f"a{n}": {**AGENT, "id": f"a{n}", "name": f"agent-{n}"} for n in range(30)}

    (head,) = [line for line in shown({"agents": many}, height=20) if line.startswith("agent +")]

    assert head.split("state")[0].strip() == "agent +15"


@pytest.mark.parametrize(
    ("rows", "height", "granted"),
    [
        ([], 10, []),
        ([3, 3], 100, [3, 3]),
        ([30, 30], 14, [5, 5]),
        ([1, 30], 14, [1, 9]),
        ([30, 30], 5, [3, 0]),
        ([30], 2, [0]),
    ],
)
def test_lines_are_shared_evenly_and_the_last_tables_go_first(
    rows: list[int], height: int, granted: list[int]
) -> None:
    assert fit(rows, height) == granted


def test_a_broken_connection_is_said_and_the_last_picture_stays() -> None:
    lines = shown(TOLD, lost="connection reset")

    assert lines[0].endswith("no connection: connection reset; trying again")
    assert any(line.startswith("one ") for line in lines)


def test_why_an_agent_does_not_serve_is_in_the_head() -> None:
    issue = {"kind": "ModelCannotBeLoaded", "model_path": "/m", "detail": "no memory"}
    stuck = {f"a{n}": {**AGENT, "id": f"a{n}", "issues": [issue]} for n in range(5)}

    lines = shown({"agents": stuck})

    assert "one: ModelCannotBeLoaded: /m: no memory" in lines
    assert "3 more issues: headrace status" in lines


def test_names_and_messages_cannot_steer_the_terminal() -> None:
    evil = "[bold]x\x1b[2J\n"
    agent = {**AGENT, "name": evil, "model": evil}
    fault = {"at": 1.0, "code": evil, "message": evil}

    lines = shown(
        {"agents": {evil: agent}, "errors": {"1": fault}, "fleets": {evil: {"reason": evil}}}
    )

    text = "\n".join(lines)
    assert "\x1b" not in text
    assert text.count("[bold]x\ufffd[2J") == 6


def test_a_balancer_without_anything_is_shown_too() -> None:
    assert len(shown({})) >= 3
