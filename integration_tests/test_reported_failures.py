"""What people have reported of balancers for inference, asked of this one: its routes, its links and its
agents, all real but in one process, so that a test can hold the engine.

Each test names the report in its first line.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from between import between
from event_lines import observing
from leaving import KINDS, Kind, SocketClient
from one_process import CountingEngine, Whole, whole

from agent.link import Link
from common.ids import AgentId, RequestId
from common.messages import (
    PROTOCOL,
    Described,
    Finished,
    FinishReason,
    Generate,
    Join,
    RawPrompt,
    Status,
    Step,
    ToAgent,
    Usage,
    encode,
)
from common.models import Application

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
IDLE = 5.0
"""Seconds, between two and three pings."""


@pytest.fixture
async def product() -> AsyncGenerator[Whole]:
    async with whole(keep_alive=0.02) as product:
        yield product


async def test_ten_requests_on_four_slots_are_all_served_in_their_order(product: Whole) -> None:
    """B24"""
    engine = CountingEngine(slots=4, context=100)
    async with product.agent("four", engine):
        tasks: list[asyncio.Task[Any]] = []
        ended: list[int] = []
        for n in range(10):
            # Those that come first have less to say: they end in the order in which they began.
            body = {"prompt": "a" * (n + 1)}
            task = asyncio.create_task(product.http.post("/v1/completions", json=body))
            task.add_done_callback(lambda _, n=n: ended.append(n))
            tasks.append(task)
            waiting = max(0, n - 3)
            await product.until(
                lambda n=n, waiting=waiting: (
                    product.bound == min(4, n + 1) and product.balancer.buffered == waiting
                )
            )
        engine.open()
        answers = await asyncio.gather(*tasks)

    assert [answer.status_code for answer in answers] == [200] * 10
    assert ended == [*range(10)]


async def test_everything_else_answers_while_every_slot_is_taken_and_nothing_moves(
    product: Whole,
) -> None:
    """B25"""
    engine = CountingEngine(slots=2, context=100)
    async with product.agent("held", engine):
        tasks = [asyncio.create_task(product.http.post(KINDS[-1].path, json=KINDS[-1].body("ab", 2)))
                 for _ in range(5)]  # fmt: skip
        await product.until(lambda: product.bound == 2 and product.balancer.buffered == 3)

        answers = {
            path: await product.http.get(path)
            for path in (
                "/health", "/metrics", "/v1/models", "/api/v1/agents",
                "/api/v1/buffered_requests", "/api/v1/balancer_desired_state",
                "/panel/", "/api/v1/overview", "/api/v1/requests", "/api/v1/fleets",
            )
        }  # fmt: skip
        state = answers["/api/v1/balancer_desired_state"].json()
        put = await product.http.put("/api/v1/balancer_desired_state", json=state)
        counted = await product.http.post("/v1/tokenize", json={"prompt": "abc"})

        async with observing(product.http) as observer:
            await observer.read()

        assert engine.passes == 0, "it moved"
        assert observer.state["balancer"]["requests"]["waiting"] == 3
        assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(
            answers, 200
        )
        assert answers["/api/v1/buffered_requests"].json() == {"buffered_requests_current": 3}
        assert put.is_success
        assert counted.json()["count"] == 3
        engine.open()
        assert [(await task).status_code for task in tasks] == [200] * 5


async def test_an_agent_that_is_lost_before_the_first_token_is_noticed_by_nobody(
    product: Whole,
) -> None:
    """B31: the headers of streams have been sent already, and still the answers are whole."""
    lost, heir = (CountingEngine(slots=len(KINDS), context=100) for _ in range(2))
    heir.open()
    began = [asyncio.Event() for _ in KINDS]

    async def ask(kind: Kind, has_begun: asyncio.Event) -> str:
        if kind.is_socket:
            return await ask_on_socket(product.port, kind, has_begun)
        async with product.http.stream("POST", kind.path, json=kind.body("xyz", 3)) as answer:
            has_begun.set()
            return kind.text(await answer.aread())

    async with (
        between(product.agent_port) as (link, port),
        asyncio.TaskGroup() as group,
        product.agent("lost", lost, port=port),
    ):
        tasks = [group.create_task(ask(*pair)) for pair in zip(KINDS, began, strict=True)]
        await product.until(lambda: product.bound == len(KINDS))
        for kind, has_begun in zip(KINDS, began, strict=True):
            if kind.streams:
                await has_begun.wait()
        link.freeze()
        link.reset()
        await product.until(lambda: product.balancer.buffered == len(KINDS))
        async with product.agent("heir", heir):
            texts = [await task for task in tasks]

    assert dict(zip((kind.name for kind in KINDS), texts, strict=True)) == {
        kind.name: "xyz" for kind in KINDS
    }
    assert product.outcomes() == {"length": len(KINDS)}
    assert heir.fed > 0


async def ask_on_socket(port: int, kind: Kind, has_begun: asyncio.Event) -> str:
    client = await SocketClient.ask(port, kind.path, kind.body("xyz", 3))
    has_begun.set()
    answer = await client.whole()
    await client.close()
    return kind.text(answer)


async def test_a_slow_prompt_is_waited_for_and_the_client_hears_that_it_is_alive(
    product: Whole,
) -> None:
    """B38"""
    engine = CountingEngine(slots=1, context=100)
    body = {**CHAT, "stream": True}
    async with (
        product.agent("slow", engine),
        product.http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = (line async for line in answer.aiter_lines() if line)
        heard = [await anext(lines) for _ in range(20)]
        assert engine.passes == 0
        engine.open()
        rest = [line async for line in lines if not line.startswith(":")]

    assert heard == [": keep-alive"] * 20
    assert rest[-1] == "data: [DONE]"


class Stub:
    """An agent without a model: it says that it has slots, or none, and answers what it is asked."""

    def __init__(self, port: int, number: int, *, slots: int) -> None:
        self._slots = slots
        self._name = f"stub-{number}"
        self.asked = 0
        self.lost_links = 0
        self.link = Link(f"ws://127.0.0.1:{port}", self)

    def join(self, link: Link, /) -> Join:
        agent_id = AgentId(self._name)
        return Join(protocol=PROTOCOL, agent_id=agent_id, name=self._name, status=self.status(link))

    def status(self, _link: Link, /) -> Status:
        return Status(
            version=1,
            slots_desired=1,
            slots_total=self._slots,
            slots_processing=0,
            application=Application.APPLIED if self._slots else Application.FRESH,
        )

    def description(self) -> Described:
        return Described(metadata=None, chat_template_override=None)

    def received(self, _link: Link, frame: ToAgent, /) -> None:
        if isinstance(frame, Generate):
            self.asked += 1
            usage = Usage(prompt_tokens=1)
            self.link.send(Step((Finished(frame.request_id, FinishReason.STOP, usage),)))

    def lost(self, _link: Link, /) -> None:
        self.lost_links += 1


async def test_links_of_500_agents_outlive_a_proxy_that_cuts_silent_ones(product: Whole) -> None:
    """B32: and those that have no model are given no work."""
    agents, unloaded = 500, 50
    async with between(product.agent_port, idle=IDLE) as (proxy, port):
        stubs = [Stub(port, n, slots=int(n >= unloaded)) for n in range(agents)]
        tasks = [asyncio.create_task(stub.link.run()) for stub in stubs]
        await product.until(lambda: len(product.balancer.agents) == agents)
        before = dict(proxy.carried)
        await proxy.until(
            lambda: all(proxy.carried[n] >= before[n] + 3 for n in before)  # pings
        )

        exchanges = [
            product.balancer.submit(
                request_id,
                encode(Generate(request_id=request_id, prompt=RawPrompt("a"), max_tokens=1)),
            )
            for request_id in (RequestId(f"r{n}") for n in range(agents - unloaded))
        ]
        told = [[each.event async for each in exchange] for exchange in exchanges]

        assert proxy.cuts == 0
        assert len(product.balancer.agents) == agents
        assert [stub.asked for stub in stubs] == [0] * unloaded + [1] * (agents - unloaded)
        assert all(isinstance(events[-1], Finished) for events in told)
        assert sum(stub.lost_links for stub in stubs) == 0
        for stub in stubs:
            stub.link.close()
        await asyncio.gather(*tasks)


async def test_a_proxy_does_cut_what_is_silent(product: Whole) -> None:
    """Else the test above would show nothing."""
    async with between(product.agent_port, idle=0.05) as (proxy, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await proxy.until(lambda: proxy.cuts == 1)
        writer.close()
