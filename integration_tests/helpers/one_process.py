"""The balancer's routes, its agent listener and agents, all real, on real sockets in one process; but
the engine waits for the test before each pass.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from engines import HeldEngine, OneModel
from exposition import total
from leaving import PATIENCE, outcomes
from serving import serving

from agent.echo import EchoEmbedder
from agent.embedding import Vectors
from agent.engine import Chunk, Decoded
from agent.service import Agent
from agent.swap import ModelSwap
from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.link import AgentListener
from common.models import (
    EngineChoices,
    LocalModel,
)


class HeldEmbedder(EchoEmbedder):
    """Computes vectors only when the test lets it, pass by pass."""

    def __init__(self) -> None:
        self.is_used = threading.Event()
        """A pass has been begun; the test clears it."""
        self.may_go_on = threading.Semaphore(0)
        self.passes = 0

    def advance(self, most_tokens: int | None, /) -> list[Vectors]:
        self.is_used.set()
        self.may_go_on.acquire()
        self.passes += 1
        return super().advance(most_tokens)


class CountingEngine(HeldEngine):
    """Counts the passes that have ended, and the tokens that were fed in them."""

    def __init__(self, *, slots: int, context: int) -> None:
        super().__init__(slots=slots, context=context)
        self.embedder: HeldEmbedder = HeldEmbedder()
        self.passes = 0
        self.fed = 0
        self._begun = 0
        self._changed = threading.Condition()

    def wait_for_pass(self, number: int) -> None:
        """Until this pass has been begun; it waits for the test, or will. The first one is 1."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun >= number, PATIENCE)

    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
        try:
            return super().decode(chunks)
        finally:
            self.passes += 1
            self.fed += sum(len(chunk.tokens) for chunk in chunks)


@dataclass
class Whole:
    balancer: Balancer
    port: int
    """Of the clients' routes."""
    agent_port: int
    http: httpx.AsyncClient

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this is true of the balancer."""
        changes = self.balancer.changes
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await changes.after(changes.count)

    @property
    def bound(self) -> int:
        """Slots with a request, as the balancer has it."""
        return sum(agent.slots_bound for agent in self.balancer.agents)

    @property
    def processing(self) -> int:
        """The same as the agents say it."""
        return sum(agent.status.slots_processing for agent in self.balancer.agents)

    def outcomes(self) -> dict[str, int]:
        return outcomes(self._metrics)

    @property
    def tokens(self) -> int:
        """Told to clients."""
        return int(total(self._metrics, "headrace_tokens_generated_total"))

    @property
    def _metrics(self) -> str:
        return self.balancer.metrics.text().decode()

    async def heard_agent(self) -> None:
        """Whatever the balancer has said to the only agent has come to its model's thread, and
        whatever that has said has come here: this question and its answer go behind it on the same
        link, and need no slot.
        """
        answer = await self.http.post("/v1/tokenize", json={"prompt": "a"})
        assert answer.status_code == 200, answer.text

    @asynccontextmanager
    async def agent(
        self, name: str, engine: HeldEngine, *, port: int | None = None
    ) -> AsyncGenerator[Agent]:
        """One that is linked and has its slots. ``port``: where it dials in, if not directly."""
        slots = engine.capacity.slots
        agent = Agent(
            balancers=[f"ws://127.0.0.1:{port or self.agent_port}"],
            name=name,
            models=OneModel(engine),
            swap=ModelSwap(own=EngineChoices(slots=slots), pinned=LocalModel("held")),
        )
        task = asyncio.create_task(agent.run())
        try:
            await self.until(
                lambda: any(a.name == name and a.status.slots_total for a in self.balancer.agents)
            )
            yield agent
        finally:
            engine.open()
            agent.stop()
            await task


@asynccontextmanager
async def whole(*, buffer_capacity: int = 100, keep_alive: float = 60.0) -> AsyncGenerator[Whole]:
    balancer = Balancer(buffer_capacity=buffer_capacity, patience=600.0)
    agents = AgentListener(balancer)
    agent_port = await agents.start("127.0.0.1", 0)
    try:
        async with serving(create_app(balancer, keep_alive=keep_alive)) as port:
            http = httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                headers={"user-agent": "test"},
                trust_env=False,
                timeout=PATIENCE,
            )
            try:
                async with http:
                    yield Whole(balancer, port, agent_port, http)
            finally:
                balancer.close()
    finally:
        await agents.stop()
