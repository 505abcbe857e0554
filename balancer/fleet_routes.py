"""The routes of fleets: what is wanted of each, what is there, and why the two differ."""

from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import RootModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from balancer.audit import audit
from balancer.balancer import Balancer
from balancer.fleets import MOST_FLEETS, Fleet, FleetName
from balancer.http import json_answer, read_body
from balancer.native_requests import complaints, parse
from balancer.stored_state import StoredState, fleet_part
from balancer.wishes import Wishes
from common.errors import ErrorCode, RequestError

Stream = Callable[[Callable[[], dict[str, Any]]], Response]

_names = TypeAdapter[str](FleetName)

NO_REPORT: dict[str, Any] = {
    "wanted": None,
    "seen": 0,
    "ready": 0,
    "starting": 0,
    "draining": 0,
    "reason": "no supervisor has reported on it yet",
    "is_stuck": False,
    "lacks_node": False,
}


class _Change(RootModel[dict[str, Any]]):
    """Some keys of a fleet."""


class FleetRoutes:
    def __init__(self, balancer: Balancer, wishes: Wishes, stream: Stream) -> None:
        """``stream``: makes an answer of what changes."""
        self._balancer = balancer
        self._stream = stream
        self._wishes = wishes

    async def all(self, _request: Request) -> Response:
        return json_answer(self._all())

    async def all_stream(self, _request: Request) -> Response:
        return self._stream(self._all)

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        _check_known(self._balancer.stored, name)
        return json_answer(self._told(name))

    async def put(self, request: Request) -> Response:
        """Make it, or change it."""
        name = _parse_name(request.path_params["name"])
        fleet = parse(Fleet, await read_body(request))

        def change(stored: StoredState) -> StoredState:
            fleets = {**stored.fleets, name: fleet}
            if len(fleets) > MOST_FLEETS:
                raise RequestError(
                    ErrorCode.INVALID_REQUEST, f"there are {MOST_FLEETS} fleets already"
                )
            return stored.model_copy(update={"fleets": fleets})

        await self._wishes.put(fleet_part(name), change)
        audit(request, "put_fleet", fleet=name, min=fleet.min, max=fleet.max)
        return Response(status_code=204)

    async def patch(self, request: Request) -> Response:
        """Change what is said of it; the rest stays."""
        name = request.path_params["name"]
        said = parse(_Change, await read_body(request)).root

        def change(stored: StoredState) -> StoredState:
            _check_known(stored, name)
            before = stored.fleets[name].model_dump(mode="json", by_alias=True)
            fleet = parse(Fleet, msgspec.json.encode({**before, **said}))
            return stored.model_copy(update={"fleets": {**stored.fleets, name: fleet}})

        await self._wishes.put(fleet_part(name), change)
        fleet = self._balancer.fleets[name]
        changed = ",".join(sorted(said))
        audit(request, "change_fleet", fleet=name, changed=changed, min=fleet.min, max=fleet.max)
        return Response(status_code=204)

    async def delete(self, request: Request) -> Response:
        """Its agents finish what runs, and go."""
        name = request.path_params["name"]

        def change(stored: StoredState) -> StoredState:
            _check_known(stored, name)
            fleets = {other: fleet for other, fleet in stored.fleets.items() if other != name}
            return stored.model_copy(update={"fleets": fleets})

        await self._wishes.put(fleet_part(name), change)
        audit(request, "delete_fleet", fleet=name)
        return Response(status_code=204)

    def told(self) -> dict[str, dict[str, Any]]:
        """All that is known of each fleet."""
        return {name: self._told(name) for name in self._balancer.fleets}

    def _all(self) -> dict[str, Any]:
        return {"fleets": self.told()}

    def _told(self, name: str) -> dict[str, Any]:
        view = self._balancer.fleet_views.get(name)
        report: dict[str, Any] = NO_REPORT if view is None else msgspec.to_builtins(view.report)
        return {
            "fleet": self._balancer.fleets[name].model_dump(mode="json", by_alias=True),
            **report,
            "reason": self._reason(report["reason"]),
            "waiting": self._balancer.waiting[name],
            "agents": () if view is None else msgspec.to_builtins(view.agents),
        }

    def _reason(self, told: str | None) -> str | None:
        """``told``: by the supervisor, when it answered last."""
        silence = self._balancer.unsupervised_for
        if silence is None:
            return told
        reason = f"the supervisor has not answered for {silence:.0f} s"
        return reason if told is None else f"{reason}; before: {told}"


def _check_known(stored: StoredState, name: str) -> None:
    if name not in stored.fleets:
        raise RequestError(ErrorCode.FLEET_NOT_FOUND, "there is no such fleet")


def _parse_name(name: str) -> str:
    try:
        return _names.validate_python(name)
    except ValidationError as error:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, complaints(error, whole="the fleet's name")
        ) from error
