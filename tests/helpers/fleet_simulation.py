"""Days of traffic in virtual time, with which a fleet plan is judged.

Requests come at random around a curve, with bursts; agents take their time to start; nodes are
added and removed as Ray's autoscaler would. Each request goes to the agent with least to do, as the
dispatcher does it. ``--seed N --picture FILE`` draws one day.
"""

import argparse
import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf, log2
from pathlib import Path
from typing import Protocol

from balancer.fleet_plan import (
    TOO_MUCH_FOR,
    Drain,
    Effect,
    FleetPlan,
    FleetReport,
    Member,
    Reserve,
    Start,
    Stop,
)
from balancer.fleets import Fleet
from common.models import Phase
from deploy.bench_report import picture_format
from deploy.fleet_picture import Series, to_picture, to_text

HOUR = 3600.0
DAY = 24 * HOUR
TICK = 0.5
"""Seconds between plans while something is going on."""
CALM_TICK = 10.0
"""Else."""

NODE_STAYS = 300.0
"""Seconds that a node is kept without an agent."""

STARTING = (Phase.NODE, Phase.PROCESS, Phase.DOWNLOAD, Phase.LOAD, Phase.WARM_UP)
ON_A_NEW_NODE = ((40.0, 90.0), (2.0, 4.0), (10.0, 20.0), (8.0, 15.0), (1.0, 2.0))
ON_A_NODE = ((0.2, 1.0), (2.0, 4.0), (0.0, 0.5), (8.0, 15.0), (1.0, 2.0))
"""Seconds of each phase, from and to."""

LONGEST_START = sum(longest for _, longest in ON_A_NEW_NODE)
LONGEST_NODE = ON_A_NEW_NODE[0][1]
USUAL_START = sum(sum(bounds) / 2 for bounds in ON_A_NODE)


class Planner(Protocol):
    def want(self, fleets: Mapping[str, Fleet], generations: Mapping[str, str]) -> None: ...
    def plan(
        self, waiting: Mapping[str, int], members: Sequence[Member], *, now: float
    ) -> list[Effect]: ...
    def reports(self) -> dict[str, FleetReport]: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one fleet is for."""

    fleet: Fleet
    curve: tuple[tuple[float, float], ...]
    """Requests a second at some hours, with straight lines between them."""
    seconds: float
    """That a request takes, in the mean."""
    bursts: int = 0
    """A day, in the hours in which there is any traffic."""
    burst: tuple[int, int] = (0, 0)
    """Requests that come with one, from and to."""

    def rate(self, time: float) -> float:
        hour = time / HOUR
        for (begin, low), (end, high) in pairwise(self.curve):
            if begin <= hour < end:
                return low + (high - low) * (hour - begin) / (end - begin)
        return 0.0

    def requests(self, chance: random.Random) -> list[tuple[float, float]]:
        """When each comes, and how many seconds it takes."""
        highest = max(rate for _, rate in self.curve)
        times: list[float] = []
        time = 0.0
        while highest and (time := time + chance.expovariate(highest)) < DAY:
            if chance.random() * highest < self.rate(time):
                times.append(time)
        hours = [hour for hour, _ in self.curve]
        between = (max(hours) - min(hours)) * HOUR / max(self.bursts, 1)
        for number in range(self.bursts):  # each in its part of the day, not close to the next one
            begin = min(hours) * HOUR + between * (number + chance.uniform(0, 0.8))
            times += [begin + chance.uniform(0, 2) for _ in range(chance.randint(*self.burst))]
        return [
            (time, min(chance.lognormvariate(0, 0.5) * self.seconds * 0.88, 5 * self.seconds))
            for time in sorted(times)
        ]


WORKING_DAY = {
    "chat": Traffic(
        Fleet(slots=4, max=32),
        # In the dead of night nobody comes.
        (
            (5.5, 0.03),
            (9, 0.4),
            (11.5, 0.5),
            (12.5, 0.3),
            (15, 0.65),
            (18, 0.25),
            (23, 0.05),
            (24, 0.03),
        ),
        seconds=40,
        bursts=4,
        burst=(15, 40),
    ),
    "code": Traffic(
        Fleet(slots=2, max=16),
        ((8, 0.02), (9.5, 0.12), (12, 0.12), (13, 0.05), (14, 0.15), (17.5, 0.1), (18.5, 0.0)),
        seconds=40,
    ),
    "batch": Traffic(
        Fleet(slots=8, max=16, idle_time=600),
        ((2, 0.0), (23, 0.0)),
        seconds=30,
        bursts=3,
        burst=(40, 120),
    ),
}


@dataclass(slots=True, eq=False)
class Agent:
    name: str
    fleet: str
    generation: str
    slots: int
    born: float
    phase: Phase = Phase.NODE
    processing: int = 0
    has_node: bool = False

    def seen(self) -> Member:
        serves = self.phase in (Phase.READY, Phase.DRAINING)
        slots = self.slots if serves else 0
        return Member(self.name, self.fleet, self.generation, self.phase, slots, self.processing)


@dataclass(slots=True)
class Record:
    """What has become of one fleet's day."""

    requests: int = 0
    served: int = 0
    waits: list[float] = field(default_factory=list[float])
    agent_seconds: float = 0.0
    cheapest: float = 0.0
    """Agent seconds of who knows the day before it begins."""
    most_agents: int = 0
    wanted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Each change."""
    series: Series = field(default_factory=lambda: Series([], [], [], []))

    @property
    def longest_wait(self) -> float:
        return max(self.waits, default=0.0)

    @property
    def ratio(self) -> float:
        return self.agent_seconds / self.cheapest

    @property
    def turns(self) -> list[float]:
        """When the number wanted has begun to fall after it rose, or to rise after it fell."""
        turns: list[float] = []
        before, was_rising = 0, None
        for time, wanted in self.wanted:
            if wanted == before:
                continue
            is_rising = wanted > before
            if was_rising is not None and is_rising != was_rising:
                turns.append(time)
            before, was_rising = wanted, is_rising
        return turns

    @property
    def hurried_turns(self) -> int:
        """That were followed by another one within ten minutes."""
        return sum(after - before < 600 for before, after in pairwise(self.turns))

    def most_turns(self, seconds: float = 600.0) -> int:
        """In any time so long."""
        turns = self.turns
        counts = (sum(begin <= turn < begin + seconds for turn in turns) for begin in turns)
        return max(counts, default=0)

    def wanted_at(self, time: float) -> int:
        return next((wanted for at, wanted in reversed(self.wanted) if at <= time), 0)


class Day:
    """One day; ``run`` plays it."""

    def __init__(self, traffics: Mapping[str, Traffic], planner: Planner, *, seed: int) -> None:
        self._chance = random.Random(seed)
        self._traffics = traffics
        self._planner = planner
        planner.want(
            {name: traffic.fleet for name, traffic in traffics.items()},
            dict.fromkeys(traffics, "g1"),
        )
        self.records = {name: Record() for name in traffics}
        self._agents: dict[str, dict[str, Agent]] = {name: {} for name in traffics}
        self._waiting: dict[str, deque[tuple[float, float]]] = {name: deque() for name in traffics}
        self._nodes: deque[float] = deque()
        """Until when each that is not used is there."""
        self._events: list[tuple[float, int, _Event]] = []
        self._count = 0
        self._planned_at = -inf
        for name, traffic in traffics.items():
            requests = traffic.requests(self._chance)
            record = self.records[name]
            record.requests = len(requests)
            record.cheapest = cheapest(requests, traffic.fleet.slots)
            for time, seconds in requests:
                self._at(time, _Arrival(name, seconds))

    def run(self) -> dict[str, Record]:
        next_plan = 0.0
        while self._events and self._events[0][0] < DAY + HOUR:
            time = self._events[0][0]
            if next_plan <= time:
                self._plan(next_plan)
                self._planned_at = next_plan
                next_plan += TICK if self._is_busy else CALM_TICK
                continue
            _, _, event = heapq.heappop(self._events)
            self._happen(event, time)
            if self._is_busy:
                next_plan = min(
                    next_plan, self._planned_at + TICK * ceil((time - self._planned_at) / TICK)
                )
        while next_plan < DAY + HOUR:
            self._plan(next_plan)
            next_plan += CALM_TICK
        for name, agents in self._agents.items():
            for agent in agents.values():
                self.records[name].agent_seconds += next_plan - agent.born
        return self.records

    @property
    def _is_busy(self) -> bool:
        """Something may have to be decided soon."""
        for name, agents in self._agents.items():
            if self._waiting[name]:
                return True
            slots = processing = 0
            for agent in agents.values():
                if agent.phase is not Phase.READY:
                    return True
                slots += agent.slots
                processing += agent.processing
            if processing and processing >= slots:
                return True
        return False

    def _at(self, time: float, event: "_Event") -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def _happen(self, event: "_Event", now: float) -> None:
        match event:
            case _Arrival(fleet, seconds):
                self._waiting[fleet].append((now, seconds))
                self._dispatch(fleet, now)
            case _Finish(agent):
                agent.processing -= 1
                self.records[agent.fleet].served += 1
                if agent.phase is Phase.DRAINING and not agent.processing:
                    self._end(agent, now)
                else:
                    self._dispatch(agent.fleet, now)
            case _Progress(agent, index, is_node_new):
                self._progress(agent, index, is_node_new, now)

    def _dispatch(self, fleet: str, now: float) -> None:
        waiting = self._waiting[fleet]
        while waiting:
            free = [
                agent
                for agent in self._agents[fleet].values()
                if agent.phase is Phase.READY and agent.processing < agent.slots
            ]
            if not free:
                return
            came, seconds = waiting.popleft()
            self.records[fleet].waits.append(now - came)
            agent = min(free, key=lambda each: each.processing)
            agent.processing += 1
            self._at(now + seconds, _Finish(agent))

    def _progress(self, agent: Agent, index: int, is_node_new: bool, now: float) -> None:
        """The agent comes into its ``index``-th phase."""
        if agent.name not in self._agents[agent.fleet]:
            return  # it was stopped
        agent.has_node = index > 0
        if index == len(STARTING):
            agent.phase = Phase.READY
            self._dispatch(agent.fleet, now)
            return
        agent.phase = STARTING[index]
        bounds = (ON_A_NEW_NODE if is_node_new else ON_A_NODE)[index]
        self._at(now + self._chance.uniform(*bounds), _Progress(agent, index + 1, is_node_new))

    def _end(self, agent: Agent, now: float) -> None:
        del self._agents[agent.fleet][agent.name]
        self.records[agent.fleet].agent_seconds += now - agent.born
        if agent.has_node:
            self._nodes.append(now + NODE_STAYS)

    def _plan(self, now: float) -> None:
        waiting = {name: len(requests) for name, requests in self._waiting.items()}
        members = [agent.seen() for agents in self._agents.values() for agent in agents.values()]
        for effect in self._planner.plan(waiting, members, now=now):
            self._do(effect, now)
        for name, report in self._planner.reports().items():
            record = self.records[name]
            agents = len(self._agents[name])
            record.most_agents = max(record.most_agents, agents)
            if not record.wanted or record.wanted[-1][1] != report.wanted:
                record.wanted.append((now, report.wanted))
            record.series.add(now, agents=agents, waiting=waiting[name], served=record.served)

    def _do(self, effect: Effect, now: float) -> None:
        match effect:
            case Start(name, fleet, generation):
                assert name not in self._agents[fleet], name
                slots = self._traffics[fleet].fleet.slots
                agent = Agent(name, fleet, generation, slots, now)
                self._agents[fleet][name] = agent
                while self._nodes and self._nodes[0] < now:
                    self._nodes.popleft()
                is_node_new = not self._nodes
                if self._nodes:
                    self._nodes.pop()
                self._progress(agent, 0, is_node_new, now)
            case Drain(name):
                agent = self._agents[name.rpartition("-")[0]][name]
                agent.phase = Phase.DRAINING
                if not agent.processing:
                    self._end(agent, now)
            case Stop(name):
                agent = self._agents[name.rpartition("-")[0]][name]
                assert agent.phase in STARTING
                self._end(agent, now)
            case Reserve():
                pass


@dataclass(frozen=True, slots=True)
class _Arrival:
    fleet: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Finish:
    agent: Agent


@dataclass(frozen=True, slots=True)
class _Progress:
    agent: Agent
    index: int
    is_node_new: bool


_Event = _Arrival | _Finish | _Progress


class NaivePlanner:
    """So many agents as the load of this moment fills, at once."""

    def __init__(self) -> None:
        self._fleets: dict[str, Fleet] = {}
        self._reports: dict[str, FleetReport] = {}

    def want(self, fleets: Mapping[str, Fleet], generations: Mapping[str, str]) -> None:
        self._fleets = dict(fleets)

    def plan(
        self, waiting: Mapping[str, int], members: Sequence[Member], *, now: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        for name, fleet in self._fleets.items():
            here = [each for each in members if each.fleet == name]
            staying = [each for each in here if each.phase is not Phase.DRAINING]
            load = waiting[name] + sum(each.processing for each in staying)
            wanted = max(min(ceil(load / fleet.slots), fleet.max), fleet.min)
            idle = [each for each in staying if each.serves and not each.processing]
            effects += [Drain(each.name) for each in idle[: max(len(staying) - wanted, 0)]]
            names = {each.name for each in here}
            free = (f"{name}-{n}" for n in range(1, 10_000) if f"{name}-{n}" not in names)
            effects += [Start(next(free), name, "g1") for _ in range(wanted - len(staying))]
            ready = sum(each.serves for each in staying)
            self._reports[name] = FleetReport(wanted, len(here), ready, 0, 0, None)
        return effects

    def reports(self) -> dict[str, FleetReport]:
        return self._reports


def cheapest(requests: Iterable[tuple[float, float]], slots: int) -> float:
    """Agent seconds with which nobody waits, for who knows the day beforehand.

    The ``n``-th agent is there while more than ``(n - 1) * slots`` requests run. It is started
    before, and stays when it would have to be started again at once.
    """
    changes = sorted(_changes(requests))
    total, load = 0.0, 0
    last_end: dict[int, float] = {}
    began: dict[int, float] = {}
    for time, change in changes:
        load += change
        agents = ceil(load / slots)
        while len(began) < agents:
            number = len(began)
            began[number] = time
            gap = time - last_end.get(number, -inf)
            total += min(gap, USUAL_START)
        while len(began) > agents:
            number = len(began) - 1
            total += time - began.pop(number)
            last_end[number] = time
    return total


def _changes(requests: Iterable[tuple[float, float]]) -> Iterator[tuple[float, int]]:
    for time, seconds in requests:
        yield time, 1
        yield time + seconds, -1


def longest_wait_allowed(record: Record) -> float:
    """A request waits at most until it is decided that it needs an agent, and that one serves.

    It is decided at once that there must be more, and each decision doubles them; if somebody waits
    for a node for very long, after that one has it.
    """
    decisions = 1 + ceil(log2(max(record.most_agents, 1)))
    return LONGEST_NODE + decisions * (TOO_MUCH_FOR + TICK) + LONGEST_START


def in_words(records: Mapping[str, Record]) -> str:
    lines = [
        "fleet  requests  most agents  longest wait  mean wait  agent hours  cheapest  ratio"
        "  turns  hurried"
    ]
    for name, record in records.items():
        mean = sum(record.waits) / max(len(record.waits), 1)
        lines.append(
            f"{name:<6} {record.requests:8} {record.most_agents:12} {record.longest_wait:13.1f}"
            f" {mean:10.2f} {record.agent_seconds / HOUR:12.1f} {record.cheapest / HOUR:9.1f}"
            f" {record.ratio:6.2f} {len(record.turns):6} {record.hurried_turns:8}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulates a day of fleets.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--days", type=int, default=1, help="so many seeds, one after another")
    parser.add_argument("--picture", help="a file that ends in .png or .svg")
    parser.add_argument("--naive", action="store_true", help="a planner without hysteresis")
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.days):
        planner = NaivePlanner() if options.naive else FleetPlan()
        records = Day(WORKING_DAY, planner, seed=seed).run()
        print(f"seed {seed}\n{in_words(records)}")  # noqa: T201
        if options.days == 1:
            for name, record in records.items():
                print(f"\n{to_text(record.series, title=name)}")  # noqa: T201
        if options.picture:
            series = {name: record.series for name, record in records.items()}
            format = picture_format(options.picture)
            data = to_picture(series, title=f"a day of fleets, seed {seed}", format=format)
            Path(options.picture).write_bytes(data)


if __name__ == "__main__":
    main()
