"""What ``headrace top`` shows: a view of the balancer becomes lines that fit the window. No I/O here:
``now`` is an argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.overview import Agent, Fault, Fleet, Request, StatusView
from deploy.terminal import bar, cell, one_line, part, seconds, size

SPARK = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"

STYLES = {
    "ready": "green",
    "held": "yellow",
    "draining": "yellow",
    "no_model": "dim",
    "stuck": "bold red",
    "retrying": "red",
}
"""Of agents' states; the others are on their way."""

MOST_ERRORS = 3
"""That are shown while there is anything else to see."""


@dataclass(frozen=True, slots=True)
class Window:
    width: int
    height: int


LONGEST_WHOLE = 24
"""Characters, of what is not cut where there is room."""

SHORTEST_ID = 8

GAP = 2
"""Between columns."""


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    justify: Literal["left", "right"] = "left"
    kind: Literal["whole", "id", "rest"] = "whole"
    """An id is cut before anything else is, and words that take the rest are cut before that."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A table that may be cut. An empty line, its head, and a line for each row."""

    columns: Sequence[_Column]
    rows: Sequence[Sequence[Text]]

    def table(self, count: int, *, width: int) -> RenderableType:
        """Of the first rows only. How many are left out stands in the head."""
        hidden = len(self.rows) - count
        names = [column.name for column in self.columns]
        if hidden:
            names[0] += f" +{hidden}"
        needs = [
            max(len(name), *(row[n].cell_len for row in self.rows[:count]))
            for n, name in enumerate(names)
        ]
        widths = self._widths(needs, width)
        shown = [n for n, each in enumerate(widths) if each]
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
        for n in shown:
            justify = self.columns[n].justify
            table.add_column(cell(names[n]), justify=justify, width=widths[n], no_wrap=True)
        for row in self.rows[:count]:
            table.add_row(*(row[n] for n in shown))
        return Group(Text(""), table)

    def _widths(self, needs: Sequence[int], width: int) -> list[int]:
        """Of each column; 0: there is no room for it."""
        kinds = [column.kind for column in self.columns]
        left = width - GAP * (len(kinds) - 1)
        widths = [
            min(need, LONGEST_WHOLE) if kind == "whole" else 0
            for need, kind in zip(needs, kinds, strict=True)
        ]
        left -= sum(widths)
        for wanted, least in (("id", SHORTEST_ID), ("rest", 0)):
            for n, kind in enumerate(kinds):
                if kind == wanted:
                    widths[n] = min(needs[n], max(least, left))
                    left -= widths[n]
        return widths


HEAD_LINES = 2


def top_view(
    view: StatusView, window: Window, *, url: str, now: float, lost: str | None = None
) -> RenderableType:
    """``now``: in seconds since 1970. ``lost``: why the status stream is lost; None: it is not."""
    head = _head(view, window, url=url, now=now, lost=lost)
    requests = sorted(view.requests.values(), key=lambda each: each.arrived)
    parts = [
        _agents(view.agents.values(), window),
        _fleets(view.fleets),
        _running([each for each in requests if each.state != "over"], now=now),
        _errors(view.errors[:MOST_ERRORS], now=now),
        _over([each for each in reversed(requests) if each.state == "over"]),
    ]
    there = [each for each in parts if each.rows]
    granted = fit([len(each.rows) for each in there], window.height - len(head))
    return Group(
        *head,
        *(each.table(n, width=window.width) for each, n in zip(there, granted, strict=True) if n),
    )


def fit(rows: Sequence[int], height: int) -> list[int]:
    """How many rows of each table are shown: in turn each gets one more, as long as there are lines. Those
    for which not even a head and a row are left, the last ones, get none.
    """
    granted = [0] * len(rows)
    for n in range(len(rows)):
        if height > HEAD_LINES:
            granted[n] = 1
            height -= HEAD_LINES + 1
    while height > 0:
        before = height
        for n, count in enumerate(rows):
            if height > 0 and 0 < granted[n] < count:
                granted[n] += 1
                height -= 1
        if height == before:
            break
    return granted


def _number(name: str) -> _Column:
    return _Column(name, justify="right")


# The head


def _head(
    view: StatusView, window: Window, *, url: str, now: float, lost: str | None
) -> list[Text]:
    about = view.about
    first = Text.assemble(("headrace", "bold"), f" {about.version}  {url}")
    if about.started is not None:
        first.append(f"  up {seconds(max(0.0, now - about.started))}", "dim")
    if not about.accepts:
        first.append("  accepts nothing new", "bold yellow")
    if about.supervisor_silent_for is not None:
        first.append(f"  supervisor silent for {seconds(about.supervisor_silent_for)}", "red")
    if lost is not None:
        first.append(f"  no connection: {one_line(lost)}; trying again", "bold red")
    busy, slots = view.slots
    ready = sum(agent.state == "ready" for agent in view.agents.values())
    second = Text.assemble(
        "agents ", (f"{ready}", "bold"), f" ready of {len(view.agents)}   slots ",
        (f"{busy}", "bold"), f" of {slots} ", bar(busy, slots, width=16), "   buffer ",
        (f"{view.buffer.waiting}", "bold yellow" if view.buffer.waiting else "bold"),
        f" of {view.buffer.capacity} ({size(view.buffer.bytes)})",
    )  # fmt: skip
    counts = view.counts
    third = Text.assemble(
        "requests ", (f"{counts.running}", "bold"), " running ",
        (f"{counts.waiting}", "bold"), " waiting   over ",
    )  # fmt: skip
    over = ", ".join(f"{one_line(name)} {count}" for name, count in counts.over.items())
    third.append(over or "none", "dim")
    rate = view.token_rate
    fourth = Text.assemble(
        ("" if rate is None else f"{rate:.1f}", "bold"), " tokens/s " if rate is not None else "",
        (_spark(view, max(0, min(60, window.width - 60))), "cyan"),
    )  # fmt: skip
    first_token = next(
        (each.first_token for each in reversed(view.history) if each.first_token is not None), None
    )
    if first_token is not None:
        fourth.append(f"   first token after {seconds(first_token)}")
    if view.model.desired is not None:
        name = view.model.desired.rpartition("/")[2]
        fourth.append(f"   model {one_line(name)}", "dim")
    lines = [first, second, third, fourth]
    if view.model.halted_by is not None:
        lines.append(Text("no further agent changes its model: one was lost in it", "bold red"))
    lines += _complaints(view.agents.values())
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return [line for line in lines[: max(1, window.height - 3)] if line.plain]


def _spark(view: StatusView, width: int) -> str:
    history = view.history[-width - 1 :]
    rates = [
        (after.tokens - before.tokens) / max(0.1, after.at - before.at)
        for before, after in pairwise(history)
    ]
    highest = max(rates, default=0.0)
    if highest <= 0:
        return ""
    return "".join(SPARK[min(7, int(max(0.0, rate) / highest * 7.999))] for rate in rates)


MOST_COMPLAINTS = 3


def _complaints(agents: Iterable[Agent]) -> list[Text]:
    told = [
        Text(one_line(f"{agent.title}: {issue.words}"), "red")
        for agent in agents
        for issue in agent.issues
    ]
    if len(told) > MOST_COMPLAINTS:
        told[MOST_COMPLAINTS - 1 :] = [
            Text(f"{len(told) - MOST_COMPLAINTS + 1} more issues: headrace status", "red")
        ]
    return told


# The tables


def _agents(agents: Iterable[Agent], window: Window) -> _Part:
    slots_width = max(4, min(16, (window.width - 80) // 2))
    rows = [
        [
            cell(agent.title),
            state_of(agent),
            Text.assemble(
                bar(agent.slots_busy, agent.slots, width=slots_width),
                f" {agent.slots_busy}/{agent.slots}",
            ),
            cell(_rate(agent.figures.decode_rate)),
            cell(_rate(agent.figures.prefill_rate)),
            cell(part(agent.figures.cell_use)),
            cell(part(agent.figures.hit_rate)),
            cell(agent.model),
        ]
        for agent in sorted(agents, key=lambda each: each.title)
    ]
    columns = [
        _Column("agent"), _Column("state"), _Column("slots"), _number("tokens/s"), _number("prompt/s"), _number("KV"),
        _number("cached"), _Column("model", kind="rest"),
    ]  # fmt: skip
    return _Part(columns, rows)


def state_of(agent: Agent) -> Text:
    """In a few words, with how much of a file has come."""
    words = agent.state.replace("_", " ")
    if agent.download is not None:
        words = f"{words}, {progress_words(agent)}".removeprefix("downloading, ")
    if agent.held and agent.state != "held":
        words += ", held"
    if agent.is_stuck and agent.state != "stuck":
        words += ", stuck"
    if agent.tries_again and agent.state != "retrying":
        words += ", tries again"
    return cell(words, "red" if agent.is_stuck else STYLES.get(agent.state, "cyan"))


def progress_words(agent: Agent) -> str:
    """Of a download."""
    download = agent.download
    if download is None:
        return ""
    much = f"{download.current / download.total:.0%}" if download.total else size(download.current)
    return f"fetching {much} of {download.filename}"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _fleets(fleets: Mapping[str, Fleet]) -> _Part:
    rows = [fleet_row(name, fleet) for name, fleet in sorted(fleets.items())]
    columns = [
        _Column("fleet"), _number("ready"), _number("wanted"), _number("limits"), _number("waiting"),
        _Column("why", kind="rest"),
    ]  # fmt: skip
    return _Part(columns, rows)


def fleet_row(name: str, fleet: Fleet) -> list[Text]:
    style = "red" if fleet.is_stuck else ""
    return [
        cell(name, style),
        cell(str(fleet.ready)),
        cell("" if fleet.wanted is None else str(fleet.wanted)),
        cell(f"{fleet.fleet.min}-{fleet.fleet.max}"),
        cell(str(fleet.waiting)),
        cell(one_line(fleet.reason or ""), style),
    ]


def _running(requests: Iterable[Request], *, now: float) -> _Part:
    rows = [
        [
            cell(each.id),
            cell(each.state, "yellow" if each.state == "waiting" else "green"),
            cell(seconds(max(0.0, now - each.arrived))),
            cell(seconds(each.waited)),
            cell(str(each.tokens)),
            cell(_prompt(each)),
            cell(each.agent),
            cell(one_line(each.why or "")),
        ]
        for each in requests
    ]
    columns = [
        _Column("request", kind="id"), _Column("state"), _number("age"), _number("waited"), _number("tokens"),
        _number("prompt"), _Column("agent"), _Column("why", kind="rest"),
    ]  # fmt: skip
    return _Part(columns, rows)


def _prompt(request: Request) -> str:
    if request.prompt_tokens is None:
        return ""
    cached = f" ({request.cached_tokens} cached)" if request.cached_tokens else ""
    return f"{request.prompt_tokens}{cached}"


def _over(requests: Iterable[Request]) -> _Part:
    rows = [
        [
            cell(each.id),
            cell(each.outcome, "" if each.outcome in {"stop", "length"} else "yellow"),
            cell(seconds(each.ended)),
            cell(seconds(each.waited)),
            cell(seconds(each.first_token)),
            cell(str(each.tokens)),
            cell(_prompt(each)),
            cell(each.agent),
            cell(one_line(each.message or each.why or "")),
        ]
        for each in requests
    ]
    columns = [
        _Column("over", kind="id"), _Column("outcome"), _number("took"), _number("waited"), _number("first"),
        _number("tokens"), _number("prompt"), _Column("agent"), _Column("", kind="rest"),
    ]  # fmt: skip
    return _Part(columns, rows)


def _errors(errors: Iterable[Fault], *, now: float) -> _Part:
    rows = [
        [
            cell(each.code, "red"),
            cell(f"{seconds(max(0.0, now - each.at))} ago"),
            cell(str(each.count)),
            cell(each.agent),
            cell(one_line(each.message)),
        ]
        for each in errors
    ]
    columns = [
        _Column("error"), _number("when"), _number("times"), _Column("agent"), _Column("message", kind="rest"),
    ]  # fmt: skip
    return _Part(columns, rows)
