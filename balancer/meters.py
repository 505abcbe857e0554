"""What is measured of requests, by model. No I/O and no clock here.

Each token is measured, so that must cost next to nothing: counts are plain numbers, and are made into
metrics when somebody asks for them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from balancer.terms import Route

OTHER = "other"
"""Stands for models whose names are not known."""

MOST_MODELS = 64

WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
DURATIONS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds, in seconds."""


class Distribution:
    """How many of so many seconds there were."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [*map(str, self._bounds), "+Inf"]
        counts = accumulate(self._counts)
        family.add_metric(labels, list(zip(bounds, counts, strict=True)), self._sum)


class ModelMeter:
    """Of all requests for one model."""

    def __init__(self) -> None:
        self.tokens = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.waits = Distribution(WAITS)
        self.first_tokens = Distribution(WAITS)
        self.gaps = Distribution(GAPS)
        self.durations = Distribution(DURATIONS)
        self._over: dict[tuple[Route, str], int] = {}

    def over(self, route: Route, outcome: str, seconds: float) -> None:
        """A request has ended, so long after its arrival."""
        self.durations.observe(seconds)
        key = (route, outcome)
        self._over[key] = self._over.get(key, 0) + 1

    @property
    def outcomes(self) -> Mapping[tuple[Route, str], int]:
        """How many requests ended so, by route and outcome."""
        return self._over


class Meters:
    """By the names of models that the balancer knows, as many as have series of their own."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMeter] = {OTHER: ModelMeter()}

    def of(self, model: str | None) -> ModelMeter:
        if model is None:
            return self._models[OTHER]
        meter = self._models.get(model)
        return self._begin(model) if meter is None else meter

    def use(self, model: str | None) -> None:
        """A request for it has come: of those beyond ``MOST_MODELS`` the ones go that nobody asks for."""
        if model in self._models and model != OTHER:
            self._models[model] = self._models.pop(model)

    def _begin(self, model: str) -> ModelMeter:
        if len(self._models) >= MOST_MODELS:
            del self._models[next(name for name in self._models if name != OTHER)]
        meter = self._models[model] = ModelMeter()
        return meter

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "headrace_requests",
            "Requests that are over, by route, model, and how they ended",
            labels=["route", "model", "outcome"],
        )
        for name, model in self._models.items():
            for (route, outcome), count in model.outcomes.items():
                requests.add_metric([route, name, outcome], count)
        yield requests
        yield self._counter(
            "headrace_tokens_generated", "Tokens sent to clients", lambda model: model.tokens
        )
        yield self._counter(
            "headrace_prompt_tokens",
            "Prompt tokens of finished requests",
            lambda model: model.prompt_tokens,
        )
        yield self._counter(
            "headrace_cached_prompt_tokens",
            "Prompt tokens of finished requests that an agent held already",
            lambda model: model.cached_prompt_tokens,
        )
        yield self._histogram(
            "headrace_buffer_wait_seconds", "From arrival to a slot", lambda model: model.waits
        )
        yield self._histogram(
            "headrace_time_to_first_token_seconds",
            "From arrival to the first token",
            lambda model: model.first_tokens,
        )
        yield self._histogram(
            "headrace_inter_token_seconds",
            "From one token of a request to its next",
            lambda model: model.gaps,
        )
        yield self._histogram(
            "headrace_request_seconds",
            "From arrival to the end, however it came",
            lambda model: model.durations,
        )

    def _counter(self, name: str, text: str, value: Callable[[ModelMeter], int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model"])
        for model_name, model in self._models.items():
            family.add_metric([model_name], value(model))
        return family

    def _histogram(
        self, name: str, text: str, value: Callable[[ModelMeter], Distribution]
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model"])
        for model_name, model in self._models.items():
            value(model).add_to(family, [model_name])
        return family
