"""What is remembered of requests, and for how long."""

import pytest

from balancer.journal import MOST_DECISIONS, MOST_OVER, Decider, Decision, Journal, State, What
from balancer.terms import ANY, Route, Terms
from common.ids import AgentId, RequestId

R1, R2 = RequestId("r1"), RequestId("r2")


def test_a_request_is_told_from_its_arrival_to_its_end() -> None:
    journal = Journal()
    record = journal.begin(R1, Terms(route=Route.RESPONSES), now=100.0, at=5000.0)
    record.decide(What.BUFFERED, "all is taken", by=Decider.DISPATCHER, now=100.5)
    record.decide(What.DISPATCHED, "it is free", by=Decider.DISPATCHER, now=101.0, agent="one")
    journal.end(record, "stop", now=103.0)

    assert record.decisions == [
        Decision(0.0, Decider.BALANCER, What.ARRIVED, "by responses"),
        Decision(0.5, Decider.DISPATCHER, What.BUFFERED, "all is taken"),
        Decision(1.0, Decider.DISPATCHER, What.DISPATCHED, "it is free", "one"),
        Decision(3.0, Decider.BALANCER, What.OVER, "stop"),
    ]


def test_the_state_follows_from_who_has_it() -> None:
    journal = Journal()
    record = journal.begin(R1, ANY, now=0.0, at=0.0)
    states = [record.state]
    record.agent_id = AgentId("a")
    states.append(record.state)
    journal.end(record, "stop", now=1.0)

    assert [*states, record.state] == [State.WAITING, State.RUNNING, State.OVER]


def test_what_is_over_is_no_longer_open() -> None:
    journal = Journal()
    first = journal.begin(R1, ANY, now=0.0, at=0.0)
    second = journal.begin(R2, ANY, now=1.0, at=1.0)
    journal.end(first, "stop", now=2.0)

    assert ([*journal.open], journal.over) == ([second], [first])


def test_the_oldest_that_are_over_are_forgotten() -> None:
    journal = Journal()
    for n in range(MOST_OVER + 2):
        journal.end(journal.begin(RequestId(str(n)), ANY, now=n, at=n), "stop", now=n)

    assert len(journal.over) == MOST_OVER
    assert journal.find("1") is None
    assert journal.find("2") is not None


def test_refusals_do_not_push_out_what_ran() -> None:
    journal = Journal()
    ran = journal.begin(R1, ANY, now=0.0, at=0.0)
    ran.dispatched = 0.0
    journal.end(ran, "stop", now=0.0)
    for n in range(2 * MOST_OVER):
        journal.end(journal.begin(RequestId(str(n)), ANY, now=n, at=n), "buffer_full", now=n)

    assert journal.find(R1) is ran
    assert journal.over[0] is ran


def test_first_and_latest_decisions_are_kept_of_one_that_has_many() -> None:
    journal = Journal()
    record = journal.begin(R1, ANY, now=0.0, at=0.0)
    for n in range(1, 5 * MOST_DECISIONS):
        record.decide(What.REFUSED, str(n), by=Decider.SCHEDULER, now=n)

    moments = [decision.at for decision in record.decisions]
    assert len(moments) == 2 * MOST_DECISIONS
    assert moments[:2] == [0.0, 1.0]
    assert moments[-1] == 5 * MOST_DECISIONS - 1


@pytest.mark.parametrize("name", ["r1", "chatcmpl-r1", "cmpl-r1", "resp_r1"])
def test_a_request_is_found_by_its_answers_id(name: str) -> None:
    journal = Journal()
    record = journal.begin(R1, ANY, now=0.0, at=0.0)

    assert journal.find(name) is record
    journal.end(record, "stop", now=1.0)
    assert journal.find(name) is record


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("0123456789a", "0123456789a"),
        ("0123456789", None),
        ("0123456", None),
        ("0123456789ab", "0123456789ab"),
        ("chatcmpl-98765432", "9876543210"),
        ("9876543", None),
    ],
)
def test_a_request_is_found_by_how_no_others_id_begins(name: str, found: str | None) -> None:
    journal = Journal()
    for n, request_id in enumerate(("0123456789a", "0123456789ab", "9876543210")):
        record = journal.begin(RequestId(request_id), ANY, now=n, at=n)
        if n == 0:
            journal.end(record, "stop", now=1.0)

    record = journal.find(name)

    assert (record and record.request_id) == found


def test_nobody_is_found_by_another_name() -> None:
    assert Journal().find("r1") is None
