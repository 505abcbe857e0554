"""``python -m integration_tests.chaos``: by hand, for as long as you like."""

import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from deploy.settings import EngineKind
from integration_tests.chaos.plan import OF_AGENTS, OF_BALANCER, Kind
from integration_tests.chaos.report import show
from integration_tests.chaos.run import Settings, run

console = Console()


def chaos(
    seed: Annotated[int | None, typer.Option(help="Default: by the clock.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long faults strike.")] = None,
    faults: Annotated[int | None, typer.Option(help="How many, in place of --seconds.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two, on average.")] = 2.5,
    clients: Annotated[int, typer.Option(help="At any time.")] = 8,
    kind: Annotated[list[Kind] | None, typer.Option(help="Only these; may be repeated.")] = None,
    engine: Annotated[
        EngineKind, typer.Option(help="Of a real model only the length of an answer is known.")
    ] = EngineKind.ECHO,
    balancer: Annotated[
        bool, typer.Option(help="Strike replica, proxy and controller too.")
    ] = False,
) -> None:
    kinds = {**OF_AGENTS, **(OF_BALANCER if balancer else {})}
    if kind:
        kinds = {each: {**OF_AGENTS, **OF_BALANCER}[each] for each in kind}
    settings = Settings(
        seed=int(time.time()) if seed is None else seed,
        kinds=kinds,
        seconds=60.0 if seconds is None and faults is None else seconds,
        faults=faults,
        interval=interval,
        clients=clients,
        engine=engine,
    )
    console.print(f"seed {settings.seed}")
    report = run(settings)
    show(report, console)
    sys.exit(1 if report.violations else 0)


typer.run(chaos)
