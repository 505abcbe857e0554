"""How fleets have grown and shrunk, as text and as a picture."""

import io
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

from deploy.bench_report import PictureFormat

BARS = " ▁▂▃▄▅▆▇█"
LONGEST_NAME = 8


@dataclass(frozen=True, slots=True)
class Series:
    """What was seen of one fleet, at some times in rising order."""

    times: list[float]
    """Seconds."""
    agents: list[int]
    waiting: list[int]
    """Requests without a slot."""
    served: list[int]
    """Requests that are over, in all."""

    def add(self, time: float, *, agents: int, waiting: int, served: int) -> None:
        self.times.append(time)
        self.agents.append(agents)
        self.waiting.append(waiting)
        self.served.append(served)

    def rates(self, bins: int) -> tuple[list[float], list[float]]:
        """Equal parts of the time: where each begins, and how many requests a second were served
        in it.
        """
        if len(self.times) < 2:
            return [], []
        begin, width = self.times[0], (self.times[-1] - self.times[0]) / bins
        if not width:
            return [], []
        edges = [begin + n * width for n in range(bins + 1)]
        counts = [self.served[max(bisect_right(self.times, edge) - 1, 0)] for edge in edges]
        counts[-1] = self.served[-1]
        rates = [(after - before) / width for before, after in pairwise(counts)]
        return edges[:-1], rates

    def highest(self, values: Sequence[int], bins: int) -> list[int]:
        """Of each of the equal parts of the time; what held when it began counts."""
        if not self.times:
            return []
        begin, width = self.times[0], (self.times[-1] - self.times[0]) / bins or 1.0
        highest: list[int] = []
        first = 0
        for n in range(bins):
            end = max(bisect_right(self.times, begin + (n + 1) * width), first + 1)
            highest.append(max(values[first:end]))
            first = min(end - 1, len(values) - 1)
        return highest


def to_text(series: Series, *, title: str, width: int = 72) -> str:
    """A line each for agents, waiting and served requests."""
    rates = series.rates(width)[1]
    lines = [title]
    for name, values in (
        ("agents", series.highest(series.agents, width)),
        ("waiting", series.highest(series.waiting, width)),
        ("served/s", rates),
    ):
        most = max(values, default=0)
        lines.append(f"{name:<{LONGEST_NAME}} |{_bars(values, most)}| at most {most:.3g}")
    return "\n".join(lines)


def _bars(values: Sequence[float], most: float) -> str:
    """What is not nothing can be seen."""
    return "".join(BARS[ceil(value / most * (len(BARS) - 1)) if most else 0] for value in values)


def to_picture(series: Mapping[str, Series], *, title: str, format: PictureFormat) -> bytes:
    """Of some fleets, a column each. Needs matplotlib."""
    from matplotlib.figure import Figure  # optional, and takes a second to import

    columns = max(len(series), 1)
    figure = Figure(figsize=(6 * columns, 7), layout="constrained")
    figure.suptitle(title)
    grid: Any = figure.subplots(3, columns, squeeze=False, sharex="col")
    for column, (name, each) in enumerate(series.items()):
        scale, unit = _unit(each.times)
        times = [time / scale for time in each.times]
        agents, waiting, served = grid[:, column]
        agents.step(times, each.agents, where="post")
        agents.set(title=name, ylabel="agents", ylim=(0, None))
        waiting.step(times, each.waiting, where="post", color="tab:red")
        waiting.set(ylabel="requests waiting", ylim=(0, None))
        begins, rates = each.rates(200)
        served.step([begin / scale for begin in begins], rates, where="post", color="tab:green")
        served.set(ylabel="requests served per second", xlabel=unit, ylim=(0, None))
        for axes in (agents, waiting, served):
            axes.grid(visible=True, alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format=format.value, dpi=120)
    return file.getvalue()


def _unit(times: Sequence[float]) -> tuple[float, str]:
    span = times[-1] - times[0] if times else 0.0
    if span > 3 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if span > 300 else (1.0, "seconds")
