"""What operators do, over real HTTP."""

import asyncio
import json
import logging

import httpx
import pytest
from played import Play, ask

from balancer.balancer import Balancer
from common.errors import ErrorCode
from common.ids import RequestId
from common.messages import (
    Conversation,
    Drain,
    Failed,
    Tokenize,
    Tokenized,
    Undrain,
)

R1, R2 = RequestId("r1"), RequestId("r2")


async def test_an_agent_is_drained_and_undrained(
    client: httpx.AsyncClient, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.audit")
    agent = play("one", slots=1)

    assert (await client.post("/api/v1/agent/id-of-one/drain")).status_code == 204
    assert (await client.post("/api/v1/agent/id-of-one/undrain")).status_code == 204

    assert [await agent.next_frame(), await agent.next_frame()] == [Drain(), Undrain()]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" from=")[0] for line in lines] == [
        "action=drain agent_id=id-of-one",
        "action=undrain agent_id=id-of-one",
    ]


@pytest.mark.parametrize("act", ["drain", "undrain"])
async def test_an_agent_that_is_not_there_cannot_be_drained(
    client: httpx.AsyncClient, act: str
) -> None:
    answer = await client.post(f"/api/v1/agent/nobody/{act}")

    assert (answer.status_code, answer.text) == (404, "there is no such agent\n")


async def test_a_request_that_runs_is_cancelled_and_its_client_told(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    agent = play("one", slots=1)
    exchange = ask(balancer, R1)
    await agent.asked()
    agent.say_token(R1, "a")

    assert (await client.delete("/api/v1/requests/r1")).status_code == 204

    await anext(exchange)
    told = await anext(exchange)
    assert isinstance(told.event, Failed)
    assert told.event.code is ErrorCode.CANCELLED_BY_OPERATOR
    assert await agent.cancelled() == R1
    assert (await client.delete("/api/v1/requests/r1")).status_code == 404


async def test_a_request_that_waits_is_cancelled(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    exchange = ask(balancer, R1)

    assert (await client.delete("/api/v1/requests/r1")).status_code == 204

    told = await anext(exchange)
    assert isinstance(told.event, Failed)
    assert balancer.buffered == 0


async def test_the_openai_client_is_told_that_an_operator_did_it(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "Hi"}))
    while not (listed := (await client.get("/api/v1/requests")).json()["requests"]):
        pass

    await client.delete(f"/api/v1/requests/cmpl-{listed[0]['id']}")

    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "cancelled_by_operator")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_request_that_nobody_knows_is_not_found(
    client: httpx.AsyncClient, method: str
) -> None:
    assert (await client.request(method, "/api/v1/requests/r9")).status_code == 404


PREVIEW = {"conversation_history": [{"role": "user", "content": "Hi"}], "template": "<{{ 1 }}>"}


async def test_a_template_is_tried_on_an_agent(client: httpx.AsyncClient, play: Play) -> None:
    agent = play("one", slots=1)
    asking = asyncio.create_task(client.post("/api/v1/chat_template_preview", json=PREVIEW))

    frame = await agent.next_frame()
    assert isinstance(frame, Tokenize)
    assert frame.template == "<{{ 1 }}>"
    assert isinstance(frame.prompt, Conversation)
    assert frame.prompt.messages[0].content == "Hi"
    agent.say(Tokenized(frame.request_id, (), ("<É".encode()[:2], "<É".encode()[2:], b">"), 10))

    assert (await asking).json() == {"text": "<É>"}


async def test_a_template_that_fails_is_told_with_its_error(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play("one", slots=1)
    asking = asyncio.create_task(client.post("/api/v1/chat_template_preview", json=PREVIEW))

    frame = await agent.next_frame()
    assert isinstance(frame, Tokenize)
    agent.say(Failed(frame.request_id, ErrorCode.CHAT_TEMPLATE_ERROR, "it fails"))

    answer = await asking
    assert (answer.status_code, answer.text) == (400, "it fails\n")


async def test_without_an_agent_no_template_can_be_tried(client: httpx.AsyncClient) -> None:
    assert (await client.post("/api/v1/chat_template_preview", json=PREVIEW)).status_code == 503


async def test_a_fleet_is_changed_in_part(client: httpx.AsyncClient) -> None:
    await client.put("/api/v1/fleets/small", json={"max": 3, "slots": 2})

    answer = await client.patch("/api/v1/fleets/small", json={"min": 1, "max": 5})

    assert answer.status_code == 204
    fleet = (await client.get("/api/v1/fleets/small")).json()["fleet"]
    assert (fleet["min"], fleet["max"], fleet["slots"]) == (1, 5, 2)


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("small", {"min": 9}, 400),
        ("small", {"unheard_of": 1}, 400),
        ("small", [1], 400),
        ("other", {"min": 1}, 404),
    ],
)
async def test_a_change_that_cannot_be_leaves_the_fleet_as_it_was(
    client: httpx.AsyncClient, name: str, body: object, status: int
) -> None:
    await client.put("/api/v1/fleets/small", json={"max": 3})
    before = (await client.get("/api/v1/fleets/small")).json()["fleet"]

    answer = await client.patch(f"/api/v1/fleets/{name}", content=json.dumps(body))

    assert answer.status_code == status
    assert (await client.get("/api/v1/fleets/small")).json()["fleet"] == before


async def test_an_order_is_said_again_until_the_agent_has_heard(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    first = play("one", slots=1)
    await client.post("/api/v1/agent/id-of-one/drain")
    first.leave()

    second = play("one", slots=1)
    assert await second.next_frame() == Drain()
    second.report(slots=1, held=True, draining=True)
    second.leave()

    third = play("one", slots=1)
    third.report(slots=1)
    assert third.frames.empty()


async def test_a_drained_agent_has_no_slot_to_give_its_fleet(
    balancer: Balancer, play: Play
) -> None:
    play("a-1", slots=4, fleet="a").report(slots=4, held=True, draining=True)

    assert [(agent.slots, agent.processing) for agent in balancer.fleet_agents] == [(4, 4)]
