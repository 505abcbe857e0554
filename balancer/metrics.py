"""What a monitoring system may read at ``/metrics``, in Prometheus' text format.

Counts of what happened are kept here, those of requests in ``meters``; what *is* comes from ``gauges``.
"""

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from balancer.gauges import Gauges, families
from balancer.limits import Limit
from balancer.meters import WAITS, Meters, ModelMeter
from common.errors import ErrorCode, RequestError

disable_created_metrics()  # else each has a second one beside it, which tells when it was made

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8; escaping=values"

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


REQUEUED = ("agent_lost", "busy", "given_back")


class Metrics:
    def __init__(self, observe: Callable[[], Gauges]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Read(lambda: families(observe())))
        self._meters = Meters()
        self._registry.register(_Read(self._meters.collect))
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
            buckets=WAITS,
            registry=self._registry,
        )
        # There from the start, so that the first of each is seen to be one more.
        for reason in REQUEUED:
            self.requeued.labels(reason)
        for code in REFUSALS:
            self.refused.labels(code)
        for limit in Limit:
            self.limit_refusals.labels(limit)

    def of(self, model: str | None) -> ModelMeter:
        """What is measured of the requests for one model. ``model``: None: nobody knows its name."""
        return self._meters.of(model)

    def use(self, model: str | None) -> None:
        """A request for it has come."""
        self._meters.use(model)

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


class _Read(Collector):
    """At each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()
