"""What a monitoring system may read at ``/metrics``, in Prometheus' text format.

Counts of what happened are kept here; what *is* (agents, slots, buffer) is read from the balancer
at each scrape, so that an agent that has gone leaves no series behind.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balancer.limits import Limit
from common.errors import ErrorCode, RequestError
from common.messages import Figures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8; escaping=values"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class AgentGauges:
    name: str | None
    slots_total: int
    slots_processing: int
    figures: Figures = field(default_factory=Figures)
    step_age: float | None = None


@dataclass(frozen=True, slots=True)
class LimitGauge:
    limit: Limit
    most: int | None
    """None: it is not bounded here."""
    used: int | None
    """None: it is not a sum."""


@dataclass(frozen=True, slots=True)
class Gauges:
    buffered: int
    agents: Iterable[AgentGauges]
    abandoned: int = 0
    limits: Iterable[LimitGauge] = ()


REFUSALS = tuple(
    code
    for code in ErrorCode
    if code
    not in {
        ErrorCode.AGENT_LOST,
        ErrorCode.BUFFER_TIMEOUT,
        ErrorCode.CANCELLED_BY_OPERATOR,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.DECODE_FAILED,
        ErrorCode.GRAMMAR_REJECTED,
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.SLOW_CLIENT,
    }
)
"""Codes of what is not taken on; the others tell what became of a request that was."""

LIMITS_OF_CODES = {
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Limit.PROMPT_TOKENS,
}
"""Bounds that agents watch over."""


class Metrics:
    def __init__(self, observe: Callable[[], Gauges]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Observed(observe))
        self.requests = Counter(
            "headrace_requests",
            "Requests that are over, by how they ended",
            ["outcome"],
            registry=self._registry,
        )
        self.tokens = Counter(
            "headrace_tokens_generated", "Tokens sent to clients", registry=self._registry
        )
        self.prompt_tokens = Counter(
            "headrace_prompt_tokens", "Prompt tokens of finished requests", registry=self._registry
        )
        self.cached_prompt_tokens = Counter(
            "headrace_cached_prompt_tokens",
            "Prompt tokens of finished requests that an agent held already",
            registry=self._registry,
        )
        self.wait = Histogram(
            "headrace_buffer_wait_seconds",
            "From arrival to a slot",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.requeued = Counter(
            "headrace_requeued",
            "Requests put back at the head of the buffer",
            ["reason"],
            registry=self._registry,
        )
        self.given_up = Counter(
            "headrace_agents_given_up",
            "Agents that answered and did nothing else",
            registry=self._registry,
        )
        self.resumed = Counter(
            "headrace_resumed",
            "Times that an answer which had begun went on from another agent",
            registry=self._registry,
        )

        self.refused = Counter(
            "headrace_refused_requests",
            "Requests, messages and connections that were turned away, by the error's code",
            ["reason"],
            registry=self._registry,
        )
        self.limit_refusals = Counter(
            "headrace_limit_refusals",
            "Refusals because of a bound: see headrace_limit",
            ["limit"],
            registry=self._registry,
        )
        self.cancel = Histogram(
            "headrace_cancel_seconds",
            "From a client's leaving until its slot is free",
            buckets=SECONDS,
            registry=self._registry,
        )
        # There from the start, so that the first of each is seen to be one more.
        for code in REFUSALS:
            self.refused.labels(code)
        for limit in Limit:
            self.limit_refusals.labels(limit)

    def refuse(self, error: RequestError) -> None:
        """At a border, of what has not become a request."""
        if error.code in REFUSALS:
            self.refused.labels(error.code).inc()
        if error.limit is not None:
            self.limit_refusals.labels(error.limit).inc()

    def refuse_request(self, code: ErrorCode) -> None:
        """Of one that was submitted, and not begun."""
        if code in REFUSALS:
            self.refused.labels(code).inc()
        if code in LIMITS_OF_CODES:
            self.reach(LIMITS_OF_CODES[code])

    def reach(self, limit: Limit) -> None:
        """Somebody has come up against it."""
        self.limit_refusals.labels(limit).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Observed(Collector):
    def __init__(self, observe: Callable[[], Gauges]) -> None:
        self._observe = observe

    def collect(self) -> Iterator[Metric]:
        gauges = self._observe()
        buffered = GaugeMetricFamily("headrace_requests_buffered", "Requests that wait for a slot")
        buffered.add_metric([], gauges.buffered)
        yield buffered
        abandoned = GaugeMetricFamily(
            "headrace_abandoned_requests", "Requests with a slot for which nobody waits any longer"
        )
        abandoned.add_metric([], gauges.abandoned)
        yield abandoned
        yield from _limits(gauges.limits)
        agents = list(gauges.agents)
        count = GaugeMetricFamily("headrace_agents", "Agents that are linked")
        count.add_metric([], len(agents))
        yield count
        # By name, since ids are new with each process: a name may stand for several agents.
        named: dict[str, list[AgentGauges]] = {}
        for agent in agents:
            named.setdefault(agent.name or "unnamed", []).append(agent)
        yield from _slots(named)
        yield from _scheduler(named)


def _limits(limits: Iterable[LimitGauge]) -> Iterator[Metric]:
    most = GaugeMetricFamily(
        "headrace_limit", "What is bounded, and by how much; +Inf: not here", labels=["limit"]
    )
    used = GaugeMetricFamily(
        "headrace_limit_used", "How much is in use of what is bounded in sum", labels=["limit"]
    )
    for gauge in limits:
        most.add_metric([gauge.limit], math.inf if gauge.most is None else gauge.most)
        if gauge.used is not None:
            used.add_metric([gauge.limit], gauge.used)
    yield from (most, used)


Named: TypeAlias = Mapping[str, Sequence[AgentGauges]]


def _slots(named: Named) -> Iterator[Metric]:
    total = GaugeMetricFamily("headrace_slots", "Slots that could run a request", labels=["agent"])
    processing = GaugeMetricFamily(
        "headrace_slots_processing", "Slots that run a request", labels=["agent"]
    )
    for name, agents in named.items():
        total.add_metric([name], sum(agent.slots_total for agent in agents))
        processing.add_metric([name], sum(agent.slots_processing for agent in agents))
    yield total
    yield processing


def _scheduler(named: Named) -> Iterator[Metric]:
    """What the agents' schedulers say of themselves."""
    cells = GaugeMetricFamily(
        "headrace_kv_cells", "KV cells by what holds them", labels=["agent", "state"]
    )
    prompts = CounterMetricFamily(
        "headrace_scheduler_prompt_tokens",
        "Prompt tokens by where they came from: fed to the model, or cached",
        labels=["agent", "source"],
    )
    pauses = CounterMetricFamily(
        "headrace_scheduler_pauses",
        "Requests that gave up their KV cells for an older one, to be fed again",
        labels=["agent"],
    )
    waiting = GaugeMetricFamily(
        "headrace_scheduler_waiting",
        "Requests with a slot that wait for KV cells or for a prefix",
        labels=["agent"],
    )
    for name, agents in named.items():
        figures = [agent.figures for agent in agents]
        cells.add_metric([name, "free"], sum(each.cells_free for each in figures))
        cells.add_metric([name, "cached"], sum(each.cells_cached for each in figures))
        cells.add_metric([name, "running"], sum(each.cells_running for each in figures))
        prompts.add_metric([name, "fed"], sum(each.prompt_tokens_fed for each in figures))
        prompts.add_metric([name, "cached"], sum(each.prompt_tokens_cached for each in figures))
        pauses.add_metric([name], sum(each.pauses for each in figures))
        waiting.add_metric([name], sum(each.waiting for each in figures))
    yield from (cells, prompts, pauses, waiting)
    yield _measured(
        named,
        "headrace_prefill_tokens_per_second",
        "Prompt tokens a second of passes that only fed prompts; absent if there were none",
        lambda agent: agent.figures.prefill_rate,
    )
    yield _measured(
        named,
        "headrace_decode_tokens_per_second",
        "Generated tokens a second of all streams together; absent if there were none",
        lambda agent: agent.figures.decode_rate,
    )
    yield _measured(
        named,
        "headrace_concurrent_sequences",
        "Streams that generate in one pass, on average; absent if there were none",
        lambda agent: agent.figures.concurrency,
    )
    yield _measured(
        named,
        "headrace_step_age_seconds",
        "Since the newest pass began; absent while there is nothing to do",
        lambda agent: agent.step_age,
        combine=max,
    )


def _measured(
    named: Named,
    name: str,
    description: str,
    value: Callable[[AgentGauges], float | None],
    combine: Callable[[Iterable[float]], float] = sum,
) -> Metric:
    family = GaugeMetricFamily(name, description, labels=["agent"])
    for agent_name, agents in named.items():
        values = [each for agent in agents if (each := value(agent)) is not None]
        if values:
            family.add_metric([agent_name], combine(values))
    return family
