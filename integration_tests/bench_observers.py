"""What observers of the status stream cost those who generate.

Run by hand, on a machine that has nothing else to do:

    python integration_tests/bench_observers.py [--runs 3]

It prints ratios only: tokens/s, and the longest gap in a stream, with a hundred observers divided by
those without any, medians of runs that take turns. Half of the observers never read.
"""

import argparse
import asyncio
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from helpers.product import Up, start_up

OBSERVERS = 100
STREAMS = 4
TOKENS = 200

BODY = {
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass(frozen=True, slots=True)
class Run:
    rate: float
    """Tokens a second of all streams together."""
    longest_gap: float


async def stream(client: httpx.AsyncClient, gaps: list[float]) -> None:
    last = None
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def run(up: Up) -> Run:
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=up.address, timeout=120, trust_env=False) as client:
        started = time.perf_counter()
        await asyncio.gather(*(stream(client, gaps) for _ in range(STREAMS)))
        seconds = time.perf_counter() - started
    return Run(STREAMS * TOKENS / seconds, max(gaps))


async def read(client: httpx.AsyncClient, begun: asyncio.Event) -> None:
    async with client.stream("GET", "/api/v1/events") as response:
        async for _ in response.aiter_lines():
            begun.set()


@asynccontextmanager
async def observers(up: Up) -> AsyncGenerator[None]:
    request = f"GET /api/v1/events HTTP/1.1\r\nhost: 127.0.0.1:{up.port}\r\n\r\n".encode()
    deaf = [socket.create_connection(("127.0.0.1", up.port)) for _ in range(OBSERVERS // 2)]
    for each in deaf:
        each.sendall(request)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=up.address, timeout=120, limits=limits, trust_env=False
    ) as client:
        begun = [asyncio.Event() for _ in range(OBSERVERS // 2)]
        tasks = [asyncio.create_task(read(client, each)) for each in begun]
        await asyncio.gather(*(each.wait() for each in begun))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in deaf:
                each.close()


async def main(runs: int) -> None:
    with start_up("--slots", str(STREAMS)) as up:
        await run(up)  # warms up
        without: list[Run] = []
        watched: list[Run] = []
        for _ in range(runs):
            without.append(await run(up))
            async with observers(up):
                watched.append(await run(up))
    pairs = list(zip(watched, without, strict=True))
    rates = [one.rate / other.rate for one, other in pairs]
    gaps = [one.longest_gap / other.longest_gap for one, other in pairs]
    told = [
        f"{platform.machine()}, {os.cpu_count()} cores, {STREAMS} streams of {TOKENS} tokens",
        f"{OBSERVERS} observers, half of them deaf, divided by none, medians of {runs}:",
        f"tokens/s     {statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})",
        f"longest gap  {statistics.median(gaps):.2f} ({min(gaps):.2f} to {max(gaps):.2f})",
    ]
    sys.stdout.write("\n".join(told) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What observers cost.")
    parser.add_argument("--runs", type=int, default=3)
    asyncio.run(main(parser.parse_args().runs))
