"""How many agents each fleet has, and which of them go. No I/O and no clock here: ``now`` is an
argument.

What is seen counts, not what was decided: a plan that is made anew takes over the members that are
there. Its memory only makes it slower to act: since when there is too much or too little load, and
which starts have failed. Decisions of one fleet, in this order:

1. members of an old generation that do not serve yet are stopped, and those that have long been
   in trouble while others serve;
2. what is beyond ``max`` goes: who does not serve yet, who is idle, who has least to do;
3. members of an old generation are replaced, one at a time;
4. more are started, if there are less than ``min``, or the load has been too much for a while;
5. one goes that the load of the last time had no need of: that is ``idle_time`` if there was none
   at all, and else twice as long, or three times if nobody has gone since the last start. It has
   nothing to do now, but may have had: the dispatcher spreads requests, and while any come nobody is
   idle for long.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from typing import TypeAlias

from balancer.fleet_memory import Failures, Peak
from balancer.fleets import MOST_AGENTS, Fleet, Resources
from common.models import Phase

TOO_MUCH_FOR = 2.0
"""Seconds that load must be too much, without end, before more agents are started; and between two
such decisions, and between two agents that go.
"""

NODE_IS_SLOW = 5.0
"""Seconds that an agent waits for a node before it is said."""

NO_NODE = 30.0
"""Seconds that an agent waits for a node before no more are started, and an idle one of an old
generation makes room.
"""

NO_NODE_EVER = 180.0
"""Seconds after which a busy one of an old generation makes room: a node that is bought takes
minutes, and until then it serves.
"""

TROUBLED_FOR = 120.0
"""Seconds after which an agent that cannot serve, while others of its kind do, is tried anew: it may
come to another node.
"""

UNSEEN = 30.0
"""Seconds after which a start that nobody has seen anything of has failed."""

TELL_AGAIN = 10.0
"""Seconds after which who was told to go, and does not, is told again."""

SPREAD = 2.5
"""How much more than before is to be expected, in square roots of the load. In the simulated days
2.0 costs 4 % fewer agent hours, and an agent that goes is wanted again within ten minutes about
three times as often.
"""

CRASH_LOOP = 5
"""So many failures in a row, and no agent that served, are no accident."""

LONGEST_REASON = 500

STARTING = (Phase.NODE, Phase.PROCESS, Phase.DOWNLOAD, Phase.LOAD, Phase.WARM_UP)
"""In this order; what has come farther goes later."""


@dataclass(frozen=True, slots=True)
class Member:
    """An agent of a fleet, as it is seen now."""

    name: str
    """``FLEET-N``."""
    fleet: str
    generation: str
    """What it was started with: see ``FleetPlan.want``; empty: it cannot be told just now."""
    phase: Phase
    slots: int = 0
    """0 until it serves."""
    processing: int = 0
    """Requests that run there, whoever sent them."""
    problem: str | None = None
    """Why it does not serve, if it cannot for now."""

    @property
    def serves(self) -> bool:
        return self.phase is Phase.READY and self.slots > 0

    @property
    def is_troubled(self) -> bool:
        """It does not serve, and will not before something changes."""
        return self.problem is not None and not self.serves

    @property
    def number(self) -> int:
        digits = self.name.rpartition("-")[2]
        return int(digits) if digits.isdecimal() else 0


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
    """What is wanted of Ray's autoscaler beforehand; empty: nothing.

    As Ray takes it, for the whole cluster: what the present members have is part of it. The first
    plan says it in any case, later ones when it changes.
    """

    bundles: tuple[Resources, ...]


Effect: TypeAlias = Start | Drain | Stop | Reserve


@dataclass(frozen=True, slots=True)
class FleetReport:
    wanted: int
    """Agents that there should be now; without the one that is there twice in a replacement."""
    seen: int
    ready: int
    """That serve."""
    starting: int
    draining: int
    reason: str | None = None
    """What keeps the fleet from being as wanted, in words."""
    is_stuck: bool = False
    """Nothing will come of it by itself soon, so that nobody should wait for it: no agent serves, and
    starts have failed again and again, or all that are there cannot serve or have waited for a node
    for ``NO_NODE_EVER``.
    """
    lacks_node: bool = False
    """No agent serves, and one has waited for a node for ``NODE_IS_SLOW``."""


class FleetPlan:
    """How many agents each fleet has, and which of them go."""

    def __init__(self) -> None:
        self._wished: dict[str, Fleet] | None = None
        self._states: dict[str, _State] = {}
        """Of the wished fleets, and of those that still have members."""
        self._reserved: tuple[Resources, ...] | None = None

    def want(self, fleets: Mapping[str, Fleet], generations: Mapping[str, str]) -> None:
        """What the operator wants now. A fleet's generation is another one when its agents must
        be started anew, with other settings or other code.
        """
        self._wished = dict(fleets)
        for name in fleets:
            if name not in self._states:
                self._states[name] = _State(name)
        for name, state in self._states.items():
            state.want(fleets.get(name), generations.get(name, ""))

    def ended(self, name: str, reason: str, *, now: float) -> None:
        """A member has ended, and was not asked to; or it could not be started."""
        state = self._states.get(name.rpartition("-")[0])
        if state is not None:
            state.ended(name, reason[:LONGEST_REASON], now=now)

    def plan(
        self, waiting: Mapping[str, int], members: Sequence[Member], *, now: float
    ) -> list[Effect]:
        """``waiting``: requests without a slot, by fleet; ``members``: all that there are.

        To be called about twice a second, and may be more often. Each effect is said once, or
        again after a while if nothing has come of it. Nothing is decided before ``want`` has said
        what there should be.
        """
        if self._wished is None:
            return []
        seen: dict[str, list[Member]] = {name: [] for name in self._states}
        for member in members:
            seen.setdefault(member.fleet, []).append(self._as_known(member))
        effects: list[Effect] = []
        for name, here in seen.items():
            state = self._states.get(name)
            if state is None:
                state = self._states[name] = _State(name)
            effects += state.plan(waiting.get(name, 0), here, now=now)
        self._states = {
            name: state
            for name, state in self._states.items()
            if name in self._wished or state.known
        }
        reserved = self._room(self._wished)
        if reserved != self._reserved:
            self._reserved = reserved
            effects.append(Reserve(reserved))
        return effects

    def _as_known(self, member: Member) -> Member:
        """Whose generation cannot be told just now is of the wanted one until it can."""
        state = self._states.get(member.fleet)
        if member.generation or state is None:
            return member
        return replace(member, generation=state.generation)

    def reports(self) -> dict[str, FleetReport]:
        """As of the last plan; also of fleets that are deleted, while they have members."""
        return {
            name: state.report for name, state in self._states.items() if state.report is not None
        }

    def _room(self, fleets: Mapping[str, Fleet]) -> tuple[Resources, ...]:
        if not any(fleet.spare_nodes for fleet in fleets.values()):
            return ()
        bundles: list[Resources] = []
        for name, fleet in fleets.items():
            here = len(self._states[name].known)
            spare = min(fleet.spare_nodes, max(fleet.max - here, 0))
            bundles += [fleet.resources] * (here + spare)
        return tuple(bundles)


@dataclass(slots=True)
class _Known:
    """What is remembered of a member that is there, or was started."""

    generation: str
    born: float
    """When it was started, or first seen."""
    since: float
    """In its phase."""
    phase: Phase | None = None
    """None: not seen yet."""
    idle_since: float | None = None
    troubled_since: float | None = None
    told_at: float | None = None
    """When it was last told to go."""
    ended_at: float | None = None
    """It is still listed, for a moment."""


@dataclass(slots=True)
class _State:
    """One fleet."""

    name: str
    wish: Fleet | None = None
    """None: there should be no such fleet."""
    generation: str = ""
    known: dict[str, _Known] = field(default_factory=dict[str, _Known])
    report: FleetReport | None = None
    peak: Peak = field(default_factory=Peak)
    watched_since: float | None = None
    crowded_since: float | None = None
    full_since: float | None = None
    grown_at: float = -inf
    shrunk_at: float = -inf
    was_hasty: bool = False
    """More were started soon after one went."""
    failures: Failures = field(default_factory=Failures)
    newcomer: str | None = None
    """Who is to replace an old member, and does not serve yet."""
    room_made: bool = False
    """An old member has already gone for the newcomer, which had no node otherwise."""

    # Of the plan that is being made

    seen: dict[str, Member] = field(default_factory=dict[str, Member])
    staying: dict[str, Member] = field(default_factory=dict[str, Member])
    """Without those that go."""
    effects: list[Effect] = field(default_factory=list[Effect])

    def want(self, wish: Fleet | None, generation: str) -> None:
        self.wish = wish
        if wish is not None and generation != self.generation:
            self.generation = generation
            self.failures = Failures()
            self.newcomer = None
            self.room_made = False

    def ended(self, name: str, reason: str, *, now: float) -> None:
        known = self.known.get(name)
        if known is None:
            # Its plan has been made anew, or it was missed before: the better reason is this one.
            if self.failures.counted_at < now - TELL_AGAIN:
                self._failed(reason, born=now, generation=self.generation, now=now)
            self.failures.reason = reason
            return
        if known.ended_at is not None:
            return
        known.ended_at = now
        if known.told_at is None and known.phase is not Phase.DRAINING:
            self._failed(reason, born=known.born, generation=known.generation, now=now)
        if known.phase is None:
            del self.known[name]

    def _failed(self, reason: str, *, born: float, generation: str, now: float) -> None:
        is_current = generation == self.generation
        self.failures.add(reason, born=born, is_current=is_current, now=now)

    def plan(self, waiting: int, members: Sequence[Member], *, now: float) -> list[Effect]:
        self.effects = []
        self._observe(members, now=now)
        if self.wish is None:
            for member in tuple(self.staying.values()):
                self._dismiss(member, now=now)
            self._write_report(0, self._why_deleted(), is_stuck=False, now=now)
            return self.effects
        for member in tuple(self.staying.values()):
            if member.phase in STARTING and member.generation != self.generation:
                self._dismiss(member, now=now)
        self._try_elsewhere(now=now)
        self._find_newcomer()
        self._obey_max(self.wish, now=now)
        self._replace(self.wish, now=now)
        more, started = self._grow(self.wish, waiting, now=now)
        if not more:
            self._shrink(self.wish, now=now)
        missing = more - started
        # What load would have, and may not be started now, is no wish yet: it comes and goes.
        wanted = max(self._size, self.wish.min, min(missing, 1))
        reason = self._why(self.wish, waiting, missing, now=now)
        self._write_report(wanted, reason, is_stuck=self._is_stuck(now=now), now=now)
        return self.effects

    # What is seen

    def _observe(self, members: Iterable[Member], *, now: float) -> None:
        self.seen = {member.name: member for member in members}
        if self.watched_since is None:
            self.watched_since = now
        for name, known in tuple(self.known.items()):
            if name not in self.seen:
                self._miss(name, known, now=now)
        self.staying = {}
        for name, member in self.seen.items():
            known = self.known.get(name)
            if known is None or (
                known.ended_at is not None and now - known.ended_at > TELL_AGAIN
            ):  # it is new to us, or lives after all
                known = self.known[name] = _Known(member.generation, born=now, since=now)
            if known.phase is not member.phase:
                # Who is seen to wait for a node has done so since its start.
                first = known.phase is None and member.phase is Phase.NODE
                known.since = known.born if first else now
                known.phase = member.phase
            known.generation = member.generation
            if not member.serves or member.processing:
                known.idle_since = None
            elif known.idle_since is None:
                known.idle_since = now
            known.troubled_since = _since(known.troubled_since, member.is_troubled, now=now)
            if member.phase is Phase.DRAINING or known.ended_at is not None:
                continue
            if known.told_at is None:
                self.staying[name] = member
                is_current = member.generation == self.generation
                if known.troubled_since == now and is_current:  # it has failed, if it lives on
                    reason = f"{name} could not serve: {member.problem}"
                    self._failed(reason, born=known.born, generation=known.generation, now=now)
            elif now - known.told_at >= TELL_AGAIN:
                self._dismiss(member, now=now)
            if member.serves and member.generation == self.generation:
                self.failures.serves(since=known.since, now=now)

    def _miss(self, name: str, known: _Known, *, now: float) -> None:
        if known.phase is None and known.ended_at is None and now - known.born < UNSEEN:
            return
        del self.known[name]
        if known.ended_at is None and known.told_at is None and known.phase is not Phase.DRAINING:
            reason = (
                "nothing was seen of it after its start" if known.phase is None else "it is lost"
            )
            self._failed(f"{name}: {reason}", born=known.born, generation=known.generation, now=now)

    @property
    def _unseen(self) -> list[str]:
        return [name for name, known in self.known.items() if known.phase is None]

    @property
    def _serving(self) -> list[Member]:
        return [member for member in self.staying.values() if member.serves]

    @property
    def _coming(self) -> list[str]:
        """Members that do not serve yet."""
        return [each.name for each in self.staying.values() if not each.serves] + self._unseen

    @property
    def _old(self) -> list[Member]:
        """Members that are to be replaced."""
        return [each for each in self.staying.values() if each.generation != self.generation]

    @property
    def _fresh(self) -> list[Member]:
        return [each for each in self.staying.values() if each.generation == self.generation]

    @property
    def _extra(self) -> int:
        """1 while there is one more than wanted, since an old one waits for its successor."""
        return int(self.newcomer is not None and not self.room_made)

    @property
    def _size(self) -> int:
        """Members that there are to stay, and that will come."""
        return len(self.staying) + len(self._unseen) - self._extra

    def _idle_since(self, member: Member) -> float:
        """Infinite: it has something to do."""
        since = self.known[member.name].idle_since
        return inf if since is None else since

    # What is done

    def _dismiss(self, member: Member, *, now: float) -> None:
        stops = member.phase in STARTING
        self.effects.append(Stop(member.name) if stops else Drain(member.name))
        self.known[member.name].told_at = now
        self.staying.pop(member.name, None)

    def _start(self, count: int, *, now: float) -> list[str]:
        names: list[str] = []
        number = 0
        while len(names) < count:
            number += 1
            name = f"{self.name}-{number}"
            if name not in self.known:
                self.known[name] = _Known(self.generation, born=now, since=now)
                self.effects.append(Start(name, self.name, self.generation))
                names.append(name)
        return names

    def _obey_max(self, wish: Fleet, *, now: float) -> None:
        # Who has not been seen yet may never come; nobody goes in its place.
        is_extra_seen = self._extra and self.newcomer in self.staying
        beyond = len(self.staying) - wish.max - int(is_extra_seen)
        if beyond <= 0:
            return

        def order(member: Member) -> tuple[object, ...]:
            # Who serves goes last, whoever has most to do after the others; of equals, who is of an
            # old generation, and then the newest: the names that stay are the low ones.
            farther = len(STARTING) if member.serves else self._progress(member)
            is_current = member.generation == self.generation
            return farther, member.processing, is_current, -member.number

        for member in sorted(self.staying.values(), key=order)[:beyond]:
            self._dismiss(member, now=now)

    def _try_elsewhere(self, *, now: float) -> None:
        if not self._is_proven:
            return
        for member in self._troubled:
            since = self.known[member.name].troubled_since
            if since is not None and now - since >= TROUBLED_FOR:
                self._dismiss(member, now=now)

    def _progress(self, member: Member) -> int:
        if member.is_troubled:
            return -1
        return STARTING.index(member.phase) if member.phase in STARTING else len(STARTING) - 1

    def _find_newcomer(self) -> None:
        if not self._old:
            self.newcomer = None
            self.room_made = False
            return
        if self.newcomer is not None and self.newcomer not in (*self.staying, *self._unseen):
            self.newcomer = None  # it has failed
        if self.newcomer is None:  # a plan that was made anew finds it
            coming = [each for each in self._fresh if not each.serves]
            self.newcomer = min(coming, key=lambda each: each.number).name if coming else None

    def _replace(self, wish: Fleet, *, now: float) -> None:
        old = self._old
        if not old:
            return
        if self.newcomer is None:
            if len(self.known) <= wish.max and not self._is_crash_loop:
                self.newcomer = next(iter(self._start(self._may_start(1, now=now), now=now)), None)
            return
        newcomer = self.staying.get(self.newcomer)
        if newcomer is None:
            return
        if newcomer.serves:
            if not self.room_made:
                self._dismiss(self._least_used(old), now=now)
            self.newcomer = None
            self.room_made = False
        elif not (self.room_made or self._is_crash_loop or self._is_somebody_going):
            # There may be no room for both: one GPU. Better a pause than no change at all.
            leaving = self._least_used(old)
            patience = NO_NODE_EVER if leaving.processing else NO_NODE
            if self._waits_for_node(newcomer, patience, now=now):
                self._dismiss(leaving, now=now)
                self.room_made = True

    def _least_used(self, members: Iterable[Member]) -> Member:
        """Idle for longest, or with least to do."""
        return min(members, key=lambda m: (m.processing, self._idle_since(m), -m.number))

    @property
    def _is_somebody_going(self) -> bool:
        return len(self.seen) > len(self.staying)

    @property
    def _is_crash_loop(self) -> bool:
        return self.failures.in_vain >= CRASH_LOOP and not self._is_proven

    @property
    def _is_proven(self) -> bool:
        """The wanted generation can serve: others that fail do so because of where they are."""
        return any(member.serves for member in self._fresh)

    @property
    def _troubled(self) -> list[Member]:
        """Who cannot serve, of those that should."""
        return [member for member in self._fresh if member.is_troubled]

    def _waits_for_node(self, member: Member, seconds: float, *, now: float) -> bool:
        return member.phase is Phase.NODE and now - self.known[member.name].since >= seconds

    def _without_node(self, seconds: float, *, now: float) -> int:
        return sum(self._waits_for_node(each, seconds, now=now) for each in self.staying.values())

    def _may_start(self, count: int, *, now: float) -> int:
        """How many of them may be started now."""
        if now < self.failures.retry_at or self._without_node(NO_NODE, now=now):
            return 0
        troubled = self._troubled
        if troubled and not self._is_proven:
            return 0  # it would fail in the same way
        if troubled or self.failures.in_vain >= 2:  # one shows whether it is better now
            is_tried = self._unseen or any(not (m.serves or m.is_troubled) for m in self._fresh)
            return min(count, 0 if is_tried else 1)
        return count

    def _grow(self, wish: Fleet, waiting: int, *, now: float) -> tuple[int, int]:
        """How many more there should be, and how many of them are started, as they may."""
        serving = self._serving
        # Who cannot serve is no help, and who will replace another one no more help than that one.
        helpless = {each.name for each in self._troubled}
        if self._extra:
            helpless.add(str(self.newcomer))
        have = len({*self.staying, *self._unseen} - helpless)
        coming = len(set(self._coming) - helpless) * wish.slots
        processing = sum(member.processing for member in serving)
        # A slot of an old member may be of no use to them.
        free = sum(max(each.slots - each.processing, 0) for each in self._fresh if each.serves)
        without = waiting - coming - free
        slots = sum(member.slots for member in serving) + coming
        self.peak.add(_agents_for(processing + waiting, wish), now=now)
        is_crowded = waiting > 0 and without >= wish.grow_when_waiting
        is_full = processing > 0 and processing >= wish.grow_at_slot_use * slots
        self.crowded_since = _since(self.crowded_since, is_crowded, now=now)
        self.full_since = _since(self.full_since, is_full, now=now)

        more = 0
        if have < wish.min:
            more = wish.min - have
        elif have == 0:
            more = int(waiting > 0)
        elif _lasts(self.crowded_since, now=now):
            more = min(max(ceil(without / wish.slots), 1), have)
        elif _lasts(self.full_since, now=now):
            more = 1
        more = max(min(more, wish.max - self._size), 0)
        if not more:
            return 0, 0
        self.peak.add(min(have + more, MOST_AGENTS), now=now)  # what was started is kept a while
        # Those that go count too: they have their nodes still.
        room = max(wish.max + self._extra - len(self.known), 0)
        started = self._start(self._may_start(min(more, room), now=now), now=now)
        if started:
            self.was_hasty = now - self.shrunk_at < 2 * wish.idle_time
            self.grown_at = now
            self.crowded_since = _since(None, is_crowded, now=now)
            self.full_since = _since(None, is_full, now=now)
        return more, len(started)

    def _shrink(self, wish: Fleet, *, now: float) -> None:
        """By one, without which all would have gone well for long enough."""
        assert self.watched_since is not None
        # Whether load comes again is seen in twice the time; but if there is none, nobody stays, or
        # one that was wanted back at once. To begin to shrink takes longer than to go on: else the
        # number would go up and down.
        begin = now - wish.idle_time
        if self.peak.since(begin):
            begin -= wish.idle_time * (2 if self.grown_at > self.shrunk_at else 1)
        elif self.was_hasty:
            begin -= wish.idle_time
        self.peak.forget(before=now - 3 * wish.idle_time)
        if self.watched_since > begin or now - self.shrunk_at < TOO_MUCH_FOR:
            return
        needed = max(self.peak.since(begin), wish.min)
        spare = [each for each in self.staying.values() if each.name != self.newcomer]
        troubled = [each for each in spare if each.is_troubled]
        pending = [each for each in spare if each.phase is Phase.NODE]
        # Of an old generation, if there is one: else what has just been replaced would go.
        idle = [each for each in self._old or spare if self._idle_since(each) < inf]
        if troubled and len(self._serving) >= needed:
            self._dismiss(max(troubled, key=lambda each: each.number), now=now)
        elif pending and len(spare) - len(troubled) > needed:
            self._dismiss(max(pending, key=lambda each: each.number), now=now)
        elif idle and len(self._serving) > needed:
            # Who has been idle for longest has least in its cache that somebody will ask for.
            self._dismiss(self._least_used(idle), now=now)
        else:
            return
        self.shrunk_at = now

    # What is said

    def _is_stuck(self, *, now: float) -> bool:
        if self._serving:
            return False
        hopeless = {
            each.name
            for each in self._fresh
            if each.is_troubled or self._waits_for_node(each, NO_NODE_EVER, now=now)
        }
        return self._is_crash_loop or (bool(hopeless) and not set(self._coming) - hopeless)

    def _write_report(self, wanted: int, reason: str | None, *, is_stuck: bool, now: float) -> None:
        serving = len(self._serving)
        self.report = FleetReport(
            wanted=wanted,
            seen=len(self.seen),
            ready=serving,
            starting=len(self._coming),
            draining=len(self.seen) - len(self.staying),
            reason=reason,
            is_stuck=is_stuck,
            lacks_node=not serving and bool(self._without_node(NODE_IS_SLOW, now=now)),
        )

    def _why_deleted(self) -> str:
        return f"there is no such fleet any more: {_agents(len(self.seen))} still to end"

    def _why(self, wish: Fleet, waiting: int, missing: int, *, now: float) -> str | None:
        reasons: list[str] = []
        old = self._old
        troubled = self._troubled
        fails = self._is_crash_loop or bool(troubled and not self._is_proven)
        newcomer = self.staying.get(self.newcomer or "") if old and not fails else None
        if newcomer is not None and not self._waits_for_node(newcomer, NODE_IS_SLOW, now=now):
            newcomer = None
        slow = self._without_node(NODE_IS_SLOW, now=now) - (newcomer is not None)
        room = f"for a node with {wish.resources.words}"
        if troubled:
            others = f" and {_agents(len(troubled) - 1)} more" if len(troubled) > 1 else ""
            reasons.append(f"{troubled[0].name}{others} cannot serve: {troubled[0].problem}")
        if self._is_crash_loop:
            reasons.append(
                f"crash loop: {self.failures.in_vain} starts in a row have failed,"
                f" the last one with: {self.failures.reason}"
            )
        elif (
            self.failures.count
            and not troubled
            and (missing or self._coming or now < self.failures.retry_at)
        ):
            reasons.append(
                f"an agent has ended ({self.failures.reason});"
                f" {self.failures.delay:.0f} s until the next start"
            )
        if slow:
            waits = "waits" if slow == 1 else "wait"
            reasons.append(f"{_agents(slow)} {waits} {room}")
        if old and fails:
            reasons.append(
                f"the new generation does not serve: {_agents(len(old))} of the old one left as is"
            )
        elif old:
            waits = "" if newcomer is None else f": {newcomer.name} waits {room}"
            reasons.append(f"{_agents(len(old))} of an old generation to be replaced{waits}")
        if not reasons and self._coming:
            reasons.append(f"{_agents(len(self._coming))} starting")
        if not reasons and missing:
            reasons.append("others must end first")
        if not reasons and waiting and len(self.staying) >= wish.max:
            reasons.append(f"{waiting} waiting, and max ({wish.max}) is reached")
        return "; ".join(reasons)[:LONGEST_REASON] or None


def _agents_for(load: int, wish: Fleet) -> int:
    """How many agents do well with so many requests that wait or run.

    Their number goes up and down by about its square root when they come at random, and no agent
    should go that is wanted again at once.
    """
    per_agent = wish.slots * wish.grow_at_slot_use
    return min(ceil((load + SPREAD * sqrt(load)) / per_agent), MOST_AGENTS)


def _since(before: float | None, holds: bool, *, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _lasts(since: float | None, *, now: float) -> bool:
    return since is not None and now - since >= TOO_MUCH_FOR


def _agents(count: int) -> str:
    return "1 agent" if count == 1 else f"{count} agents"
