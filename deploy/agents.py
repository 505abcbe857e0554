"""An agent from its settings, and an agent that is a process of its own, without Ray."""

import asyncio
from collections.abc import Callable

from agent.echo import EchoEngine
from agent.engine import Engine, KvLayout
from agent.loop import LoopSettings
from agent.service import Agent
from deploy.machine import stop_signals
from deploy.settings import AgentSettings, EngineKind

DRAIN_TIMEOUT = 120.0
"""Seconds that running streams are given when an agent is asked to go."""

ECHO_CONTEXT = 4096


def make_agent(settings: AgentSettings) -> Agent:
    """Must be called inside a running asyncio loop."""
    return Agent(
        balancer=settings.balancer,
        name=settings.name,
        slots=settings.slots,
        model_path=settings.model_path,
        load=_loader(settings),
        loop_settings=LoopSettings(
            longest_gap=settings.longest_gap, cache_tokens=settings.cache_tokens
        ),
    )


async def serve(settings: AgentSettings, say: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM: the first one drains, the second one ends it now.

    Raises what ``Agent.run`` raises.
    """
    agent = make_agent(settings)
    draining: list[asyncio.Task[None]] = []

    def asked_to_stop() -> None:
        if draining:
            agent.stop()
            return
        say("draining: what runs is finished first; once more to stop now")
        draining.append(asyncio.create_task(agent.drain(DRAIN_TIMEOUT)))

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, asked_to_stop)
    await agent.run()


def _loader(settings: AgentSettings) -> Callable[[], Engine]:
    """A function that loads the engine, to be called on the thread that will own it."""

    def load() -> Engine:
        if settings.engine is EngineKind.ECHO:
            return EchoEngine(
                slots=settings.slots,
                context=settings.context or ECHO_CONTEXT,
                cells=settings.kv_cells,
                shares_cells=settings.kv_layout is KvLayout.UNIFIED,
            )
        from agent.llama import LlamaEngine  # needs the built library; echo does not

        return LlamaEngine(
            settings.model_path,
            slots=settings.slots,
            threads=settings.threads,
            context=settings.context,
            cells=settings.kv_cells,
            layout=settings.kv_layout,
        )

    return load
