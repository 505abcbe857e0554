"""A collector of OpenTelemetry, over OTLP/HTTP: keeps all spans that it is sent."""

import asyncio
import gzip
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@dataclass
class Collector:
    address: str = ""
    spans: list[Span] = field(default_factory=list[Span])
    bodies: list[bytes] = field(default_factory=list[bytes])
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def take(self, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        async with self.arrived:
            self.bodies.append(body)
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self.arrived.notify_all()
        return Response(b"", media_type="application/x-protobuf")

    async def until(self, name: str, count: int = 1) -> list[Span]:
        """Wait for so many spans of this name; all that are of the same traces."""
        async with asyncio.timeout(20), self.arrived:
            while sum(span.name == name for span in self.spans) < count:
                await self.arrived.wait()
        traces = {span.trace_id for span in self.spans if span.name == name}
        return [span for span in self.spans if span.trace_id in traces]


@asynccontextmanager
async def collecting() -> AsyncGenerator[Collector]:
    collector = Collector()
    app = Starlette(routes=[Route("/v1/traces", collector.take, methods=["POST"])])
    async with serving(app) as port:
        collector.address = f"http://127.0.0.1:{port}/v1/traces"
        yield collector
