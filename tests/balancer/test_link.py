"""The agent listener, with an agent's frames written by the test."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest
from msgspec.structs import replace
from played import Until, ask, metric
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin

from balancer.balancer import Balancer
from balancer.keys import Keys, Role
from balancer.limits import Limits
from balancer.link import AgentListener
from common.ids import AgentId, RequestId
from common.messages import (
    GIVEN_UP,
    PROTOCOL,
    REFUSED,
    Cancel,
    Finished,
    FinishReason,
    Generate,
    Join,
    RawPrompt,
    SetState,
    Status,
    Step,
    ToAgent,
    ToBalancer,
    Usage,
    decode_to_agent,
    encode,
)

R = RequestId("r")


def status(version: int = 1, slots: int = 1) -> Status:
    return Status(version=version, slots_desired=slots, slots_total=slots, slots_processing=0)


def join(agent_id: str = "a", protocol: int = PROTOCOL) -> Join:
    return Join(protocol=protocol, agent_id=AgentId(agent_id), name=agent_id, status=status())


@pytest.fixture
async def url(balancer: Balancer) -> AsyncGenerator[str]:
    listener = AgentListener(balancer)
    port = await listener.start("127.0.0.1", 0)
    yield f"ws://127.0.0.1:{port}"
    await listener.stop()


async def dial(url: str, frame: ToBalancer | None) -> ClientConnection:
    socket = await connect(url, proxy=None)
    if frame is not None:
        await socket.send(encode(frame))
    return socket


async def request(socket: ClientConnection) -> ToAgent:
    """The next frame that is about a request."""
    async with asyncio.timeout(10):
        while isinstance(frame := decode_to_agent(await socket.recv()), SetState):
            pass
        return frame


async def closed(socket: ClientConnection) -> int | None:
    async with asyncio.timeout(10):
        await socket.wait_closed()
    return socket.close_code


async def test_an_agent_joins_works_and_leaves(balancer: Balancer, url: str, until: Until) -> None:
    socket = await dial(url, join())
    await until(lambda: len(balancer.agents) == 1)

    exchange = ask(balancer, R)
    asked = await request(socket)
    finished = Finished(R, FinishReason.STOP, Usage(1, 0, 1))
    await socket.send(encode(Step((finished,))))
    told = [told.event async for told in exchange]
    await socket.close()

    assert asked == Generate(request_id=R, prompt=RawPrompt("Hi"), max_tokens=5)
    assert told == [finished]
    await until(lambda: balancer.agents == [])


async def test_a_status_changes_the_slots(balancer: Balancer, url: str, until: Until) -> None:
    async with await dial(url, join()) as socket:
        await socket.send(encode(status(version=2, slots=7)))

        await until(lambda: [a.status.slots_total for a in balancer.agents] == [7])


async def test_a_cut_link_is_a_lost_agent(balancer: Balancer, url: str, until: Until) -> None:
    socket = await dial(url, join())
    await until(lambda: len(balancer.agents) == 1)

    socket.transport.abort()

    await until(lambda: balancer.agents == [])


async def test_the_log_tells_why_an_agent_left(
    balancer: Balancer, url: str, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "balancer.balancer")
    cut, polite = await dial(url, join("cut")), await dial(url, join("polite"))
    await until(lambda: len(balancer.agents) == 2)

    cut.transport.abort()
    await until(lambda: len(balancer.agents) == 1)
    await polite.close()
    await until(lambda: not balancer.agents)

    assert "agent_id=cut left: its connection was lost" in caplog.messages
    assert "agent_id=polite left: its link was closed" in caplog.messages


async def test_a_new_link_of_the_same_agent_replaces_the_old_one(
    balancer: Balancer, url: str, until: Until
) -> None:
    old = await dial(url, join())
    await until(lambda: len(balancer.agents) == 1)
    ask(balancer, R)

    new = await dial(url, join())
    assert await request(new) == await request(old)
    await old.close()

    await new.send(encode(status(version=2, slots=3)))
    await until(lambda: [a.status.slots_total for a in balancer.agents] == [3])
    await new.close()


async def test_an_agent_that_has_come_to_a_stop_is_told_so(
    balancer: Balancer, url: str, until: Until
) -> None:
    socket = await dial(url, join())
    stuck = replace(status(version=2), step_age=7.0, step_limit=6.0)

    await socket.send(encode(stuck))

    assert await closed(socket) == GIVEN_UP
    assert balancer.agents == []


async def test_another_protocol_is_refused_for_good(balancer: Balancer, url: str) -> None:
    socket = await dial(url, join(protocol=PROTOCOL + 1))

    assert await closed(socket) == REFUSED
    assert socket.close_reason == f"this balancer speaks protocol {PROTOCOL}"
    assert balancer.agents == []


@pytest.mark.parametrize("data", [b"\xc1", "text", b""])
async def test_an_unreadable_first_frame_ends_the_link(
    balancer: Balancer, url: str, data: bytes | str
) -> None:
    socket = await dial(url, None)
    await socket.send(data)

    assert await closed(socket) == 1003
    assert balancer.agents == []


async def test_a_first_frame_of_another_kind_ends_the_link(url: str) -> None:
    socket = await dial(url, status())

    assert await closed(socket) == 1002


@pytest.mark.parametrize(
    "frame",
    [
        {"slots_total": -1},
        {"slots_total": 2**62},
        {"slots_processing": "many"},
    ],
)
async def test_impossible_numbers_end_the_link(
    balancer: Balancer, url: str, frame: dict[str, object]
) -> None:
    data = {**msgspec.to_builtins(status()), **frame}
    socket = await dial(url, None)
    await socket.send(msgspec.msgpack.encode({**msgspec.to_builtins(join()), "status": data}))

    assert await closed(socket) == 1003
    assert balancer.agents == []


async def test_web_pages_cannot_join(url: str) -> None:
    with pytest.raises(InvalidStatus):
        await connect(url, proxy=None, origin=Origin("http://evil.example"))


async def test_an_unreadable_later_frame_loses_only_that_agent(
    balancer: Balancer, url: str, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "balancer.balancer")
    good, bad = await dial(url, join("good")), await dial(url, join("bad"))
    await until(lambda: len(balancer.agents) == 2)

    await bad.send(b"\xc1")

    await until(lambda: [agent.name for agent in balancer.agents] == ["good"])
    await good.close()
    assert "agent_id=bad left: it sent what cannot be read" in caplog.messages


async def test_a_cancel_reaches_the_agent(balancer: Balancer, url: str, until: Until) -> None:
    async with await dial(url, join()) as socket:
        await until(lambda: len(balancer.agents) == 1)
        ask(balancer, R)
        await request(socket)

        balancer.cancel(R)

        assert await request(socket) == Cancel(R)


async def test_stopping_the_listener_tells_the_agents(balancer: Balancer) -> None:
    listener = AgentListener(balancer)
    port = await listener.start("127.0.0.1", 0)
    socket = await dial(f"ws://127.0.0.1:{port}", join())

    await listener.stop()

    with pytest.raises(ConnectionClosed):
        await socket.recv()
    assert socket.close_code == 1001
    assert balancer.agents == []


@pytest.mark.parametrize("limits", [Limits(agents=1)])
async def test_more_agents_than_may_be_are_told_to_come_again(
    balancer: Balancer, url: str, until: Until
) -> None:
    first = await dial(url, join())
    await until(lambda: len(balancer.agents) == 1)

    with pytest.raises(InvalidStatus) as caught:
        await dial(url, join("b"))

    assert caught.value.response.status_code == 503
    assert caught.value.response.body == b"too many agents (1 at most): try again later\n"
    assert metric(balancer, 'headrace_limit_refusals_total{limit="agents"}') == 1
    assert metric(balancer, 'headrace_limit_used{limit="agents"}') == 1
    await first.close()
    await until(lambda: not balancer.agents)
    second = await dial(url, join("b"))
    await until(lambda: len(balancer.agents) == 1)
    await second.close()


KEYS = Keys([(Role.AGENT, "a-key-for-agents"), (Role.INFERENCE, "a-key-for-clients")])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer of-nobody"}, 401),
        ({"Authorization": "Basic a-key-for-agents"}, 401),
        ({"Authorization": "Bearer a-key-for-clients"}, 403),
    ],
)
async def test_an_agent_without_its_key_is_refused_before_anything_else(
    balancer: Balancer, headers: dict[str, str], status: int
) -> None:
    listener = AgentListener(balancer)
    port = await listener.start("127.0.0.1", 0, keys=KEYS)

    with pytest.raises(InvalidStatus) as caught:
        await connect(f"ws://127.0.0.1:{port}", proxy=None, additional_headers=headers)

    await listener.stop()
    assert caught.value.response.status_code == status
    assert metric(balancer, 'headrace_limit_used{limit="agents"}') == 0
    reason = {401: "unauthorized", 403: "forbidden"}[status]
    assert metric(balancer, f'headrace_refused_requests_total{{reason="{reason}"}}') == 1


async def test_an_agent_with_its_key_joins(balancer: Balancer, until: Until) -> None:
    listener = AgentListener(balancer)
    port = await listener.start("127.0.0.1", 0, keys=KEYS)
    headers = {"Authorization": "Bearer a-key-for-agents"}

    async with connect(f"ws://127.0.0.1:{port}", proxy=None, additional_headers=headers) as socket:
        await socket.send(encode(join()))
        await until(lambda: len(balancer.agents) == 1)
    await listener.stop()


async def test_the_log_tells_what_an_agent_said_when_it_closed_its_link(
    balancer: Balancer, url: str, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "balancer.balancer")
    socket = await dial(url, join("failing"))
    await until(lambda: len(balancer.agents) == 1)

    await socket.close(1011, "a fault of mine")
    await until(lambda: not balancer.agents)

    assert "agent_id=failing left: it closed its link with 1011: a fault of mine" in caplog.messages
