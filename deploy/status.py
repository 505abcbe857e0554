"""``headrace status``: agents, slots and buffer at a glance, and why something does not work."""

import ssl
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balancer.keys import Role
from common.errors import HeadraceError
from deploy.access import OWN_KEY

LONGEST_REASON = 200
"""Characters of a refusal that are shown."""

HALTED = (
    "No further agent changes its model: one was lost while it did. It goes on when one has shown "
    "that the model works, or when the desired state is put again."
)


def show_status(
    url: str, console: Console, *, key: str | None = None, tls: ssl.SSLContext | None = None
) -> None:
    """Of the balancer at ``http://HOST:PORT``, or ``https`` with ``tls``. Raises ``HeadraceError`` if
    it does not answer.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(
            base_url=url, headers=headers, verify=tls or True, timeout=5.0, trust_env=False
        ) as client:
            agents = client.get("/api/v1/agents").raise_for_status().json()["agents"]
            told = [_ask(client, agent["id"]) for agent in agents]
            buffered = client.get("/api/v1/buffered_requests").raise_for_status().json()
    except httpx.HTTPStatusError as error:
        reason = error.response.text.strip()[:LONGEST_REASON]
        if error.response.status_code in {401, 403}:
            reason += f" (--key-file or {OWN_KEY[Role.MANAGEMENT]})"
        raise HeadraceError(f"{url}: HTTP {error.response.status_code}: {reason}") from error
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise HeadraceError(f"no answer from a balancer at {url}: {error}") from error
    table = Table("agent", "model", "slots", "busy", "state")
    complaints: list[str] = []
    for row, details in zip(agents, told, strict=True):
        name = row["name"] or row["id"]
        table.add_row(
            escape(name),
            escape(Path(row["model_path"] or "").name),
            str(row["slots_total"]),
            str(row["slots_processing"]),
            "gone" if details is None else describe_status(details["status"]),
        )
        complaints += (
            f"{name}: {issue['kind']}: {issue['model_path']}: {issue['detail']}"
            for issue in (details["status"]["issues"] if details else ())
        )
    if any(details and details["rollout_halted_by"] for details in told):
        complaints.append(HALTED)
    console.print(table)
    for line in (*complaints, f"buffered requests: {buffered['buffered_requests_current']}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _ask(client: httpx.Client, agent_id: str) -> dict[str, Any] | None:
    """None: it has gone meanwhile."""
    response = client.get(f"/api/v1/agent/{agent_id}/status")
    return None if response.status_code == 404 else response.raise_for_status().json()


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
