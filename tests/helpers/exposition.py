"""What stands in a text of metrics."""

import re
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LABEL = re.compile(r'(\w+)="([^"]*)"')


def samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def total(text: str, series: str) -> float:
    """The sum of all series of this name with these labels and perhaps others:
    ``headrace_requests_total{outcome="stop"}``.
    """
    name, _, told = series.partition("{")
    labels = set(LABEL.findall(told))
    return sum(
        sample.value
        for sample in samples(text)
        if sample.name == name and labels <= sample.labels.items()
    )


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """The sums of a metric for each value of one of its labels."""
    sums: dict[str, float] = {}
    for sample in samples(text):
        if sample.name == name:
            value = sample.labels[label]
            sums[value] = sums.get(value, 0.0) + sample.value
    return sums
