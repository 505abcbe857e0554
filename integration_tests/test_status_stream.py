"""The status stream of the running product, through Serve's proxy, with real agents."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from event_lines import observing
from product import Command, Up

QUESTION: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture
async def http(up: Up) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=up.address, timeout=60, trust_env=False) as client:
        yield client


async def test_a_stream_that_was_cut_goes_on_with_what_was_missed(
    http: httpx.AsyncClient,
) -> None:
    async with observing(http) as before:
        await before.read()
    answer = await http.post("/v1/completions", json=QUESTION)
    request_id = answer.headers["x-request-id"]

    async with observing(http, before.last_id) as after:
        await after.until(lambda state: request_id in state.get("requests", {}))

    assert "snapshot" not in after.events
    told = after.state["requests"][request_id]
    assert (told["state"], told["outcome"], told["tokens"]) == ("over", "length", 20)


async def test_an_agent_that_joins_and_one_that_dies_are_seen(
    up: Up, http: httpx.AsyncClient
) -> None:
    async with observing(http) as observer:
        await observer.read()
        agent = Command("agent", "--balancer", up.balancer, "--engine", "echo", "--name", "guest")
        try:

            def guests(state: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
                return [each for each in state["agents"].values() if each["name"] == "guest"]

            await observer.until(
                lambda state: any(guest["state"] == "ready" for guest in guests(state))
            )
            agent.kill_the_rest()
            await observer.until(lambda state: not guests(state))
            await observer.until(
                lambda state: any(each["agent"] == "guest" for each in state["errors"].values())
            )
        finally:
            agent.kill_the_rest()
            agent.ended()


async def test_what_was_decided_about_a_request_is_told_by_dispatcher_and_scheduler(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post("/v1/completions", json=QUESTION)

    told = (await http.get(f"/api/v1/requests/{answer.json()['id']}")).json()

    assert [(each["by"], each["what"]) for each in told["decisions"]] == [
        ("balancer", "arrived"),
        ("dispatcher", "dispatched"),
        ("scheduler", "admitted"),
        ("scheduler", "first_token"),
        ("balancer", "over"),
    ]
    assert "Once upon" not in str(told)


async def test_a_drained_agent_keeps_what_runs_and_gets_nothing_new(
    http: httpx.AsyncClient,
) -> None:
    agents = (await http.get("/api/v1/overview")).json()["agents"]
    (agent_id,) = agents
    body = {**QUESTION, "max_tokens": 200}
    running = asyncio.create_task(http.post("/v1/completions", json=body))
    async with observing(http) as observer:
        await observer.until(
            lambda state: any(each["state"] == "running" for each in state["requests"].values())
        )
        assert (await http.post(f"/api/v1/agent/{agent_id}/drain")).status_code == 204
        await observer.until(lambda state: state["agents"][agent_id]["held"])
        waiting = asyncio.create_task(http.post("/v1/completions", json=QUESTION))
        await observer.until(lambda state: state["balancer"]["buffer"]["waiting"] == 1)
        assert (await running).json()["usage"]["completion_tokens"] == 200

        assert (await http.post(f"/api/v1/agent/{agent_id}/undrain")).status_code == 204
        assert (await waiting).json()["usage"]["completion_tokens"] == 20


async def test_a_template_is_tried_on_the_real_model(http: httpx.AsyncClient) -> None:
    history = {"conversation_history": [{"role": "user", "content": "Hi"}]}

    own = await http.post("/api/v1/chat_template_preview", json=history)
    tried = await http.post(
        "/api/v1/chat_template_preview",
        json={**history, "template": "{{ bos_token }}[{{ messages[0].content }}]"},
    )
    broken = await http.post(
        "/api/v1/chat_template_preview", json={**history, "template": "{% for"}
    )

    assert "<|im_start|>user\nHi<|im_end|>" in own.json()["text"]
    assert tried.json()["text"].endswith("[Hi]")
    assert broken.status_code == 400
    assert broken.text.startswith("the chat template failed")
