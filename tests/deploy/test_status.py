"""What an operator sees at a glance, over real HTTP."""

import asyncio
import io
from typing import Any

import pytest
from played import Play
from rich.console import Console

from common.errors import HeadraceError
from common.models import AgentIssue, Application, Download, IssueKind
from deploy.status import HALTED, show_status

STUCK = AgentIssue(IssueKind.MODEL_CANNOT_BE_LOADED, "/m.gguf", "no memory for it")


async def shown(address: str) -> str:
    console = Console(file=io.StringIO(), width=120)
    await asyncio.to_thread(show_status, f"http://{address}", console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"slots": 2}, "ready"),
        ({"slots": 0}, "loading"),
        ({"slots": 0, "application": Application.APPLIED}, "no model"),
        ({"slots": 2, "draining": True}, "draining"),
        ({"slots": 2, "draining": True, "swapping": True}, "changing its model"),
        (
            {"slots": 2, "awaits_turn": True},
            "ready, waits for its turn to change the model",
        ),
        ({"slots": 0, "download": Download("m.gguf", 5, 10)}, "fetching m.gguf 50%"),
        ({"slots": 2, "download": Download("m.gguf", 5, None)}, "fetching m.gguf, ready"),
        ({"slots": 2, "application": Application.STUCK, "issues": (STUCK,)}, "ready, stuck"),
        (
            {"slots": 0, "application": Application.RETRYING, "issues": (STUCK,)},
            "trying again",
        ),
    ],
)
async def test_what_an_agent_does_is_said_in_a_few_words(
    address: str, play: Play, status: dict[str, Any], state: str
) -> None:
    play("one").report(**status)

    (row,) = [
        line for line in (await shown(address)).splitlines() if "one " in line and "\u2502" in line
    ]

    assert [cell.strip() for cell in row.split("\u2502")][-2] == state


async def test_why_something_does_not_work_is_said_below(address: str, play: Play) -> None:
    play("one").report(slots=2, application=Application.STUCK, issues=(STUCK,))

    lines = (await shown(address)).splitlines()

    assert "one: ModelCannotBeLoaded: /m.gguf: no memory for it" in lines
    assert lines[-1] == "buffered requests: 0"


async def test_a_halted_change_of_models_is_said(address: str, play: Play) -> None:
    lost = play("lost")
    lost.report(slots=1, awaits_turn=True)
    play("left").report(slots=1, awaits_turn=True)
    assert HALTED not in await shown(address)

    lost.leave()

    assert HALTED in (await shown(address)).replace("\n", "")


async def test_an_address_without_a_balancer_is_an_error() -> None:
    with pytest.raises(HeadraceError, match="no answer from a balancer"):
        show_status("http://127.0.0.1:1", Console())
