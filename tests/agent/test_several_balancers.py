"""Two real balancers with listeners of their own, and one real agent of two slots that both flood."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from answers import text_of
from engines import OneModel

from agent.echo import EchoEngine
from agent.engine import Chunk, Decoded
from agent.service import Agent
from agent.swap import ModelSwap
from balancer.balancer import Balancer, new_id
from balancer.exchange import Exchange
from balancer.link import AgentListener
from common.errors import ErrorCode
from common.messages import (
    Failed,
    Finished,
    Generate,
    RawPrompt,
    Status,
    TokenGenerated,
    encode,
)
from common.models import EngineChoices, LocalModel

SLOTS = 2
REQUESTS = 60
"""Of each balancer, all at once."""

TEXT = "abc"

PATIENCE = 30.0


class WatchedEngine(EchoEngine):
    """Notes which sequences have begun and not ended, and can be held up."""

    def __init__(self) -> None:
        super().__init__(slots=SLOTS, context=64)
        self.most = 0
        """Sequences that took part in one pass."""
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        self.may_go_on.wait(PATIENCE)
        self.most = max(self.most, len({chunk.sequence_id for chunk in chunks}))
        return super().decode(chunks)


@dataclass
class Side:
    """A balancer with its listener."""

    name: str
    order: list[str]
    """Whose requests have ended, one after the other."""
    balancer: Balancer = field(
        default_factory=lambda: Balancer(buffer_capacity=REQUESTS, patience=PATIENCE)
    )
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list[Exchange])

    def __post_init__(self) -> None:
        self.listener = AgentListener(self.balancer)

    async def start(self) -> None:
        self.url = f"ws://127.0.0.1:{await self.listener.start('127.0.0.1', 0)}"

    async def stop(self) -> None:
        self.balancer.close()
        await self.listener.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        changes = self.balancer.changes
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await changes.after(changes.count)

    def sees(self, condition: Callable[[Status], bool]) -> bool:
        """Is it true of the agent's newest status?"""
        return any(condition(agent.status) for agent in self.balancer.agents)

    @property
    def is_quiet(self) -> bool:
        """Nothing has come behind the ends."""
        return all(exchange.is_empty for exchange in self.exchanges)

    async def ask(self) -> str:
        """What becomes of it: its text, or the error with which it has ended."""
        request_id = new_id()
        frame = Generate(request_id=request_id, prompt=RawPrompt(TEXT), max_tokens=9)
        exchange = self.balancer.submit(request_id, encode(frame))
        self.exchanges.append(exchange)
        text = ""
        async for told in exchange:
            match told.event:
                case TokenGenerated() as token:
                    text += text_of(token)
                case Failed(code=code):
                    text = str(code)
                case end:
                    assert isinstance(end, Finished)
        self.order.append(self.name)
        return text

    async def flood(self) -> Counter[str]:
        async with asyncio.timeout(PATIENCE):
            return Counter(await asyncio.gather(*(self.ask() for _ in range(REQUESTS))))


@asynccontextmanager
async def both() -> AsyncGenerator[tuple[Side, Side, WatchedEngine]]:
    order: list[str] = []
    sides = Side("one", order), Side("two", order)
    engine = WatchedEngine()
    for side in sides:
        await side.start()
    agent = Agent(
        balancers=[side.url for side in sides],
        name="shared",
        models=OneModel(engine),
        swap=ModelSwap(own=EngineChoices(slots=SLOTS), pinned=LocalModel("echo")),
    )
    running = asyncio.create_task(agent.run())
    try:
        for side in sides:
            await side.until(partial(side.sees, lambda status: status.slots_total == SLOTS))
        yield *sides, engine
    finally:
        engine.may_go_on.set()
        agent.stop()
        await running
        for side in sides:
            await side.stop()


async def test_two_balancers_share_an_agent_that_never_runs_more_than_its_slots() -> None:
    async with both() as (one, two, engine):
        outcomes = await asyncio.gather(one.flood(), two.flood())

        assert outcomes == [{TEXT: REQUESTS}, {TEXT: REQUESTS}]
        for side in (one, two):
            await side.until(partial(side.sees, lambda status: status.slots_processing == 0))
            assert side.is_quiet, "answered once"
        assert engine.most == SLOTS
        # While both had something to be done, neither was left behind.
        assert min(Counter(one.order[:REQUESTS]).values()) > REQUESTS // 3


async def test_when_one_balancer_is_gone_the_others_requests_go_on() -> None:
    async with both() as (one, two, engine), asyncio.TaskGroup() as group:
        engine.may_go_on.clear()
        lost = [group.create_task(one.ask())]
        await two.until(partial(two.sees, lambda status: status.slots_elsewhere == 1))
        kept = [group.create_task(two.ask())]
        await one.until(partial(one.sees, lambda status: status.slots_elsewhere == 1))
        lost += [group.create_task(one.ask()) for _ in range(9)]
        kept += [group.create_task(two.ask()) for _ in range(9)]

        await one.listener.stop()
        engine.may_go_on.set()

        async with asyncio.timeout(PATIENCE):
            assert [await task for task in kept] == [TEXT] * 10
        await two.until(partial(two.sees, lambda status: status.slots_processing == 0))
        one.balancer.close()
        assert [await task for task in lost] == [ErrorCode.SHUTTING_DOWN] * 10
