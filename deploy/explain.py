"""``headrace explain``: what balancer, dispatcher and scheduler decided for a request, in order. No I/O."""

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.overview import OverviewError, Request
from deploy.terminal import cell, one_line, seconds


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    at: float = 0.0
    """Seconds since the request arrived."""
    by: str = ""
    agent: str | None = None
    what: str = ""
    why: str = ""


class Explained(Request, frozen=True, kw_only=True):
    decisions: tuple[Decision, ...] = ()


def explain(told: dict[str, Any]) -> RenderableType:
    """``told``: as ``GET /api/v1/requests/{id}`` does. Raises ``OverviewError``."""
    try:
        request = msgspec.convert(told, Explained)
    except msgspec.ValidationError as error:
        raise OverviewError(f"the balancer has another version of headrace: {error}") from error
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("after", justify="right", no_wrap=True)
    for name in ("who", "agent", "what"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    for each in request.decisions:
        table.add_row(
            f"{each.at:.3f} s",
            cell(each.by),
            cell(each.agent),
            cell(each.what.replace("_", " ")),
            Text(one_line(each.why)),
        )
    lines = [Text(line, overflow="fold") for line in summary(request)]
    return Group(*lines, Text(""), table) if request.decisions else Group(*lines)


def summary(request: Request) -> list[str]:
    """The request as a whole, without control characters."""
    model = "" if request.model is None else f", model {request.model}"
    client = "" if request.client_id is None else f", its client calls it {request.client_id}"
    first = f"{request.id}: {request.route}{model}, priority {request.priority}{client}"
    if request.state == "over":
        state = f"over after {seconds(request.ended)}: {request.outcome}"
    else:
        state = request.state
    if request.message:
        state += f" ({request.message})"
    parts = [state]
    if request.waited is not None:
        why = f" ({request.why})" if request.why else ""
        parts.append(f"waited {seconds(request.waited)}{why}")
    elif request.why:
        parts.append(f"waits: {request.why}")
    if request.agent is not None:
        moves = f" (moved {request.moves} time(s))" if request.moves else ""
        parts.append(f"agent {request.agent}{moves}")
    lines = [first, ", ".join(parts)]
    counts: list[str] = []
    if request.prompt_tokens is not None:
        counts.append(f"{request.prompt_tokens} prompt tokens, {request.cached_tokens or 0} cached")
    if request.first_token is not None:
        counts.append(f"first token after {seconds(request.first_token)}")
    counts.append(f"{request.tokens} tokens generated")
    lines.append(", ".join(counts))
    return [one_line(line) for line in lines]
