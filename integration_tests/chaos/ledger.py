"""What was asked and what came of it: every request has exactly one outcome, and the right one.

No I/O and no clock here: ``now`` is an argument, in seconds of any clock that goes on.
"""

import enum
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from balancer.dispatcher import MOST_LOSSES
from common.errors import ErrorCode
from integration_tests.chaos.plan import LOSING, OF_BALANCER, Kind, Manner, Protocol, Question

LONGEST = 240.0
"""Seconds until a request must have its outcome."""

NOTEWORTHY = 0.5
"""Seconds without a piece that are a gap."""

AFTERMATH = 30.0
"""Seconds after a fault in which its consequences may show."""


NOTICED_WITHIN = 5.0
"""Seconds after a fault is over in which an agent may still be given up for it."""

CLOCK_ERROR = 0.05
"""Seconds that a departure may seem to be before its fault: the balancer's log has the wall clock,
in whole milliseconds, and a link that is cut is noticed in less than one.
"""


class Outcome(enum.StrEnum):
    COMPLETE = "complete"
    ERROR = "error"
    """A last message that says what went wrong."""
    CUT = "cut off"
    """The connection ended without a last message."""
    UNREACHED = "not reached"
    """There was no connection to be had."""
    LEFT = "left"
    """The client itself."""
    REFUSED = "refused"
    """As rubbish has to be."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was carried out."""

    kind: Kind
    agent: str | None
    began: float
    ended: float
    """When all was as before: the agent back, the link as good as it was."""


@dataclass(frozen=True, slots=True)
class Ending:
    outcome: Outcome
    at: float
    code: str
    """Of an error; else empty."""


@dataclass(frozen=True, slots=True)
class Gap:
    began: float
    ended: float
    agent: str | None
    """Who was at it, if the protocol tells."""


@dataclass(frozen=True, slots=True)
class Spell:
    agent: str
    began: float
    """When its first piece came."""


class _Anybody(Container[str | None]):
    def __contains__(self, _agent: object) -> bool:
        return True


@dataclass(slots=True)
class Record:
    name: str
    protocol: Protocol
    manner: Manner
    question: Question | None
    """None: rubbish."""
    began: float
    said: int = 0
    """Characters of the answer that have come."""
    spells: list[Spell] = field(default_factory=list["Spell"])
    """Who generated it, one after the other, if the protocol tells."""
    gaps: list[Gap] = field(default_factory=list[Gap])
    request_id: str | None = None
    """The balancer's own, if the protocol tells it."""
    dispatches: int | None = None
    """How often the balancer gave it to an agent, by its log; None: that cannot be known."""
    first: float | None = None
    ending: Ending | None = None
    faults: list[str] = field(default_factory=list[str])
    """What was wrong with what came."""
    _newest: float = 0.0

    @property
    def moves(self) -> int:
        """How often another agent went on with it, as far as it is known."""
        seen = max(0, len(self.spells) - 1)
        return seen if self.dispatches is None else max(seen, self.dispatches - 1)

    def suspects(self, began: float, ended: float) -> Container[str | None]:
        """Who may have been at it between these times. While nothing comes nobody knows."""
        assert self.ending is not None
        until = self._newest if self.spells else self.began
        silences = [(gap.began, gap.ended) for gap in self.gaps]
        silences += [(until, self.ending.at)]
        if self.spells:
            silences.append((self.began, self.spells[0].began))
        if any(start <= ended and end >= began for start, end in silences):
            return _Anybody()
        ends = [spell.began for spell in self.spells[1:]] + [self.ending.at]
        return {
            spell.agent
            for spell, end in zip(self.spells, ends, strict=True)
            if spell.began <= ended and end >= began
        }

    def ended_as(self, outcome: Outcome) -> bool:
        return self.ending is not None and self.ending.outcome is outcome

    def heard(self, text: str, *, now: float, agent: str | None = None) -> None:
        """A piece of the answer has come."""
        if self.ending is not None:
            self.faults.append(f"after its end came {text[:40]!r}")
            return
        if self.question is None:
            self.faults.append(f"rubbish was answered with {text[:40]!r}")
            return
        answer = self.question.answer
        if answer is not None and text != (wanted := answer[self.said : self.said + len(text)]):
            self.faults.append(
                f"at character {self.said} of {len(answer)} came {text[:40]!r} and not {wanted[:40]!r}"
            )
        if self.first is None:
            self.first = now
        elif now - self._newest > NOTEWORTHY:
            self.gaps.append(Gap(self._newest, now, self.spells[-1].agent if self.spells else None))
        self._newest = now
        self.said += len(text)
        if agent is not None and (not self.spells or self.spells[-1].agent != agent):
            self.spells.append(Spell(agent, now))

    def counted(self, *, prompt: int, answer: int) -> None:
        """The usage has come, in tokens."""
        assert self.question is not None
        is_echo = self.question.answer is not None
        wanted = len(self.question.prompt.encode()) if is_echo else prompt
        if (prompt, answer) != (wanted, self.question.tokens):
            self.faults.append(
                f"the usage is {prompt} + {answer} tokens and not {wanted} + {self.question.tokens}"
            )

    def ended(self, outcome: Outcome, *, now: float, code: str = "") -> None:
        if self.ending is not None:
            self.faults.append(f"{outcome} {code} after it was {self.ending.outcome} already")
            return
        self.ending = Ending(outcome, now, code)


class Ledger:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.struck: list[Struck] = []

    def open(
        self,
        name: str,
        protocol: Protocol,
        manner: Manner,
        question: Question | None,
        *,
        now: float,
    ) -> Record:
        record = Record(name, protocol, manner, question, now)
        self.records.append(record)
        return record

    def dispatched(self, counts: Mapping[str, int]) -> None:
        """By the balancer's log: how often it gave each request to an agent, by its own ids."""
        for record in self.records:
            if record.request_id is not None:
                record.dispatches = counts.get(record.request_id, 0)

    def violations(self, *, now: float) -> list[str]:
        """What must never be, in words; empty: all is well."""
        return [
            f"request {record.name} ({record.protocol}, {record.manner}): {fault}"
            for record in self.records
            for fault in _faults(record, self.struck, now=now)
        ]


def is_excused(record: Record, struck: Sequence[Struck]) -> bool:
    """May it have ended with an error? Only

    1. if the balancer's side was struck meanwhile: then streams end, but clearly;
    2. if it lost more agents than a request may lose;
    3. for being read too slowly.
    """
    assert record.ending is not None
    if any(s.kind in OF_BALANCER and touches(s, record) for s in struck):
        return True
    if record.ending.code.endswith(ErrorCode.AGENT_LOST):
        return most_losses(record, struck) > MOST_LOSSES
    slow = record.ending.code.endswith(ErrorCode.SLOW_CLIENT)
    return slow and record.manner is Manner.READS_SLOWLY


def most_losses(record: Record, struck: Sequence[Struck]) -> int:
    """How many agents it may have lost: by the log, if that has it; else all that were lost while it
    was theirs, or may have been.
    """
    if record.dispatches is not None:
        return record.dispatches
    losses = [s for s in struck if s.kind in LOSING and touches(s, record)]
    return sum(s.agent in record.suspects(s.began, s.ended) for s in losses)


def touches(struck: Struck, record: Record) -> bool:
    """May the request owe its outcome to this?"""
    end = float("inf") if record.ending is None else record.ending.at
    if struck.kind in OF_BALANCER:
        return struck.began <= end and struck.ended + AFTERMATH >= record.began
    return struck.began <= end and struck.ended >= record.began


def _faults(record: Record, struck: Sequence[Struck], *, now: float) -> list[str]:
    found = list(record.faults)
    ending = record.ending
    if ending is None:
        return [*found, "has no outcome"]
    if ending.at - record.began > LONGEST:
        found.append(f"took {ending.at - record.began:.0f} s")
    balancer_struck = any(s.kind in OF_BALANCER and touches(s, record) for s in struck)
    question = record.question
    match ending.outcome:
        case Outcome.COMPLETE if question is not None and record.said < len(question.answer or ""):
            found.append(
                f"ended well after {record.said} of {len(question.answer or '')} characters"
            )
        case Outcome.COMPLETE if question is None:
            found.append("rubbish was served")
        case Outcome.CUT | Outcome.UNREACHED if not balancer_struck:
            found.append(f"{ending.outcome}, in silence: {ending.code}")
        case Outcome.REFUSED if question is not None:
            found.append(f"was refused: {ending.code}")
        case Outcome.ERROR if question is None and not balancer_struck:
            found.append(f"rubbish was not refused: {ending.code}")
        case Outcome.ERROR if question is not None and not is_excused(record, struck):
            found.append(f"an error that could have been avoided: {ending.code}")
        case _:
            pass
    return found


@dataclass(frozen=True, slots=True)
class Departure:
    """The balancer lost an agent, or gave it up."""

    agent: str
    at: float
    reason: str


def unexplained(departures: Sequence[Departure], struck: Sequence[Struck]) -> list[str]:
    """Agents that were lost though nothing had struck them that may cost a link: a slow one must
    never be taken for a dead one.
    """
    return [
        f"{departure.agent} was given up, and nothing had struck it: {departure.reason}"
        for departure in departures
        if not any(
            (s.kind in OF_BALANCER or (s.kind in LOSING and s.agent == departure.agent))
            and s.began - CLOCK_ERROR <= departure.at <= s.ended + NOTICED_WITHIN
            for s in struck
        )
    ]


@dataclass(frozen=True, slots=True)
class Counts:
    """Of requests that are over, as the balancer's metrics have them."""

    by_outcome: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_outcome.values())


def disagreements(records: Sequence[Record], counts: Counts) -> list[str]:
    """Between what clients saw and what the balancer counted since all were zero; for a run in which
    the balancer itself was not struck. Of a client that left nobody knows how far it came.
    """
    asked = [record for record in records if record.question is not None]
    left = sum(r.ended_as(Outcome.LEFT) for r in asked)
    certain = len(asked) - left
    found: list[str] = []
    if not certain <= counts.total <= len(asked):
        found.append(
            f"the balancer counted {counts.total} outcomes of {certain} requests and {left} that left"
        )
    complete = sum(r.ended_as(Outcome.COMPLETE) for r in asked)
    well = counts.by_outcome.get("stop", 0) + counts.by_outcome.get("length", 0)
    if not complete <= well <= complete + left:
        found.append(
            f"the balancer counted {well} complete answers, clients {complete} and {left} left"
        )
    return found
