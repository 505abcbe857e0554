"""A run as tables: what struck and how long it took to mend, what came of the requests, and how long
nobody got a token.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from integration_tests.chaos.ledger import Outcome, Record, Struck
from integration_tests.chaos.run import Report

MOST_SHOWN = 10
"""Requests that failed, with what the balancer's log has of them."""


def show(report: Report, console: Console) -> None:
    console.print(faults_table(report))
    console.print(outcomes_table(report.ledger.records))
    console.print(growth_table(report))
    asked = len(report.ledger.records)
    console.print(
        f"seed {report.settings.seed}: {len(report.ledger.struck)} faults, {asked} requests in"
        f" {report.seconds:.0f} s; {len(report.violations)} violations",
        highlight=False,
    )
    for violation in report.violations:
        console.print(f"  violation: {violation}", markup=False, highlight=False, soft_wrap=True)
    if report.violations:
        console.print(strikes_table(report.ledger.struck))
        for line in report.log:
            if "request_id=" not in line:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    failed = [record for record in report.ledger.records if record.ended_as(Outcome.ERROR)]
    for record in failed[:MOST_SHOWN]:
        if record.request_id is not None:
            console.print(f"request {record.name} ended with an error:", highlight=False)
            for line in history(report, record):
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def history(report: Report, record: Record) -> list[str]:
    """What the balancer's log has of a request, and of the coming and going of its agents."""
    mine = f"request_id={record.request_id} "
    agents = {
        word
        for line in report.log
        if mine in line
        for word in line.split()
        if word.startswith("agent_id=")
    }
    return [
        line
        for line in report.log
        if mine in line or ("request_id=" not in line and agents & set(line.split()))
    ]


def faults_table(report: Report) -> Table:
    table = Table(title="Faults")
    for name in ("kind", "how many", "mended after", "longest", "gap in a stream", "longest"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    lasted: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    for struck in report.ledger.struck:
        lasted[struck.kind].append(struck.ended - struck.began)
        for record in report.ledger.records:
            for gap in record.gaps:
                # Whose gap it is, if the protocol tells who was at work.
                is_its = gap.agent is not None and gap.agent == struck.agent
                if is_its and gap.began <= struck.ended and gap.ended >= struck.began:
                    gaps[struck.kind].append(gap.ended - gap.began)
    for kind, times in sorted(lasted.items()):
        table.add_row(kind, str(len(times)), *_typical(times), *_typical(gaps[kind]))
    return table


def strikes_table(struck: Iterable[Struck]) -> Table:
    """One after the other: who, and from when to when, in seconds after the first."""
    table = Table(title="Strikes")
    for name in ("kind", "agent", "from", "to"):
        table.add_column(name, justify="right" if name in {"from", "to"} else "left")
    ordered = sorted(struck, key=lambda s: s.began)
    for each in ordered:
        times = [f"{at - ordered[0].began:.1f}" for at in (each.began, each.ended)]
        table.add_row(each.kind, each.agent, *times)
    return table


def _typical(seconds: list[float]) -> tuple[str, str]:
    """The median and the longest."""
    if not seconds:
        return "", ""
    return f"{sorted(seconds)[len(seconds) // 2]:.1f} s", f"{max(seconds):.1f} s"


def outcomes_table(records: Iterable[Record]) -> Table:
    """Outcome by protocol."""
    counts: Counter[tuple[str, str]] = Counter()
    for record in records:
        protocol = "rubbish" if record.question is None else str(record.protocol)
        counts[protocol, _outcome(record)] += 1
    # There are many outcomes and few protocols: so it is as wide as a terminal at most.
    protocols = sorted({protocol for protocol, _ in counts})
    table = Table(title="Outcomes", padding=0, box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("outcome", no_wrap=True)
    for protocol in protocols:
        table.add_column(protocol, justify="right")
    for outcome in sorted({outcome for _, outcome in counts}):
        table.add_row(outcome, *(str(counts[protocol, outcome] or "") for protocol in protocols))
    return table


def _outcome(record: Record) -> str:
    if record.ending is None:
        return "NONE"
    match record.ending.outcome:
        case Outcome.COMPLETE if record.moves:
            return f"complete, {record.moves} move{'s' * (record.moves > 1)}"
        case Outcome.ERROR:
            return record.ending.code.split()[-1]
        case outcome:
            return str(outcome)


def growth_table(report: Report) -> Table:
    table = Table(title="Before and after")
    for name in ("process", "MB before", "after", "descriptors before", "after"):
        table.add_column(name, justify="left" if name == "process" else "right")
    for name, old, new in report.growth:
        table.add_row(
            name,
            f"{old.kilobytes / 1024:.0f}",
            f"{new.kilobytes / 1024:.0f}",
            str(old.descriptors),
            str(new.descriptors),
        )
    return table
