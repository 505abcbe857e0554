"""What operators want, kept and told."""

import asyncio

import pytest

from balancer.balancer import Balancer
from balancer.state_store import MemoryStore, StateError
from balancer.stored_state import AGENT_OVERRIDES, DESIRED_STATE, StoredState
from balancer.wishes import Wishes
from common.errors import ErrorCode, RequestError


class Kept(MemoryStore):
    def __init__(self) -> None:
        self.states: list[StoredState] = []

    def save(self, state: StoredState, /) -> None:
        self.states.append(state)


def same(stored: StoredState) -> StoredState:
    return stored


async def test_each_change_is_newer_than_the_one_before(balancer: Balancer) -> None:
    store = Kept()
    wishes = Wishes(balancer, store)

    await asyncio.gather(*(wishes.put(DESIRED_STATE, same) for _ in range(5)))

    times = [state.revisions[DESIRED_STATE] for state in store.states]
    assert times == sorted(set(times))
    assert balancer.stored == store.states[-1]


async def test_a_change_is_newer_than_one_of_a_clock_that_is_ahead(balancer: Balancer) -> None:
    ahead = 2**60
    balancer.want(balancer.stored.put(AGENT_OVERRIDES, at=ahead))

    await Wishes(balancer).put(DESIRED_STATE, same)

    assert balancer.stored.latest == ahead + 1


async def test_what_another_balancer_was_told_later_is_kept_and_followed(
    balancer: Balancer,
) -> None:
    store = Kept()
    wishes = Wishes(balancer, store)
    await wishes.put(DESIRED_STATE, same)
    mine = balancer.stored
    both = mine.put(AGENT_OVERRIDES, at=mine.latest + 1)
    theirs = both.model_copy(update={"revisions": {AGENT_OVERRIDES: both.latest}})

    await wishes.follow(theirs)
    await wishes.follow(mine)

    assert balancer.stored == both
    assert store.states == [mine, both]


async def test_a_change_that_cannot_be_made_changes_nothing(balancer: Balancer) -> None:
    store = Kept()
    before = balancer.stored

    def refuse(_stored: StoredState) -> StoredState:
        raise RequestError(ErrorCode.INVALID_REQUEST, "no")

    with pytest.raises(RequestError):
        await Wishes(balancer, store).put(DESIRED_STATE, refuse)

    assert (balancer.stored, store.states) == (before, [])


async def test_what_is_not_kept_is_not_wanted(balancer: Balancer) -> None:
    class Full(MemoryStore):
        def save(self, state: StoredState, /) -> None:
            raise StateError("the disk is full")

    before = balancer.stored

    with pytest.raises(StateError):
        await Wishes(balancer, Full()).put(DESIRED_STATE, same)

    assert balancer.stored == before
