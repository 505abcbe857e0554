"""The management routes over real HTTP, with the agents' parts played by the test."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from played import Play, ask

from balancer import management
from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.desired_state import BalancerDesiredState
from balancer.state_store import FileStore, MemoryStore, StateError
from balancer.stored_state import StoredState
from balancer.wishes import Wishes
from common.ids import RequestId
from common.messages import Described, Sampling
from common.models import AgentIssue, Download, EngineChoices, IssueKind, LocalModel, NoModel


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


AGENT = "/api/v1/agent/id-of-one"


async def test_an_agents_model_is_described(client: httpx.AsyncClient, play: Play) -> None:
    agent = play("one")
    assert (await client.get(f"{AGENT}/model_metadata")).json() is None
    assert (await client.get(f"{AGENT}/chat_template_override")).json() is None

    agent.describe(Described({"general.name": "x"}, "{{ messages }}"))

    metadata = (await client.get(f"{AGENT}/model_metadata")).json()
    template = (await client.get(f"{AGENT}/chat_template_override")).json()
    assert metadata == {"metadata": {"general.name": "x"}}
    assert template == {"content": "{{ messages }}"}


@pytest.mark.parametrize("what", ["model_metadata", "chat_template_override", "status"])
async def test_an_agent_that_is_not_there_is_404(client: httpx.AsyncClient, what: str) -> None:
    assert (await client.get(f"/api/v1/agent/nobody/{what}")).status_code == 404


async def test_an_agents_own_words_say_why_something_failed(
    client: httpx.AsyncClient, play: Play
) -> None:
    issue = AgentIssue(IssueKind.MODEL_CANNOT_BE_LOADED, "/m.gguf", "no memory for it")
    play("one", labels=("gpu",)).report(slots=1, issues=(issue,))

    told = (await client.get(f"{AGENT}/status")).json()

    assert told["labels"] == ["gpu"]
    assert told["status"]["issues"][0]["detail"] == "no memory for it"


PATH = {"model_path": "/m.gguf"}


@pytest.mark.parametrize("kind", IssueKind)
async def test_every_issue_has_its_published_form(
    client: httpx.AsyncClient, play: Play, kind: IssueKind
) -> None:
    issue = AgentIssue(kind, "/m.gguf", "why", lock_path="/lock", template="{{")
    play("one").report(slots=1, issues=(issue,))

    (agent,) = (await client.get("/api/v1/agents")).json()["agents"]

    others: dict[IssueKind, dict[str, Any]] = {
        IssueKind.HUGGING_FACE_CANNOT_ACQUIRE_LOCK: {"lock_path": "/lock", "model_path": PATH},
        IssueKind.CHAT_TEMPLATE_DOES_NOT_COMPILE: {
            "error": "why",
            "model_path": PATH,
            "template_content": "{{",
        },
        IssueKind.SLOT_CANNOT_START: {"error": "why", "slot_index": 0},
    }
    assert agent["issues"] == [{kind.value: others.get(kind, PATH)}]


async def test_a_download_is_shown(client: httpx.AsyncClient, play: Play) -> None:
    play("known").report(slots=0, download=Download("m.gguf", 5, 9))
    play("unknown").report(slots=0, download=Download("m.gguf", 5, None))
    play("none")

    agents = (await client.get("/api/v1/agents")).json()["agents"]

    keys = ("filename", "current", "total", "indeterminate")
    assert [tuple(agent[f"download_{key}"] for key in keys) for agent in agents] == [
        ("m.gguf", 5, 9, False),
        ("m.gguf", 5, 0, True),
        (None, 0, 0, True),
    ]


async def test_the_desired_state_reaches_every_agent(client: httpx.AsyncClient, play: Play) -> None:
    here = play("here")
    route = "/api/v1/balancer_desired_state"
    state = {**(await client.get(route)).json(), "model": {"LocalToAgent": "/m.gguf"}}

    await client.put(route, json=state)
    later = play("later")

    assert [state.model for state in here.states] == [NoModel(), LocalModel("/m.gguf")]
    assert [state.model for state in later.states] == [LocalModel("/m.gguf")]
    applicable = (await client.get("/api/v1/balancer_applicable_state")).json()
    assert applicable == {key: state[key] for key in applicable}
    assert set(applicable) == set(state) - {"use_chat_template_override"}


async def test_overrides_reach_the_agents_that_they_are_for(
    client: httpx.AsyncClient, play: Play
) -> None:
    big, small = play("big", labels=("gpu",)), play("small")
    overrides = {"overrides": [{"label": "gpu", "n_gpu_layers": -1}]}

    put = await client.put("/api/v1/agent_overrides", json=overrides)

    assert put.status_code == 204
    assert big.states[-1].overrides == EngineChoices(n_gpu_layers=-1)
    assert small.states[-1].overrides == EngineChoices()
    told = (await client.get("/api/v1/agent_overrides")).json()["overrides"]
    assert [(each["label"], each["n_gpu_layers"]) for each in told] == [("gpu", -1)]
    bad = await client.put("/api/v1/agent_overrides", json={"overrides": [{"heat": 1}]})
    assert bad.status_code == 400


async def test_agents_are_given_their_turn_one_after_another(
    balancer: Balancer, play: Play
) -> None:
    one, two = play("one"), play("two")
    one.report(slots=1, awaits_turn=True)
    two.report(slots=1, awaits_turn=True)
    assert (one.turns, two.turns) == ([1], [])

    one.report(slots=1, turn_taken=1)

    assert (one.turns, two.turns) == ([1], [2])


class BrokenStore(MemoryStore):
    def save(self, state: StoredState, /) -> None:
        raise StateError("the disk is full")


async def test_what_cannot_be_stored_is_not_applied(balancer: Balancer, play: Play) -> None:
    agent = play("one")
    transport = httpx.ASGITransport(create_app(balancer, Wishes(balancer, BrokenStore())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        route = "/api/v1/balancer_desired_state"
        before = (await client.get(route)).json()

        put = await client.put(route, json={**before, "model": {"LocalToAgent": "/m.gguf"}})

        assert (put.status_code, put.text) == (500, "the disk is full\n")
        assert (await client.get(route)).json() == before
    assert len(agent.states) == 1


async def test_what_is_put_is_there_after_a_restart(balancer: Balancer, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "state.json")
    transport = httpx.ASGITransport(create_app(balancer, Wishes(balancer, store)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        route = "/api/v1/balancer_desired_state"
        state = {**(await client.get(route)).json(), "model": {"LocalToAgent": "/m.gguf"}}
        await client.put(route, json=state)

    stored = store.load()
    assert stored is not None
    assert json.loads(stored.balancer_desired_state.model_dump_json(by_alias=True)) == state


async def test_a_desired_state_is_not_put_over_one_that_was_never_seen(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    state = (await client.get("/api/v1/balancer_desired_state")).json()
    seen = balancer.stored.wish_number

    def put(number: object) -> Any:
        headers = {"if-match": f'"{number}"'}
        return client.put("/api/v1/balancer_desired_state", json=state, headers=headers)

    told = await put(seen)
    assert (told.status_code, told.headers["etag"]) == (204, f'"{balancer.stored.wish_number}"')
    assert (await client.get("/api/v1/balancer_desired_state")).headers["etag"] == told.headers[
        "etag"
    ]
    late = await put(seen)
    assert (late.status_code, late.headers["x-headrace-error"]) == (409, "overtaken")
    assert (await put("nonsense")).status_code == 400
    assert (await put(balancer.stored.wish_number)).status_code == 204
    anyhow = await client.put(
        "/api/v1/balancer_desired_state", json=state, headers={"if-match": "*"}
    )
    assert anyhow.status_code == 204


async def test_an_error_says_to_programs_which_it_is(client: httpx.AsyncClient) -> None:
    other_page = {"origin": "https://elsewhere.example"}

    refused = await client.put("/api/v1/fleets/a", json={}, headers=other_page)
    unknown = await client.get("/api/v1/fleets/a")

    assert refused.headers["x-headrace-error"] == "origin_not_allowed"
    assert unknown.headers["x-headrace-error"] == "fleet_not_found"
