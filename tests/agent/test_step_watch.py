"""Who is slow is not taken for dead, and who is dead is found."""

import pytest

from agent.step_watch import (
    FACTOR,
    FLOOR,
    LOOKS,
    UNMEASURED,
    DocumentCosts,
    Step,
    StepWatch,
    step_limit,
)

STEP = Step(1, began=100.0, limit=10.0)


def test_a_step_without_progress_is_found_soon_after_its_limit() -> None:
    watch = StepWatch()

    found = [watch.look(STEP, progress=0, now=100.0 + n) for n in range(20)]

    assert found.index(True) == 10 + LOOKS


def test_a_step_that_gets_on_may_take_as_long_as_it_likes() -> None:
    watch = StepWatch()

    assert not any(watch.look(STEP, progress=n // 9, now=100.0 + n) for n in range(1000))


def test_short_steps_are_never_old_however_many_there_are() -> None:
    watch = StepWatch()

    for n in range(1000):
        step = Step(n, began=99.9 + n, limit=10.0)
        assert not watch.look(step, progress=0, now=100.0 + n)
        assert watch.age(step, progress=0, now=100.0 + n) == pytest.approx(0.1)


def test_one_old_step_is_no_proof_if_the_next_look_finds_another() -> None:
    watch = StepWatch()
    for n in range(11):
        watch.look(STEP, progress=0, now=100.0 + n)
    assert not watch.look(STEP, progress=0, now=111.0)

    assert not watch.look(Step(2, began=111.5, limit=10.0), progress=0, now=112.0)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The machine was suspended, or all of the process was stopped."""
    watch = StepWatch()
    watch.look(STEP, progress=0, now=101.0)

    assert not any(watch.look(STEP, progress=0, now=1000.0 + n) for n in range(6))
    assert watch.age(STEP, progress=0, now=1005.0) == pytest.approx(1 + 2 + 5)


def test_a_step_that_began_before_a_suspension_is_as_young() -> None:
    watch = StepWatch()
    watch.look(None, progress=0, now=99.5)

    assert watch.age(STEP, progress=0, now=1000.0) == pytest.approx(2)


def test_the_age_grows_between_two_looks() -> None:
    watch = StepWatch()
    assert watch.age(STEP, progress=0, now=100.5) == pytest.approx(0.5)
    watch.look(STEP, progress=0, now=101.0)

    assert watch.age(STEP, progress=0, now=101.25) == pytest.approx(1.25)
    assert watch.age(STEP, progress=7, now=101.25) == 0


def test_an_idle_thread_is_not_looked_at() -> None:
    watch = StepWatch()
    for n in range(11):
        watch.look(STEP, progress=0, now=100.0 + n)

    assert not any(watch.look(None, progress=0, now=111.0 + n) for n in range(100))


def test_the_limit_follows_what_is_expected() -> None:
    assert step_limit(None) == UNMEASURED
    assert step_limit(0.0) == FLOOR
    assert step_limit(2.0) == FLOOR + 2 * FACTOR


def test_documents_are_expected_to_cost_what_a_batch_has_cost_lately() -> None:
    costs = DocumentCosts()
    costs.began()
    assert costs.expected(10) is None

    costs.spent(1.0)
    costs.spent(2.0)
    costs.completed(30)

    assert costs.expected(20) == pytest.approx(2.0)
    costs.began()
    costs.spent(0.1)
    costs.completed(10)
    assert costs.expected(20) == pytest.approx(1.8)


def test_a_batch_that_was_not_completed_does_not_count() -> None:
    costs = DocumentCosts()
    costs.spent(100.0)

    costs.began()
    costs.spent(1.0)
    costs.completed(1)

    assert costs.expected(1) == pytest.approx(1.0)
