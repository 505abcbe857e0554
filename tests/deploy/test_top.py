"""The live view, in a real terminal and elsewhere, against the real balancer."""

import asyncio
import json
from typing import Any

import pytest
from commands import COMMAND, headrace, on_terminal
from gateway import Gateway
from played import Play, ask

from balancer.balancer import Balancer
from common.ids import RequestId

CTRL_C = "\x03"
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def port(address: str) -> str:
    return address.rpartition(":")[2]


@pytest.mark.parametrize("key", ["q", CTRL_C, "\x1b"])
async def test_it_shows_what_happens_until_a_key_ends_it(port: str, play: Play, key: str) -> None:
    play("one", slots=3)
    async with on_terminal("top", "--port", port) as terminal:
        await terminal.shows("0/3")
        assert not terminal.echoes

        other = play("newcomer", slots=7)
        await terminal.shows("0/7")
        terminal.forget()
        other.leave()
        await terminal.shows("of 3 ")  # slots, in the head
        assert "0/7" not in terminal.written

        terminal.type(key)
        assert await terminal.ended() == 0
        await terminal.shows(BACK)
        assert terminal.echoes


async def test_it_says_that_the_connection_is_lost_and_goes_on_when_it_is_back(
    port: str, play: Play
) -> None:
    play("one", slots=3)
    gateway = Gateway(int(port))
    await gateway.open()
    async with on_terminal("top", "--port", str(gateway.port), width=150) as terminal:
        await terminal.shows("0/3")

        await gateway.close()
        await terminal.shows("no connection")
        play("two", slots=7)
        await gateway.open()

        await terminal.shows("0/7")
        terminal.type("q")
        assert await terminal.ended() == 0
    await gateway.close()


async def test_it_fits_a_small_window(port: str, play: Play) -> None:
    for n in range(20):
        play(f"agent-{n:02}")
    async with on_terminal("top", "--port", port, width=60, height=10) as terminal:
        await terminal.shows("agent +")
        terminal.type("q")
        await terminal.ended()

    assert ALTERNATE in terminal.written
    assert "agent-19" not in terminal.written


async def test_where_there_is_no_terminal_it_is_one_picture(
    port: str, play: Play, balancer: Balancer
) -> None:
    agent = play("one")
    ask(balancer, RequestId("r1"))
    await agent.asked()

    done = await headrace("top", "--port", port)

    assert (done.status, done.errors) == (0, "")
    assert "\x1b" not in done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("headrace ")
    assert any(line.startswith("r1 ") for line in lines)


async def test_once_it_is_one_picture_on_a_terminal_too(port: str, play: Play) -> None:
    play("one")
    async with on_terminal("top", "--port", port, "--once") as terminal:
        assert await terminal.ended() == 0
        await terminal.shows("one")

    assert ALTERNATE not in terminal.written


async def test_as_json_each_event_is_a_line(port: str, play: Play) -> None:
    play("one")
    once = await headrace("top", "--port", port, "--once", "--json")
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "top", "--port", port, "--json", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            first = await read(process.stdout)
            play("two")
            while "id-of-two" not in (change := await read(process.stdout))["data"].get(
                "agents", {}
            ):
                pass
    finally:
        process.kill()
        await process.wait()

    assert set(json.loads(once.output)["data"]["agents"]) == {"id-of-one"}
    assert (first["event"], set(first["data"]["agents"])) == ("snapshot", {"id-of-one"})
    assert (change["event"], bool(change["id"])) == ("change", True)


async def read(output: asyncio.StreamReader) -> dict[str, Any]:
    return json.loads(await output.readline())


async def test_a_balancer_that_refuses_is_one_line_and_leaves_the_terminal_alone(
    port: str,
) -> None:
    async with on_terminal("top", "--port", "1") as terminal:
        assert await terminal.ended() == 1
        await terminal.shows("headrace: no answer from a balancer at http://127.0.0.1:1")

    assert ALTERNATE not in terminal.written
