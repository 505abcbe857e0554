"""What a monitoring system may read at ``/metrics``, in Prometheus' text format.

Counts of what happened are kept here; what *is* (agents, slots, buffer) is read from the balancer
at each scrape, so that an agent that has gone leaves no series behind.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8; escaping=values"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class AgentGauges:
    name: str | None
    slots_total: int
    slots_processing: int


@dataclass(frozen=True, slots=True)
class Gauges:
    buffered: int
    agents: Iterable[AgentGauges]


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
        agents = list(gauges.agents)
        # By name, since ids are new with each process: a name may stand for several agents.
        names = sorted({agent.name or "unnamed" for agent in agents})
        count = GaugeMetricFamily("headrace_agents", "Agents that are linked")
        count.add_metric([], len(agents))
        yield count
        total = GaugeMetricFamily(
            "headrace_slots", "Slots that could run a request", labels=["agent"]
        )
        processing = GaugeMetricFamily(
            "headrace_slots_processing", "Slots that run a request", labels=["agent"]
        )
        for name in names:
            named = [agent for agent in agents if (agent.name or "unnamed") == name]
            total.add_metric([name], sum(agent.slots_total for agent in named))
            processing.add_metric([name], sum(agent.slots_processing for agent in named))
        yield total
        yield processing
