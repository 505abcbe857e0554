"""What *is*, in the metrics: agents, slots, buffer. Read from the balancer at each scrape, so that an
agent that has gone leaves no series behind.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from balancer.agent_states import AgentState
from balancer.limits import Limit
from common.messages import Figures


@dataclass(frozen=True, slots=True)
class AgentGauges:
    name: str | None
    slots_total: int
    slots_processing: int
    figures: Figures = field(default_factory=Figures)
    step_age: float | None = None
    state: AgentState = AgentState.READY


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


def families(gauges: Gauges) -> Iterator[Metric]:
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
    count = GaugeMetricFamily("headrace_agents", "Agents that are linked", labels=["state"])
    states = Counter(agent.state for agent in agents)
    for state in AgentState:
        count.add_metric([state], states[state])
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
        "headrace_step_seconds",
        "What a pass takes of late, on average; absent if there were none",
        lambda agent: agent.figures.step_seconds,
        combine=max,
    )
    yield _measured(
        named,
        "headrace_step_tokens",
        "Tokens that go into a pass of late, on average: its batch; absent if there were none",
        lambda agent: agent.figures.step_tokens,
        combine=max,
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
