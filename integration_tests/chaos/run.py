"""One run: start, warm up, strike while clients come and go, let it calm down, and look at what is
left.
"""

import asyncio
import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import monotonic, time

import httpx

from deploy.settings import EngineKind
from integration_tests.chaos.clients import Clients
from integration_tests.chaos.cluster import (
    CONTROLLER,
    PROXY,
    REPLICA,
    Cluster,
    Footprint,
    cluster,
    footprint,
)
from integration_tests.chaos.faults import Faults
from integration_tests.chaos.ledger import (
    LONGEST,
    Counts,
    Departure,
    Ledger,
    disagreements,
    unexplained,
)
from integration_tests.chaos.plan import LOSING, OF_BALANCER, Fault, Kind, Visit, faults, visit
from integration_tests.helpers.product import Up, start_up
from tests.helpers.exposition import by_label, total

WARM_UP_VISITS = 20
RETRY_PAUSE = 0.5
CALM_TIMEOUT = 30.0
"""Seconds for slots and buffer to be free after the last client has gone."""

MOST_GROWTH = 40 * 2**10
"""Kilobytes of resident memory."""
MOST_MORE_DESCRIPTORS = 12

JOINED = re.compile(r"agent_id=(\w+) name=(\S+) joined$")
LEFT = re.compile(r"agent_id=(\w+) left: (.*)$")
MENTIONS = re.compile(r" (request_id=|agent_id=\w+ (name=\S+ joined|left: ))")
DISPATCHED = re.compile(r"request_id=(\w+) agent_id=\w+ dispatched$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Settings:
    seed: int
    kinds: Mapping[Kind, float]
    seconds: float | None = None
    """Of faults; None: until there were ``faults`` of them."""
    faults: int | None = None
    interval: float = 2.5
    """Seconds between two faults, on average."""
    agents: int = 3
    clients: int = 8
    """That are there at any time."""
    engine: EngineKind = EngineKind.ECHO


@dataclass(slots=True)
class Report:
    settings: Settings
    ledger: Ledger = field(default_factory=Ledger)
    violations: list[str] = field(default_factory=list[str])
    growth: list[tuple[str, Footprint, Footprint]] = field(
        default_factory=list[tuple[str, Footprint, Footprint]]
    )
    """Of each process: what it is, before, after."""
    seconds: float = 0.0
    log: list[str] = field(default_factory=list[str])
    """Of the balancer, as far as it speaks of requests and of agents that came or went."""


def run(settings: Settings) -> Report:
    report = Report(settings)
    options = ("--agents", "0", "--engine", settings.engine)
    with start_up(*options, "--buffer-size", "256", "--buffer-timeout", "120") as up:
        folders = _folders(up)
        agents = asyncio.run(_run(settings, up, report))
        if up.command.stop() != 0:
            report.violations.append("headrace up did not end well")
        left = up.command.processes()
    report.violations += [f"still there: {name}" for name in [*agents, *left]]
    report.violations += [f"still there: {folder}" for folder in folders if Path(folder).exists()]
    return report


def _folders(up: Up) -> set[str]:
    return set(re.findall(r"/tmp/headrace-\w+", " ".join(up.command.processes())))


def _log(folders: Iterable[str]) -> list[str]:
    """The lines of all replicas that speak of a request or of an agent that came or went."""
    return [
        line
        for folder in folders
        for log in sorted(Path(folder).glob("session_latest/logs/worker-*.err"))
        for line in log.read_text(errors="replace").splitlines()
        if MENTIONS.search(line)
    ]


def _departures(log: Iterable[str], began: float) -> list[Departure]:
    """In the time of ``monotonic``; not those before ``began``."""
    offset = time() - monotonic()
    names: dict[str, str] = {}
    found: list[Departure] = []
    for line in log:
        if joined := JOINED.search(line):
            names[joined[1]] = joined[2]
        elif left := LEFT.search(line):
            stamp = datetime.fromisoformat(line[:23].replace(",", "."))
            found.append(Departure(names[left[1]], stamp.timestamp() - offset, left[2]))
    return [departure for departure in found if departure.at >= began]


async def _run(settings: Settings, up: Up, report: Report) -> list[str]:
    """Return what is left of the agents."""
    async with cluster(
        up, agents=settings.agents, seed=settings.seed, engine=settings.engine
    ) as running:
        await _strike(settings, running, report)
        commands = [agent.command for agent in running.agents]
    return [line for command in commands for line in command.processes()]


async def _strike(settings: Settings, running: Cluster, report: Report) -> None:
    ledger = report.ledger
    model = (await running.http.get("/v1/models")).json()["data"][0]["id"]
    clients = Clients(running.up.address, model, ledger, running.http)
    numbers = itertools.count()

    warm_up = Ledger()
    warming = Clients(running.up.address, model, warm_up, running.http)
    await asyncio.gather(
        *(warming.come(_visit(settings, -1 - number)) for number in range(WARM_UP_VISITS))
    )
    report.violations += [f"while warming up: {v}" for v in warm_up.violations(now=monotonic())]
    before = _footprints(running)
    counted = await _counts(running.http)

    over = asyncio.Event()

    async def keep_coming() -> None:
        while not over.is_set():
            if not await clients.come(_visit(settings, next(numbers))):
                await asyncio.sleep(RETRY_PAUSE)

    strikes = Faults(running, ledger)
    began = monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(settings.clients):
            group.create_task(keep_coming())
        await strikes.strike(_planned(settings, strikes))
        over.set()
    report.seconds = monotonic() - began

    report.violations += strikes.violations
    report.log = _log(_folders(running.up))
    ledger.dispatched(Counter(DISPATCHED.findall("\n".join(report.log))))
    departures = _departures(report.log, began)
    if not departures and any(struck.kind in LOSING for struck in ledger.struck):
        report.violations.append("the balancer's log tells of no lost agent: are its words others?")
    report.violations += unexplained(departures, ledger.struck)
    report.violations += ledger.violations(now=monotonic())
    report.violations += sorted(set(running.overfull))
    report.violations += await _not_calm(running)
    if not any(struck.kind in OF_BALANCER for struck in ledger.struck):
        counts = await _counts(running.http)
        since = {
            outcome: count - counted.by_outcome.get(outcome, 0)
            for outcome, count in counts.by_outcome.items()
        }
        report.violations += disagreements(ledger.records, Counts(since))
    report.growth = _grown(before, _footprints(running))
    for name, old, new in report.growth:
        if new.kilobytes - old.kilobytes > MOST_GROWTH:
            report.violations.append(f"{name} grew from {old.kilobytes} to {new.kilobytes} KB")
        if new.descriptors - old.descriptors > MOST_MORE_DESCRIPTORS:
            report.violations.append(
                f"{name} had {old.descriptors} open descriptors and has {new.descriptors}"
            )


def _visit(settings: Settings, number: int) -> Visit:
    return visit(settings.seed, number, of_model=settings.engine is not EngineKind.ECHO)


def _planned(settings: Settings, strikes: Faults) -> Iterator[Fault]:
    """Until the time is over, or the number is reached."""
    plan = faults(
        settings.seed,
        agents=settings.agents,
        kinds=settings.kinds,
        interval=settings.interval,
    )
    if settings.faults is not None:
        wanted = settings.faults
        return itertools.takewhile(lambda _: strikes.count < wanted, plan)
    end = monotonic() + (settings.seconds or 0.0)
    return itertools.takewhile(lambda fault: monotonic() + fault.wait < end, plan)


async def _not_calm(running: Cluster) -> list[str]:
    """When all clients have gone: what is not free, and who is not there."""
    found: list[str] = []

    def is_idle() -> bool:
        return all(
            running.serves(agent.name)
            and all(a["slots_processing"] == 0 for a in running.linked if a["name"] == agent.name)
            for agent in running.agents
        )

    if not await running.until(is_idle, CALM_TIMEOUT):
        found.append(f"not all agents are there and idle: {running.linked}")
    for agent in running.linked:
        told = (await running.http.get(f"/api/v1/agent/{agent['id']}/status")).json()
        bound, own = told["slots_bound"], told["status"]["slots_processing"]
        if (bound, own) != (0, 0):
            found.append(f"{agent['name']}: {bound} slots bound, {own} of its own in use")
    buffered = (await running.http.get("/api/v1/buffered_requests")).json()
    if buffered["buffered_requests_current"] != 0:
        found.append(f"{buffered['buffered_requests_current']} requests are buffered")
    text = (await running.http.get("/metrics")).text
    for name, wanted in (
        ("headrace_requests_buffered", 0.0),
        ("headrace_agents", float(len(running.agents))),
        *((f'headrace_slots_processing{{agent="{a.name}"}}', 0.0) for a in running.agents),
    ):
        if (value := total(text, name)) != wanted:
            found.append(f"{name} is {value:g} and not {wanted:g}")
    return found


async def _counts(http: httpx.AsyncClient) -> Counts:
    text = (await http.get("/metrics")).text
    counts = by_label(text, "headrace_requests_total", "outcome")
    return Counts({outcome: int(count) for outcome, count in counts.items()})


def _footprints(running: Cluster) -> dict[str, Footprint]:
    """By what the process is, since some are new."""
    pids = {agent.name: agent.pid for agent in running.agents}
    for name, words in (("replica", REPLICA), ("proxy", PROXY), ("controller", CONTROLLER)):
        for pid in running.find(words):
            pids[name] = pid
    found: dict[str, Footprint] = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            found[name] = footprint(pid)
    return found


def _grown(
    before: dict[str, Footprint], after: dict[str, Footprint]
) -> list[tuple[str, Footprint, Footprint]]:
    return [(name, old, after[name]) for name, old in before.items() if name in after]


assert CALM_TIMEOUT < LONGEST
