"""What operators want, kept and told."""

import asyncio

import pytest

from balancer.balancer import Balancer
from balancer.state_store import MemoryStore, StateError, StoredState
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

    await asyncio.gather(*(wishes.put(same) for _ in range(5)))

    revisions = [state.revision for state in store.states]
    assert revisions == sorted(set(revisions))
    assert balancer.stored == store.states[-1]


async def test_a_change_is_newer_than_one_of_a_clock_that_is_ahead(balancer: Balancer) -> None:
    ahead = 2**60
    balancer.want(balancer.stored.model_copy(update={"revision": ahead}))

    await Wishes(balancer).put(same)

    assert balancer.stored.revision == ahead + 1


async def test_what_another_balancer_was_told_is_followed_if_it_is_newer(
    balancer: Balancer,
) -> None:
    store = Kept()
    wishes = Wishes(balancer, store)
    await wishes.put(same)
    mine = balancer.stored
    newer = mine.model_copy(update={"revision": mine.revision + 1})

    await wishes.follow(newer)
    await wishes.follow(mine)

    assert balancer.stored == newer
    assert store.states == [mine, newer]


async def test_a_change_that_cannot_be_made_changes_nothing(balancer: Balancer) -> None:
    store = Kept()
    before = balancer.stored

    def refuse(_stored: StoredState) -> StoredState:
        raise RequestError(ErrorCode.INVALID_REQUEST, "no")

    with pytest.raises(RequestError):
        await Wishes(balancer, store).put(refuse)

    assert (balancer.stored, store.states) == (before, [])


async def test_what_is_not_kept_is_not_wanted(balancer: Balancer) -> None:
    class Full(MemoryStore):
        def save(self, state: StoredState, /) -> None:
            raise StateError("the disk is full")

    before = balancer.stored

    with pytest.raises(StateError):
        await Wishes(balancer, Full()).put(same)

    assert balancer.stored == before
