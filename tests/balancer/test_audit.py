"""Each act of an operator leaves one line, and no key."""

import hashlib
import logging
from collections.abc import AsyncGenerator

import httpx
import pytest
from serving import serving

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.keys import Keys, Role

KEY = "a-key-for-managers"
FINGERPRINT = hashlib.sha256(KEY.encode()).hexdigest()[:8]


@pytest.fixture
async def managed(balancer: Balancer) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_app(balancer, keys=Keys([(Role.MANAGEMENT, KEY)]))
    async with (
        serving(app) as port,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"authorization": f"Bearer {KEY}"},
            trust_env=False,
            timeout=30,
        ) as client,
    ):
        yield client
        balancer.close()


@pytest.fixture(autouse=True)
def audited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.audit")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "headrace.audit"]


BY = f"from=127.0.0.1 role=management key={FINGERPRINT}"


async def test_every_act_is_noted_with_who_did_it_and_never_with_the_key(
    managed: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    state = (await managed.get("/api/v1/balancer_desired_state")).json()
    state["model"] = {"Url": {"url": "https://models.example/a/small.gguf?token=secret"}}

    await managed.put("/api/v1/balancer_desired_state", json=state)
    await managed.put("/api/v1/agent_overrides", json={"overrides": [{"label": "a", "slots": 2}]})
    await managed.put("/api/v1/fleets/qwen", json={"min": 1, "max": 3})
    await managed.delete("/api/v1/fleets/qwen")

    assert lines(caplog) == [
        f"action=put_desired_state model=small changed=model {BY}",
        f"action=put_agent_overrides overrides=1 {BY}",
        f"action=put_fleet fleet=qwen min=1 max=3 {BY}",
        f"action=delete_fleet fleet=qwen {BY}",
    ]
    assert KEY not in caplog.text
    assert "secret" not in caplog.text


async def test_what_is_not_done_is_not_noted(
    managed: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await managed.put("/api/v1/balancer_desired_state", json={})
    await managed.delete("/api/v1/fleets/none")
    await managed.put("/api/v1/fleets/qwen", json={}, headers={"authorization": "Bearer other"})

    assert lines(caplog) == []


async def test_who_shows_no_key_has_no_fingerprint(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await client.put("/api/v1/fleets/qwen", json={})

    assert lines(caplog) == [
        "action=put_fleet fleet=qwen min=0 max=1 from=127.0.0.1 role=management"
    ]
