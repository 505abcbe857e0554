"""The supervisor of the fleets: one Ray actor for the whole cluster, which starts agents and has them go.

What is wanted, and who waits, the balancers tell it, twice a second; which agents are there, Ray. It
keeps nothing else, so that it may be killed at any time: another takes its place and finds all again.
"""

import asyncio
import logging
import os
from typing import Any, assert_never

import msgspec
import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from balancer.fleet_beats import Answer, Beat, FleetView
from balancer.fleet_plan import Drain, Effect, FleetPlan, Reserve, Start, Stop
from balancer.fleet_registry import SILENCE, Registry
from balancer.fleet_sight import Sight
from balancer.fleets import Fleet, Resources
from deploy.logs import set_up
from deploy.members import Members, bundle, draining_nodes, generation, why_no_node
from deploy.settings import SupervisorSettings
from deploy.succession import Claim

log = logging.getLogger(__name__)

NAME = "headrace-supervisor"

LOOK_INTERVAL = 0.5

ORPHANED = 600.0
"""Seconds without any balancer after which all agents are stopped, and the supervisor ends."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class Supervisor:
    def __init__(self, settings: SupervisorSettings, declared: int) -> None:
        """``declared``: see ``Claim``."""
        set_up(settings.log_format)
        self._claim = Claim(declared, repr(settings))
        self._settings = settings
        self._loop = asyncio.get_event_loop()
        self._started = self._loop.time()
        self._registry = Registry(now=self._started)
        self._plan = FleetPlan()
        self._views: dict[str, FleetView] = {}
        self._wake = asyncio.Event()
        self._running = self._loop.create_task(self._run())
        self._running.add_done_callback(_end_with)

    async def settings(self) -> str:
        """What it was made with: a ``Claim``."""
        return str(self._claim)

    async def beat(self, data: bytes) -> bytes:
        """A balancer's ``Beat``; returns an ``Answer``. Both as JSON."""
        beat = msgspec.json.decode(data, type=Beat)
        problem = self._registry.hear(beat, now=self._loop.time())
        if problem is not None:
            log.error("%s", problem)
        self._wake.set()
        answer: Answer = self._registry.answer(beat, self._views)
        return msgspec.json.encode(answer)

    async def shut_down(self) -> None:
        """Stop all agents, whatever they do. Returns when they have gone; then kill this actor."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._end()

    async def _end(self) -> None:
        await self._members.stop_all()
        reserve(())  # the wish would outlive us

    async def _run(self) -> None:
        self._members = Members(self._settings, self._ended)
        await self._members.find()
        while True:
            self._wake.clear()
            await self._look()
            if self._loop.time() - self._registry.last_heard > ORPHANED:
                log.warning("no balancer has been there for %g s: all agents are stopped", ORPHANED)
                await self._end()
                # For good: `exit_actor` ends nothing outside of a call, and Ray restarts what ends itself.
                ray.kill(ray.get_runtime_context().current_actor)
                return
            try:
                async with asyncio.timeout(LOOK_INTERVAL):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _ended(self, sight: Sight, reason: str) -> None:
        if not sight.is_leaving:
            self._plan.ended(sight.name, reason, now=self._loop.time())
        self._wake.set()

    async def _look(self) -> None:
        now = self._loop.time()
        for balancer_id in self._registry.expire(now=now):
            log.warning("balancer %s is lost", balancer_id)
        if self._registry.is_blind:
            return
        # Until all balancers had time to beat: agents that were found have links to all of them.
        if now - self._started > SILENCE or not any(s.was_found for s in self._members.sights):
            self._members.dial(self._registry.addresses)
        self._members.see(self._registry.agents)
        if self._members.sights:
            self._members.leave(await asyncio.to_thread(draining_nodes))
        members = [sight.member(now=now) for sight in self._members.sights]
        state = self._registry.state
        if state is None:
            return
        self._plan.want(
            state.fleets,
            {name: generation(self._settings, f) for name, f in state.fleets.items()},
        )
        for effect in self._plan.plan(self._registry.waiting, members, now=now):
            self._carry_out(effect, state.fleets)
        await self._tell(state.fleets)

    def _carry_out(self, effect: Effect, fleets: dict[str, Fleet]) -> None:
        match effect:
            case Start(name, fleet, of_generation):
                try:
                    self._members.start(name, fleet, fleets[fleet], of_generation)
                except (RayError, TypeError, ValueError) as error:  # Ray knows no such resources
                    log.warning("agent=%s cannot be started: %s", name, error)
                    self._plan.ended(name, f"Ray refuses it: {error}", now=self._loop.time())
            case Drain(name):
                self._members.drain(name)
            case Stop(name):
                self._members.stop(name)
            case Reserve(bundles):
                reserve(bundles)
            case _:
                assert_never(effect)

    async def _tell(self, fleets: dict[str, Fleet]) -> None:
        now = self._loop.time()
        reports = self._plan.reports()
        sights = self._members.sights
        waits = any(not sight.has_process for sight in sights)
        nodes: list[dict[str, Any]] = await asyncio.to_thread(ray.nodes) if waits else []
        self._views = {
            name: FleetView(
                report=report,
                agents=tuple(
                    sight.view(now=now, why_no_node=_why_no_node(fleets.get(name), nodes))
                    for sight in sights
                    if sight.fleet == name
                ),
            )
            for name, report in reports.items()
        }


def reserve(bundles: tuple[Resources, ...]) -> None:
    """Ask Ray's autoscaler for so much room, and no longer for what was asked before."""
    asked = [(bundle(each), dict(each.labels)) for each in bundles]
    try:
        request_resources(
            bundles=[resources for resources, _ in asked],
            bundle_label_selectors=[labels for _, labels in asked],
        )
    except (RayError, RuntimeError, ValueError) as error:
        log.warning("no room could be asked for beforehand: %s", error)


def _end_with(running: asyncio.Task[None]) -> None:
    """An actor whose loop has ended would answer for ever and do nothing; Ray starts another."""
    if not running.cancelled() and (error := running.exception()) is not None:
        log.critical("the supervisor's loop ended", exc_info=error)
        logging.shutdown()
        os._exit(1)


def _why_no_node(fleet: Fleet | None, nodes: list[dict[str, Any]]) -> str | None:
    return None if fleet is None else why_no_node(fleet.resources, nodes)
