"""The management routes: what agents and buffer look like, once or as a stream, and desired state.

A stream sends the newest state, whole, when it has changed: a slow reader misses what lay between
and costs nothing. Each ends after some minutes, so that one that is never read is not kept for
ever; clients connect again.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from balancer.balancer import AgentView, Balancer
from balancer.desired_state import BalancerDesiredState
from balancer.http import ClosingStream, read_body
from balancer.metrics import CONTENT_TYPE
from balancer.native import parse
from common.messages import Issue

KEEP_ALIVE = 3.0
"""Seconds between comments on an idle stream; the published client gives up after 5."""

LIFETIME = 600.0
"""Seconds that one stream may last."""

Snapshot = Callable[[], dict[str, Any]]


class Management:
    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    async def agents(self, _request: Request) -> Response:
        return _json(self._agents())

    async def agents_stream(self, _request: Request) -> Response:
        return self._stream(self._agents)

    async def buffered(self, _request: Request) -> Response:
        return _json(self._buffered())

    async def buffered_stream(self, _request: Request) -> Response:
        return self._stream(self._buffered)

    async def desired_state(self, _request: Request) -> Response:
        state = self._balancer.desired_state
        return Response(state.model_dump_json(by_alias=True), media_type="application/json")

    async def put_desired_state(self, request: Request) -> Response:
        self._balancer.desired_state = parse(BalancerDesiredState, await read_body(request))
        return Response(status_code=204)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._balancer.metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _agents(self) -> dict[str, Any]:
        return {"agents": [_agent(agent) for agent in self._balancer.agents]}

    def _buffered(self) -> dict[str, Any]:
        return {"buffered_requests_current": self._balancer.buffered}

    def _stream(self, snapshot: Snapshot) -> Response:
        return ClosingStream(
            self._events(snapshot),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def _events(self, snapshot: Snapshot) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        end = loop.time() + LIFETIME
        sent = b""
        while not self._balancer.closed.is_set() and loop.time() < end:
            count = self._balancer.changes.count
            data = msgspec.json.encode(snapshot())
            if data != sent:
                sent = data
                yield b"data: " + data + b"\n\n"
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await self._balancer.changes.after(count)
            except TimeoutError:
                yield b": keep-alive\n\n"


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _agent(agent: AgentView) -> dict[str, Any]:
    """An agent in the published wire format."""
    status = agent.status
    if Issue.MODEL_CANNOT_BE_LOADED in status.issues:
        application = "Stuck"
    else:
        application = "Applied" if status.slots_total else "Fresh"
    return {
        "desired_slots_total": status.slots_desired,
        "download_current": 0,
        "download_filename": None,
        "download_indeterminate": True,
        "download_total": 0,
        "id": agent.agent_id,
        "issues": [{issue: {"model_path": status.model_path}} for issue in status.issues],
        "model_path": status.model_path,
        "name": agent.name,
        # The agent's report may be a moment older than what has just been bound to it.
        "slots_processing": max(status.slots_processing, agent.slots_bound),
        # The format has no word for draining; an agent that takes nothing new offers no slots.
        "slots_total": 0 if status.draining else status.slots_total,
        "state_application_status": application,
        "uses_chat_template_override": False,
    }
