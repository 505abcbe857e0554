"""What an operator sees at a glance, over real HTTP."""

import asyncio
import io
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from certificates import Signed, make_certificate
from played import Play
from rich.console import Console
from serving import serving

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.keys import Keys, Role
from common.errors import HeadraceError
from common.models import AgentIssue, Application, Download, IssueKind
from deploy.status import HALTED, show_status
from deploy.tls import client_context

KEY, OTHER_KEY = "key-of-an-operator", "key-of-some-agents"

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


@pytest.fixture
def certificate(tmp_path: Path) -> Signed:
    return make_certificate(tmp_path, "own")


@pytest.fixture
async def locked(balancer: Balancer, certificate: Signed) -> AsyncGenerator[str]:
    """A balancer that wants a key, over TLS."""
    app = create_app(balancer, keys=Keys([(Role.MANAGEMENT, KEY), (Role.AGENT, OTHER_KEY)]))
    async with serving(app, certificate) as port:
        yield f"https://127.0.0.1:{port}"
        balancer.close()


async def test_a_balancer_that_wants_a_key_over_tls_is_shown_one(
    locked: str, certificate: Signed, play: Play
) -> None:
    play("one").report(slots=2)
    console = Console(file=io.StringIO(), width=120)
    tls = client_context(certificate.certificate)

    await asyncio.to_thread(show_status, locked, console, key=KEY, tls=tls)

    assert isinstance(console.file, io.StringIO)
    assert "ready" in console.file.getvalue()


@pytest.mark.parametrize(("key", "status"), [(None, 401), (OTHER_KEY, 403)])
async def test_it_says_which_key_is_wanted(
    locked: str, certificate: Signed, key: str | None, status: int
) -> None:
    tls = client_context(certificate.certificate)

    with pytest.raises(HeadraceError, match="--key-file or HEADRACE_MANAGEMENT_KEY") as caught:
        await asyncio.to_thread(show_status, locked, Console(), key=key, tls=tls)

    assert f"HTTP {status}" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_an_address_without_a_balancer_is_an_error() -> None:
    with pytest.raises(HeadraceError, match="no answer from a balancer"):
        show_status("http://127.0.0.1:1", Console())
