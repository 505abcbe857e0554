"""Following the status stream of the real balancer, over breaks."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from gateway import Gateway
from played import Play

from common.errors import HeadraceError
from deploy.management import Management, Place
from deploy.overview import OverviewError, StatusEvent, StatusView
from deploy.status_stream import EventReader, Lost, follow, views

EVENT = b'id: e-1\nevent: change\ndata: {"agents":{"a":null}}\n\n'
READ = StatusEvent("e-1", "change", {"agents": {"a": None}})


def test_events_are_read_however_they_are_cut() -> None:
    for size in (1, 7, 1000):
        reader = EventReader()
        text = b": hello\n\n" + EVENT + b": keep-alive\n\n" + EVENT

        events = [
            event
            for start in range(0, len(text), size)
            for event in reader.read(text[start : start + size])
        ]

        assert events == [READ, READ]


def test_other_line_ends_are_part_of_the_data() -> None:
    text = 'event: change\ndata: {"x":{"a":"1\u2028\u0085"}}\n\n'

    (event,) = EventReader().read(text.encode())

    assert event.data == {"x": {"a": "1\u2028\u0085"}}


def test_what_cannot_be_read_is_an_error() -> None:
    with pytest.raises(OverviewError):
        list(EventReader().read(b"data: {\n\n"))


@pytest.fixture
async def gateway(address: str) -> AsyncGenerator[Gateway]:
    gateway = Gateway(int(address.rpartition(":")[2]))
    await gateway.open()
    yield gateway
    await gateway.close()


def no_loss(reason: str) -> None:
    raise AssertionError(reason)


async def until_view(seen: AsyncGenerator[StatusView], *agents: str) -> StatusView:
    async with asyncio.timeout(120):
        async for view in seen:
            if set(view.agents) == set(agents):
                return view
    raise AssertionError("it has ended")


async def test_the_view_follows_what_happens(address: str, play: Play) -> None:
    one = play("one", slots=2)
    async with (
        Management(Place(f"http://{address}")) as balancer,
        aclosing(views(balancer, lost=no_loss)) as seen,
    ):
        assert (await until_view(seen, "id-of-one")).agents["id-of-one"].slots == 2

        play("two")
        one.leave()

        await until_view(seen, "id-of-two")


async def test_after_a_break_it_goes_on_with_what_has_changed_meanwhile(
    gateway: Gateway, play: Play
) -> None:
    play("one")
    async with (
        Management(Place(f"http://127.0.0.1:{gateway.port}")) as balancer,
        aclosing(follow(balancer)) as events,
        asyncio.timeout(120),
    ):
        first = await anext(events)
        assert isinstance(first, StatusEvent)
        assert first.kind == "snapshot"

        await gateway.close()
        play("two")
        lost = await anext(events)
        await gateway.open()
        kinds: list[str] = []
        async for event in events:
            if isinstance(event, StatusEvent):
                kinds.append(event.kind)
                if "id-of-two" in event.data.get("agents", {}):
                    break

    assert isinstance(lost, Lost)
    assert set(kinds) == {"change"}


async def test_a_balancer_that_has_never_answered_is_an_error() -> None:
    async with Management(Place("http://127.0.0.1:1")) as balancer:
        with pytest.raises(HeadraceError, match="no answer from a balancer"):
            await anext(follow(balancer))


async def test_what_is_no_balancer_is_an_error(address: str) -> None:
    async with Management(Place(f"http://{address}/nope")) as balancer:
        with pytest.raises(HeadraceError, match="Not Found"):
            await anext(follow(balancer))


async def test_breaks_are_told_and_the_view_stays(gateway: Gateway, play: Play) -> None:
    play("one")
    reasons: list[str] = []
    async with (
        Management(Place(f"http://127.0.0.1:{gateway.port}")) as balancer,
        aclosing(views(balancer, lost=reasons.append)) as seen,
        asyncio.timeout(120),
    ):
        view = await until_view(seen, "id-of-one")

        await gateway.close()
        while not reasons:
            view = await anext(seen)
        assert set(view.agents) == {"id-of-one"}
        await gateway.open()
        play("two")
        await until_view(seen, "id-of-one", "id-of-two")
