"""An agent as a Ray actor."""

import asyncio
import logging

import ray

from deploy.agents import DRAIN_TIMEOUT, make_agent
from deploy.settings import AgentSettings

MOST_RESTARTS = 3
"""A model that kills its process must not be loaded for ever."""


# No logical CPUs: on one machine the user has said how many agents and threads there are to be.
@ray.remote(num_cpus=0, max_restarts=MOST_RESTARTS, max_task_retries=0)
class AgentActor:
    def __init__(self, settings: AgentSettings) -> None:
        logging.basicConfig(level=logging.INFO)
        loop = asyncio.get_event_loop()
        self._running = loop.create_task(self._run(settings))

    async def _run(self, settings: AgentSettings) -> None:
        self._agent = make_agent(settings)
        await self._agent.run()

    async def problem(self) -> str | None:
        """Why this agent does not serve, if it has ended; None while it runs."""
        if not self._running.done():
            return None
        error = self._running.exception()
        return "it was stopped" if error is None else str(error)

    async def drain(self) -> None:
        """Returns when nothing runs any more."""
        await self._agent.drain(DRAIN_TIMEOUT)
        await asyncio.wait({self._running})
