"""Is a text of metrics as Prometheus' guides want it? As ``promtool check metrics`` asks, and more."""

import re
from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

NAME = re.compile(r"headrace_[a-z0-9]+(_[a-z0-9]+)*")
LABEL = re.compile(r"[a-z]+(_[a-z]+)*")
OTHER_UNITS = re.compile(
    "_(ms|milliseconds?|microseconds?|nanoseconds?|minutes?|hours?|bits?|byte"
    "|(kilo|mega|giga|kibi|mebi|gibi)bytes?|[kmg]i?b|percent)(_|$)"
)
ENDINGS = ("_total", "_count", "_sum", "_bucket", "_created", "_info")
OF_SCRAPES = {"job", "instance", "quantile"}
"""Labels that Prometheus, or another type of metric, has for itself."""


def faults(text: str) -> list[str]:
    """What is wrong, a line each; none: it is good."""
    families = list(text_string_to_metric_families(text))
    found = [fault for family in families for fault in _faults(family)]
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    names = Counter(name for name, _ in types)
    found += [
        f"{name}: a counter without _total"
        for name, type_ in types
        if type_ == "counter" and not name.endswith("_total")
    ]
    found += [f"{name}: stands there twice" for name, count in names.items() if count > 1]
    series = Counter(
        line.rpartition(" ")[0] for line in text.splitlines() if line and line[0] != "#"
    )
    return found + [f"{each}: a series twice" for each, count in series.items() if count > 1]


def _faults(family: Metric) -> Iterator[str]:
    name = family.name
    if not family.documentation:
        yield f"{name}: no HELP"
    if family.type not in {"counter", "gauge", "histogram"}:
        yield f"{name}: its type is {family.type}"
    if not NAME.fullmatch(name):
        yield f"{name}: not a name of ours"
    if OTHER_UNITS.search(name):
        yield f"{name}: not a base unit"
    if name.endswith(ENDINGS):
        yield f"{name}: an ending that stands for something else"
    if family.type in name.split("_"):
        yield f"{name}: its type is in its name"
    if family.type == "histogram" and not name.endswith(("_seconds", "_bytes", "_tokens")):
        yield f"{name}: a histogram of what?"
    for sample in family.samples:
        labels = set(sample.labels)
        if family.type == "histogram" and sample.name.endswith("_bucket"):
            labels.discard("le")
        yield from (
            f"{name}: the label {label}"
            for label in labels
            if not LABEL.fullmatch(label) or label in OF_SCRAPES or label == "le"
        )
        if family.type != "gauge" and not sample.value >= 0:
            yield f"{sample.name}: {sample.value}"
    if len({frozenset(set(sample.labels) - {"le"}) for sample in family.samples}) > 1:
        yield f"{name}: series with unlike labels"
    if family.type == "histogram":
        yield from _histogram_faults(family)


def _histogram_faults(family: Metric) -> Iterator[str]:
    buckets: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
    counts: dict[frozenset[tuple[str, str]], float] = {}
    for sample in family.samples:
        key = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
        if sample.name.endswith("_bucket"):
            buckets.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[key] = sample.value
    if buckets.keys() != counts.keys():
        yield f"{family.name}: buckets without a count, or the other way round"
    for key, its in buckets.items():
        if its != sorted(its) or sorted(value for _, value in its) != [value for _, value in its]:
            yield f"{family.name}: buckets that do not rise"
        if its[-1] != (float("inf"), counts.get(key)):
            yield f"{family.name}: the last bucket is not all"
