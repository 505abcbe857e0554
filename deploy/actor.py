"""An agent as a Ray actor."""

import asyncio
import logging
import os

import ray

from common.errors import HeadraceError
from deploy.agents import make_agent
from deploy.settings import LOG_FORMAT, AgentSettings

log = logging.getLogger(__name__)

MOST_RESTARTS = 20
"""In its whole life. That a model kills its process again and again is seen to in ``deploy.attempts``."""


# No logical CPUs: on one machine the user has said how many agents and threads there are to be.
@ray.remote(num_cpus=0, max_restarts=MOST_RESTARTS, max_task_retries=0)
class AgentActor:
    def __init__(self, settings: AgentSettings) -> None:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        loop = asyncio.get_event_loop()
        self._running = loop.create_task(self._run(settings))

    async def _run(self, settings: AgentSettings) -> None:
        self._agent = make_agent(settings)
        try:
            await self._agent.run()
        except HeadraceError:
            raise  # `problem` tells; to start again would not help
        except Exception:
            log.exception("the agent broke down; Ray starts it anew")
            os._exit(1)

    async def problem(self) -> str | None:
        """Why this agent does not serve, if it has ended; None while it runs."""
        if not self._running.done():
            return None
        error = self._running.exception()
        return "it was stopped" if error is None else str(error)
