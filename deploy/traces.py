"""Traces of requests for OpenTelemetry, sent over OTLP/HTTP. Off unless an address is said.

The balancer alone makes them, when a request is over, from what it has written down: see
``balancer.spans``. They are sent by a thread of their own; if nobody takes them, they are dropped.
"""

import logging
import threading
from collections.abc import Sequence
from time import monotonic
from urllib.parse import urlsplit

from opentelemetry.context import Context, attach, detach
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from balancer.journal import Record
from balancer.spans import Kind, Span, trace
from common.ids import RequestId

log = logging.getLogger(__name__)

MOST_WAITING = 4096
"""Spans that have not been sent; more are dropped."""

SEND_INTERVAL = 1.0
TIMEOUT = 5.0
"""Seconds in which a collector must take what it is sent."""

CLOSING = 2.0
"""Seconds that what is left may take at the end."""

COMPLAINT_INTERVAL = 60.0
"""Seconds between two lines in the log about a collector that takes nothing."""

KINDS = {Kind.SERVER: SpanKind.SERVER, Kind.INTERNAL: SpanKind.INTERNAL}

HEADERS = ("traceparent", "tracestate")

_propagator = TraceContextTextMapPropagator()


class Traces:
    """An observer of the balancer's records."""

    def __init__(self, address: str, *, timeout: float = TIMEOUT) -> None:
        """``address``: where spans are sent, such as ``http://127.0.0.1:4318/v1/traces``;
        ``timeout``: in seconds, for each time.
        """
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they would tell of each attempt
        exporter = OTLPSpanExporter(address, timeout=timeout)
        self._processor = BatchSpanProcessor(
            _Complaining(exporter, urlsplit(address).hostname or ""),
            max_queue_size=MOST_WAITING,
            schedule_delay_millis=SEND_INTERVAL * 1000,
        )
        provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource.create({"service.name": "headrace"}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("headrace")
        self._parents: dict[RequestId, Context] = {}
        """Of requests whose clients have told of one."""

    def arrived(self, record: Record, /) -> None:
        span = get_current_span()
        if span.get_span_context().is_valid:
            self._parents[record.request_id] = set_span_in_context(span, Context())

    def over(self, record: Record, /) -> None:
        parent = self._parents.pop(record.request_id, Context())
        self._send(trace(record), parent)

    def noting(self, app: ASGIApp) -> ASGIApp:
        """The same, with what clients say of their traces known to ``arrived``."""
        return TraceParents(app)

    def close(self) -> None:
        """Send what is left, for as long as it does not hang; nothing may be told after it."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSING)

    def _send(self, span: Span, parent: Context) -> None:
        sent = self._tracer.start_span(
            span.name,
            parent,
            KINDS[span.kind],
            span.attributes,
            start_time=_nanoseconds(span.start),
            record_exception=False,
            set_status_on_exception=False,
        )
        if not sent.is_recording():
            return  # the client wants no trace of it
        for event in span.events:
            sent.add_event(event.name, event.attributes, _nanoseconds(event.at))
        if span.error is not None:
            sent.set_status(Status(StatusCode.ERROR, span.error))
        context = set_span_in_context(sent, parent)
        for child in span.children:
            self._send(child, context)
        sent.end(_nanoseconds(span.end))


class TraceParents:
    """Keeps in each call's context of which trace the client says that it is a part."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        told = {name: headers[name] for name in HEADERS if name in headers}
        token = attach(_propagator.extract(told, Context()))
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)


class _Complaining(SpanExporter):
    """Says in the log, now and then, that spans are lost."""

    def __init__(self, exporter: SpanExporter, host: str) -> None:
        self._exporter = exporter
        self._host = host
        self._lost = 0
        self._next = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            if monotonic() >= self._next:
                self._next = monotonic() + COMPLAINT_INTERVAL
                log.warning("host=%s takes no traces; %d spans are lost", self._host, self._lost)
                self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
