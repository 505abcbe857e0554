"""Ours against llama-server: same model, same machine, same threads, same slots, same prompts.

Run by hand, on a machine that has nothing else to do:

    python integration_tests/bench_scheduler.py --llama-server PATH [--runs 3]

It prints ratios only, ours divided by llama-server's: medians of the ratios of single runs, in which
the sides take turns, each from a cold start.
"""

import argparse
import asyncio
import contextlib
import enum
import itertools
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
from helpers.product import free_port, start_up
from rich.console import Console
from rich.table import Table

from agent.engine import Engine
from agent.llama import LlamaEngine
from agent.loop import DecodeLoop
from agent.prompt import Preparer
from common.ids import RequestId
from common.messages import (
    Event,
    Failed,
    Figures,
    Finished,
    Generate,
    Noted,
    RawPrompt,
    Sampling,
    TokenGenerated,
)
from deploy.bench import Api, Asking, Server, ask, open_client
from deploy.bench_report import Outcome, Usage, make_prompts, make_warm_up, summarize
from deploy.model import default_model

THREADS = 2
SLOTS = 8
CONTEXT = 5120
"""Tokens of one request at most; llama-server is given as many for each slot."""

CLIENTS = 8
REQUESTS = 16
MAX_TOKENS = 64

SHORT_TOKENS = 35
SHARED_TOKENS = 450
QUESTION_TOKENS = 12
LONG_TOKENS = 4000

RUNNING_TOKENS = 400
"""Of the stream that a long prompt disturbs; it must not end before that prompt is ingested."""
RUNNING_BEFORE = 16
"""How many of them come before the long prompt does."""
LONG_ANSWER_TOKENS = 8

START_TIMEOUT = 120.0
STOP_TIMEOUT = 30.0
REQUEST_TIMEOUT = 300.0

GREEDY = {"temperature": 0.0, "penalty_repeat": 1.0, "penalty_presence": 0.0, "ignore_eos": True}
"""Our defaults penalise repetition, llama-server's do not."""


class UnfairError(Exception):
    """The sides cannot be compared; the text says why."""


class Side(enum.StrEnum):
    PRODUCT = "product"
    """All of it, over HTTP: Ray, the balancer, one agent."""
    AGENT = "agent"
    """The decode loop alone, in this process."""
    LLAMA_SERVER = "llama-server"


class Workload(enum.StrEnum):
    SHORT = "short"
    """Short prompts that share nothing."""
    SHARED = "shared"
    """A long system prompt that all share, and a short question of their own."""
    LONG = "long"
    """A long prompt comes while a stream runs."""


@dataclass(frozen=True, slots=True)
class Measured:
    first: float
    """Seconds to the first token: the median, or the long prompt's."""
    gap: float
    """Seconds of the longest gap: of any stream, or of the one that runs."""
    tokens_per_second: float | None = None

    def divided_by(self, other: "Measured") -> "Measured":
        mine, others = self.tokens_per_second, other.tokens_per_second
        return Measured(
            self.first / other.first,
            self.gap / other.gap,
            None if mine is None or others is None else mine / others,
        )


TARGETS = {
    (Workload.SHORT, Side.PRODUCT): Measured(1.0, 0.5, 0.9),
    (Workload.SHORT, Side.AGENT): Measured(1.0, 0.5, 1.05),
    (Workload.SHARED, Side.PRODUCT): Measured(0.4, 0.12, 2.0),
    (Workload.SHARED, Side.AGENT): Measured(0.4, 0.12, 2.0),
    (Workload.LONG, Side.PRODUCT): Measured(1.0, 0.05),
    (Workload.LONG, Side.AGENT): Measured(1.0, 0.05),
}
"""Ratios to reach: tokens per second at least, seconds at most."""


class Ask(Protocol):
    """Send one prompt to a side, read its answer to the end."""

    def __call__(
        self, prompt: str, *, max_tokens: int, on_text: Callable[[], None] | None = None
    ) -> Awaitable[Outcome]: ...


# The workloads


async def measure(workload: Workload, send: Ask, seed: int) -> Measured:
    (warm_up,) = make_warm_up(seed, requests=1, tokens=SHORT_TOKENS)
    await ask_whole(send, warm_up, MAX_TOKENS)
    match workload:
        case Workload.SHORT:
            prompts = make_prompts(seed, requests=REQUESTS, tokens=SHORT_TOKENS)
            return await measure_closed(send, prompts)
        case Workload.SHARED:
            prompts = make_prompts(
                seed, requests=REQUESTS, tokens=QUESTION_TOKENS, shared_tokens=SHARED_TOKENS
            )
            return await measure_closed(send, prompts)
        case Workload.LONG:
            return await measure_disturbed(send, seed)


async def measure_closed(send: Ask, prompts: Sequence[str]) -> Measured:
    waiting = iter(prompts)

    async def client() -> list[Outcome]:
        return [await ask_whole(send, prompt, MAX_TOKENS) for prompt in waiting]

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(CLIENTS)]
    seconds = time.perf_counter() - started
    outcomes = [outcome for client in clients for outcome in client.result()]
    figures = summarize(outcomes, seconds=seconds)
    assert figures.gaps is not None
    # Of an even number, the mean of the two in the middle: half of these requests find their
    # prefix cached, the others do not.
    first = statistics.median(each.time_to_first_token or math.inf for each in outcomes)
    return Measured(first, figures.gaps.max, figures.output_tokens_per_second)


async def measure_disturbed(send: Ask, seed: int) -> Measured:
    (short,) = make_prompts(seed, requests=1, tokens=SHORT_TOKENS)
    (long,) = make_prompts(seed + 1, requests=1, tokens=LONG_TOKENS)
    texts = itertools.count(1)
    runs = asyncio.Event()

    def on_text() -> None:
        if next(texts) == RUNNING_BEFORE:
            runs.set()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(ask_whole(send, short, RUNNING_TOKENS, on_text))
        async with asyncio.timeout(REQUEST_TIMEOUT):
            await runs.wait()
        disturbing = group.create_task(ask_whole(send, long, LONG_ANSWER_TOKENS))
    stream, first = running.result(), disturbing.result().time_to_first_token
    assert first is not None
    if stream.ended < disturbing.result().texts[0]:
        raise UnfairError("the running stream ended before the long prompt was ingested")
    return Measured(first, max(stream.gaps))


async def ask_whole(
    send: Ask, prompt: str, max_tokens: int, on_text: Callable[[], None] | None = None
) -> Outcome:
    """A side that does less work must not win. Raises ``UnfairError``."""
    outcome = await send(prompt, max_tokens=max_tokens, on_text=on_text)
    if not outcome.ok:
        raise UnfairError(f"a request failed: {outcome.error}")
    if outcome.output_tokens != max_tokens:
        raise UnfairError(f"an answer has {outcome.output_tokens} tokens, not {max_tokens}")
    return outcome


# The sides


@asynccontextmanager
async def over_http(server: Server) -> AsyncGenerator[Ask]:
    native = server.api is Api.NATIVE
    extra = GREEDY if native else {"temperature": 0.0, "ignore_eos": True}
    async with open_client() as client:

        def send(
            prompt: str, *, max_tokens: int, on_text: Callable[[], None] | None = None
        ) -> Awaitable[Outcome]:
            asking = Asking(max_tokens=max_tokens, timeout=REQUEST_TIMEOUT, extra=extra)
            return ask(client, server, asking, prompt, on_text=on_text)

        yield send


@asynccontextmanager
async def product(model: Path) -> AsyncGenerator[Ask]:
    with start_up(
        "--model", str(model),
        "--threads", str(THREADS),
        "--slots", str(SLOTS),
        "--context", str(CONTEXT), "--kv-cells", str(SLOTS * CONTEXT),
    ) as up:  # fmt: skip
        async with over_http(Server(up.address, Api.NATIVE)) as send:
            yield send


@asynccontextmanager
async def llama_server(program: Path, model: Path) -> AsyncGenerator[Ask]:
    address = f"127.0.0.1:{(port := free_port())}"
    process = subprocess.Popen(  # noqa: ASYNC220 - nothing else waits for this loop
        [
            program,
            "--model", model,
            "--parallel", str(SLOTS),
            "--ctx-size", str(SLOTS * CONTEXT),
            "--threads", str(THREADS),
            "--threads-batch", str(THREADS),
            "--host", "127.0.0.1",
            "--port", str(port),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await _until_healthy(f"http://{address}/health", process)
        async with over_http(Server(f"http://{address}", Api.OPENAI_COMPLETIONS)) as send:
            yield send
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_TIMEOUT), httpx.AsyncClient(trust_env=False) as client:
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).is_success:
                    return
            await asyncio.sleep(0.1)
    raise UnfairError(f"llama-server ended with status {process.returncode}")


@dataclass(slots=True)
class _Open:
    """A request of which the agent has not told the end."""

    over: asyncio.Future[tuple[Usage | None, str | None]]
    on_text: Callable[[], None] | None
    texts: list[float] = field(default_factory=list[float])


class AgentAlone:
    """Plays the service's part: hears the decode loop's thread, and asks it."""

    def __init__(self, model: Path) -> None:
        def load() -> Engine:
            return LlamaEngine(
                str(model), slots=SLOTS, threads=THREADS, context=CONTEXT, cells=SLOTS * CONTEXT
            )

        self._asyncio = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Preparer] = self._asyncio.create_future()
        self._open: dict[RequestId, _Open] = {}
        self._numbers = itertools.count()
        self._loop = DecodeLoop(load, self)

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[Ask]:
        self._loop.start()
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._loaded
            yield self._ask
        finally:
            self._loop.stop()
            if not await asyncio.to_thread(self._loop.join, STOP_TIMEOUT):
                raise UnfairError("the decode loop did not end")

    async def _ask(
        self, prompt: str, *, max_tokens: int, on_text: Callable[[], None] | None = None
    ) -> Outcome:
        sent = time.perf_counter()
        request = Generate(
            request_id=RequestId(str(next(self._numbers))),
            prompt=RawPrompt(prompt),
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0, penalty_repeat=1, penalty_presence=0, ignore_eos=True),
        )
        this = self._open[request.request_id] = _Open(self._asyncio.create_future(), on_text)
        self._loop.submit(self._loaded.result().prepare_prompt(request))
        async with asyncio.timeout(REQUEST_TIMEOUT):
            usage, error = await this.over
        return Outcome(sent, tuple(this.texts), time.perf_counter(), usage, error)

    # On the loop's thread

    def loaded(self, engine: Engine, /) -> None:
        self._asyncio.call_soon_threadsafe(self._loaded.set_result, Preparer(engine))

    def happened(self, events: Sequence[Event], /) -> None:
        self._asyncio.call_soon_threadsafe(self._take, events, time.perf_counter())

    def noted(self, notes: Sequence[Noted], /) -> None:
        pass

    def measured(self, figures: Figures, /) -> None:
        pass

    def ended(self, error: BaseException | None, /) -> None:
        self._asyncio.call_soon_threadsafe(self._end, f"the loop has ended: {error}")

    # On the asyncio loop again

    def _take(self, events: Sequence[Event], now: float) -> None:
        for event in events:
            this = self._open[event.request_id]
            if isinstance(event, TokenGenerated | Finished) and event.segments:
                this.texts.append(now)
                if this.on_text is not None:
                    this.on_text()
            match event:
                case Finished(usage=usage):
                    told = (usage.prompt_tokens, usage.cached_prompt_tokens, usage.content_tokens)
                    self._open.pop(event.request_id).over.set_result((Usage(*told), None))
                case Failed(message=message):
                    self._open.pop(event.request_id).over.set_result((None, message))
                case _:
                    pass

    def _end(self, reason: str) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(RuntimeError(reason))
        for this in self._open.values():
            if not this.over.done():
                this.over.set_result((None, reason))


# The comparison


async def measure_side(
    side: Side, workload: Workload, *, program: Path, model: Path, seed: int
) -> Measured:
    """From a cold start to its end; loading the model is not measured."""
    match side:
        case Side.PRODUCT:
            started = product(model)
        case Side.AGENT:
            started = AgentAlone(model).run()
        case Side.LLAMA_SERVER:
            started = llama_server(program, model)
    async with started as send:
        return await measure(workload, send, seed)


def compare(
    workload: Workload, sides: Sequence[Side], *, program: Path, model: Path, run: int
) -> dict[Side, Measured]:
    """One run: each of our sides, divided by llama-server. Who goes first alternates."""
    order = [*sides, Side.LLAMA_SERVER]
    if run % 2:
        order.reverse()
    found = {
        side: asyncio.run(
            measure_side(side, workload, program=program, model=model, seed=1000 * run)
        )
        for side in order
    }
    return {side: found[side].divided_by(found[Side.LLAMA_SERVER]) for side in sides}


def median(ratios: Sequence[Measured]) -> Measured:
    rates = [ratio.tokens_per_second for ratio in ratios if ratio.tokens_per_second is not None]
    return Measured(
        statistics.median(ratio.first for ratio in ratios),
        statistics.median(ratio.gap for ratio in ratios),
        statistics.median(rates) if rates else None,
    )


def row(workload: Workload, side: Side, ratio: Measured) -> list[str]:
    target = TARGETS[workload, side]
    rate, wanted = ratio.tokens_per_second, target.tokens_per_second
    return [
        workload,
        side,
        "" if rate is None or wanted is None else at_least(rate, wanted),
        at_most(ratio.first, target.first),
        at_most(ratio.gap, target.gap),
    ]


def at_least(ratio: float, target: float) -> str:
    if ratio >= target:
        return f"{ratio:.3f}, ≥ {target:g}"
    return f"[red]{ratio:.3f}, not ≥ {target:g}[/red]"


def at_most(ratio: float, target: float) -> str:
    if ratio <= target:
        return f"{ratio:.3f}, ≤ {target:g}"
    return f"[red]{ratio:.3f}, not ≤ {target:g}[/red]"


def machine() -> str:
    """The processor's own name, if the system tells it."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def sides_of(text: str) -> list[Side]:
    return [side for side in map(Side, text.split(",")) if side is not Side.LLAMA_SERVER]


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llama-server", type=Path, required=True, metavar="PATH")
    parser.add_argument("--runs", type=count, default=3)
    parser.add_argument("--only", type=Workload, metavar="|".join(Workload))
    parser.add_argument("--sides", type=sides_of, default=[Side.PRODUCT, Side.AGENT])
    options = parser.parse_args()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # what was started is stopped then too
    status = 0
    try:
        report(
            [options.only] if options.only else list(Workload),
            options.sides,
            program=options.llama_server,
            runs=options.runs,
        )
    except* (UnfairError, OSError) as group:
        for error in leaves(group):
            Console(stderr=True).print(f"bench_scheduler: {error}", markup=False)
        status = 1
    except* KeyboardInterrupt:
        status = 130
    return status


def leaves(group: BaseExceptionGroup[Exception]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def report(
    workloads: Sequence[Workload], sides: Sequence[Side], *, program: Path, runs: int
) -> None:
    progress = Console(stderr=True)
    model = default_model()
    table = Table("workload", "side", "tokens/s", "first token after", "longest gap")
    for workload in workloads:
        found: list[dict[Side, Measured]] = []
        for run in range(runs):
            progress.print(f"{workload}: run {run + 1} of {runs}")
            found.append(compare(workload, sides, program=program, model=model, run=run))
        for side in sides:
            table.add_row(*row(workload, side, median([ratios[side] for ratios in found])))
    console = Console()
    console.print(f"ours / llama-server, medians of {runs} runs, and what they should be")
    console.print(table)
    console.print(f"on {machine()}")


if __name__ == "__main__":
    sys.exit(main())
