"""What is written down of each request's way: for metrics, for charts, for whoever asks why.

The balancer says what happens, once, and here it is noted wherever it counts.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Protocol

from balancer.exchange import Timing
from balancer.history import History, Load
from balancer.incidents import Incidents, told
from balancer.journal import Decider, Journal, Record, What
from balancer.metrics import Metrics
from balancer.terms import Terms
from common.errors import ErrorCode, RequestError
from common.ids import AgentId, RequestId
from common.messages import Failed, Finished, Note, Noted

log = logging.getLogger(__name__)

CANCELLED = "cancelled"
"""The outcome of a request whose client has gone."""

OPERATORS_OWN = {
    ErrorCode.AGENT_NOT_FOUND,
    ErrorCode.FLEET_NOT_FOUND,
    ErrorCode.REQUEST_NOT_FOUND,
    ErrorCode.OVERTAKEN,
}
"""What operators are told at once when they ask for it."""

NOTES = {
    Note.ADMITTED: What.ADMITTED,
    Note.WAITS_FOR_PREFIX: What.WAITS_FOR_PREFIX,
    Note.WAITS_FOR_CELLS: What.WAITS_FOR_CELLS,
    Note.PAUSED: What.PAUSED,
    Note.DECODE_FAILED: What.DECODE_FAILED,
}


class Observer(Protocol):
    """Is told of each request."""

    def arrived(self, record: Record, /) -> None:
        """In the context of the client's own call."""
        ...

    def over(self, record: Record, /) -> None: ...


@dataclass(slots=True)
class Records:
    metrics: Metrics
    observer: Observer | None = None
    journal: Journal = field(default_factory=Journal)
    incidents: Incidents = field(default_factory=Incidents)
    history: History = field(default_factory=History)
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """How many requests are over, by how they ended."""
    began: float = field(default_factory=time)
    """Seconds since 1970."""

    def arrived(self, request_id: RequestId, terms: Terms, model: str | None) -> Record:
        """``model``: the best name of the one it asks for; None: any, or nobody knows it."""
        record = self.journal.begin(request_id, terms, now=monotonic(), at=time())
        record.model_name = model
        self.metrics.use(model)
        log.info(
            "request_id=%s client_request_id=%s route=%s model=%s arrived",
            request_id,
            terms.client_id,
            terms.route,
            model,
        )
        if self.observer is not None:
            self.observer.arrived(record)
        return record

    def waits(self, record: Record, why: str) -> None:
        """No slot is free for it."""
        record.why = why
        record.decide(What.BUFFERED, why, by=Decider.DISPATCHER, now=monotonic())
        log.info("request_id=%s waits: %s", record.request_id, why)

    def dispatched(
        self, record: Record, agent_id: AgentId, name: str | None, why: str, *, model: str | None
    ) -> None:
        """``model``: the best name of the one that the agent serves."""
        now = monotonic()
        record.model_name = model
        if record.dispatched is None:
            record.dispatched = now
        record.agent_id, record.agent = agent_id, name
        record.decide(What.DISPATCHED, why, by=Decider.DISPATCHER, now=now, agent=name)
        log.info("request_id=%s agent_id=%s dispatched", record.request_id, agent_id)

    def noted(self, record: Record, note: Noted) -> None:
        """Its agent's scheduler says this of it."""
        self._taken(record)
        if note.note is Note.ADMITTED and record.cached_tokens is None:
            record.prompt_tokens, record.cached_tokens = note.tokens, note.cached
        what = NOTES[note.note]
        now = monotonic()
        record.decide(what, note.why, by=Decider.SCHEDULER, now=now, agent=record.agent)

    def refused_by_agent(self, record: Record) -> None:
        """It has no slot free, or must let go of what it began."""
        has_begun = record.started is not None
        self.metrics.requeued.labels("given_back" if has_begun else "busy").inc()
        log.info("request_id=%s agent_id=%s refused", record.request_id, record.agent_id)
        if has_begun:
            self._put_back(record, What.GIVEN_BACK, Decider.SCHEDULER, "")
            record.moves += 1
            return
        self._put_back(record, What.REFUSED, Decider.SCHEDULER, "")
        if not record.is_taken:
            record.dispatched = None  # it waits yet

    def agent_lost(self, record: Record, reason: str) -> None:
        self._put_back(record, What.AGENT_LOST, Decider.BALANCER, reason)
        record.moves += 1

    def started(self, record: Record, *, with_token: bool) -> None:
        """Its first event has come that is for the client."""
        self._taken(record)
        now = record.started = monotonic()
        if with_token:
            seconds = now - record.arrived
            self.metrics.of(record.model_name).first_tokens.observe(seconds)
            self.history.got_first_token(seconds)
            by = Decider.SCHEDULER
            record.decide(What.FIRST_TOKEN, by=by, now=now, agent=record.agent)

    def went_on(self, record: Record) -> None:
        """The first event has come from the agent that has it now; it is not the first one that had it."""
        by = Decider.SCHEDULER
        record.decide(What.WENT_ON, by=by, now=monotonic(), agent=record.agent)

    def got_token(self, record: Record) -> None:
        now = monotonic()
        record.tokens += 1
        self.history.totals.tokens += 1
        model = self.metrics.of(record.model_name)
        model.tokens += 1
        if record.last_token is not None:
            model.gaps.observe(now - record.last_token)
        record.last_token = now

    def over(self, record: Record, agent: str | None, event: Finished | Failed) -> Timing:
        """Its client's last event. ``agent``: the name of the one that it comes from."""
        match event:
            case Finished(reason=reason, usage=usage):
                message = None
                outcome = str(reason)
                record.prompt_tokens = usage.prompt_tokens
                record.cached_tokens = usage.cached_prompt_tokens
                totals = self.history.totals
                totals.prompt_tokens += usage.prompt_tokens
                totals.cached_tokens += usage.cached_prompt_tokens
                model = self.metrics.of(record.model_name)
                model.prompt_tokens += usage.prompt_tokens
                model.cached_prompt_tokens += usage.cached_prompt_tokens
            case Failed(code=code):
                message = told(code, event.message)
                outcome = str(code)
                if code is not ErrorCode.CANCELLED_BY_OPERATOR:
                    self.history.totals.failures += 1
                    self.incident(code, message, request_id=event.request_id, agent=agent)
                if record.started is None:
                    self.metrics.refuse_request(code)
        log.info("request_id=%s over: %s", record.request_id, outcome)
        now = self._end(record, outcome, message)
        return Timing(record.arrived, record.dispatched, record.started, now)

    def cancelled(self, record: Record) -> None:
        """Its client has gone."""
        log.info("request_id=%s cancelled", record.request_id)
        self._end(record, CANCELLED, None)

    def refused(self, error: RequestError) -> None:
        """At a border: what has not become a request."""
        self.metrics.refuse(error)
        if error.code not in OPERATORS_OWN:
            self.incident(error.code, told(error.code, error.message))

    def sample(self, load: Load) -> None:
        self.history.sample(load, at=time())

    def incident(
        self,
        code: ErrorCode,
        message: str | None,
        *,
        request_id: RequestId | None = None,
        agent: str | None = None,
    ) -> None:
        """``message``: see ``told``."""
        self.incidents.add(code, message, at=time(), request_id=request_id, agent=agent)

    def _put_back(self, record: Record, what: What, by: Decider, why: str) -> None:
        record.decide(what, why, by=by, now=monotonic(), agent=record.agent)
        record.agent_id = record.agent = None

    def _taken(self, record: Record) -> None:
        """Its agent did not refuse it: so long it has waited."""
        if not record.is_taken and record.dispatched is not None:
            record.is_taken = True
            waits = self.metrics.of(record.model_name).waits
            waits.observe(record.dispatched - record.arrived)

    def _end(self, record: Record, outcome: str, message: str | None) -> float:
        now = monotonic()
        if record.dispatched is None:  # who waited in vain has waited, too
            self.metrics.of(record.model_name).waits.observe(now - record.arrived)
        self._taken(record)
        self.history.totals.requests += 1
        self.outcomes[outcome] += 1
        self.metrics.of(record.model_name).over(record.terms.route, outcome, now - record.arrived)
        self.journal.end(record, outcome, now=now, message=message)
        if self.observer is not None:
            self.observer.over(record)
        return now
