"""The plan of fleets, whatever agents, nodes, load and the operator do: each thing that it does
needs a cause, and in the end all is as it is wanted.

``HEADRACE_EXAMPLES`` sets how many histories are played.
"""

import os
from collections import Counter

from bodies import PATIENT
from fleet_world import SLOTS, FleetWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from balancer.fleet_plan import TELL_AGAIN, Drain, Effect, Member, Reserve, Start, Stop
from common.models import Phase

FLEETS = ("a", "b")
NEXT = {
    Phase.NODE: Phase.PROCESS,
    Phase.PROCESS: Phase.DOWNLOAD,
    Phase.DOWNLOAD: Phase.LOAD,
    Phase.LOAD: Phase.WARM_UP,
    Phase.WARM_UP: Phase.READY,
}

fleets = st.sampled_from(FLEETS)
picks = st.integers(0, 1000)
"""Which of those that there are."""
bounds = st.sampled_from([(0, 1), (0, 3), (1, 1), (1, 2), (2, 2), (2, 3), (0, 0)])


class Histories(RuleBasedStateMachine):
    @initialize(sizes=st.lists(bounds, min_size=1, max_size=2), waiting=st.integers(0, 9))
    def begin(self, sizes: list[tuple[int, int]], waiting: int) -> None:
        self.world = FleetWorld()
        self.nodes = 4
        self.waiting: Counter[str] = Counter()
        self.generation = 1
        self.failed_at: dict[str, float] = {}
        self.told_at: dict[str, float] = {}
        self.things = 0
        for fleet, min_and_max in zip(FLEETS, sizes, strict=False):
            self.size(fleet=fleet, min_and_max=min_and_max)
        self.waiting["a"] = waiting
        self.step()
        self.all_go_on()

    # What is known of it from outside

    def of(self, fleet: str) -> list[Member]:
        return [each for each in self.world.members.values() if each.fleet == fleet]

    def staying(self, fleet: str) -> list[Member]:
        return [each for each in self.of(fleet) if each.phase is not Phase.DRAINING]

    def pick(self, pick: int, *phases: Phase) -> Member | None:
        members = [each for each in self.world.members.values() if each.phase in phases]
        return members[pick % len(members)] if members else None

    @property
    def free_nodes(self) -> int:
        taken = sum(each.phase is not Phase.NODE for each in self.world.members.values())
        return self.nodes - taken

    def change(
        self, member: Member, phase: Phase, processing: int = 0, problem: str | None = None
    ) -> None:
        number = member.number
        self.world.come(
            number, phase=phase, processing=processing, problem=problem, fleet=member.fleet
        )

    # What happens

    @rule(count=st.sampled_from([1, 1, 2, 5]), pause=st.sampled_from([0, 0, 0, 2, 10, 40]))
    def time_passes(self, count: int, pause: float) -> None:
        for _ in range(count):
            self.step()
            self.world.now += pause

    def step(self) -> None:
        before = dict(self.world.members)
        now = self.world.now
        self.told_at = {name: at for name, at in self.told_at.items() if name in before}
        effects = self.world.step(**self.waiting)
        named = [effect.name for effect in effects if not isinstance(effect, Reserve)]
        assert len(named) == len(set(named))
        for effect in effects:
            self.check(effect, before, effects, now)
        for fleet in {effect.fleet for effect in effects if isinstance(effect, Start)}:
            has_old = any(each.generation != self.wanted(fleet) for each in self.of(fleet))
            gone = sum(
                isinstance(effect, Drain | Stop) and before[effect.name].fleet == fleet
                for effect in effects
            )
            assert len(self.of(fleet)) + gone <= self.world.wishes[fleet].max + has_old + gone
        self.check_reports()

    def wanted(self, fleet: str) -> str:
        return self.world.generations[fleet]

    def check(
        self, effect: Effect, before: dict[str, Member], effects: list[Effect], now: float
    ) -> None:
        match effect:
            case Start(name, fleet, generation):
                assert name not in before
                assert fleet in self.world.wishes
                assert generation == self.wanted(fleet)
                assert now - self.failed_at.get(fleet, -100) >= 1
                fresh = [
                    each
                    for each in before.values()
                    if each.fleet == fleet and each.generation == generation
                ]
                if any(each.is_troubled for each in fresh):
                    starts = [e for e in effects if isinstance(e, Start) and e.fleet == fleet]
                    assert len(starts) == 1
                    assert any(each.serves for each in fresh)
            case Drain(name) | Stop(name):
                member = before[name]
                assert member.phase is not Phase.DRAINING
                assert isinstance(effect, Stop) == (member.phase is not Phase.READY)
                assert now - self.told_at.get(name, -100) >= TELL_AGAIN
                self.told_at[name] = now
                self.check_cause(member, before, effects)
            case Reserve():
                pass

    def check_cause(self, member: Member, before: dict[str, Member], effects: list[Effect]) -> None:
        wish = self.world.wishes.get(member.fleet)
        if wish is None:
            return
        there = [
            each
            for each in before.values()
            if each.fleet == member.fleet and each.phase is not Phase.DRAINING
        ]
        gone = {effect.name for effect in effects if isinstance(effect, Drain | Stop)}
        is_old = member.generation != self.wanted(member.fleet)
        if is_old and member.phase is not Phase.READY:
            return
        serving = [each for each in there if each.phase is Phase.READY]
        if is_old:
            # Somebody has come for it, or waits for its node; or there are more than are needed.
            fresh = [each for each in there if each.generation == self.wanted(member.fleet)]
            if any(each.phase in (Phase.READY, Phase.NODE) for each in fresh):
                return
        if len(there) > wish.max:
            spared = [
                each
                for each in there
                if each.generation == member.generation
                and each.name not in gone
                and not each.processing
            ]
            assert not (member.processing and spared)
            return
        if member.is_troubled and any(
            each.serves and each.generation == member.generation for each in there
        ):
            return  # it is tried anew
        assert not member.processing
        if member.phase is Phase.READY:
            left = [each for each in serving if each.name not in gone]
            assert len(left) >= wish.min
        else:
            assert member.phase is Phase.NODE or member.is_troubled
            assert len(there) > wish.min

    @rule(pick=picks)
    def goes_on(self, pick: int) -> None:
        member = self.pick(pick, *NEXT)
        if member is None or (member.phase is Phase.NODE and self.free_nodes <= 0):
            return
        self.change(member, NEXT[member.phase])

    @rule()
    def all_go_on(self) -> None:
        for _ in range(len(NEXT)):
            for member in [*self.world.members.values()]:
                if member.phase in NEXT and (member.phase is not Phase.NODE or self.free_nodes > 0):
                    self.change(member, NEXT[member.phase])

    @rule(pick=picks, problem=st.sampled_from([None, "no such file"]))
    def has_a_problem(self, pick: int, problem: str | None) -> None:
        member = self.pick(pick, Phase.DOWNLOAD, Phase.LOAD)
        if member is not None:
            self.change(member, member.phase, problem=problem)

    @rule(pick=picks)
    def crashes(self, pick: int) -> None:
        member = self.pick(pick, *NEXT, Phase.READY)
        if member is not None:
            self.world.end(member.number, fleet=member.fleet)
            if member.fleet in self.world.wishes:
                self.failed_at[member.fleet] = self.world.now

    @rule(pick=picks)
    def vanishes(self, pick: int) -> None:
        member = self.pick(pick, *NEXT, Phase.READY)
        if member is not None:
            del self.world.members[member.name]

    @rule(pick=picks, processing=st.integers(0, SLOTS))
    def is_loaded(self, pick: int, processing: int) -> None:
        member = self.pick(pick, Phase.READY)
        if member is not None:
            self.change(member, Phase.READY, processing)

    @rule(pick=picks)
    def has_drained(self, pick: int) -> None:
        member = self.pick(pick, Phase.DRAINING)
        if member is not None:
            del self.world.members[member.name]

    @rule(fleet=fleets, waiting=st.sampled_from([0, 0, 1, 5, 30]))
    def wait(self, fleet: str, waiting: int) -> None:
        self.waiting[fleet] = waiting

    @rule(nodes=st.integers(0, 8))
    def nodes_change(self, nodes: int) -> None:
        self.nodes = nodes

    # What is wanted

    @rule(fleet=fleets, min_and_max=bounds)
    def size(self, fleet: str, min_and_max: tuple[int, int]) -> None:
        low, high = min_and_max
        generation = self.world.generations.get(fleet, "g1")
        self.world.want(generation, fleet=fleet, min=low, max=high, idle_time=10)

    @precondition(lambda self: self.world.wishes)
    @rule(pick=picks, back=st.booleans())
    def other_settings(self, pick: int, back: bool) -> None:
        fleet = [*self.world.wishes][pick % len(self.world.wishes)]
        self.generation += not back
        generation = f"g{self.generation - back if self.generation > 1 else 1}"
        if generation == self.world.generations[fleet]:
            return
        wish = self.world.wishes[fleet].model_dump(exclude_none=True)
        self.world.want(generation, fleet=fleet, **wish)
        self.failed_at.pop(fleet, None)

    @precondition(lambda self: self.world.wishes)
    @rule(pick=picks)
    def delete(self, pick: int) -> None:
        fleet = [*self.world.wishes][pick % len(self.world.wishes)]
        self.world.delete(fleet)
        self.failed_at.pop(fleet, None)

    @rule()
    def made_anew(self) -> None:
        self.world.remake()
        self.world.plan.want(self.world.wishes, self.world.generations)
        self.failed_at.clear()
        self.told_at.clear()

    # What holds

    @invariant()
    def the_plan_is_asked_after_most_things(self) -> None:
        self.things += 1
        if self.things % 3:
            self.step()

    def check_reports(self) -> None:
        for name, report in self.world.plan.reports().items():
            wish = self.world.wishes.get(name)
            assert report.wanted >= 0
            assert report.ready + report.draining <= report.seen
            if wish is None:
                assert report.wanted == 0

    def teardown(self) -> None:
        """When nothing fails any more, all is soon as it is wanted."""
        if not hasattr(self, "world"):
            return
        self.nodes = 100
        self.failed_at.clear()
        self.generation += 1
        for fleet in self.world.wishes:
            wish = self.world.wishes[fleet].model_dump(exclude_none=True)
            self.world.want(f"g{self.generation}", fleet=fleet, **wish)
        for waiting in (3, 0):
            self.waiting = Counter(dict.fromkeys(FLEETS, waiting))
            for _ in range(40):
                self.all_go_on()
                for member in [*self.world.members.values()]:
                    if member.phase is Phase.DRAINING:
                        del self.world.members[member.name]
                    elif member.processing:
                        self.change(member, Phase.READY)
                self.step()
                self.world.now += 4
            for fleet, wish in self.world.wishes.items():
                members = self.of(fleet)
                assert {each.generation for each in members} <= {self.wanted(fleet)}
                assert {each.phase for each in members} <= {Phase.READY}
                if waiting:
                    assert members or not wish.max
                else:
                    assert len(members) == wish.min
            assert {each.fleet for each in self.world.members.values()} <= self.world.wishes.keys()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    PATIENT, max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "80")), stateful_step_count=40
)
