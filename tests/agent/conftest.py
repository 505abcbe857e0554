"""An agent that runs, and the balancer that the test plays."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from engines import HeldEngine
from linked import (
    HELD,
    PlayedBalancer,
    PlayedModels,
    RunningAgent,
)


@pytest.fixture
async def balancer() -> AsyncGenerator[PlayedBalancer]:
    balancer = PlayedBalancer()
    yield balancer
    await balancer.stop()


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine(slots=2, context=32)


@pytest.fixture
def models(engine: HeldEngine) -> PlayedModels:
    return PlayedModels(**{HELD.path: engine})


@pytest.fixture
async def running(
    balancer: PlayedBalancer, engine: HeldEngine, models: PlayedModels
) -> AsyncGenerator[RunningAgent]:
    running = RunningAgent(await balancer.start(), models=models)
    yield running
    engine.open()
    running.agent.stop()
    await asyncio.wait({running.task})
