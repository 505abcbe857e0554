"""Agents of fleets for a supervisor under test, as their actors show them; a test says when they end."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fake_ray import FakeActor, FakeClass, FakeRay

from deploy.actor import Identity
from deploy.members import NAMESPACE, PREFIX
from deploy.settings import AgentSettings


@dataclass
class PlayedActor:
    """Of one agent."""

    settings: AgentSettings
    generation: str = ""
    node: str = "node-1"
    dialled: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    drains: list[float] = field(default_factory=list[float])
    over: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = "it was stopped"

    async def identity(self) -> Identity:
        return Identity(self.settings.fleet or "", self.generation, self.node)

    async def dial(self, balancers: tuple[str, ...]) -> None:
        self.dialled.append(balancers)

    async def drain(self, seconds: float) -> None:
        self.drains.append(seconds)

    async def ended(self) -> str:
        await self.over.wait()
        return self.reason


def add_agent(ray: FakeRay, settings: AgentSettings, generation: str = "") -> FakeActor:
    """One that an earlier supervisor has started."""
    assert settings.name is not None
    return ray.add(
        PlayedActor, settings, generation, name=PREFIX + settings.name, namespace=NAMESPACE
    )


def played_class(ray: FakeRay) -> Any:
    """In place of the class of actors that supervisors start."""
    return FakeClass(ray, PlayedActor)


def played(ray: FakeRay, name: str) -> PlayedActor:
    return ray.actors[PREFIX + name].instance
