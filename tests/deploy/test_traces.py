"""Traces of real requests come to a collector whole, or are not missed."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeAlias

import httpx
import pytest
from collector import Collector, collecting
from loaded import agents
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from played import PlayedAgent
from serving import serving

from balancer.app import create_app
from balancer.balancer import Balancer
from deploy.traces import Traces

SECRET = "a prompt that nobody else may read"
CHAT = {"model": "echo", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
ROUTE = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@asynccontextmanager
async def traced(balancer: Balancer, address: str) -> AsyncGenerator[httpx.AsyncClient]:
    traces = balancer.records.observer = Traces(address, timeout=1.0)
    async with (
        serving(traces.noting(create_app(balancer))) as port,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30
        ) as client,
    ):
        yield client
        balancer.close()
    await asyncio.to_thread(traces.close)


@pytest.fixture
async def collector() -> AsyncGenerator[Collector]:
    async with collecting() as collector:
        yield collector


def attributes(span: Span) -> dict[str, object]:
    return {
        pair.key: getattr(pair.value, str(pair.value.WhichOneof("value")))
        for pair in span.attributes
    }


Tree: TypeAlias = dict[str, "Tree"]


def tree(spans: list[Span], parent: bytes) -> Tree:
    """By name, those that have this parent, with what is in them."""
    return {span.name: tree(spans, span.span_id) for span in spans if span.parent_span_id == parent}


WHOLE: Tree = {"headrace.request": {"buffer": {}, "agent one": {"prefill": {}, "decode": {}}}}


async def test_a_collector_has_the_whole_tree_of_a_request(
    balancer: Balancer, collector: Collector
) -> None:
    async with agents(balancer, "one"), traced(balancer, collector.address) as client:
        answer = await client.post(ROUTE, json=CHAT)
        spans = await collector.until("headrace.request")

    assert tree(spans, b"") == WHOLE
    named = {span.name: span for span in spans}
    request, decode = named["headrace.request"], named["decode"]
    told = attributes(request)
    assert request.kind == Span.SPAN_KIND_SERVER
    assert told["headrace.request_id"] == answer.headers["x-request-id"]
    assert (told["headrace.route"], told["headrace.outcome"]) == ("chat_completions", "length")
    assert told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    inner = [span for span in spans if span is not request]
    assert all(
        request.start_time_unix_nano
        <= span.start_time_unix_nano
        <= span.end_time_unix_nano
        <= request.end_time_unix_nano
        for span in inner
    )
    assert decode.end_time_unix_nano > decode.start_time_unix_nano


async def test_prompts_are_in_no_span(balancer: Balancer, collector: Collector) -> None:
    async with agents(balancer, "one"), traced(balancer, collector.address) as client:
        await client.post(ROUTE, json=CHAT)
        await collector.until("headrace.request")

    assert not [body for body in collector.bodies if SECRET.encode() in body]
    assert not [body for body in collector.bodies if b"nobody" in body]


async def test_what_a_client_says_of_its_trace_is_followed(
    balancer: Balancer, collector: Collector
) -> None:
    async with agents(balancer, "one"), traced(balancer, collector.address) as client:
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
            assert (await client.post(ROUTE, json=CHAT, headers=headers)).is_success
        await client.post(ROUTE, json=CHAT, headers={"traceparent": "nonsense"})
        await collector.until("headrace.request", 2)

    ours = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    assert tree(ours, bytes.fromhex(PARENT)) == WHOLE
    assert sum(span.name == "headrace.request" for span in ours) == 1, "one was not to be sent"
    assert sum(span.name == "headrace.request" for span in collector.spans) == 2


async def test_a_move_to_another_agent_is_seen(balancer: Balancer, collector: Collector) -> None:
    async with traced(balancer, collector.address) as client:
        first, second = (PlayedAgent(balancer, name, fingerprint="f") for name in ("one", "two"))
        asking = asyncio.create_task(client.post(ROUTE, json={**CHAT, "model": "played"}))
        asked = await first.asked()
        first.say_token(asked.request_id, "a")
        first.leave()
        await second.asked()
        second.say_token(asked.request_id, "b")
        second.finish(asked.request_id)
        await asking
        spans = await collector.until("headrace.request")

    (whole,) = tree(spans, b"").values()
    assert set(whole) == {"buffer", "agent one", "agent two"}
    named = {span.name: span for span in spans}
    assert named["agent one"].status.code == Status.STATUS_CODE_ERROR
    assert named["headrace.request"].status.code == Status.STATUS_CODE_UNSET


async def test_a_collector_that_is_not_there_costs_a_line_in_the_log(
    balancer: Balancer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    caplog.set_level(logging.WARNING)

    def note(_record: logging.LogRecord) -> bool:
        loop.call_soon_threadsafe(told.set)
        return True

    monkeypatch.setattr(caplog.handler, "filters", [note])  # it is every test's
    async with (
        agents(balancer, "one"),
        traced(balancer, "http://127.0.0.1:9/v1/traces") as client,
    ):
        for _ in range(20):
            assert (await client.post(ROUTE, json=CHAT)).is_success
        async with asyncio.timeout(20):
            await told.wait()

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("host=127.0.0.1 takes no traces; ")
