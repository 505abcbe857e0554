"""The agents of fleets as Ray actors: started, found again, asked and ended. Which ones, ``balancer.fleet_plan``
decides.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.exceptions import ActorUnavailableError, RayError

from balancer.desired_state import referred
from balancer.fleet_beats import SeenAgent
from balancer.fleet_sight import Sight
from balancer.fleets import Fleet, Resources
from deploy.actor import AgentActor, Identity, node_of
from deploy.settings import AgentSettings, SupervisorSettings

log = logging.getLogger(__name__)

NAMESPACE = "headrace"
PREFIX = "headrace-agent-"
"""Of the names of their actors."""

LONGEST_DRAIN = 120.0
"""Seconds that what runs may go on when an agent is to go; what is left goes on elsewhere."""

FIND_TIMEOUT = 2.0
"""Seconds for those that are found to say what they are; others are left as they are until they do."""

STOP_TIMEOUT = 20.0
RELEASE_TIMEOUT = 10.0
POLL_INTERVAL = 0.05

Ended = Callable[[Sight, str], None]
"""Is told of an agent that has ended, and the reason."""


def generation(own: SupervisorSettings, fleet: Fleet) -> str:
    """What an agent is started with, as a sum: those of another one are replaced."""
    told = fleet.model_dump_json(include={"model", "slots", "resources", "engine"})
    return hashlib.sha256(f"{own} {told}".encode()).hexdigest()[:12]


def agent_settings(
    name: str, fleet_name: str, fleet: Fleet, balancers: tuple[str, ...], own: SupervisorSettings
) -> AgentSettings:
    engine = fleet.engine
    return AgentSettings(
        balancers=balancers,
        name=name,
        fleet=fleet_name,
        engine=own.engine,
        choices=engine.engine_choices(fleet.slots),
        pinned=None if fleet.model is None else referred(fleet.model),
        kv_layout=engine.kv_layout,
        kv_cells=engine.kv_cells,
        cache_tokens=engine.cache_tokens,
        longest_gap=engine.longest_gap,
        key_file=own.key_file,
        tls_pin_text=own.tls_pin_text,
        log_format=own.log_format,
    )


@dataclass(slots=True)
class _Kept:
    handle: Any
    sight: Sight
    node: str = ""
    """Ray's id of the one that it runs on, or ran on last; empty: not known."""
    has_run: asyncio.Event = field(default_factory=asyncio.Event)


class Members:
    """Must be used inside one asyncio loop."""

    def __init__(self, settings: SupervisorSettings, ended: Ended) -> None:
        self._settings = settings
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._kept: dict[str, _Kept] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._addresses: tuple[str, ...] = ()

    async def find(self) -> None:
        """Those that a supervisor before this one has started."""
        for actor in await asyncio.to_thread(_named):
            with suppress(ValueError):  # it has gone meanwhile
                handle = await asyncio.to_thread(ray.get_actor, actor, NAMESPACE)
                name = actor.removeprefix(PREFIX)
                fleet = name.rpartition("-")[0]
                self._keep(handle, Sight(name, self._loop.time(), fleet, was_found=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(FIND_TIMEOUT):
                for kept in tuple(self._kept.values()):
                    await kept.has_run.wait()

    def start(self, name: str, fleet_name: str, fleet: Fleet, generation: str) -> None:
        resources = fleet.resources
        actor: Any = AgentActor
        handle = actor.options(
            name=PREFIX + name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            label_selector=dict(resources.labels) or None,
            scheduling_strategy="SPREAD",
        ).remote(
            agent_settings(name, fleet_name, fleet, self._addresses, self._settings), generation
        )
        log.info("agent=%s is started, generation %s", name, generation)
        self._keep(handle, Sight(name, self._loop.time(), fleet_name, generation))

    def drain(self, name: str) -> None:
        log.info("agent=%s is to go when what runs there is over", name)
        self._kept[name].sight.is_leaving = True
        self._kept[name].handle.drain.remote(LONGEST_DRAIN)

    def stop(self, name: str) -> None:
        log.info("agent=%s is stopped", name)
        self._kept[name].sight.is_leaving = True
        ray.kill(self._kept[name].handle)

    def leave(self, nodes: Collection[str]) -> None:
        """Have those go that run on these nodes."""
        for name, kept in self._kept.items():
            sight = kept.sight
            if kept.node in nodes and sight.has_process and not sight.is_leaving:
                log.info("agent=%s runs on a node that is to go", name)
                self.drain(name)

    async def stop_all(self) -> None:
        for name in self._kept:
            self.stop(name)
        if self._watches:
            await asyncio.wait(self._watches, timeout=STOP_TIMEOUT)

    def dial(self, addresses: tuple[str, ...]) -> None:
        """Have all of them keep a link to each of these balancers."""
        if addresses != self._addresses:
            self._addresses = addresses
            for kept in self._kept.values():
                if kept.sight.has_process:
                    kept.handle.dial.remote(addresses)

    def see(self, agents: Mapping[str, SeenAgent]) -> None:
        """What the balancers say."""
        for name, kept in self._kept.items():
            if name in agents:
                kept.sight.see(agents[name], now=self._loop.time())

    @property
    def sights(self) -> list[Sight]:
        return [kept.sight for kept in self._kept.values()]

    def _keep(self, handle: Any, sight: Sight) -> None:
        kept = self._kept[sight.name] = _Kept(handle, sight)
        watch = self._loop.create_task(self._watch(kept))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, kept: _Kept) -> None:
        """Its whole life. Whatever goes wrong, it is taken off the list, or its fleet would count on it
        for ever.
        """
        sight = kept.sight
        try:
            reason = await self._life(kept)
        except Exception as error:
            log.exception("agent=%s is out of sight", sight.name)
            reason = f"the supervisor lost sight of it: {first_line(error)}"
        try:
            ray.kill(kept.handle)
            await self._released(PREFIX + sight.name)
        except Exception:
            log.exception("agent=%s may not have ended", sight.name)
        del self._kept[sight.name]
        if sight.is_leaving:
            log.info("agent=%s has gone", sight.name)
        else:
            log.warning("agent=%s has ended: %s", sight.name, reason)
        self._ended(sight, reason)

    async def _life(self, kept: _Kept) -> str:
        """Until it has ended for good, however often Ray starts it again; returns the reason."""
        handle, sight = kept.handle, kept.sight
        while True:
            try:
                # Answered as soon as there is a node with room for it.
                identity: Identity = await handle.identity.remote()
                sight.run(identity.fleet, identity.generation, now=self._loop.time())
                kept.node = node_of(identity)
                kept.has_run.set()
                if self._addresses:  # else it keeps to those that it was told before
                    await handle.dial.remote(self._addresses)
                return await handle.ended.remote()
            except ActorUnavailableError:  # its node or its process is lost
                sight.lose()
                if sight.is_leaving:
                    return "it was lost while it was to go"  # a new one would not know that
            except RayError as error:
                return f"its actor died: {first_line(error)}"

    async def _released(self, actor: str) -> None:
        """Until the name may be given to another."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT):
                while await asyncio.to_thread(_exists, actor):  # noqa: ASYNC110, Ray tells nobody
                    await asyncio.sleep(POLL_INTERVAL)


def _named() -> list[str]:
    """The actors of all agents of fleets."""
    named: Any = ray.util.list_named_actors(all_namespaces=True)
    return [
        each["name"]
        for each in named
        if each["namespace"] == NAMESPACE and each["name"].startswith(PREFIX)
    ]


def draining_nodes() -> Collection[str]:
    """The ids of those that are to go, as ``ray drain-node`` and the autoscaler say. Ray tells its own
    parts only; if another version of it does not, agents stay there until they are lost.
    """
    try:
        nodes: Any = ray_state.get_draining_nodes()
    except (RayError, AttributeError) as error:
        log.debug("Ray does not say which nodes are to go: %s", error)
        return ()
    return nodes


def kill_all() -> list[str]:
    """All agents of fleets, whoever keeps them, or nobody does; returns their actors."""
    killed = _named()
    for actor in killed:
        with suppress(ValueError, RayError):  # it has gone meanwhile
            ray.kill(ray.get_actor(actor, NAMESPACE))
    return killed


def first_line(error: Exception) -> str:
    """Ray's texts are long."""
    return str(error).partition("\n")[0] or type(error).__name__


def _exists(actor: str) -> bool:
    try:
        ray.get_actor(actor, NAMESPACE)
    except ValueError:
        return False
    except RayError:
        return True  # who knows
    return True


def bundle(resources: Resources) -> dict[str, float]:
    """In the words of Ray's autoscaler, which takes no parts of a CPU or GPU but in sums."""
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus}
    return {name: amount for name, amount in wanted.items() if amount}


def why_no_node(resources: Resources, nodes: list[dict[str, Any]]) -> str:
    """``nodes``: as ``ray.nodes()`` tells of them."""
    fitting = [node for node in nodes if node["Alive"] and _fits(resources, node)]
    if not fitting:
        return f"no node has {resources.words}"
    return f"the {len(fitting)} node(s) with {resources.words} are full"


def _fits(resources: Resources, node: dict[str, Any]) -> bool:
    labels: dict[str, str] = node.get("Labels") or {}
    has_labels = all(labels.get(name) == value for name, value in resources.labels.items())
    return has_labels and all(
        node["Resources"].get(name, 0) >= amount for name, amount in bundle(resources).items()
    )
