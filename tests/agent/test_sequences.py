"""The pool of sequence IDs."""

import pytest

from agent.sequences import SequencePool


def test_an_id_belongs_to_one_at_a_time() -> None:
    pool = SequencePool(3)

    assert {pool.acquire() for _ in range(3)} == {0, 1, 2}
    assert not pool.has_free
    with pytest.raises(AssertionError):
        pool.acquire()


def test_a_released_id_is_handed_out_again() -> None:
    pool = SequencePool(1)
    first = pool.acquire()

    pool.release(first)

    assert pool.acquire() == first


def test_a_cached_id_is_not_free_until_it_is_released() -> None:
    pool = SequencePool(1)
    first = pool.acquire()
    pool.rest(first, 5)

    assert not pool.has_free
    assert pool.cached_length(first) == 5
    pool.release(first)
    assert pool.has_free
    assert pool.cached_length(first) is None


def test_the_cached_id_that_was_of_use_last_is_the_last_to_go() -> None:
    pool = SequencePool(2)
    first, second = pool.acquire(), pool.acquire()
    pool.rest(first, 5)
    pool.rest(second, 6)
    assert pool.oldest_cached == first

    pool.touch(first)

    assert pool.oldest_cached == second
    assert pool.cached_length(first) == 5


def test_the_cached_id_that_is_of_no_use_is_the_first_to_go() -> None:
    pool = SequencePool(2)
    first, second = pool.acquire(), pool.acquire()
    pool.rest(first, 5)
    pool.rest(second, 6)

    pool.expose(second)

    assert pool.oldest_cached == second
    assert pool.cached_length(second) == 6


def test_an_id_that_nobody_holds_cannot_be_released() -> None:
    pool = SequencePool(1)

    with pytest.raises(KeyError):
        pool.release(pool.acquire() + 1)  # type: ignore[arg-type]
