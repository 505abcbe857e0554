"""The commands of operators, as processes against the real balancer."""

import json
from typing import Any

import pytest
from commands import headrace, on_terminal
from played import Play, ask

from balancer.balancer import Balancer
from common.ids import AgentId, RequestId
from common.messages import PROTOCOL, Cancel, Join, Status

R1, R2, R3 = (RequestId(f"r{n}") for n in range(1, 4))

CTRL_C = "\x03"


@pytest.fixture
def port(address: str) -> str:
    return address.rpartition(":")[2]


async def told(*arguments: str) -> dict[str, Any]:
    """The one line of JSON that a command prints."""
    done = await headrace(*arguments, "--json")
    assert (done.status, done.errors, len(done.output.splitlines())) == (0, "", 1)
    return json.loads(done.output)


# Seeing


async def test_status_is_a_table_or_json(port: str, play: Play) -> None:
    play("one", slots=3)

    shown = await headrace("status", "--port", port)
    overview = await told("status", "--port", port)

    assert "one" in shown.output
    assert "ready" in shown.output
    assert overview["agents"]["id-of-one"]["slots"] == 3


async def test_explain_tells_the_way_of_a_request(
    port: str, play: Play, balancer: Balancer
) -> None:
    agent = play("one")
    ask(balancer, R1)
    await agent.asked()
    agent.say_token(R1, "a")
    agent.finish(R1)

    shown = await headrace("explain", "--port", port, R1)
    raw = await told("explain", "--port", port, R1)

    words = [line.split()[2:5] for line in shown.output.splitlines()[5:]]
    assert words[0][:2] == ["balancer", "arrived"]
    assert ["dispatcher", "one", "dispatched"] in words
    assert ["scheduler", "one", "first"] in words
    assert "over after" in shown.output
    assert [each["what"] for each in raw["decisions"]][-1] == "over"


async def test_what_nobody_knows_is_one_line_and_status_1(port: str) -> None:
    for command in ("explain", "cancel"):
        done = await headrace(command, "--port", port, "nope")

        assert (done.status, done.output) == (1, "")
        assert done.errors.startswith("headrace: ")
        assert len(done.errors.splitlines()) == 1


# Acting


async def test_a_drained_agent_gets_nothing_until_it_is_undrained(
    port: str, play: Play, balancer: Balancer
) -> None:
    agent = play("one")

    drained = await told("drain", "--port", port, "one")
    ask(balancer, R1)
    assert balancer.buffered == 1
    shown = await headrace("status", "--port", port)
    undrained = await told("undrain", "--port", port, "id-of-one")

    assert drained == {"drained": [{"id": "id-of-one", "name": "one"}], "idle": False}
    assert undrained == {"undrained": [{"id": "id-of-one", "name": "one"}]}
    assert "held" in shown.output
    assert (await agent.asked()).request_id == R1


async def test_drain_waits_until_nothing_runs_there(
    port: str, play: Play, balancer: Balancer
) -> None:
    agent = play("one", slots=2)
    ask(balancer, R1)
    await agent.asked()
    async with on_terminal("drain", "--port", port, "one", "--wait") as terminal:
        await terminal.shows("one: 1 request(s) run")

        agent.finish(R1)
        agent.report(slots=2)

        await terminal.shows("nothing runs there any more")
        assert await terminal.ended() == 0


async def test_an_interrupted_wait_leaves_the_agent_drained(
    port: str, play: Play, balancer: Balancer
) -> None:
    agent = play("one")
    ask(balancer, R1)
    await agent.asked()
    async with on_terminal("drain", "--port", port, "one", "--wait") as terminal:
        await terminal.shows("one: 1 request(s) run")
        terminal.type(CTRL_C)

        assert await terminal.ended() == 130
        await terminal.shows("undrain lets it take requests again")
    overview = await told("status", "--port", port)
    assert overview["agents"]["id-of-one"]["held"] is True


async def test_a_name_that_several_have_is_refused_with_their_ids_unless_all_are_meant(
    port: str, balancer: Balancer, play: Play
) -> None:
    play("twin")
    other = Join(
        protocol=PROTOCOL,
        agent_id=AgentId("second"),
        name="twin",
        status=Status(version=1, slots_desired=1, slots_total=1, slots_processing=0),
    )
    balancer.join(other, lambda _data: None, lambda _reason: None)

    refused = await headrace("drain", "--port", port, "twin")
    both = await told("drain", "--port", port, "twin", "--all")

    assert refused.status == 1
    assert refused.errors == (
        "headrace: 2 agents are called 'twin': id-of-twin, second; say --all, or an id\n"
    )
    assert {each["id"] for each in both["drained"]} == {"id-of-twin", "second"}


async def test_an_agent_that_nobody_knows_is_refused_with_those_that_there_are(
    port: str, play: Play
) -> None:
    play("one")

    done = await headrace("drain", "--port", port, "other")

    assert (done.status, done.output) == (1, "")
    assert done.errors == "headrace: there is no agent 'other'; there are: one\n"


async def test_a_request_is_cancelled(port: str, play: Play, balancer: Balancer) -> None:
    agent = play("one")
    ask(balancer, R1)
    await agent.asked()

    done = await told("cancel", "--port", port, R1)

    assert done == {"cancelled": R1}
    assert await agent.next_frame() == Cancel(R1)


async def test_a_fleet_is_scaled(port: str, client: Any) -> None:
    fleet = {"model": {"LocalToAgent": "/m.gguf"}, "slots": 3, "max": 2}
    assert (await client.put("/api/v1/fleets/small", json=fleet)).status_code == 204

    scaled = await told("scale", "--port", port, "small", "--max", "5")
    refused = await headrace("scale", "--port", port, "small", "--min", "9")
    unknown = await headrace("scale", "--port", port, "large", "--min", "1")

    assert scaled == {"fleet": "small", "min": 0, "max": 5}
    now = (await client.get("/api/v1/fleets/small")).json()["fleet"]
    assert (now["slots"], now["max"], now["min"]) == (3, 5, 0)
    assert (refused.status, unknown.status) == (1, 1)
    assert "min (9) is more than max (5)" in refused.errors
    assert unknown.errors == "headrace: there is no such fleet\n"


async def test_scale_wants_to_know_what() -> None:
    done = await headrace("scale", "small")

    assert done.status == 2
    assert "--min" in done.errors
