"""What an operator sees at a glance, as the real balancer tells it."""

import asyncio
import io
from typing import Any

import pytest
from played import Play, ask
from rich.console import Console

from balancer.balancer import Balancer
from common.ids import RequestId
from common.models import AgentIssue, Application, Download, IssueKind
from deploy.management import Management, Place
from deploy.overview import StatusView
from deploy.status import show_status
from deploy.swap import HALTED

STUCK = AgentIssue(IssueKind.MODEL_CANNOT_BE_LOADED, "/m.gguf", "no memory for it")


async def shown(address: str) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    async with Management(Place(f"http://{address}")) as balancer:
        show_status(StatusView.of(await balancer.overview()), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"slots": 2}, "ready"),
        ({"slots": 0}, "loading"),
        ({"slots": 0, "application": Application.APPLIED}, "no model"),
        ({"slots": 2, "draining": True, "leaving": True}, "draining"),
        ({"slots": 2, "draining": True, "swapping": True}, "swapping"),
        ({"slots": 2, "awaits_turn": True}, "waits for turn"),
        ({"slots": 2, "held": True}, "held"),
        ({"slots": 2, "held": True, "awaits_turn": True}, "held"),
        ({"slots": 0, "download": Download("m.gguf", 5, 10)}, "fetching 50% of m.gguf"),
        ({"slots": 2, "download": Download("m.gguf", 5, None)}, "ready, fetching 5 B of m.gguf"),
        ({"slots": 2, "application": Application.STUCK, "issues": (STUCK,)}, "ready, stuck"),
        ({"slots": 0, "application": Application.STUCK, "issues": (STUCK,)}, "stuck"),
        (
            {"slots": 2, "application": Application.RETRYING, "issues": (STUCK,)},
            "ready, tries again",
        ),
        ({"slots": 0, "application": Application.RETRYING, "issues": (STUCK,)}, "retrying"),
    ],
)
async def test_what_an_agent_does_is_said_in_a_few_words(
    address: str, play: Play, status: dict[str, Any], state: str
) -> None:
    play("one").report(**status)

    (row,) = [line for line in await shown(address) if line.startswith("\u2502 one ")]

    assert [cell.strip() for cell in row.split("\u2502")][-2] == state


async def test_why_something_does_not_work_is_said_below(address: str, play: Play) -> None:
    play("one").report(slots=2, application=Application.STUCK, issues=(STUCK,))

    lines = await shown(address)

    assert "one: ModelCannotBeLoaded: /m.gguf: no memory for it" in lines
    assert lines[-1] == "buffered requests: 0 of 2 (0 B)"


async def test_requests_are_counted_by_state(address: str, play: Play, balancer: Balancer) -> None:
    agent = play("one")
    for name in ("r1", "r2", "r3"):
        ask(balancer, RequestId(name))
    agent.finish(RequestId("r1"))

    lines = await shown(address)

    assert "requests: 1 running, 1 waiting, 1 stop" in lines
    assert any(line.startswith("buffered requests: 1 of 2 (") for line in lines)


async def test_a_halted_change_of_models_is_said(address: str, play: Play) -> None:
    lost = play("lost")
    lost.report(slots=1, awaits_turn=True)
    play("left").report(slots=1, awaits_turn=True)
    assert HALTED not in await shown(address)

    lost.leave()

    async with asyncio.timeout(10):  # what is told may be half a second old
        while HALTED not in await shown(address):
            pass


async def test_fleets_are_shown_with_what_they_want(address: str, client: Any) -> None:
    fleet = {"model": {"LocalToAgent": "/m.gguf"}, "min": 1, "max": 2}
    await client.put("/api/v1/fleets/small", json=fleet)

    (row,) = [line for line in await shown(address) if line.startswith("\u2502 small ")]

    assert [cell.strip() for cell in row.split("\u2502")][4] == "1-2"


async def test_a_balancer_without_agents_is_shown_too(address: str) -> None:
    assert (await shown(address))[0] == "no agents"
