"""An agent as a Ray actor: the actor's process keeps the agent's."""

import asyncio
import logging

import ray

from deploy.keeper import Keeper
from deploy.machine import LOG_FORMAT
from deploy.settings import AgentSettings, to_line

log = logging.getLogger(__name__)

MOST_RESTARTS = 20
"""Of the keeper by Ray, in its whole life. How often an agent is started again it decides itself."""


# No logical CPUs: on one machine the user has said how many agents and threads there are to be.
@ray.remote(num_cpus=0, max_restarts=MOST_RESTARTS, max_task_retries=0)
class AgentActor:
    def __init__(self, settings: AgentSettings) -> None:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        # In the group of Ray's processes, so that whoever ends those reaches it too.
        self._keeper = Keeper(to_line(settings))
        # Ray's loop has a thread that lives as long as the actor, as the keeper wants it.
        self._running = asyncio.get_event_loop().create_task(self._keeper.run())

    async def problem(self) -> str | None:
        """Why this agent does not serve, if it has ended; None while it runs or is started again."""
        if not self._running.done():
            return None
        error = self._running.exception()
        return "it was stopped" if error is None else str(error)
