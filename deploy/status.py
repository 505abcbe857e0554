"""``headrace status``: agents, slots and buffer at a glance, and why something does not work."""

from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.errors import HeadraceError


def show_status(url: str, console: Console) -> None:
    """Of the balancer at ``http://HOST:PORT``. Raises ``HeadraceError`` if it does not answer."""
    try:
        with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as client:
            agents = client.get("/api/v1/agents").raise_for_status().json()["agents"]
            told = [
                client.get(f"/api/v1/agent/{agent['id']}/status").json().get("status")
                for agent in agents
            ]
            buffered = client.get("/api/v1/buffered_requests").raise_for_status().json()
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise HeadraceError(f"no answer from a balancer at {url}: {error}") from error
    table = Table("agent", "model", "slots", "busy", "state")
    for row, status in zip(agents, told, strict=True):
        table.add_row(
            escape(row["name"] or row["id"]),
            escape(Path(row["model_path"] or "").name),
            str(row["slots_total"]),
            str(row["slots_processing"]),
            "gone" if status is None else describe_status(status),
        )
    console.print(table)
    for row, status in zip(agents, told, strict=True):
        for issue in status["issues"] if status else ():
            line = f"{row['name'] or row['id']}: {issue['kind']}: {issue['model_path']}: {issue['detail']}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"buffered requests: {buffered['buffered_requests_current']}")


def describe_status(status: dict[str, Any]) -> str:
    """What an agent does, in a few words. ``status``: as the route ``/status`` tells it."""
    words: list[str] = []
    download = status["download"]
    if download:
        total = download["total"]
        part = f" {download['current'] / total:.0%}" if total else ""
        words.append(f"fetching {download['filename']}{part}")
    if status["swapping"]:
        words.append("changing its model")
    elif status["draining"]:
        words.append("draining")
    elif status["slots_total"]:
        words.append("ready")
    elif status["application"] == "Applied":
        words.append("no model")
    elif not download and not status["issues"]:
        words.append("loading")
    if status["awaits_turn"]:
        words.append("waits for its turn to change the model")
    if status["application"] == "Stuck":
        words.append("stuck")
    elif status["issues"] and status["application"] == "AttemptedAndRetrying":
        words.append("trying again")
    return ", ".join(words)
