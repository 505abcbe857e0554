"""The ledger finds whatever must not be."""

from balancer.dispatcher import MOST_LOSSES
from integration_tests.chaos.ledger import (
    LONGEST,
    Counts,
    Departure,
    Gap,
    Ledger,
    Outcome,
    Record,
    Struck,
    disagreements,
    unexplained,
)
from integration_tests.chaos.plan import Kind, Manner, Protocol, Question

QUESTION = Question("water mill", 20, None, "water mill", 10)
A, B = "agent-a", "agent-b"
LOST = "502 agent_lost"


def asked(
    ledger: Ledger,
    question: Question | None = QUESTION,
    *,
    manner: Manner = Manner.READS,
    protocol: Protocol = Protocol.NATIVE,
) -> Record:
    return ledger.open("1", protocol, manner, question, now=0.0)


def found(ledger: Ledger) -> list[str]:
    """What is wrong, without the name of the request."""
    return [violation.split("): ", 1)[1] for violation in ledger.violations(now=100.0)]


def killed(agent: str, began: float, ended: float) -> Struck:
    return Struck(Kind.KILL, agent, began, ended)


def test_a_whole_answer_in_pieces_from_two_agents_is_well() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water ", now=1.0, agent=A)
    record.heard("mill", now=1.1, agent=B)
    record.counted(prompt=10, answer=10)
    record.ended(Outcome.COMPLETE, now=1.2)

    assert (found(ledger), record.moves) == ([], 1)


def test_a_piece_that_came_twice_is_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water ", now=1.0)
    record.heard("er ", now=1.1)

    assert found(ledger)[0] == "at character 6 of 10 came 'er ' and not 'mil'"


def test_a_piece_that_is_missing_is_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("wat", now=1.0)
    record.heard(" mill", now=1.1)

    assert found(ledger)[0] == "at character 3 of 10 came ' mill' and not 'er mi'"


def test_more_than_the_answer_is_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water mill!", now=1.0)
    record.ended(Outcome.COMPLETE, now=1.1)

    assert found(ledger) == ["at character 0 of 10 came 'water mill!' and not 'water mill'"]


def test_an_answer_that_ends_early_but_well_is_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water", now=1.0)
    record.ended(Outcome.COMPLETE, now=1.1)

    assert found(ledger) == ["ended well after 5 of 10 characters"]


def test_text_after_the_end_is_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water mill", now=1.0)
    record.ended(Outcome.COMPLETE, now=1.1)
    record.heard("water", now=1.2)

    assert found(ledger) == ["after its end came 'water'"]


def test_two_ends_are_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water mill", now=1.0)
    record.ended(Outcome.COMPLETE, now=1.1)
    record.ended(Outcome.ERROR, now=1.2, code=LOST)

    assert found(ledger) == ["error 502 agent_lost after it was complete already"]


def test_tokens_that_are_counted_twice_are_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water mill", now=1.0)
    record.counted(prompt=10, answer=14)
    record.ended(Outcome.COMPLETE, now=1.1)

    assert found(ledger) == ["the usage is 10 + 14 tokens and not 10 + 10"]


def test_of_a_model_only_the_number_of_tokens_is_known() -> None:
    ledger = Ledger()
    well, badly = (asked(ledger, Question("tell", 10, None, None, 10)) for _ in range(2))

    for record, tokens in ((well, 10), (badly, 11)):
        record.heard("whatever", now=1.0)
        record.counted(prompt=2, answer=tokens)
        record.ended(Outcome.COMPLETE, now=1.1)

    assert found(ledger) == ["the usage is 2 + 11 tokens and not 2 + 10"]


def test_a_request_without_an_outcome_is_found() -> None:
    ledger = Ledger()

    asked(ledger).heard("water", now=1.0)

    assert found(ledger) == ["has no outcome"]


def test_an_outcome_that_comes_too_late_is_found() -> None:
    ledger = Ledger()
    record = asked(ledger)

    record.heard("water mill", now=1.0)
    record.ended(Outcome.COMPLETE, now=LONGEST + 1)

    assert found(ledger) == [f"took {LONGEST + 1:.0f} s"]


def test_a_stream_that_ends_in_silence_is_found() -> None:
    ledger = Ledger()
    ledger.struck.append(killed(A, 0.5, 2.0))

    asked(ledger).ended(Outcome.CUT, now=1.0, code="ReadError")

    assert found(ledger) == ["cut off, in silence: ReadError"]


def test_a_stream_may_be_cut_off_by_the_death_of_the_proxy() -> None:
    ledger = Ledger()
    ledger.struck.append(Struck(Kind.KILL_PROXY, None, 0.5, 2.0))

    asked(ledger).ended(Outcome.CUT, now=1.0)

    assert found(ledger) == []


def test_what_came_long_after_the_death_of_the_proxy_is_not_its_fault() -> None:
    ledger = Ledger()
    ledger.struck.append(Struck(Kind.KILL_PROXY, None, -100.0, -90.0))

    asked(ledger).ended(Outcome.CUT, now=1.0)

    assert found(ledger) == ["cut off, in silence: "]


def test_who_left_owes_nothing_more_but_what_came_before_must_be_right() -> None:
    ledger = Ledger()
    well, badly = asked(ledger), asked(ledger)

    well.heard("water", now=1.0)
    well.ended(Outcome.LEFT, now=1.1)
    badly.heard("mill", now=1.0)
    badly.ended(Outcome.LEFT, now=1.1)

    assert found(ledger) == ["at character 0 of 10 came 'mill' and not 'wate'"]


def test_rubbish_must_be_refused() -> None:
    ledger = Ledger()
    refused, failed, served = (
        asked(ledger, None, manner=Manner.SENDS_RUBBISH),
        asked(ledger, None, manner=Manner.SENDS_RUBBISH),
        asked(ledger, None, manner=Manner.SENDS_RUBBISH),
    )

    refused.ended(Outcome.REFUSED, now=1.0, code="400: no JSON")
    failed.ended(Outcome.ERROR, now=1.0, code="500: oh")
    served.heard("water", now=1.0)
    served.ended(Outcome.COMPLETE, now=1.1)

    assert found(ledger) == [
        "rubbish was not refused: 500: oh",
        "rubbish was answered with 'water'",
        "rubbish was served",
    ]


def test_what_is_no_rubbish_must_not_be_refused() -> None:
    ledger = Ledger()

    asked(ledger).ended(Outcome.REFUSED, now=1.0, code="400 no")

    assert found(ledger) == ["was refused: 400 no"]


def test_an_error_without_a_fault_could_have_been_avoided() -> None:
    ledger = Ledger()

    asked(ledger).ended(Outcome.ERROR, now=1.0, code="504 buffer_timeout")

    assert found(ledger) == ["an error that could have been avoided: 504 buffer_timeout"]


def test_who_has_lost_as_many_agents_as_allowed_must_be_served_on() -> None:
    ledger = Ledger()
    record = asked(ledger)
    record.request_id = "r"
    ledger.struck += [killed(A, n, n + 0.5) for n in range(5)]
    record.ended(Outcome.ERROR, now=10.0, code=LOST)

    ledger.dispatched({"r": MOST_LOSSES})
    too_early = found(ledger)
    ledger.dispatched({"r": MOST_LOSSES + 1})

    assert too_early == [f"an error that could have been avoided: {LOST}"]
    assert found(ledger) == []


LONG = Question("-" * 1000, 1000, None, "-" * 1000, 1000)


def served(record: Record, agent: str, began: float, ended: float) -> None:
    """One character every 0.25 s."""
    for quarter in range(int(began * 4), int(ended * 4)):
        record.heard("-", now=quarter / 4, agent=agent)


def test_the_loss_of_other_agents_is_no_excuse() -> None:
    ledger = Ledger()
    record = asked(ledger, LONG, protocol=Protocol.SOCKET)

    served(record, A, 1.0, 10.0)
    ledger.struck += [killed(B, 2.0 + n, 2.5 + n) for n in range(5)]
    record.ended(Outcome.ERROR, now=10.0, code=LOST)

    assert found(ledger) == [f"an error that could have been avoided: {LOST}"]


def test_the_loss_of_its_own_agents_is_one() -> None:
    ledger = Ledger()
    record = asked(ledger, LONG, protocol=Protocol.SOCKET)

    served(record, A, 1.0, 3.0)
    served(record, B, 3.0, 10.0)
    # The first one is mended only when another agent has gone on already.
    ledger.struck += [killed(A, 2.5, 6.0)]
    ledger.struck += [killed(B, 4.0 + n, 4.5 + n) for n in range(MOST_LOSSES)]
    record.ended(Outcome.ERROR, now=10.0, code=LOST)

    assert found(ledger) == []
    ledger.struck.pop()
    assert found(ledger) == [f"an error that could have been avoided: {LOST}"]


def test_while_nothing_comes_any_loss_may_be_its_own() -> None:
    ledger = Ledger()
    paused, silent = (asked(ledger, LONG, protocol=Protocol.SOCKET) for _ in range(2))

    served(paused, A, 0.5, 2.0)
    served(paused, A, 8.0, 10.0)
    served(silent, A, 0.5, 2.0)
    ledger.struck += [killed(B, 3.0 + n, 3.5 + n) for n in range(MOST_LOSSES + 1)]
    for record in (paused, silent):
        record.ended(Outcome.ERROR, now=10.0, code=LOST)

    assert found(ledger) == []


def test_before_its_first_piece_any_loss_may_be_its_own() -> None:
    ledger = Ledger()
    record = asked(ledger, protocol=Protocol.SOCKET)

    ledger.struck += [killed(B, 1.0 + n, 1.5 + n) for n in range(MOST_LOSSES + 1)]
    record.ended(Outcome.ERROR, now=10.0, code=LOST)

    assert found(ledger) == []


def test_a_moment_without_a_loss_is_no_excuse_for_a_lost_agent() -> None:
    ledger = Ledger()
    record = asked(ledger, protocol=Protocol.SOCKET)

    ledger.struck += [Struck(Kind.PAUSE, A, 1.0 + n, 1.5 + n) for n in range(MOST_LOSSES + 1)]
    record.ended(Outcome.ERROR, now=10.0, code=LOST)

    assert found(ledger) == [f"an error that could have been avoided: {LOST}"]


def test_only_a_slow_reader_may_be_ended_for_being_slow() -> None:
    ledger = Ledger()

    asked(ledger).ended(Outcome.ERROR, now=1.0, code="503 slow_client")
    slow = asked(ledger, manner=Manner.READS_SLOWLY)
    slow.ended(Outcome.ERROR, now=1.0, code="503 slow_client")

    assert found(ledger) == ["an error that could have been avoided: 503 slow_client"]


def test_a_pause_in_a_stream_is_a_gap_of_whoever_was_at_it() -> None:
    record = asked(Ledger())

    record.heard("wat", now=1.0, agent=A)
    record.heard("er", now=1.1, agent=A)
    record.heard(" mill", now=4.1, agent=B)

    assert record.gaps == [Gap(1.1, 4.1, A)]


def test_an_agent_may_be_given_up_only_if_it_was_struck_so_that_its_link_may_be_lost() -> None:
    struck = [
        killed(A, 10.0, 12.0),
        Struck(Kind.PAUSE, B, 20.0, 21.0),
        Struck(Kind.DELAY, B, 30.0, 31.0),
        Struck(Kind.KILL_REPLICA, None, 50.0, 55.0),
    ]

    def complaints(agent: str, at: float) -> int:
        return len(unexplained([Departure(agent, at, "it was lost")], struck))

    assert [complaints(A, at) for at in (9.9, 9.97, 10.5, 13.0, 40.0, 52.0)] == [1, 0, 0, 0, 1, 0]
    assert [complaints(B, at) for at in (10.5, 20.5, 30.5, 52.0)] == [1, 1, 1, 0]


def over(ledger: Ledger, *outcomes: Outcome) -> None:
    for outcome in outcomes:
        asked(ledger).ended(outcome, now=1.0)


def test_the_balancer_must_have_counted_each_request_once() -> None:
    ledger = Ledger()
    over(ledger, Outcome.COMPLETE, Outcome.COMPLETE, Outcome.ERROR, Outcome.LEFT)
    asked(ledger, None, manner=Manner.SENDS_RUBBISH).ended(Outcome.REFUSED, now=1.0)

    def complaints(**counts: int) -> list[str]:
        return disagreements(ledger.records, Counts(counts))

    assert complaints(stop=1, length=1, agent_lost=1, cancelled=1) == []
    assert complaints(stop=2, length=1, agent_lost=1) == []  # who left was served to the end
    assert complaints(stop=2, agent_lost=1) == []  # who left never came
    assert complaints(stop=2) == ["the balancer counted 2 outcomes of 3 requests and 1 that left"]
    assert complaints(stop=3, agent_lost=2) == [
        "the balancer counted 5 outcomes of 3 requests and 1 that left"
    ]
    assert complaints(stop=4) == ["the balancer counted 4 complete answers, clients 2 and 1 left"]
    assert complaints(stop=1, agent_lost=2) == [
        "the balancer counted 1 complete answers, clients 2 and 1 left"
    ]
