import asyncio

from answers import content

from balancer.exchange import Changes, Exchange, Told
from balancer.limits import MOST_UNREAD_BYTES, MOST_UNREAD_EVENTS
from common.ids import RequestId, TokenId
from common.messages import (
    DocumentTooLong,
    Embedded,
    Finished,
    FinishReason,
    TokenGenerated,
    Usage,
)

R = RequestId("r")
LAST = Told("a", Finished(R, FinishReason.STOP, Usage()))


def token(text: str) -> Told:
    return Told("a", TokenGenerated(R, TokenId(0), content(text)))


async def test_events_come_in_order_and_stop_after_the_last() -> None:
    exchange = Exchange()
    for told in (token("a"), token("b"), LAST):
        exchange.put(told)

    assert [told async for told in exchange] == [token("a"), token("b"), LAST]


async def test_a_reader_waits_for_what_is_not_there_yet() -> None:
    exchange = Exchange()
    reader = asyncio.create_task(anext(exchange))
    await asyncio.sleep(0)
    assert not reader.done()

    exchange.put(token("a"))

    assert await reader == token("a")


async def test_says_when_it_is_full_but_has_room_for_the_last_event() -> None:
    exchange = Exchange()
    for _ in range(MOST_UNREAD_EVENTS):
        assert not exchange.is_full
        exchange.put(token("a"))

    assert exchange.is_full
    exchange.put(LAST)
    assert [told async for told in exchange][-1] == LAST


async def test_vectors_and_refused_documents_are_not_the_last() -> None:
    exchange = Exchange()
    told = [
        Told("a", Embedded(R, "d", 1, bytes(4))),
        Told("a", DocumentTooLong(R, "e", 2, 1)),
        LAST,
    ]
    for each in told:
        exchange.put(each)

    assert [each async for each in exchange] == told


async def test_is_full_of_a_few_large_vectors() -> None:
    exchange = Exchange()
    large = Told("a", Embedded(R, "d", 1, bytes(MOST_UNREAD_BYTES // 2)))
    exchange.put(large)
    assert not exchange.is_full

    exchange.put(large)
    assert exchange.is_full

    await anext(exchange)
    assert not exchange.is_full


async def test_many_changes_between_two_looks_are_one() -> None:
    changes = Changes()
    changes.notify()
    changes.notify()

    assert await changes.after(0) == 2


async def test_a_change_wakes_everyone_who_waits() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.after(0)) for _ in range(3)]
    await asyncio.sleep(0)

    changes.notify()

    assert await asyncio.gather(*waiting) == [1, 1, 1]
