"""An agent's links to several balancers, over real sockets, with the balancers' parts played."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest
from linked import PlayedBalancer, PlayedLink

from agent.link import GivenUpError, Link, LinkRefusedError
from agent.links import Links
from common.ids import AgentId, RequestId
from common.messages import (
    GIVEN_UP,
    PROTOCOL,
    REFUSED,
    Busy,
    Cancel,
    Described,
    Join,
    Status,
    Step,
    ToAgent,
)


class Owner:
    """Says little and notes what it is told."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.lost_links: list[str] = []
        self.frames: list[tuple[str, ToAgent]] = []
        self._news = asyncio.Event()

    def join(self, link: Link, /) -> Join:
        return Join(
            protocol=PROTOCOL, agent_id=AgentId("a"), name=link.address, status=self.status(link)
        )

    def status(self, link: Link, /) -> Status:
        return Status(version=1, slots_desired=1, slots_total=1, slots_processing=0)

    def description(self) -> Described:
        return Described(None, None)

    def received(self, link: Link, frame: ToAgent, /) -> None:
        self.frames.append((link.address, frame))
        self._news.set()

    def lost(self, link: Link, /) -> None:
        self.lost_links.append(link.address)
        self._news.set()

    def failed(self, error: BaseException, /) -> None:
        self.errors.append(error)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def balancers() -> AsyncGenerator[list[PlayedBalancer]]:
    balancers = [PlayedBalancer(), PlayedBalancer()]
    yield balancers
    for balancer in balancers:
        await balancer.stop()


@pytest.fixture
async def urls(balancers: list[PlayedBalancer]) -> list[str]:
    return [await balancer.start() for balancer in balancers]


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
async def links(owner: Owner, urls: list[str]) -> AsyncGenerator[Links]:
    links = Links(urls, owner)
    yield links
    await links.close()


async def joined(balancer: PlayedBalancer) -> PlayedLink:
    link = await balancer.link()
    assert isinstance(await link.frame(), Join)
    return link


async def test_there_is_a_link_to_each_balancer(
    balancers: list[PlayedBalancer], urls: list[str], owner: Owner, links: Links
) -> None:
    assert not links.is_linked
    links.start()

    for balancer, url in zip(balancers, urls, strict=True):
        link = await balancer.link()
        join = await link.frame()
        assert isinstance(join, Join)
        assert join.name == url
        await link.send(Cancel(RequestId(url)))
    await owner.until(lambda: len(owner.frames) == 2)
    assert set(owner.frames) == {(url, Cancel(RequestId(url))) for url in urls}
    assert links.is_linked


async def test_what_is_dialled_anew_leaves_the_other_links_alone(
    balancers: list[PlayedBalancer], urls: list[str], owner: Owner, links: Links
) -> None:
    links.dial(urls[:1])  # before the start it is only noted
    links.start()
    first = await joined(balancers[0])

    links.dial(reversed(urls))
    second = await joined(balancers[1])
    links.dial([*urls, urls[0]])
    for link in links:
        link.send(Step((Busy(RequestId(link.address)),)))

    for link, url in ((first, urls[0]), (second, urls[1])):
        assert await link.event() == Busy(RequestId(url))
    assert owner.lost_links == []


async def test_a_balancer_that_is_not_wanted_any_more_hears_the_rest_and_a_good_bye(
    balancers: list[PlayedBalancer], urls: list[str], owner: Owner, links: Links
) -> None:
    links.start()
    first, second = [await joined(balancer) for balancer in balancers]
    for link in links:
        link.send(Step((Busy(RequestId("last")),)))

    links.dial(urls[1:])

    assert await first.event() == Busy(RequestId("last"))
    await first.socket.wait_closed()
    assert first.socket.close_code == 1000
    await owner.until(lambda: owner.lost_links == [urls[0]])
    assert await second.event() == Busy(RequestId("last"))
    assert [link.address for link in links] == urls[1:]
    assert owner.errors == []


async def test_no_balancers_are_nothing_to_fail_of(
    balancers: list[PlayedBalancer], urls: list[str], owner: Owner, links: Links
) -> None:
    links.start()
    await joined(balancers[0])
    links.dial([])
    await owner.until(lambda: urls[0] in owner.lost_links)
    assert not links.is_linked

    links.dial(urls[:1])

    await joined(balancers[0])
    assert owner.errors == []


async def test_who_refuses_is_left_alone_until_it_is_named_again(
    balancers: list[PlayedBalancer], urls: list[str], owner: Owner, links: Links
) -> None:
    links.start()
    first, second = [await joined(balancer) for balancer in balancers]

    await first.socket.close(REFUSED, "not you")
    await owner.until(lambda: owner.lost_links == [urls[0]])
    await second.send(Cancel(RequestId("mark")))
    await owner.until(lambda: owner.frames != [])
    assert [link.address for link in links] == urls[1:]
    assert owner.errors == []

    links.dial(urls)
    await joined(balancers[0])


async def test_while_another_one_serves_who_refuses_is_tried_again(
    balancers: list[PlayedBalancer],
    urls: list[str],
    owner: Owner,
    links: Links,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.links.REFUSED_FOR", 0.0)
    links.start()
    first, second = [await joined(balancer) for balancer in balancers]

    for _ in range(3):
        await first.socket.close(REFUSED, "not yet")
        first = await joined(balancers[0])

    await first.send(Cancel(RequestId("mark")))
    await owner.until(lambda: owner.frames != [])
    assert sorted(link.address for link in links) == sorted(urls)
    assert owner.errors == []
    assert second.socket.close_code is None


async def test_who_is_tried_again_and_refuses_when_it_is_the_last_one_makes_the_agent_fail(
    balancers: list[PlayedBalancer], owner: Owner, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.links.REFUSED_FOR", 0.0)
    links.start()
    first, second = [await joined(balancer) for balancer in balancers]
    await first.socket.close(REFUSED, "not you")
    first = await joined(balancers[0])

    monkeypatch.setattr("agent.links.REFUSED_FOR", 1000.0)
    await second.socket.close(REFUSED, "nor here")
    await owner.until(lambda: len(owner.lost_links) == 2)
    await first.send(Cancel(RequestId("mark")))
    await owner.until(lambda: owner.frames != [])
    assert owner.errors == []
    await first.socket.close(REFUSED, "nor now")

    await owner.until(lambda: owner.errors != [])
    assert isinstance(owner.errors[0], LinkRefusedError)


async def test_refused_by_all_it_fails(
    balancers: list[PlayedBalancer], owner: Owner, links: Links
) -> None:
    links.start()
    first, second = [await joined(balancer) for balancer in balancers]
    await first.socket.close(REFUSED, "not you")
    await second.socket.close(REFUSED, "nor here")

    await owner.until(lambda: owner.errors != [])
    (error,) = owner.errors
    assert isinstance(error, LinkRefusedError)


async def test_an_address_that_is_none_is_refused(owner: Owner) -> None:
    links = Links(["no address"], owner)
    links.start()

    await owner.until(lambda: owner.errors != [])
    assert isinstance(owner.errors[0], LinkRefusedError)
    await links.close()


async def test_to_be_held_for_dead_by_one_is_to_fail(
    balancers: list[PlayedBalancer], owner: Owner, links: Links
) -> None:
    links.start()
    _, second = [await joined(balancer) for balancer in balancers]

    await second.socket.close(GIVEN_UP, "it says nothing")

    await owner.until(lambda: owner.errors != [])
    assert isinstance(owner.errors[0], GivenUpError)


async def test_what_a_balancer_says_that_takes_leave_makes_nothing_fail(
    balancers: list[PlayedBalancer],
    urls: list[str],
    owner: Owner,
    links: Links,
    caplog: pytest.LogCaptureFixture,
) -> None:
    links.start()
    first, _ = [await joined(balancer) for balancer in balancers]

    links.dial(urls[1:])
    await first.socket.close(GIVEN_UP, "it says nothing")
    await owner.until(lambda: owner.lost_links == [urls[0]])
    await links.close()

    assert owner.errors == []
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


async def test_closing_waits_for_no_balancer_that_is_not_there(
    balancers: list[PlayedBalancer],
    urls: list[str],
    owner: Owner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.links.GOOD_BYE_TIMEOUT", 1000.0)
    links = Links([*urls, "ws://127.0.0.1:9"], owner)
    links.start()
    first, second = [await joined(balancer) for balancer in balancers]

    async with asyncio.timeout(10):
        await links.close()

    for link in (first, second):
        await link.socket.wait_closed()
        assert link.socket.close_code == 1000
    assert sorted(owner.lost_links) == sorted(urls)
    assert list(links) == []
