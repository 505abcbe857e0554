"""A fault is told by its kind and place, never by its text."""

import pytest

from common.faults import fault

SECRET = "a client's words"


def prepare() -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ValueError(SECRET) from error


def test_a_fault_says_what_and_where_and_what_it_comes_from() -> None:
    with pytest.raises(ValueError, match=SECRET) as caught:
        prepare()

    told = fault(caught.value)
    first, second = told.split(", from ")
    assert first.startswith("ValueError at test_faults.py:")
    assert first.count(" < ") == 1
    assert second.startswith("KeyError at test_faults.py:")
    assert SECRET not in told
    assert told.isprintable()


def test_one_that_was_never_raised_has_no_place() -> None:
    assert fault(ValueError(SECRET)) == "ValueError at no place"


def test_a_circle_of_causes_ends() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one

    assert fault(one).count(", from ") == 1
