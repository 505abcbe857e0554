"""The metrics of a balancer that has served, refused and lost: real routes, links and agents."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import httpx
from serving import serving

from agent.service import Agent
from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.link import AgentListener
from common.models import EngineChoices
from deploy.agents import make_agent
from deploy.settings import AgentSettings, EngineKind

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 5}
PROMPT = {"raw_prompt": "abcdefgh", "max_tokens": 4}


async def metrics_after_load() -> str:
    """Some requests by several routes; two agents are there, and a third has gone."""
    balancer = Balancer(buffer_capacity=1, patience=60.0)
    async with serving(create_app(balancer)) as port:
        url = f"http://127.0.0.1:{port}"
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client,
            agents(balancer, "one", "other"),
        ):
            async with agents(balancer, "gone"):
                await _serve(client)
            await _serve(client)
            await _until(balancer, lambda: _has_figures(balancer))
            text = (await client.get("/metrics")).text
        balancer.close()
    return text


async def _serve(client: httpx.AsyncClient) -> None:
    for n in range(3):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "seed": n})
        assert answer.status_code == 200, answer.text
    native = await client.post("/api/v1/continue_from_raw_prompt", json=PROMPT)
    assert "Done" in native.text
    refused = await client.post("/v1/chat/completions", json={**CHAT, "model": "unknown"})
    assert refused.status_code == 404


@asynccontextmanager
async def agents(balancer: Balancer, *names: str) -> AsyncGenerator[None]:
    """With these agents, of two slots each, which say prompts back."""
    listener = AgentListener(balancer)
    port = await listener.start("127.0.0.1", 0)
    agents = [_agent(port, name) for name in names]
    before = len(balancer.agents)
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.run())
        await _until(
            balancer,
            lambda: sum(a.status.slots_total > 0 for a in balancer.agents) == before + len(agents),
        )
        yield
        for agent in agents:
            agent.stop()
    await listener.stop()


async def _until(balancer: Balancer, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await balancer.changes.after(balancer.changes.count)


def _has_figures(balancer: Balancer) -> bool:
    """An agent has told how its passes were, which it does a moment later."""
    figures = [agent.status.figures for agent in balancer.agents]
    return any(each.prefill_rate and each.decode_rate for each in figures)


def _agent(port: int, name: str) -> Agent:
    return make_agent(
        AgentSettings(
            balancers=(f"ws://127.0.0.1:{port}",),
            name=name,
            engine=EngineKind.ECHO,
            choices=EngineChoices(slots=2, context_size=256),
        )
    )
