"""``headrace status``: agents, fleets and requests at a glance, and why something does not work."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.overview import StatusView
from deploy.swap import HALTED
from deploy.terminal import cell, one_line, part, size
from deploy.top_view import fleet_row, state_of


def show_status(view: StatusView, console: Console) -> None:
    if view.agents:
        console.print(_agents(view))
    else:
        console.print("no agents")
    if view.fleets:
        console.print(_fleets(view))
    lines = [
        f"{agent.title}: {issue.words}" for agent in view.agents.values() for issue in agent.issues
    ]
    if view.model.halted_by is not None:
        lines.append(HALTED)
    silence = view.about.supervisor_silent_for
    if silence is not None:
        lines.append(f"the supervisor of the fleets has not answered for {silence:.0f} s")
    if not view.about.accepts:
        lines.append("the balancer takes nothing new")
    if view.model.desired is not None:
        lines.append(f"desired model: {view.model.desired}")
    counts, buffer = view.counts, view.buffer
    over = "".join(f", {count} {outcome}" for outcome, count in sorted(counts.over.items()))
    lines.append(f"requests: {counts.running} running, {counts.waiting} waiting{over}")
    lines.append(f"buffered requests: {buffer.waiting} of {buffer.capacity} ({size(buffer.bytes)})")
    for line in lines:
        console.print(Text(one_line(line)), soft_wrap=True)


def _agents(view: StatusView) -> Table:
    table = Table("agent", "model", "slots", "busy", "cached", "state")
    for agent in sorted(view.agents.values(), key=lambda each: each.title):
        table.add_row(
            cell(agent.title),
            cell(agent.model),
            str(agent.slots),
            str(agent.slots_busy),
            part(agent.figures.hit_rate),
            state_of(agent),
        )
    return table


def _fleets(view: StatusView) -> Table:
    table = Table("fleet", "ready", "wanted", "limits", "waiting", "why")
    for name, fleet in sorted(view.fleets.items()):
        table.add_row(*fleet_row(name, fleet))
    return table
