"""Clients that leave the running product: real Ray, Serve's proxy, the real small model. What exactly is
still done for them is told by ``test_clients_leave_in_every_state``.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator

import httpx
import pytest
from between import Between, between
from exposition import total
from leaving import (
    EMBEDDING_KINDS,
    KINDS,
    NATIVE,
    PATIENCE,
    SOCKET,
    Client,
    Kind,
    Way,
    outcomes,
)
from product import Up, start_up

FED = 'headrace_scheduler_prompt_tokens_total{agent="agent-1",source="fed"}'
TOKENS = "headrace_tokens_generated_total"
ENDLESS = 8000
"""Tokens, which take minutes."""
LONG = 3000
"""Words of a prompt, which take many seconds to be read."""

by_name = {kind.name: kind for kind in KINDS}
SOME = [NATIVE, SOCKET, by_name["chat, streamed"], by_name["chat, whole"]]
each_kind = pytest.mark.parametrize("kind", SOME, ids=[kind.name for kind in SOME])


@pytest.fixture(scope="module")
def one_slot() -> Generator[Up]:
    with start_up("--slots", "1", "--buffer-timeout", "600") as up:
        yield up


class Watch:
    """Reads what the product says of itself."""

    def __init__(self, up: Up, http: httpx.AsyncClient) -> None:
        self.port = up.port
        self.http = http
        self._up = up

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).raise_for_status().text

    async def cancelled(self) -> int:
        return outcomes(await self.metrics()).get("cancelled", 0)

    async def value(self, series: str) -> float:
        return total(await self.metrics(), series)

    async def until(self, condition: Callable[[str], bool]) -> None:
        """Wait until this is true of the metrics."""
        async with asyncio.timeout(PATIENCE):
            while not condition(await self.metrics()):  # each look is a request
                pass

    async def until_buffered(self, count: int) -> None:
        await asyncio.to_thread(self._up.until_buffered, count)

    async def until_processing(self, count: int) -> None:
        """As the agents say it."""
        await asyncio.to_thread(
            self._up.until, lambda agents: sum(a["slots_processing"] for a in agents) == count
        )

    async def is_quiet(self) -> None:
        """No slot is held, to the agent or to the balancer, and nobody waits."""
        await self.until_processing(0)
        metrics = await self.metrics()
        assert total(metrics, 'headrace_slots_processing{agent="agent-1"}') == 0
        assert total(metrics, "headrace_requests_buffered") == 0

    async def serves(self) -> None:
        answer = await self.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200


@pytest.fixture
async def watch(one_slot: Up) -> AsyncGenerator[Watch]:
    async with httpx.AsyncClient(
        base_url=one_slot.address, timeout=PATIENCE, trust_env=False
    ) as http:
        yield Watch(one_slot, http)


async def gone(client: Client, way: Way, proxy: Between, watch: Watch) -> None:
    """The client leaves, and the balancer has noticed; that is its request's one outcome."""
    before = outcomes(await watch.metrics())
    client.leave(way, proxy)
    if way is Way.IS_FROZEN:
        proxy.reset()
    await watch.until(lambda metrics: outcomes(metrics) != before)
    assert outcomes(await watch.metrics()) == before | {"cancelled": before.get("cancelled", 0) + 1}


@each_kind
async def test_while_it_waits(kind: Kind, watch: Watch) -> None:
    """B03, B08"""
    holder = await NATIVE.ask(watch.port, "Once upon a time", ENDLESS)
    await holder.begun()
    fed = await watch.value(FED)
    for way in kind.ways:
        async with between(watch.port) as (proxy, port):
            client = await kind.ask(port, f"Nobody reads this: {way}", 5)
            await watch.until_buffered(1)

            await gone(client, way, proxy, watch)

            await watch.until_buffered(0)
            await client.close()
    await holder.begun()  # it goes on
    await holder.close()
    await watch.is_quiet()
    assert await watch.value(FED) - fed < 100, "what waited has reached the agent"
    await watch.serves()


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, id=f"{kind.name}: {way}")
        for kind, way in zip(SOME, [Way.RESETS, Way.CLOSES, Way.IS_CUT, Way.CLOSES], strict=True)
    ],
)
async def test_while_its_prompt_is_read(kind: Kind, way: Way, watch: Watch) -> None:
    """B02"""
    fed = await watch.value(FED)
    async with between(watch.port) as (proxy, port):
        client = await kind.ask(port, f"{kind.name}: " + "word " * LONG, 5)
        await watch.until(lambda metrics: total(metrics, FED) > fed)

        await gone(client, way, proxy, watch)

        await watch.is_quiet()
        assert await watch.value(FED) - fed < LONG / 2, "it was read on"
        await client.close()
    await watch.serves()


@each_kind
async def test_while_it_is_answered(kind: Kind, watch: Watch) -> None:
    """B01"""
    for n, way in enumerate(kind.ways):
        tokens = await watch.value(TOKENS)
        async with between(watch.port) as (proxy, port):
            client = await kind.ask(port, f"Tell me a story, number {n}.", ENDLESS)
            await watch.until(lambda metrics, tokens=tokens: total(metrics, TOKENS) > tokens)
            if kind.streams:
                await client.begun()

            await gone(client, way, proxy, watch)

            await watch.is_quiet()
            assert await watch.value(TOKENS) - tokens < ENDLESS / 10
            await client.close()
    await watch.serves()


async def test_documents_that_nobody_waits_for(watch: Watch) -> None:
    """The rest of a batch is not begun."""
    state = (await watch.http.get("/api/v1/balancer_desired_state")).json()
    enabled = {"enable_embeddings": True, "pooling_type": "Mean", "embedding_batch_size": 1}
    parameters = state["inference_parameters"] | enabled
    await watch.http.put(
        "/api/v1/balancer_desired_state", json=state | {"inference_parameters": parameters}
    )
    try:
        for kind in EMBEDDING_KINDS:
            for way in (Way.CLOSES, Way.IS_CUT):
                async with between(watch.port) as (proxy, port):
                    client = await kind.ask(port, "word " * 300, 256)
                    await watch.until_processing(1)

                    await gone(client, way, proxy, watch)

                    await watch.is_quiet()
                    await client.close()
    finally:
        await watch.http.put("/api/v1/balancer_desired_state", json=state)
    await watch.serves()
