"""What several tests need: a balancer, an agent whose part the test plays, and a real server."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

import httpx
import pytest
from played import Play, PlayedAgent, Until
from serving import serving

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.limits import Limits


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
async def balancer(limits: Limits) -> Balancer:
    return Balancer(buffer_capacity=2, patience=60.0, limits=limits)


@pytest.fixture
def play(balancer: Balancer) -> Play:
    """Let an agent join the balancer: ``play("name", slots=2)``."""
    return partial(PlayedAgent, balancer)


@pytest.fixture
def keep_alive() -> float:
    """Seconds between two comments of a silent stream."""
    return 60.0


@pytest.fixture
async def address(balancer: Balancer, keep_alive: float) -> AsyncGenerator[str]:
    """The balancer's routes under a real server: ``127.0.0.1:PORT``."""
    async with serving(create_app(balancer, keep_alive=keep_alive)) as port:
        yield f"127.0.0.1:{port}"
        balancer.close()


@pytest.fixture
async def client(address: str) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://{address}",
        headers={"user-agent": "test"},  # else it is told only what the published client knows
        trust_env=False,
        timeout=10,
    ) as client:
        yield client


@pytest.fixture
def until(balancer: Balancer) -> Until:
    """Wait until something is true of the balancer: ``await until(lambda: ...)``."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await balancer.changes.after(balancer.changes.count)

    return wait
