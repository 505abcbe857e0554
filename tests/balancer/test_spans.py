"""Where a request's time went, as a tree."""

from typing import Any

from balancer.journal import Decider, Journal, Record, What
from balancer.spans import Kind, Span, trace
from balancer.terms import Route, Terms
from common.ids import RequestId

AT = 1_000_000.0
"""When requests arrive, in seconds since 1970."""


def over(*told: tuple[float, What, str | None], outcome: str, ended: float, **more: Any) -> Record:
    """``told``: when, what, and of which agent."""
    journal = Journal()
    terms = Terms(route=more.pop("route", Route.CONVERSATION))
    record = journal.begin(RequestId("r"), terms, now=50.0, at=AT)
    for at, what, agent in told:
        record.decide(what, f"why {what}", by=Decider.BALANCER, now=50.0 + at, agent=agent)
    for name, value in more.items():
        setattr(record, name, value)
    journal.end(record, outcome, now=50.0 + ended, message=more.get("message"))
    return record


def tree(span: Span) -> Any:
    """Its name, from when to when, and what is in it."""
    place = (span.name, span.start - AT, span.end - AT)
    return (*place, [tree(child) for child in span.children]) if span.children else place


def test_a_request_waits_is_read_and_answered() -> None:
    record = over(
        (0.0, What.BUFFERED, None),
        (2.0, What.DISPATCHED, "a"),
        (2.5, What.ADMITTED, "a"),
        (4.0, What.FIRST_TOKEN, "a"),
        outcome="stop",
        ended=9.0,
    )

    assert tree(trace(record)) == (
        *("headrace.request", 0, 9),
        [
            ("buffer", 0, 2),
            ("agent a", 2, 9, [("prefill", 2.5, 4), ("decode", 4, 9)]),
        ],
    )


def test_one_that_moves_waits_and_is_answered_again() -> None:
    record = over(
        (0.0, What.DISPATCHED, "a"),
        (0.5, What.REFUSED, "a"),
        (1.0, What.DISPATCHED, "b"),
        (1.25, What.ADMITTED, "b"),
        (1.5, What.FIRST_TOKEN, "b"),
        (3.0, What.AGENT_LOST, "b"),
        (4.0, What.DISPATCHED, "c"),
        (4.5, What.ADMITTED, "c"),
        (5.0, What.WENT_ON, "c"),
        outcome="length",
        ended=6.0,
    )

    told = trace(record)

    assert tree(told) == (
        *("headrace.request", 0, 6),
        [
            ("buffer", 0, 0),
            ("agent a", 0, 0.5),
            ("buffer", 0.5, 1),
            ("agent b", 1, 3, [("prefill", 1.25, 1.5), ("decode", 1.5, 3)]),
            ("buffer", 3, 4),
            ("agent c", 4, 6, [("prefill", 4.5, 5), ("decode", 5, 6)]),
        ],
    )
    assert [child.error for child in told.children] == [
        *(None, "refused", None, "agent_lost", None, None)
    ]
    assert told.error is None


def test_one_that_never_had_a_slot_only_waited() -> None:
    record = over(outcome="buffer_timeout", ended=10.0, message="no slot became free in time")

    told = trace(record)

    assert tree(told) == ("headrace.request", 0, 10, [("buffer", 0, 10)])
    assert told.error == "no slot became free in time"
    assert told.attributes["error.type"] == "buffer_timeout"


def test_one_that_ends_while_its_prompt_is_read_was_not_decoded() -> None:
    record = over(
        (0.0, What.DISPATCHED, "a"), (1.0, What.ADMITTED, "a"), outcome="cancelled", ended=2.0
    )

    told = trace(record)

    assert tree(told.children[1]) == ("agent a", 0, 2, [("prefill", 1, 2)])
    assert told.error is None


def test_documents_are_embedded_in_one_piece() -> None:
    record = over((0.0, What.DISPATCHED, "a"), outcome="stop", ended=2.0, route=Route.EMBEDDINGS)

    told = trace(record)

    assert tree(told.children[1]) == ("agent a", 0, 2)
    assert told.attributes["gen_ai.operation.name"] == "embeddings"


def test_what_is_not_remembered_of_many_moves_leaves_whole_spans() -> None:
    moves = [(float(n), What.DISPATCHED, "a") for n in range(100)]

    told = trace(over(*moves, outcome="stop", ended=100.0))

    assert all(0 <= child.start - AT <= child.end - AT <= 100 for child in told.children)
    ends = [child.end for child in told.children]
    assert ends == sorted(ends)
    assert ends[-1] == told.end


def test_a_span_says_what_an_operator_asks() -> None:
    record = over(
        (0.0, What.DISPATCHED, "a"),
        (1.0, What.WAITS_FOR_PREFIX, "a"),
        (1.5, What.ADMITTED, "a"),
        (2.0, What.FIRST_TOKEN, "a"),
        outcome="stop",
        ended=3.0,
        model_name="small",
        prompt_tokens=7,
        cached_tokens=5,
        tokens=4,
        started=52.0,
    )

    told = trace(record)

    assert told.kind is Kind.SERVER
    assert told.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "small",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 2.0,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "headrace.request_id": "r",
        "headrace.route": "conversation",
        "headrace.priority": "normal",
        "headrace.outcome": "stop",
        "headrace.moves": 0,
    }
    _, agent = told.children
    assert agent.attributes == {"headrace.agent": "a", "headrace.why": "why dispatched"}
    assert [(event.name, event.at - AT) for event in agent.events] == [
        ("waits_for_prefix", 1.0),
        ("admitted", 1.5),
    ]
