"""Clients that leave, by every protocol and in every way, while their request is in every state; the
engine's passes are let through one by one, so that it can be said what was still done for nobody.
"""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from between import Between, between
from engines import HeldVocabulary
from leaving import EMBEDDING_KINDS, HTTP_WAYS, KINDS, NATIVE, Client, HttpClient, Kind, Way
from one_process import CountingEngine, Whole, whole
from played import want

BATCH = 512
"""Tokens that the echo engine feeds in one pass."""

each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine(slots=1, context=6000)


@pytest.fixture
def vocabulary(engine: CountingEngine) -> HeldVocabulary:
    """Lets everything through until the test says otherwise."""
    vocabulary = HeldVocabulary()
    vocabulary.may_go_on.set()
    engine.vocabulary = vocabulary
    return vocabulary


@pytest.fixture
async def product(engine: CountingEngine, vocabulary: HeldVocabulary) -> AsyncGenerator[Whole]:
    async with whole() as product, product.agent("held", engine):
        yield product
        vocabulary.may_go_on.set()


@pytest.fixture
async def proxy(product: Whole) -> AsyncGenerator[tuple[Between, int]]:
    async with between(product.port) as proxy:
        yield proxy


async def gone(client: Client, way: Way, proxy: Between, product: Whole) -> None:
    """The client leaves, and the balancer has noticed."""
    before = product.outcomes().get("cancelled", 0)
    client.leave(way, proxy)
    if way is Way.IS_FROZEN:
        proxy.reset()
    await product.until(lambda: product.outcomes().get("cancelled", 0) > before)


async def is_free(product: Whole) -> None:
    """To the balancer and to the agent."""
    await product.until(lambda: product.bound == 0 and product.processing == 0)
    assert product.balancer.buffered == 0


async def serves_the_next(product: Whole, engine: CountingEngine, *, cancelled: int) -> None:
    """And each request has had one outcome."""
    engine.open()
    answer = await product.http.post("/v1/completions", json={"prompt": "xy"})

    assert answer.json()["choices"][0]["text"] == "xy"
    told = {"cancelled": cancelled, "stop": 1}
    assert product.outcomes() == {outcome: count for outcome, count in told.items() if count}


@pytest.mark.parametrize("way", HTTP_WAYS)
async def test_one_that_has_not_sent_all_of_its_request_has_sent_none(
    way: Way, product: Whole, engine: CountingEngine
) -> None:
    async with between(product.port) as (proxy, port):
        body = NATIVE.body("a" * 100, 90)
        client = await HttpClient.ask(port, NATIVE.path, body, missing=1)
        await product.heard_agent()  # so the server has had the time to read what there is

        client.leave(way, proxy)
        if way is Way.IS_FROZEN:
            proxy.reset()

        await client.rest()
        await client.close()
    await serves_the_next(product, engine, cancelled=0)


@each_kind
async def test_one_that_waits_never_reaches_the_agent(
    kind: Kind, product: Whole, engine: CountingEngine
) -> None:
    """B03, B08"""
    holder = await NATIVE.ask(product.port, "a" * 100, 90)
    await product.until(lambda: product.bound == 1)
    for way in kind.ways:
        async with between(product.port) as (proxy, port):
            client = await kind.ask(port, "b" * 100, 90)
            await product.until(lambda: product.balancer.buffered == 1)

            await gone(client, way, proxy, product)

            assert product.balancer.buffered == 0, way
            await client.close()
    engine.open()
    await holder.begun()  # nobody else was disturbed
    await is_free(product)
    assert product.outcomes() == {"cancelled": len(kind.ways), "length": 1}
    assert engine.fed == 100 + 89, "what waited was fed"
    await holder.close()


@each_kind
async def test_one_whose_prompt_is_prepared_is_never_fed(
    kind: Kind, product: Whole, engine: CountingEngine, vocabulary: HeldVocabulary
) -> None:
    for way in kind.ways:
        vocabulary.is_used.clear()
        vocabulary.may_go_on.clear()
        async with between(product.port) as (proxy, port):
            client = await kind.ask(port, "a" * 100, 90)
            await asyncio.to_thread(vocabulary.is_used.wait)

            await gone(client, way, proxy, product)

            await is_free(product)  # though the text is still being read
            vocabulary.may_go_on.set()
            await client.close()
    assert engine.passes == 0
    await serves_the_next(product, engine, cancelled=len(kind.ways))


@each_kind
async def test_one_whose_prompt_is_read_is_read_no_further_than_to_the_end_of_the_pass(
    kind: Kind, product: Whole, engine: CountingEngine
) -> None:
    """B02"""
    for n, way in enumerate(kind.ways):
        fed, passes = engine.fed, engine.passes
        async with between(product.port) as (proxy, port):
            client = await kind.ask(port, str(n) * 8 * BATCH, 90)
            await asyncio.to_thread(engine.wait_for_pass, passes + 1)

            await gone(client, way, proxy, product)

            await product.heard_agent()
            engine.allow()
            await is_free(product)
            assert engine.fed - fed == BATCH, way
            await client.close()
    await serves_the_next(product, engine, cancelled=len(kind.ways))


@each_kind
async def test_one_that_is_answered_gets_no_further_token_than_that_of_the_pass(
    kind: Kind, product: Whole, engine: CountingEngine
) -> None:
    """B01, streamed or not."""
    for n, way in enumerate(kind.ways, start=1):
        passes = engine.passes
        async with between(product.port) as (proxy, port):
            client = await kind.ask(port, str(n) * 100, 90)
            engine.allow(3)
            await asyncio.to_thread(engine.wait_for_pass, passes + 4)
            await product.heard_agent()
            assert product.tokens == 3 * n
            if kind.streams:
                await client.begun()

            await gone(client, way, proxy, product)

            await product.heard_agent()
            engine.allow()
            await is_free(product)
            assert engine.passes == passes + 4, way
            await client.close()
    await serves_the_next(product, engine, cancelled=len(kind.ways))


@pytest.mark.parametrize("kind", EMBEDDING_KINDS, ids=[kind.name for kind in EMBEDDING_KINDS])
async def test_documents_that_nobody_waits_for_are_not_embedded(
    kind: Kind, product: Whole, engine: CountingEngine
) -> None:
    want(product.balancer, enable_embeddings=True, embedding_batch_size=1)
    embedder = engine.embedder
    for way in kind.ways:
        embedder.is_used.clear()
        async with between(product.port) as (proxy, port):
            client = await kind.ask(port, "some text", 8)
            await asyncio.to_thread(embedder.is_used.wait)

            await gone(client, way, proxy, product)

            await product.heard_agent()
            embedder.may_go_on.release()
            await is_free(product)
            await client.close()
    assert embedder.passes == len(kind.ways), "the other documents were embedded, too"
    want(product.balancer, enable_embeddings=False)
    await serves_the_next(product, engine, cancelled=len(kind.ways))


async def test_a_client_that_will_send_no_more_is_told_that_its_answer_is_cut(
    product: Whole, engine: CountingEngine
) -> None:
    """A half-closed connection may be one whose client has gone, and a slot cannot wait to find out.
    So it counts as gone, and what came so far must not look like the whole.
    """
    client = await HttpClient.ask(product.port, NATIVE.path, NATIVE.body("a" * 100, 90))
    engine.allow(3)
    await client.begun()

    client.leave(Way.HALF_CLOSES, None)
    rest = await client.rest()

    assert b"Done" not in rest
    assert not rest.endswith(b"0\r\n\r\n"), "the mark of a whole answer"
    await client.close()
