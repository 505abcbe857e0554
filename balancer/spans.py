"""A request's record as spans of a trace: where its time went. No I/O here; prompts are not in it.

``headrace.request`` spans all. In it ``buffer`` for each time that it waited for a slot, and ``agent
NAME`` for each that had it; in those ``prefill`` until the first token, then ``decode``.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from balancer.journal import Decision, Record, What
from balancer.terms import Route
from common.messages import FinishReason

Value: TypeAlias = str | int | float | Sequence[str]

PROVIDER = "headrace"

OPERATIONS = {
    Route.RAW_PROMPT: "text_completion",
    Route.COMPLETIONS: "text_completion",
    Route.EMBEDDING_BATCH: "embeddings",
    Route.EMBEDDINGS: "embeddings",
}
"""What OpenTelemetry calls it; the others are ``chat``."""

WELL = frozenset(FinishReason)
"""Outcomes of requests that ended as their clients wished."""

LEAVES_AGENT = {What.REFUSED, What.GIVEN_BACK, What.AGENT_LOST, What.OVER}

EVENTS = {What.WAITS_FOR_PREFIX, What.WAITS_FOR_CELLS, What.PAUSED, What.ADMITTED}


class Kind(enum.Enum):
    SERVER = enum.auto()
    INTERNAL = enum.auto()


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at: float
    """Seconds since 1970."""
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    start: float
    end: float
    """Seconds since 1970."""
    kind: Kind = Kind.INTERNAL
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])
    events: Sequence[SpanEvent] = ()
    children: Sequence["Span"] = ()
    error: str | None = None
    """What went wrong, for operators."""


def trace(record: Record) -> Span:
    """Of one that is over."""
    assert record.ended is not None
    whole = record.ended - record.arrived
    children: list[Span] = []
    waits_since: float | None = 0.0
    had_by: list[Decision] = []
    for decision in record.decisions:
        if decision.what is What.DISPATCHED:
            if had_by:  # what was between is not remembered
                children.append(_of_agent(record, had_by, until=decision.at))
            if waits_since is not None:
                children.append(_buffer(record, waits_since, until=decision.at))
            waits_since, had_by = None, [decision]
        elif had_by:
            had_by.append(decision)
            if decision.what in LEAVES_AGENT:
                children.append(_of_agent(record, had_by, until=decision.at))
                waits_since, had_by = decision.at, []
    if had_by:
        children.append(_of_agent(record, had_by, until=whole))
    elif waits_since is not None and waits_since < whole:
        children.append(_buffer(record, waits_since, until=whole))
    return Span(
        "headrace.request",
        record.arrived_at,
        record.arrived_at + whole,
        Kind.SERVER,
        _attributes(record),
        children=children,
        error=None if record.outcome in WELL else record.message or record.outcome,
    )


def _buffer(record: Record, since: float, *, until: float) -> Span:
    at = record.arrived_at
    return Span("buffer", at + since, at + until)


def _of_agent(record: Record, had_by: Sequence[Decision], *, until: float) -> Span:
    """``had_by``: what was decided from the dispatch on."""
    dispatch, *rest = had_by
    at = record.arrived_at
    name = dispatch.agent or "unnamed"
    end = rest[-1] if rest else None
    is_taken = end is not None and end.what in {What.REFUSED, What.GIVEN_BACK, What.AGENT_LOST}
    return Span(
        f"agent {name}",
        at + dispatch.at,
        at + until,
        attributes={"headrace.agent": name, "headrace.why": dispatch.why},
        events=[
            SpanEvent(str(each.what), at + each.at, {"headrace.why": each.why})
            for each in rest
            if each.what in EVENTS or (is_taken and each is end)
        ],
        children=_phases(record, dispatch, rest, until=until),
        error=str(end.what) if end is not None and is_taken else None,
    )


def _phases(
    record: Record, dispatch: Decision, rest: Iterable[Decision], *, until: float
) -> list[Span]:
    at = record.arrived_at
    times = {each.what: each.at for each in reversed(list(rest))}
    token = times.get(What.FIRST_TOKEN, times.get(What.WENT_ON))
    is_text = OPERATIONS.get(record.terms.route) != "embeddings"
    if not is_text or (token is None and What.ADMITTED not in times):
        return []
    begin = times.get(What.ADMITTED, dispatch.at)
    end = until if token is None else token
    phases = [Span("prefill", at + min(begin, end), at + end)]
    if token is not None:
        phases.append(Span("decode", at + token, at + until))
    return phases


def _attributes(record: Record) -> dict[str, Value]:
    route = record.terms.route
    told: dict[str, Value | None] = {
        "gen_ai.operation.name": OPERATIONS.get(route, "chat"),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model_name,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.tokens,
        "headrace.request_id": record.request_id,
        "headrace.route": str(route),
        "headrace.priority": str(record.terms.priority),
        "headrace.outcome": record.outcome,
        "headrace.moves": record.moves,
    }
    if record.outcome is not None:
        is_well = record.outcome in WELL
        told["gen_ai.response.finish_reasons"] = [record.outcome] if is_well else None
        told["error.type"] = None if is_well else record.outcome
    if record.started is not None:
        told["gen_ai.response.time_to_first_chunk"] = record.started - record.arrived
    return {name: value for name, value in told.items() if value is not None}
