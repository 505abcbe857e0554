"""A cluster for fleet plans that does what it is told and nothing else: time, phases and load are
changed by the test.
"""

from dataclasses import replace
from typing import Any

from balancer.fleet_plan import Drain, Effect, FleetPlan, FleetReport, Member, Reserve, Start, Stop
from balancer.fleets import Fleet
from common.models import Phase

TICK = 0.5
SLOTS = 4


class FleetWorld:
    """``max`` is 8 if nothing is said; agents have ``SLOTS`` slots. The plan has watched for long."""

    def __init__(self, generation: str = "g1", **wish: Any) -> None:
        self.now = 0.0
        self.members: dict[str, Member] = {}
        self.reserved: Reserve | None = None
        self.wishes: dict[str, Fleet] = {}
        self.generations: dict[str, str] = {}
        self.remake()
        if wish:
            self.want(generation, max=0)
            self.plan.plan({}, [], now=-100_000)
            self.want(generation, **wish)

    def want(self, generation: str = "g1", fleet: str = "f", **wish: Any) -> None:
        self.wishes[fleet] = Fleet.model_validate({"max": 8} | wish)
        self.generations[fleet] = generation
        self.plan.want(self.wishes, self.generations)

    def delete(self, fleet: str = "f") -> None:
        del self.wishes[fleet]
        self.plan.want(self.wishes, self.generations)

    def remake(self) -> None:
        """The supervisor has been started anew."""
        self.plan = FleetPlan()
        if self.wishes:
            self.plan.want(self.wishes, self.generations)

    def add(
        self,
        *numbers: int,
        phase: Phase = Phase.READY,
        processing: int = 0,
        generation: str = "g1",
        fleet: str = "f",
    ) -> None:
        for number in numbers:
            name = f"{fleet}-{number}"
            self.members[name] = Member(name, fleet, generation, Phase.NODE)
            self.come(number, phase=phase, processing=processing, fleet=fleet)

    def come(
        self,
        *numbers: int,
        phase: Phase = Phase.READY,
        processing: int = 0,
        problem: str | None = None,
        fleet: str = "f",
    ) -> None:
        """Members change."""
        for number in numbers:
            name = f"{fleet}-{number}"
            self.members[name] = replace(
                self.members[name],
                phase=phase,
                slots=SLOTS if phase in (Phase.READY, Phase.DRAINING) else 0,
                processing=processing,
                problem=problem,
            )

    def end(self, *numbers: int, reason: str = "it crashed", fleet: str = "f") -> None:
        """Members end by themselves."""
        for number in numbers:
            del self.members[f"{fleet}-{number}"]
            self.plan.ended(f"{fleet}-{number}", reason, now=self.now)

    def step(self, **waiting: int) -> list[Effect]:
        """One plan, of which all is done; then half a second passes. ``waiting``: by fleet."""
        effects = self.plan.plan(waiting, list(self.members.values()), now=self.now)
        for effect in effects:
            self.do(effect)
        self.now += TICK
        return effects

    def run(self, seconds: float, **waiting: int) -> list[tuple[float, Effect]]:
        """What is decided meanwhile, and when; time is counted from now."""
        begin, done = self.now, list[tuple[float, Effect]]()
        while self.now < begin + seconds:
            time = self.now - begin
            done += [(time, effect) for effect in self.step(**waiting)]
        return done

    def do(self, effect: Effect) -> None:
        match effect:
            case Start(name, fleet, generation):
                assert name not in self.members
                self.members[name] = Member(name, fleet, generation, Phase.NODE)
            case Stop(name):
                assert self.members[name].phase not in (Phase.READY, Phase.DRAINING)
                del self.members[name]
            case Drain(name):
                member = self.members[name]
                if member.processing:
                    self.members[name] = replace(member, phase=Phase.DRAINING)
                else:
                    del self.members[name]
            case Reserve():
                self.reserved = effect

    @property
    def report(self) -> FleetReport:
        return self.plan.reports()["f"]


def started(*numbers: int, generation: str = "g1", fleet: str = "f") -> list[Effect]:
    return [Start(f"{fleet}-{number}", fleet, generation) for number in numbers]


def drained(*numbers: int) -> list[Effect]:
    return [Drain(f"f-{number}") for number in numbers]


def stopped(*numbers: int) -> list[Effect]:
    return [Stop(f"f-{number}") for number in numbers]


def timed(time: float, effects: list[Effect]) -> list[tuple[float, Effect]]:
    return [(time, effect) for effect in effects]


def crashes(world: FleetWorld, seconds: float, **waiting: int) -> list[float]:
    """When agents are started, each of which ends at once."""
    begin, starts = world.now, list[float]()
    while world.now < begin + seconds:
        for effect in world.step(**waiting):
            if isinstance(effect, Start):
                starts.append(world.now - begin - 0.5)
                del world.members[effect.name]
                world.plan.ended(effect.name, "it crashed", now=world.now - 0.5)
    return starts
