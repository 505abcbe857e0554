"""An agent as a Ray actor: the actor's process keeps the agent's."""

import asyncio
import logging
from dataclasses import dataclass

import ray

from deploy.keeper import Keeper
from deploy.logs import set_up
from deploy.settings import AgentSettings, to_line

log = logging.getLogger(__name__)

MOST_RESTARTS = 20
"""Of the keeper by Ray, in its whole life. How often an agent is started again it decides itself."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What an agent of a fleet was started as."""

    fleet: str
    generation: str
    node: str = ""
    """Ray's id of the one that it runs on. Last, and not said by older versions: see ``node_of``."""


def node_of(identity: Identity) -> str:
    """Empty: it does not say."""
    return getattr(identity, "node", "")  # pickle does not fill in what it was not given


# No logical CPUs: on one machine the user has said how many agents and threads there are to be.
@ray.remote(num_cpus=0, max_restarts=MOST_RESTARTS, max_task_retries=0)
class AgentActor:
    def __init__(self, settings: AgentSettings, generation: str = "") -> None:
        """``generation``: of one of a fleet."""
        set_up(settings.log_format)
        self._identity = Identity(
            settings.fleet or "", generation, ray.get_runtime_context().get_node_id()
        )
        # In the group of Ray's processes, so that whoever ends those reaches it too.
        self._keeper = Keeper(to_line(settings))
        # Ray's loop has a thread that lives as long as the actor, as the keeper wants it.
        self._running = asyncio.get_event_loop().create_task(self._keeper.run())

    async def identity(self) -> Identity:
        return self._identity

    async def dial(self, balancers: tuple[str, ...]) -> None:
        """Have links to these, and to no others."""
        self._keeper.dial(balancers)

    async def drain(self, seconds: float) -> None:
        """Have the agent finish what runs, and end."""
        self._keeper.drain(seconds)

    async def problem(self) -> str | None:
        """Why this agent does not serve, if it has ended; None while it runs or is started again."""
        return self._reason() if self._running.done() else None

    async def ended(self) -> str:
        """Returns when the agent has ended for good, with the reason."""
        await asyncio.wait({self._running})
        return self._reason()

    def _reason(self) -> str:
        error = self._running.exception()
        return "it was stopped" if error is None else str(error)
