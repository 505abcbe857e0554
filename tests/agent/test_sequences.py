import pytest

from agent.sequences import SequencePool


def test_an_id_comes_back_once_it_is_released() -> None:
    pool = SequencePool(1)
    sequence_id = pool.acquire()
    with pytest.raises(AssertionError, match="more sequences"):
        pool.acquire()

    pool.release(sequence_id)

    assert pool.acquire() == sequence_id


def test_all_ids_are_different_and_below_the_size() -> None:
    pool = SequencePool(4)

    assert {pool.acquire() for _ in range(4)} == {0, 1, 2, 3}
