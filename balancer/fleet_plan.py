"""How many agents each fleet has, and which of them go. No I/O and no clock here: ``now`` is an
argument.
"""

from dataclasses import dataclass
from typing import TypeAlias

from balancer.fleets import Resources
from common.models import Phase


@dataclass(frozen=True, slots=True)
class Member:
    """An agent of a fleet, as it is seen now."""

    name: str
    """``FLEET-N``."""
    fleet: str
    generation: str
    """What it was started with: see ``FleetPlan.want``."""
    phase: Phase
    slots: int = 0
    """0 until it serves."""
    processing: int = 0
    """Requests that run there, whoever sent them."""
    problem: str | None = None
    """Why it does not serve, if it cannot for now."""


@dataclass(frozen=True, slots=True)
class Start:
    name: str
    fleet: str
    generation: str


@dataclass(frozen=True, slots=True)
class Drain:
    """It takes nothing new, finishes what runs, and ends by itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """It ends now. Only of members that do not serve yet."""

    name: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """All the room that is wanted of Ray's autoscaler beforehand; empty: none."""

    bundles: tuple[Resources, ...]


Effect: TypeAlias = Start | Drain | Stop | Reserve


@dataclass(frozen=True, slots=True)
class FleetReport:
    """In agents."""

    wanted: int
    seen: int
    ready: int
    starting: int
    draining: int
    reason: str | None = None
    """Why not all that are wanted are ready."""
