"""The management routes: what agents and buffer look like, once or as a stream, and desired state.

A stream sends the newest state, whole, when it has changed: a slow reader misses what lay between
and costs nothing. Each ends after some minutes, so that one that is never read is not kept for
ever; clients connect again.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from balancer.audit import audit
from balancer.balancer import Balancer
from balancer.desired_state import AgentOverrides, BalancerDesiredState
from balancer.http import ClosingStream, read_body
from balancer.linked_agents import AgentView, best_name
from balancer.metrics import CONTENT_TYPE
from balancer.native_requests import parse
from balancer.stored_state import AGENT_OVERRIDES, DESIRED_STATE, StoredState
from balancer.wishes import Wishes
from common.errors import ErrorCode, RequestError
from common.ids import AgentId
from common.models import AgentIssue, IssueKind, names

KEEP_ALIVE = 3.0
"""Seconds between comments on an idle stream; the published client gives up after 5."""

LIFETIME = 600.0
"""Seconds that one stream may last."""

SHORTEST_PAUSE = 0.1
"""Seconds between two states on one stream at least, however often it changes."""

Snapshot = Callable[[], dict[str, Any]]


class Management:
    def __init__(self, balancer: Balancer, wishes: Wishes) -> None:
        self._balancer = balancer
        self._wishes = wishes
        self._shared: dict[Snapshot, tuple[int, float, bytes]] = {}
        """What all streams of a kind tell, after which change and when it was made: once for all."""

    async def health(self, _request: Request) -> Response:
        """For whoever decides whether clients are to be sent here."""
        if self._balancer.accepts:
            return PlainTextResponse("OK")
        return PlainTextResponse("shutting down\n", 503)

    async def agents(self, _request: Request) -> Response:
        return _json(self._agents())

    async def agents_stream(self, _request: Request) -> Response:
        return self.stream(self._agents)

    async def buffered(self, _request: Request) -> Response:
        return _json(self._buffered())

    async def buffered_stream(self, _request: Request) -> Response:
        return self.stream(self._buffered)

    async def chat_template_override(self, request: Request) -> Response:
        template = self._agent(request).description.chat_template_override
        return _json(None if template is None else {"content": template})

    async def model_metadata(self, request: Request) -> Response:
        metadata = self._agent(request).description.metadata
        return _json(None if metadata is None else {"metadata": metadata})

    async def status(self, request: Request) -> Response:
        """All that an agent says of itself, in our own words: also why something failed."""
        agent = self._agent(request)
        return _json(
            {
                "id": agent.agent_id,
                "name": agent.name,
                "labels": agent.labels,
                "slots_bound": agent.slots_bound,
                "rollout_halted_by": self._balancer.halted_by,
                "status": msgspec.to_builtins(agent.status),
            }
        )

    async def desired_state(self, _request: Request) -> Response:
        answer = _model(self._balancer.desired_state)
        answer.headers.update(self._tag)
        return answer

    async def put_desired_state(self, request: Request) -> Response:
        state = parse(BalancerDesiredState, await read_body(request))
        before = self._balancer.desired_state
        answer = await self._put(DESIRED_STATE, state, seen=_seen_wish(request))
        # Its name only: an address may have a secret.
        name = best_name(names(state.model_reference))
        changed = [key for key, value in state if value != getattr(before, key)]
        audit(request, "put_desired_state", model=name, changed=",".join(changed))
        return answer

    async def desired_state_schema(self, _request: Request) -> Response:
        """For who draws a form of it."""
        defaults = BalancerDesiredState.defaults().model_dump(mode="json", by_alias=True)
        return _json({"schema": BalancerDesiredState.model_json_schema(), "defaults": defaults})

    async def applicable_state(self, _request: Request) -> Response:
        return _model(self._balancer.desired_state.applicable)

    async def agent_overrides(self, _request: Request) -> Response:
        return _model(self._balancer.stored.agent_overrides)

    async def put_agent_overrides(self, request: Request) -> Response:
        overrides = parse(AgentOverrides, await read_body(request))
        answer = await self._put(AGENT_OVERRIDES, overrides)
        audit(request, "put_agent_overrides", overrides=len(overrides.overrides))
        return answer

    async def _put(
        self,
        part: str,
        value: BalancerDesiredState | AgentOverrides,
        *,
        seen: int | None = None,
    ) -> Response:
        """``seen``: the newest wish that the operator knew; None: whatever it is. Raises ``StateError``,
        and ``RequestError`` if there is another one.
        """

        def change(stored: StoredState) -> StoredState:
            if seen not in (None, stored.wish_number):
                raise RequestError(
                    ErrorCode.OVERTAKEN, "somebody else has put another desired state meanwhile"
                )
            return stored.model_copy(update={part: value})

        await self._wishes.put(part, change)
        return Response(status_code=204, headers=self._tag)

    @property
    def _tag(self) -> dict[str, str]:
        """The number of the newest wish, for ``If-Match``."""
        return {"etag": f'"{self._balancer.stored.wish_number}"'}

    def _agent(self, request: Request) -> AgentView:
        agent_id = AgentId(request.path_params["agent_id"])
        for agent in self._balancer.agents:
            if agent.agent_id == agent_id:
                return agent
        raise RequestError(ErrorCode.AGENT_NOT_FOUND, "there is no such agent")

    async def metrics(self, _request: Request) -> Response:
        return Response(self._balancer.metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _agents(self) -> dict[str, Any]:
        return {"agents": [_agent(agent) for agent in self._balancer.agents]}

    def _buffered(self) -> dict[str, Any]:
        return {"buffered_requests_current": self._balancer.buffered}

    def stream(self, snapshot: Snapshot) -> Response:
        """The newest of these snapshots, whenever it is another one."""
        return ClosingStream(
            self._events(snapshot),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    def _data(self, snapshot: Snapshot, count: int) -> bytes:
        now = asyncio.get_running_loop().time()
        after, made, data = self._shared.get(snapshot, (-1, 0.0, b""))
        if after != count or now - made > SHORTEST_PAUSE:
            data = msgspec.json.encode(snapshot())
            self._shared[snapshot] = (count, now, data)
        return data

    async def _events(self, snapshot: Snapshot) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        end = loop.time() + LIFETIME
        sent = b""
        while not self._balancer.closed.is_set() and loop.time() < end:
            count = self._balancer.changes.count
            data = self._data(snapshot, count)
            if data != sent:
                sent = data
                yield b"data: " + data + b"\n\n"
                await asyncio.sleep(SHORTEST_PAUSE)
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await self._balancer.changes.after(count)
            except TimeoutError:
                yield b": keep-alive\n\n"


def _seen_wish(request: Request) -> int | None:
    """Of the header ``If-Match``; raises ``RequestError`` if it is no number of ours."""
    told = request.headers.get("if-match", "*")
    if told == "*":
        return None
    number = told.strip('"')
    if not (number.isascii() and number.isdigit() and len(number) < 20):
        raise RequestError(
            ErrorCode.INVALID_REQUEST, "If-Match is not the wish_number that the overview tells"
        )
    return int(number)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _model(model: BaseModel) -> Response:
    return Response(model.model_dump_json(by_alias=True), media_type="application/json")


def _agent(agent: AgentView) -> dict[str, Any]:
    """An agent in the published wire format."""
    status = agent.status
    download = status.download
    return {
        "desired_slots_total": status.slots_desired,
        "download_current": download.current if download else 0,
        "download_filename": download.filename if download else None,
        "download_indeterminate": download is None or download.total is None,
        "download_total": (download and download.total) or 0,
        "id": agent.agent_id,
        "issues": [_issue(issue) for issue in status.issues],
        "model_path": status.model_path,
        "name": agent.name,
        "slots_processing": agent.slots_busy,
        # The format has no word for draining; an agent that takes nothing new offers no slots.
        "slots_total": 0 if status.draining else status.slots_total,
        "state_application_status": status.application.value,
        "uses_chat_template_override": status.uses_chat_template_override,
    }


def _issue(issue: AgentIssue) -> dict[str, Any]:
    path = {"model_path": issue.model_path}
    match issue.kind:
        case IssueKind.HUGGING_FACE_CANNOT_ACQUIRE_LOCK:
            return {issue.kind: {"lock_path": issue.lock_path, "model_path": path}}
        case IssueKind.CHAT_TEMPLATE_DOES_NOT_COMPILE:
            told = {"error": issue.detail, "model_path": path, "template_content": issue.template}
            return {issue.kind: told}
        case IssueKind.SLOT_CANNOT_START:
            return {issue.kind: {"error": issue.detail, "slot_index": 0}}
        case _:
            return {issue.kind: path}
