"""All that operators see, as JSON texts by section and key: see ``board``.

Agents by id, fleets by name, requests by id, errors and samples of the last minutes by number, and
the balancer itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

import msgspec

from balancer.agent_states import state_of
from balancer.balancer import Balancer
from balancer.board import State
from balancer.history import Sample
from balancer.incidents import Incident
from balancer.journal import Decision, Record
from balancer.journal import State as RequestState
from balancer.linked_agents import AgentView
from common.models import NoModel
from common.references import describe

MOST_OPEN = 200
"""Requests that are shown of those that wait or run."""

MOST_OVER = 100

Told = dict[str, Any]


class Overview:
    def __init__(
        self, balancer: Balancer, fleets: Callable[[], Mapping[str, Told]], *, version: str
    ) -> None:
        """``fleets``: as their own route tells them."""
        self._balancer = balancer
        self._fleets = fleets
        self._version = version
        self._samples: Mapping[str, bytes] = {}

    def state(self) -> State:
        records = self._balancer.records
        requests = self.requests(open_ones=MOST_OPEN, over=MOST_OVER)
        return {
            "agents": {a.agent_id: _json(self._agent(a)) for a in self._balancer.agents},
            "fleets": {name: _json(told) for name, told in self._fleets().items()},
            "requests": {each["id"]: _json(each) for each in requests},
            "errors": {
                str(number): _json(_incident(incident))
                for number, incident in records.incidents.numbered.items()
            },
            "history": self._history(),
            "balancer": {name: _json(told) for name, told in self._own().items()},
        }

    def requests(self, *, open_ones: int, over: int) -> list[Told]:
        """So many of each kind at most, newest first. Of the open ones those that run are told before
        those that wait, and of these who is served next.
        """
        journal = self._balancer.records.journal
        newest = [*islice(reversed(journal.over), over)]
        by_state = sorted(journal.open, key=lambda record: record.state is RequestState.WAITING)
        told = sorted(by_state[:open_ones], key=lambda record: record.arrived, reverse=True)
        return [self._request(record) for record in (*told, *newest)]

    def request(self, name: str) -> Told | None:
        """With all that was decided about it. None: nobody knows it, or not any more."""
        record = self._balancer.records.journal.find(name)
        if record is None:
            return None
        return {**self._request(record), "decisions": [*map(_decision, record.decisions)]}

    def _history(self) -> Mapping[str, bytes]:
        """A sample does not change any more, so each is written once."""
        before = self._samples
        self._samples = {
            key: before.get(key) or _json(_sample(sample))
            for sample in self._balancer.records.history.samples
            for key in (str(sample.number),)
        }
        return self._samples

    def _agent(self, agent: AgentView) -> Told:
        status = agent.status
        return {
            "id": agent.agent_id,
            "name": agent.name,
            "labels": agent.labels,
            "fleet": agent.fleet,
            "state": state_of(status),
            "held": status.held,
            "slots": status.slots_total,
            "slots_busy": agent.slots_busy,
            "slots_desired": status.slots_desired,
            "model": agent.model,
            "model_path": status.model_path,
            "uses_chat_template_override": status.uses_chat_template_override,
            "output_format": status.output_format,
            "application": status.application,
            "applied": status.applied,
            "download": status.download,
            "issues": [
                {"kind": each.kind, "model_path": each.model_path, "detail": each.detail}
                for each in status.issues
            ],
            "phase": status.phase,
            "phases": {phase: round(seconds, 3) for phase, seconds in status.phases.items()},
            "figures": status.figures,
            "step_age": agent.step_age,
        }

    def _request(self, record: Record) -> Told:
        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else round(moment - record.arrived, 4)

        return {
            "id": record.request_id,
            "client_id": record.terms.client_id,
            "route": record.terms.route,
            "model": record.model_name or record.terms.model,
            "priority": record.terms.priority,
            "state": record.state,
            "arrived": record.arrived_at,
            "waited": since_arrival(record.dispatched),
            "why": record.why,
            "agent": record.agent,
            "agent_id": record.agent_id,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "tokens": record.tokens,
            "first_token": since_arrival(record.started if record.tokens else None),
            "ended": since_arrival(record.ended),
            "outcome": record.outcome,
            "message": record.message,
            "moves": record.moves,
        }

    def _own(self) -> Mapping[str, Told]:
        balancer = self._balancer
        records = balancer.records
        wanted = balancer.desired_state.model_reference
        return {
            "buffer": {
                "waiting": balancer.buffered,
                "capacity": balancer.buffer_capacity,
                "bytes": balancer.buffered_bytes,
            },
            "requests": {
                "waiting": balancer.buffered,
                "running": balancer.running,
                "cancelling": balancer.abandoned,
                "over": records.outcomes,
            },
            "model": {
                "wish_number": balancer.stored.wish_number,
                "desired": None if isinstance(wanted, NoModel) else describe(wanted),
                "models": balancer.models,
                "halted_by": balancer.halted_by,
            },
            "about": {
                "version": self._version,
                "started": records.began,
                "accepts": balancer.accepts,
                "supervisor_silent_for": _whole(balancer.unsupervised_for),
            },
        }


def _decision(decision: Decision) -> Told:
    return {
        "at": round(decision.at, 4),
        "by": decision.by,
        "agent": decision.agent,
        "what": decision.what,
        "why": decision.why,
    }


def _incident(incident: Incident) -> Told:
    return {
        "at": incident.at,
        "code": incident.code,
        "message": incident.message,
        "count": incident.count,
        "request_id": incident.request_id,
        "agent": incident.agent,
    }


def _sample(sample: Sample) -> Told:
    return {
        "at": sample.at,
        **asdict(sample.totals),
        **asdict(sample.load),
        "first_token": sample.first_token,
    }


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


_json = msgspec.json.encode
