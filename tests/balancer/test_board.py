"""What observers are told: whoever missed whatever ends with what is true."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from balancer import board as board_module
from balancer.board import Board, State

Told = dict[str, dict[str, Any]]


def encoded(state: Told) -> State:
    return {
        section: {key: json.dumps(value).encode() for key, value in entries.items()}
        for section, entries in state.items()
    }


def applied(before: Told, name: str, text: bytes) -> Told:
    """As an observer does it."""
    told = json.loads(text)
    if name == "snapshot":
        return told
    state = {section: dict(entries) for section, entries in before.items()}
    for section, entries in told.items():
        for key, value in entries.items():
            if value is None:
                state[section].pop(key, None)  # it may have come and gone unseen
            else:
                state[section][key] = value
    return state


def test_who_knows_nothing_is_told_all() -> None:
    board = Board()
    board.update(encoded({"agents": {"a": 1}, "fleets": {}}))

    event = board.since(None)

    assert event is not None
    assert (event.name, json.loads(event.text)) == ("snapshot", {"agents": {"a": 1}, "fleets": {}})


def test_later_only_what_is_different_is_told() -> None:
    board = Board()
    board.update(encoded({"agents": {"a": 1, "b": 1, "c": 1}, "fleets": {"f": 1}}))
    seen = board.number
    board.update(encoded({"agents": {"a": 2, "b": 1}, "fleets": {"f": 1}}))

    event = board.since(seen)

    assert event is not None
    assert (event.name, json.loads(event.text)) == ("change", {"agents": {"a": 2, "c": None}})


def test_nothing_is_told_while_nothing_is_different() -> None:
    board = Board()
    assert board.update(encoded({"agents": {"a": 1}}))

    assert not board.update(encoded({"agents": {"a": 1}}))
    assert board.since(board.number) is None


def test_many_changes_are_one_for_who_missed_them() -> None:
    board = Board()
    board.update(encoded({"agents": {"a": 0}}))
    seen = board.number
    for n in range(1, 100):
        board.update(encoded({"agents": {"a": n}}))

    event = board.since(seen)

    assert event is not None
    assert json.loads(event.text) == {"agents": {"a": 99}}


def test_who_has_seen_more_than_there_was_is_told_all() -> None:
    board = Board()
    board.update(encoded({"agents": {"a": 1}}))

    event = board.since(board.number + 1)

    assert event is not None
    assert event.name == "snapshot"


def test_who_missed_more_removals_than_are_remembered_is_told_all(monkeypatch: Any) -> None:
    monkeypatch.setattr(board_module, "MOST_REMOVALS", 2)
    board = Board()
    board.update(encoded({"agents": {str(n): 1 for n in range(5)}}))
    first = board.number
    board.update(encoded({"agents": {"3": 1, "4": 1}}))
    second = board.number
    board.update(encoded({"agents": {"4": 1}}))

    told = [board.since(first), board.since(second)]

    assert [event.name for event in told if event] == ["snapshot", "change"]


def test_what_comes_and_goes_for_ever_takes_no_more_memory() -> None:
    board = Board()
    for n in range(3 * board_module.MOST_REMOVALS):
        board.update(encoded({"requests": {str(n): 1}}))

    assert len(board._changes) <= board_module.MOST_REMOVALS + 1  # pyright: ignore[reportPrivateUsage]


values = st.integers(0, 2)
states = st.fixed_dictionaries(
    {name: st.dictionaries(st.sampled_from("abc"), values) for name in ("agents", "requests")}
)


@given(st.lists(st.tuples(states, st.sets(st.integers(0, 3))), max_size=12))
def test_observers_that_look_now_and_then_know_what_is_true(
    steps: list[tuple[Told, set[int]]],
) -> None:
    board = Board()
    known: list[Told] = [{} for _ in range(4)]
    numbers: list[int | None] = [None] * 4
    for state, looking in steps:
        board.update(encoded(state))
        for observer in looking:
            event = board.since(numbers[observer])
            if event is not None:
                known[observer] = applied(known[observer], event.name, event.text)
                numbers[observer] = event.number
            assert known[observer] == state
