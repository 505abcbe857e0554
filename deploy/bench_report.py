"""What ``headrace bench`` decides and says: which prompts are sent when, and what the outcomes mean.

No I/O and no clock here: times are seconds since any one moment, chance is a seed, and a picture is
returned as bytes. ``deploy.bench`` sends the requests.
"""

import enum
import io
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from common.errors import HeadraceError

_WORDS = """
able above act after age all alone already always amount answer area around ask back bank bear
beautiful bed begin believe best between bird blood board body both box bring build but call can
care case cause certain change child church class close color common cool corner could course
cross cut dark deal death die direct dog doubt draw dress drive during ear earth easy edge egg
either energy enough equal evening ever example face fair family farm father feel field fill
find finger fire fish floor flower follow foot forest forward free friend fruit game gas general
give gold good green group guess hand hard have hear heat help high history hold home horse hot
house hundred ice island join keep kill king knew lady land large late law lead leave leg letter
lie lift like list little long lose love machine make many mark matter mean meat member might
milk minute moment month morning mother mouth music nature neck never news nice nine north note
notice number off often old one order out own pain pair part pass pay people person piece plain
plane play poor possible power pretty problem public push question quiet race rain ran read real
red rich right rise road roll round run said salt sand saw school sea seat see sell sense serve
seven shall share she shoe short shoulder show sign simple sing sit size sleep small smile
social soil some song sound space special spend square star state stay still stood store strange
strong such summer sure surprise swim table talk teach tell test thank then these thin think
this thought three time together tone took total toward trade travel trip
"""
WORDS = tuple(_WORDS.split())
"""Common English words, each of which is one token in most vocabularies when a space precedes it."""

PICTURE_NEEDS = "matplotlib>=3.11,<4"
"""As the extra ``bench`` in pyproject.toml says."""

LONGEST_REASON = 300
"""Characters of a reason that are kept; reasons are counted, so they must not differ in details."""

SHOWN_REASONS = 10


class BenchError(HeadraceError):
    """A benchmark that cannot be run, or whose results cannot be shown."""


# The plan


@dataclass(frozen=True, slots=True)
class Closed:
    """So many clients, each of which sends its next request when its last one is over."""

    clients: int


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come when they come, however busy the server is."""

    times: tuple[float, ...]
    """Seconds after the beginning, one for each request, rising."""


Arrivals: TypeAlias = Closed | Open


@dataclass(frozen=True, slots=True)
class Plan:
    prompts: tuple[str, ...]
    arrivals: Arrivals
    warm_up: tuple[str, ...] = ()
    """Sent before the others, not counted, and alike to none of them."""


def make_prompts(
    seed: int, *, requests: int, tokens: int, shared_tokens: int = 0
) -> tuple[str, ...]:
    """Prompts of about ``tokens`` tokens each that are their own, after ``shared_tokens`` that are
    the same in all. What is shared depends on the seed alone, not on the number of requests.
    """
    shared = _text(random.Random(f"{seed} shared"), shared_tokens)
    chance = random.Random(f"{seed} own")
    return tuple(" ".join(filter(None, (shared, _text(chance, tokens)))) for _ in range(requests))


def make_warm_up(seed: int, *, requests: int, tokens: int) -> tuple[str, ...]:
    """Prompts that share nothing with those that are measured, lest they fill a prefix cache."""
    chance = random.Random(f"{seed} warm-up")
    return tuple(_text(chance, tokens) for _ in range(requests))


def poisson(seed: int, *, requests: int, rate: float) -> Open:
    """Independent arrivals, ``rate`` a second on average; the first one at once."""
    chance = random.Random(f"{seed} arrivals")
    pauses = (chance.expovariate(rate) for _ in range(requests - 1))
    return Open(tuple(itertools.accumulate(pauses, initial=0.0)))


def _text(chance: random.Random, tokens: int) -> str:
    return " ".join(chance.choices(WORDS, k=tokens))


# What came of it


@dataclass(frozen=True, slots=True)
class Usage:
    """Counted in tokens, by the server; None: it does not say."""

    prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request that is over. All times are of one clock."""

    sent: float
    """When it was due: a client that is late must not make the server look fast."""
    texts: tuple[float, ...]
    """When something with text in it came."""
    ended: float
    usage: Usage | None = None
    error: str | None = None
    """None: it was answered to its end."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def time_to_first_token(self) -> float | None:
        """None: no text came."""
        return self.texts[0] - self.sent if self.texts else None

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in itertools.pairwise(self.texts))

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def reported_tokens(self) -> int | None:
        """How many output tokens the server says there were; None: it does not say."""
        return None if self.usage is None else self.usage.output_tokens

    @property
    def output_tokens(self) -> int:
        """As the server counts them, else as many as there were texts."""
        return len(self.texts) if self.reported_tokens is None else self.reported_tokens

    def meets(self, target: "Target") -> bool:
        """An answer without any text meets no target for its first token."""
        first = self.time_to_first_token
        return (
            self.ok
            and (target.first is None or (first is not None and first <= target.first))
            and (target.gap is None or max(self.gaps, default=0.0) <= target.gap)
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What a good answer is, in seconds; None: anything is good."""

    first: float | None = None
    """Until its first token, at most."""
    gap: float | None = None
    """Between any two of its tokens, at most."""

    @property
    def is_set(self) -> bool:
        return self.first is not None or self.gap is not None


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some durations, in seconds. Each is one that was measured (the nearest rank)."""

    p50: float
    p95: float
    p99: float
    max: float


def spread(values: Iterable[float]) -> Spread | None:
    """None if there are none."""
    ranked = sorted(values)
    if not ranked:
        return None
    p50, p95, p99 = (ranked[math.ceil(len(ranked) * share) - 1] for share in (0.5, 0.95, 0.99))
    return Spread(p50, p95, p99, ranked[-1])


class CountedBy(enum.StrEnum):
    USAGE = "usage"
    """The server said how many there were."""
    EVENTS = "events"
    """It did not; each event with text in it counts as one."""
    BOTH = "usage, and events where there was none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Only requests that were answered to their end count, except where errors are counted."""

    ok: int
    failed: int
    unfinished: int
    """Under way when the run was interrupted."""
    errors: Mapping[str, int]
    """How many failed for which reason, the most frequent first."""
    seconds: float
    """From the first request to the end of the last one."""
    requests_per_second: float
    output_tokens: int
    output_tokens_counted_by: CountedBy
    output_tokens_per_second: float
    prompt_tokens: int | None
    """None, here and below: the server does not say."""
    prompt_tokens_per_second: float | None
    cached_prompt_tokens: int | None
    time_to_first_token: Spread | None
    """None, here and below: nothing was measured."""
    gaps: Spread | None
    total_time: Spread | None
    target: Target
    goodput: float | None
    """Requests per second that met the target; None: there is no target."""


def summarize(
    outcomes: Sequence[Outcome], *, seconds: float, unfinished: int = 0, target: Target = Target()
) -> Figures:
    good = [outcome for outcome in outcomes if outcome.ok]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    prompt_tokens = _sum(outcome.usage and outcome.usage.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    met = sum(outcome.meets(target) for outcome in good)
    firsts = (outcome.time_to_first_token for outcome in good)

    def per_second(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Figures(
        ok=len(good),
        failed=len(outcomes) - len(good),
        unfinished=unfinished,
        errors=dict(errors.most_common()),
        seconds=seconds,
        requests_per_second=per_second(len(good)),
        output_tokens=output_tokens,
        output_tokens_counted_by=_counted_by(good),
        output_tokens_per_second=per_second(output_tokens),
        prompt_tokens=prompt_tokens,
        prompt_tokens_per_second=None if prompt_tokens is None else per_second(prompt_tokens),
        cached_prompt_tokens=_sum(o.usage and o.usage.cached_prompt_tokens for o in good),
        time_to_first_token=spread(first for first in firsts if first is not None),
        gaps=spread(gap for outcome in good for gap in outcome.gaps),
        total_time=spread(outcome.seconds for outcome in good),
        target=target,
        goodput=per_second(met) if target.is_set else None,
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """None unless all are known, and if there are none."""
    total: int | None = None
    for count in counts:
        if count is None:
            return None
        total = (total or 0) + count
    return total


def _counted_by(outcomes: Sequence[Outcome]) -> CountedBy:
    reported = sum(outcome.reported_tokens is not None for outcome in outcomes)
    if reported == len(outcomes):
        return CountedBy.USAGE
    return CountedBy.BOTH if reported else CountedBy.EVENTS


def reason(text: str) -> str:
    """One short printable line."""
    line = " ".join(text.split()) or "no reason was given"
    line = "".join(character for character in line if character.isprintable())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."


# How it is told


def to_json(settings: Mapping[str, Any], figures: Figures, outcomes: Sequence[Outcome]) -> bytes:
    """``{"settings": ..., "figures": ..., "requests": [...]}``; durations in seconds, and
    ``sent`` counts from the first request. Whatever is not known is null.
    """
    begin = min((outcome.sent for outcome in outcomes), default=0.0)
    requests = [
        {
            "sent": outcome.sent - begin,
            "time_to_first_token": outcome.time_to_first_token,
            "longest_gap": max(outcome.gaps, default=None),
            "total_time": outcome.seconds,
            "output_tokens": outcome.output_tokens,
            "prompt_tokens": outcome.usage and outcome.usage.prompt_tokens,
            "cached_prompt_tokens": outcome.usage and outcome.usage.cached_prompt_tokens,
            "error": outcome.error,
        }
        for outcome in outcomes
    ]
    document = {"settings": settings, "figures": asdict(figures), "requests": requests}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def to_tables(figures: Figures) -> Group:
    """For a terminal."""
    counts = Table.grid(padding=(0, 2))
    counts.add_column()
    counts.add_column(justify="right")
    counts.add_column()

    def row(name: str, value: str, remark: str = "") -> None:
        counts.add_row(name, value, escape(remark))

    row("requests ok", str(figures.ok), f"in {figures.seconds:.2f} s")
    row("requests failed", str(figures.failed))
    for error, count in list(figures.errors.items())[:SHOWN_REASONS]:
        row("", str(count), error)
    if more := sum(list(figures.errors.values())[SHOWN_REASONS:]):
        row("", str(more), "for other reasons")
    if figures.unfinished:
        row("requests unfinished", str(figures.unfinished), "interrupted, not counted")
    row("requests/s", f"{figures.requests_per_second:.2f}")
    row(
        "output tokens/s",
        f"{figures.output_tokens_per_second:.1f}",
        f"{figures.output_tokens} tokens, counted by {figures.output_tokens_counted_by}",
    )
    if figures.prompt_tokens_per_second is not None:
        row(
            "prompt tokens/s",
            f"{figures.prompt_tokens_per_second:.1f}",
            f"{figures.prompt_tokens} tokens{_cached(figures)}",
        )
    if figures.goodput is not None:
        row("goodput, requests/s", f"{figures.goodput:.2f}", _aim(figures.target))

    times = Table("", "p50", "p95", "p99", "max")
    for column in times.columns[1:]:
        column.justify = "right"
    for name, measured in (
        ("time to first token", figures.time_to_first_token),
        ("gap between tokens", figures.gaps),
        ("total time", figures.total_time),
    ):
        if measured is not None:
            values = (measured.p50, measured.p95, measured.p99, measured.max)
            times.add_row(name, *(_duration(value) for value in values))
    return Group(counts, times) if times.row_count else Group(counts)


def _cached(figures: Figures) -> str:
    cached = figures.cached_prompt_tokens
    return "" if cached is None else f", {cached} of them from a cache"


def _aim(target: Target) -> str:
    aims: list[str] = []
    if target.first is not None:
        aims.append(f"first token within {_duration(target.first)}")
    if target.gap is not None:
        aims.append(f"no gap above {_duration(target.gap)}")
    return ", ".join(aims)


def _duration(seconds: float) -> str:
    """Three digits or so: ``4.2 ms``, ``87 ms``, ``1.25 s``."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


class PictureFormat(enum.StrEnum):
    PNG = "png"
    SVG = "svg"


def picture_format(file_name: str) -> PictureFormat:
    """By the name's ending. Raises ``BenchError``, also if no picture can be drawn here."""
    try:
        _, dot, ending = file_name.rpartition(".")
        chosen = PictureFormat(ending.lower() if dot else "")
    except ValueError as error:
        raise BenchError(f"{file_name!r} ends neither in .png nor in .svg") from error
    if find_spec("matplotlib") is None:
        raise BenchError(f"a picture needs matplotlib: pip install '{PICTURE_NEEDS}'")
    return chosen


def to_picture(outcomes: Sequence[Outcome], *, title: str, format: PictureFormat) -> bytes:
    """Tokens over time, and how the durations are spread. Needs matplotlib."""
    from matplotlib.figure import Figure  # optional, and takes a second to import

    good = [outcome for outcome in outcomes if outcome.ok]
    firsts = [outcome.time_to_first_token for outcome in good]
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    over_time, first, gap, total = figure.subplots(2, 2).flat
    seconds, counts = texts_per_second(good)
    over_time.step(seconds, counts, where="post")
    over_time.set(title="stream events", xlabel="seconds", ylabel="per second", ylim=(0, None))
    for axes, name, values in (
        (first, "time to first token", [value for value in firsts if value is not None]),
        (gap, "gap between tokens", [value for outcome in good for value in outcome.gaps]),
        (total, "total time", [outcome.seconds for outcome in good]),
    ):
        if values:
            axes.ecdf(values)
        axes.set(title=name, xlabel="seconds", ylabel="share of all", xlim=(0, None), ylim=(0, 1))
        axes.grid(visible=True, alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, format=format.value, dpi=120)
    return file.getvalue()


def texts_per_second(
    outcomes: Sequence[Outcome], bins: int = 60
) -> tuple[list[float], list[float]]:
    """Events with text, per second, in equal parts of the time from the first request to the last
    event: where each part begins (and one point more for the end), and how many a second came.
    """
    times = [time for outcome in outcomes for time in outcome.texts]
    if not times:
        return [], []
    begin = min(outcome.sent for outcome in outcomes)
    width = max(max(times) - begin, 1e-9) / bins
    counts = Counter(min(int((time - begin) / width), bins - 1) for time in times)
    rates = [counts[n] / width for n in range(bins)]
    return [n * width for n in range(bins + 1)], [*rates, rates[-1]]
