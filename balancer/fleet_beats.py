"""What a balancer and the supervisor of its fleets tell each other, twice a second. No I/O here.

It travels as JSON, with keys that either side may not know yet, since during an update they are of
different versions.
"""

import msgspec

from balancer.fleet_plan import FleetReport
from common.models import Phase


class SeenAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent of a fleet, as a balancer sees it."""

    name: str
    phase: Phase
    phases: dict[Phase, float] = {}
    """Seconds that those that are over have taken."""
    slots: int = 0
    processing: int = 0
    """Requests that run there, whoever sent them."""
    problem: str | None = None


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """From a balancer. One that has not been heard for some seconds is lost."""

    balancer_id: str
    address: str
    """Where agents dial in: ``ws://HOST:PORT``."""
    digest: str
    """Of the state that it has."""
    state: str | None = None
    """A ``StoredState``, as JSON; None: the supervisor has all of it already."""
    waiting: dict[str, int] = {}
    """Requests without a slot, by fleet."""
    agents: tuple[SeenAgent, ...] = ()
    ends: bool = False
    """It is the last one from this balancer."""


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phase: Phase
    seconds: dict[Phase, float] = {}
    """That those phases have taken that are over."""
    problem: str | None = None


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    report: FleetReport
    agents: tuple[MemberView, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To a beat."""

    digest: str
    """Of the state that the supervisor has: the latest of all that balancers were told; empty: none."""
    state: str | None = None
    """A ``StoredState``, as JSON; None: the balancer has it already."""
    leads: bool = True
    """Of all balancers one does, and decides when agents change their models."""
    fleets: dict[str, FleetView] = {}
