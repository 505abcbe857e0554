"""The status stream over real HTTP."""

import asyncio
import gc
import json
import socket
import tracemalloc
from collections.abc import AsyncGenerator

import httpx
import pytest
from event_lines import observing
from played import Play, ask

from balancer import status_stream
from balancer.balancer import Balancer
from balancer.overview import Overview
from common.ids import RequestId
from common.models import Download

R1 = RequestId("r1")


async def test_it_begins_with_all_there_is(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play("one", slots=2)
    ask(balancer, R1)

    async with observing(client) as observer:
        await observer.read()

    state = observer.state
    assert observer.events == ["snapshot"]
    assert [*state] == ["agents", "fleets", "requests", "errors", "history", "balancer"]
    assert state["agents"]["id-of-one"]["slots_busy"] == 1
    assert state["requests"]["r1"]["agent"] == "one"
    assert state["balancer"]["requests"]["running"] == 1


async def test_the_overview_says_the_same_once(client: httpx.AsyncClient, play: Play) -> None:
    play("one", slots=2)

    overview = (await client.get("/api/v1/overview")).json()
    async with observing(client) as observer:
        await observer.read()

    assert overview == observer.state


async def test_later_it_tells_what_is_different(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    one = play("one", slots=1)
    play("two", slots=1)
    async with observing(client) as observer:
        await observer.read()
        one.leave()
        await observer.until(lambda state: "id-of-one" not in state["agents"])
        ask(balancer, R1)
        await observer.until(lambda state: "r1" in state["requests"])

    assert set(observer.events[1:]) == {"change"}
    assert [*observer.state["agents"]] == ["id-of-two"]


async def test_it_goes_on_where_it_was_cut(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play("one", slots=1)
    async with observing(client) as before:
        await before.read()
    ask(balancer, R1)
    play("two", slots=1)

    async with observing(client, before.last_id) as after:
        await after.until(lambda state: "r1" in state.get("requests", {}))

    assert "snapshot" not in after.events
    assert [*after.state["agents"]] == ["id-of-one", "id-of-two"]  # one is busy now


@pytest.mark.parametrize("last_id", ["another-1", "nonsense", "-", "{}-99999"])
async def test_who_saw_what_nobody_knows_begins_anew(
    client: httpx.AsyncClient, last_id: str
) -> None:
    async with observing(client) as before:
        await before.read()

    epoch = before.last_id.partition("-")[0]
    async with observing(client, last_id.format(epoch)) as after:
        await after.read()

    assert after.events == ["snapshot"]


async def test_what_was_seen_may_be_said_in_the_address(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    async with observing(client) as before:
        await before.read()
    play("one")

    route = f"/api/v1/events?last_event_id={before.last_id}"
    async with client.stream("GET", route) as response, asyncio.timeout(10):
        events = [line async for line in _first(response, 2)]

    assert events[1] == "event: change"


async def _first(response: httpx.Response, count: int) -> AsyncGenerator[str]:
    async for line in response.aiter_lines():
        yield line
        count -= 1
        if not count:
            return


async def test_a_download_is_followed(client: httpx.AsyncClient, play: Play) -> None:
    agent = play("one", slots=0)
    async with observing(client) as observer:
        await observer.read()
        for current in (10, 20):
            agent.report(slots=0, download=Download("m.gguf", current, 40))
            await observer.read()
            told = observer.state["agents"]["id-of-one"]
            assert (told["state"], told["download"]["current"]) == ("downloading", current)


async def test_a_silent_stream_has_comments(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_stream, "KEEP_ALIVE", 0.01)

    async with client.stream("GET", "/api/v1/events") as response, asyncio.timeout(10):
        async for line in response.aiter_lines():
            if line == ": keep-alive":
                break


async def test_it_ends_after_its_lifetime(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_stream, "KEEP_ALIVE", 0.01)
    monkeypatch.setattr(status_stream, "LIFETIME", 0.05)

    assert (await client.get("/api/v1/events")).status_code == 200


async def test_it_ends_with_the_balancer(client: httpx.AsyncClient, balancer: Balancer) -> None:
    async with client.stream("GET", "/api/v1/events") as response:
        lines = response.aiter_lines()
        await anext(lines)
        balancer.close()
        async with asyncio.timeout(10):
            async for _ in lines:
                pass


async def test_observers_that_never_read_hold_nobody_up(
    address: str, client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    host, _, port = address.partition(":")
    deaf = [socket.create_connection((host, int(port))) for _ in range(100)]
    for each in deaf:
        each.sendall(b"GET /api/v1/events HTTP/1.1\r\nhost: test\r\n\r\n")
    agents = [play(f"agent-{n}", slots=0) for n in range(200)]

    async with observing(client) as observer:
        for round_number in range(1, 6):
            for agent in agents:
                agent.report(slots=round_number)
            await observer.until(
                lambda state, slots=round_number: (
                    {agent["slots"] for agent in state["agents"].values()} == {slots}
                )
            )

    assert len(observer.state["agents"]) == 200
    for each in deaf:
        each.close()


async def test_nobody_looks_while_nobody_listens(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    """What is found out is found out for observers: without any, change costs nothing."""
    looks = 0

    def state() -> dict[str, dict[str, bytes]]:
        nonlocal looks
        looks += 1
        return {"agents": {str(looks): b"1"}}

    stream = status_stream.StatusStream(balancer, state)
    play("one")
    events = stream._events(None)  # pyright: ignore[reportPrivateUsage]
    assert json.loads((await anext(events)).partition(b"data: ")[2]) == {"agents": {"1": 1}}
    await events.aclose()
    seen = looks
    play("two")

    assert looks == seen
    assert stream._looking is None  # pyright: ignore[reportPrivateUsage]


async def test_observers_that_do_not_read_take_no_memory(
    balancer: Balancer, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for one in its connection is one event; behind it nothing is kept for it."""
    monkeypatch.setattr(status_stream, "SHORTEST_PAUSE", 0.01)
    agent = play("one", slots=1)
    stream = status_stream.StatusStream(balancer, Overview(balancer, dict, version="1").state)
    deaf = [stream._events(None) for _ in range(100)]  # pyright: ignore[reportPrivateUsage]
    for each in deaf:
        await anext(each)
    reading = stream._events(None)  # pyright: ignore[reportPrivateUsage]
    await anext(reading)

    async def change(rounds: range) -> int:
        for slots in rounds:
            agent.report(slots=slots)
            await anext(reading)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = await change(range(1, 10))
        after = await change(range(10, 30))
    finally:
        tracemalloc.stop()
        for each in (*deaf, reading):
            await each.aclose()

    assert after - before < 20 * 100 * 10, "bytes kept of 20 changes for 100 observers"


async def test_asking_for_the_overview_keeps_no_news_from_observers(
    client: httpx.AsyncClient, balancer: Balancer, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_stream, "KEEP_ALIVE", 1000.0)
    monkeypatch.setattr(status_stream, "SHORTEST_PAUSE", 0.0)
    async with observing(client) as observer:
        await observer.read()
        for n in range(10):
            play(f"agent-{n}")
            await client.get("/api/v1/overview")
        await observer.until(lambda state: len(state["agents"]) == 10)


async def test_a_look_that_fails_ends_the_stream_and_the_next_one_works(
    balancer: Balancer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_stream, "SHORTEST_PAUSE", 0.0)
    monkeypatch.setattr(status_stream, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(status_stream, "KEEP_ALIVE", 0.01)
    fails = False

    def state() -> dict[str, dict[str, bytes]]:
        if fails:
            raise ZeroDivisionError
        return {"agents": {"a": b"1"}}

    stream = status_stream.StatusStream(balancer, state)
    events = stream._events(None)  # pyright: ignore[reportPrivateUsage]
    await anext(events)
    fails = True
    with pytest.raises(ZeroDivisionError):
        async for _ in events:
            pass
    fails = False

    again = stream._events(None)  # pyright: ignore[reportPrivateUsage]
    assert (await anext(again)).startswith(b"id: ")
    await again.aclose()
    assert stream._observers == 0  # pyright: ignore[reportPrivateUsage]
    assert "ZeroDivisionError" in caplog.text
