"""The management routes over real HTTP, with the agents' parts played by the test."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from played import Play, ask

from balancer import management
from balancer.balancer import Balancer
from balancer.desired_state import BalancerDesiredState
from common.ids import RequestId
from common.messages import Sampling


async def next_state(lines: AsyncIterator[str]) -> dict[str, Any]:
    async with asyncio.timeout(10):
        async for line in lines:
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has ended")


async def test_an_agent_is_shown_in_the_published_form(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play("one", slots=4)
    ask(balancer, RequestId("r1"))

    agents = (await client.get("/api/v1/agents")).json()

    assert agents == {
        "agents": [
            {
                "desired_slots_total": 4,
                "download_current": 0,
                "download_filename": None,
                "download_indeterminate": True,
                "download_total": 0,
                "id": "id-of-one",
                "issues": [],
                "model_path": "/models/played.gguf",
                "name": "one",
                "slots_processing": 1,
                "slots_total": 4,
                "state_application_status": "Applied",
                "uses_chat_template_override": False,
            }
        ]
    }


async def test_an_agent_that_drains_or_loads_offers_no_slots(
    client: httpx.AsyncClient, play: Play
) -> None:
    play("draining", slots=2).report(slots=2, draining=True)
    play("loading", slots=0)

    agents = (await client.get("/api/v1/agents")).json()["agents"]

    assert [(a["slots_total"], a["state_application_status"]) for a in agents] == [
        (0, "Applied"),
        (0, "Fresh"),
    ]


async def test_the_agents_stream_follows_every_change(
    client: httpx.AsyncClient, play: Play
) -> None:
    async with client.stream("GET", "/api/v1/agents/stream") as response:
        lines = response.aiter_lines()
        assert await next_state(lines) == {"agents": []}

        agent = play("one", slots=1)
        assert [a["name"] for a in (await next_state(lines))["agents"]] == ["one"]
        agent.leave()
        assert await next_state(lines) == {"agents": []}

    assert response.headers["content-type"].startswith("text/event-stream")


async def test_the_buffer_is_shown_once_and_as_a_stream(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    async with client.stream("GET", "/api/v1/buffered_requests/stream") as response:
        lines = response.aiter_lines()
        assert await next_state(lines) == {"buffered_requests_current": 0}

        for _ in range(3):  # agents come and go, which is no news here
            play(slots=0).leave()
            await asyncio.sleep(0)
        ask(balancer, RequestId("r1"))
        assert await next_state(lines) == {"buffered_requests_current": 1}

    response = await client.get("/api/v1/buffered_requests")
    assert response.json() == {"buffered_requests_current": 1}


async def test_an_idle_stream_is_kept_alive_by_comments(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management, "KEEP_ALIVE", 0.01)

    async with client.stream("GET", "/api/v1/agents/stream") as response:
        lines = response.aiter_lines()
        seen = [await anext(lines) for _ in range(4)]

    assert seen[2] == ": keep-alive"


async def test_a_stream_ends_after_its_lifetime(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management, "KEEP_ALIVE", 0.01)
    monkeypatch.setattr(management, "LIFETIME", 0.05)

    assert (await client.get("/api/v1/agents/stream")).status_code == 200


async def test_a_stream_ends_with_the_balancer(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    async with client.stream("GET", "/api/v1/agents/stream") as response:
        lines = response.aiter_lines()
        await next_state(lines)

        balancer.close()

        with pytest.raises(AssertionError, match="ended"):
            await next_state(lines)


async def test_the_desired_state_is_stored_and_echoed_and_samples_requests(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    route = "/api/v1/balancer_desired_state"
    state = (await client.get(route)).json()
    assert state == json.loads(BalancerDesiredState.defaults().model_dump_json(by_alias=True))
    state["model"] = {"LocalToAgent": "/models/other.gguf"}
    state["inference_parameters"]["top_k"] = 3
    agent = play()

    put = await client.put(route, json=state)
    async with client.stream(
        "POST", "/api/v1/continue_from_raw_prompt", json={"raw_prompt": "Hi", "max_tokens": 1}
    ):
        asked = await agent.asked()
        agent.finish(asked.request_id)

    assert (put.status_code, put.content) == (204, b"")
    assert (await client.get(route)).json() == state
    assert asked.sampling == Sampling(top_k=3)


async def test_a_bad_desired_state_is_refused_and_changes_nothing(
    client: httpx.AsyncClient,
) -> None:
    route = "/api/v1/balancer_desired_state"
    before = (await client.get(route)).json()
    bad = {**before, "inference_parameters": {**before["inference_parameters"], "n_batch": "x"}}

    response = await client.put(route, json=bad)

    assert response.status_code == 400
    assert "n_batch" in response.text
    assert (await client.get(route)).json() == before


async def test_metrics_are_prometheus_text(client: httpx.AsyncClient, play: Play) -> None:
    play("one", slots=4)

    response = await client.get("/metrics")

    assert (
        response.headers["content-type"]
        == "text/plain; version=0.0.4; charset=utf-8; escaping=values"
    )
    assert 'headrace_slots{agent="one"} 4.0' in response.text.splitlines()
