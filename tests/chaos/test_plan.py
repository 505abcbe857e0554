"""A run is known from its seed."""

import itertools

from integration_tests.chaos.plan import (
    LONGEST,
    OF_AGENTS,
    OF_BALANCER,
    Kind,
    Manner,
    Protocol,
    faults,
    visit,
)

VISITS = [visit(7, number) for number in range(500)]


def test_the_same_seed_gives_the_same_visits_and_faults_and_another_one_others() -> None:
    def plan(seed: int) -> tuple[object, object]:
        struck = faults(seed, agents=3, kinds=OF_AGENTS, interval=2.0)
        return visit(seed, 5), list(itertools.islice(struck, 20))

    assert plan(1) == plan(1)
    assert plan(1)[0] != plan(2)[0]
    assert plan(1)[1] != plan(2)[1]


def test_every_protocol_and_every_manner_comes() -> None:
    assert {each.protocol for each in VISITS} == set(Protocol)
    assert {each.manner for each in VISITS} == set(Manner)


def test_each_answer_is_what_echo_says_of_its_prompt() -> None:
    questions = [question for each in VISITS for question in each.questions]

    for question in questions:
        assert question.answer is not None
        assert question.prompt.startswith(question.answer)
        assert len(question.answer) > 20
        generated = question.prompt.encode()[: question.tokens].decode()
        if question.stop is None:
            assert generated == question.answer
        else:
            assert generated == question.answer + question.stop
            assert question.stop not in question.answer
        assert question.tokens <= question.max_tokens
    assert {question.stop is None for question in questions} == {True, False}
    assert any(not (question.answer or "").isascii() for question in questions)
    assert len({question.prompt for question in questions}) == len(questions)


def test_no_prompt_is_too_long_for_a_run() -> None:
    assert all(len(q.prompt.encode()) < LONGEST + 100 for each in VISITS for q in each.questions)


def test_faults_strike_agents_or_the_balancer_in_the_given_rhythm() -> None:
    kinds = {**OF_AGENTS, **OF_BALANCER}

    struck = list(itertools.islice(faults(3, agents=3, kinds=kinds, interval=2.0), 500))

    assert {fault.kind for fault in struck} == set(Kind)
    assert {fault.agent for fault in struck} == {0, 1, 2, None}
    assert all((fault.agent is None) == (fault.kind in OF_BALANCER) for fault in struck)
    assert 1.8 < sum(fault.wait for fault in struck) / len(struck) < 2.2
