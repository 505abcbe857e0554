"""What was decided for a request, as it is told."""

import io
from typing import Any

import pytest
from rich.console import Console

from deploy.explain import explain
from deploy.overview import OverviewError

TOLD: dict[str, Any] = {
    "id": "r1",
    "route": "/v1/chat/completions",
    "model": "small",
    "priority": "normal",
    "state": "over",
    "waited": 1.5,
    "why": "all slots are taken",
    "agent": "one",
    "prompt_tokens": 120,
    "cached_tokens": 80,
    "tokens": 45,
    "first_token": 1.75,
    "ended": 12.0,
    "outcome": "stop",
    "moves": 1,
    "decisions": [
        {"at": 0.0, "by": "balancer", "agent": None, "what": "arrived", "why": ""},
        {
            "at": 1.5,
            "by": "dispatcher",
            "agent": "one",
            "what": "dispatched",
            "why": "a slot is free",
        },
        {
            "at": 1.6,
            "by": "scheduler",
            "agent": "one",
            "what": "waits_for_cells",
            "why": "12 of\n90",
        },
    ],
}


def told(request: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(explain(request))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_it_is_a_summary_and_a_line_for_each_decision() -> None:
    assert told(TOLD) == [
        "r1: /v1/chat/completions, model small, priority normal",
        "over after 12 s: stop, waited 1.5 s (all slots are taken), agent one (moved 1 time(s))",
        "120 prompt tokens, 80 cached, first token after 1.8 s, 45 tokens generated",
        "",
        "  after  who         agent  what             why",
        "0.000 s  balancer           arrived",
        "1.500 s  dispatcher  one    dispatched       a slot is free",
        "1.600 s  scheduler   one    waits for cells  12 of 90",
    ]


def test_what_its_client_calls_it_is_in_the_head() -> None:
    shown = told({**TOLD, "client_id": "question-1"})

    assert shown[0] == (
        "r1: /v1/chat/completions, model small, priority normal, its client calls it question-1"
    )


def test_one_that_waits_says_why() -> None:
    request = {"id": "r2", "route": "/x", "priority": "high", "state": "waiting", "why": "no agent"}

    assert told(request) == [
        "r2: /x, priority high",
        "waiting, waits: no agent",
        "0 tokens generated",
    ]


def test_what_clients_said_is_shown_without_markup_and_control_characters() -> None:
    shown = told({**TOLD, "model": "[bold]m\x1b[2J", "message": "\x07"})

    assert shown[0] == "r1: /v1/chat/completions, model [bold]m\ufffd[2J, priority normal"


def test_what_cannot_be_understood_is_an_error() -> None:
    with pytest.raises(OverviewError):
        explain({"id": 1})
