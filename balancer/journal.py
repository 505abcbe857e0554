"""What became of each request, and what was decided about it: for operators who ask.

Bounded: of those that are over the latest are kept, and of each request its first and latest
decisions. Prompts and answers are not among them. No I/O here: ``now`` is an argument.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from balancer.terms import Terms
from common.ids import AgentId, RequestId

MOST_OVER = 256
"""Requests that are remembered when they are over, of those that an agent had, and of the others."""

MOST_DECISIONS = 32
"""Of one request: so many of the first, and as many of the latest."""

PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
"""What OpenAI's answers have before a request's id."""


SHORTEST_BEGINNING = 8
"""Characters of an id by which a request is found, if there is one such."""


class Decider(enum.StrEnum):
    BALANCER = "balancer"
    DISPATCHER = "dispatcher"
    SCHEDULER = "scheduler"
    """That of an agent."""


class What(enum.StrEnum):
    """What was decided, or happened."""

    ARRIVED = "arrived"
    BUFFERED = "buffered"
    DISPATCHED = "dispatched"
    REFUSED = "refused"
    GIVEN_BACK = "given_back"
    AGENT_LOST = "agent_lost"
    ADMITTED = "admitted"
    WAITS_FOR_PREFIX = "waits_for_prefix"
    WAITS_FOR_CELLS = "waits_for_cells"
    PAUSED = "paused"
    DECODE_FAILED = "decode_failed"
    FIRST_TOKEN = "first_token"
    WENT_ON = "went_on"
    """On another agent, where the first had left off."""
    OVER = "over"


class State(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Decision:
    at: float
    """Seconds since the request's arrival."""
    by: Decider
    what: What
    why: str = ""
    agent: str | None = None
    """The name of the one it is about."""


@dataclass(slots=True, eq=False)
class Record:
    """Of one request. Times are those of the caller's clock, in seconds."""

    request_id: RequestId
    terms: Terms
    arrived: float
    arrived_at: float
    """The same in seconds since 1970."""
    dispatched: float | None = None
    """For the first time, but for agents that did not take it."""
    is_taken: bool = False
    """An agent has said that it did."""
    started: float | None = None
    """When its first event came that is for the client."""
    ended: float | None = None
    agent_id: AgentId | None = None
    """The one that has it, or had it at the end."""
    agent: str | None = None
    """Its name."""
    why: str | None = None
    """It waits, or waited last."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int = 0
    """That were generated."""
    last_token: float | None = None
    """When the latest one came."""
    model_name: str | None = None
    """The best name of the model that has it, or that it asks for; None: nobody knows it."""
    moves: int = 0
    """How often it was taken from an agent that had it, to go on, or begin anew, elsewhere."""
    outcome: str | None = None
    message: str | None = None
    """What an operator is told of its failure."""
    _first: list[Decision] = field(default_factory=list[Decision])
    _latest: deque[Decision] = field(default_factory=lambda: deque[Decision](maxlen=MOST_DECISIONS))

    @property
    def state(self) -> State:
        if self.ended is not None:
            return State.OVER
        return State.WAITING if self.agent_id is None else State.RUNNING

    @property
    def decisions(self) -> list[Decision]:
        return [*self._first, *self._latest]

    def decide(
        self,
        what: What,
        why: str = "",
        *,
        by: Decider,
        now: float,
        agent: str | None = None,
    ) -> None:
        decision = Decision(now - self.arrived, by, what, why, agent)
        if len(self._first) < MOST_DECISIONS:
            self._first.append(decision)
        else:
            self._latest.append(decision)


class Journal:
    def __init__(self) -> None:
        self._open: dict[RequestId, Record] = {}
        self._served: OrderedDict[RequestId, Record] = OrderedDict()
        self._unserved: OrderedDict[RequestId, Record] = OrderedDict()
        """Apart, so that many that are refused do not push out those that ran."""

    def begin(self, request_id: RequestId, terms: Terms, *, now: float, at: float) -> Record:
        """``at``: the same moment, in seconds since 1970."""
        record = self._open[request_id] = Record(request_id, terms, arrived=now, arrived_at=at)
        record.decide(What.ARRIVED, f"by {terms.route}", by=Decider.BALANCER, now=now)
        return record

    def end(self, record: Record, outcome: str, *, now: float, message: str | None = None) -> None:
        """``message``: fit for operators; it quotes nothing of the prompt."""
        record.ended = now
        record.outcome = outcome
        record.message = message
        record.decide(What.OVER, message or outcome, by=Decider.BALANCER, now=now)
        self._open.pop(record.request_id, None)
        over = self._unserved if record.dispatched is None else self._served
        over[record.request_id] = record
        if len(over) > MOST_OVER:
            over.popitem(last=False)

    @property
    def open(self) -> Iterator[Record]:
        """Oldest first."""
        return iter(self._open.values())

    @property
    def over(self) -> list[Record]:
        """The latest ones, oldest first."""
        both = (*self._served.values(), *self._unserved.values())
        return sorted(both, key=lambda record: record.ended or 0.0)

    def find(self, name: str) -> Record | None:
        """``name``: its id, or that of the answer, or what its client calls it (then the latest one),
        or how no other one's begins. None: nobody knows it, or not any more.
        """
        told = name
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        everywhere = (self._open, self._served, self._unserved)
        for records in everywhere:
            if (record := records.get(RequestId(name))) is not None:
                return record
        for records in everywhere:
            for record in reversed(records.values()):
                if record.terms.client_id == told:
                    return record
        if len(name) < SHORTEST_BEGINNING:
            return None
        found = [r for records in everywhere for i, r in records.items() if i.startswith(name)]
        return found[0] if len(found) == 1 else None
