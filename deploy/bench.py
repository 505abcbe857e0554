"""Sends the requests of ``headrace bench`` and notes what comes back, and when.

It decides nothing: ``deploy.bench_report`` plans what is sent when, and says what the outcomes mean.
"""

import asyncio
import enum
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from deploy.bench_report import (
    BenchError,
    Closed,
    Open,
    Outcome,
    Plan,
    Target,
    Usage,
    picture_format,
    reason,
    summarize,
    to_json,
    to_picture,
    to_tables,
)
from deploy.terminal import one_line

FIND_TIMEOUT = 5.0
"""Seconds to find out what an address speaks."""

MOST_OF_AN_ERROR = 10_000
"""Bytes of the body of a refusal that are read."""


STANDARD_OUTPUT = Path("-")
"""As a file for JSON."""


class Api(enum.StrEnum):
    """What a server speaks."""

    NATIVE = "native"
    """One JSON message a line, at ``/api/v1/continue_from_raw_prompt``."""
    OPENAI = "openai"
    """Chat: server-sent events at ``/v1/chat/completions``."""
    OPENAI_COMPLETIONS = "openai-completions"
    """Raw prompts: server-sent events at ``/v1/completions``."""


ROUTES = {
    Api.NATIVE: "/api/v1/continue_from_raw_prompt",
    Api.OPENAI: "/v1/chat/completions",
    Api.OPENAI_COMPLETIONS: "/v1/completions",
}


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    """``http://HOST:PORT`` and what stands before the routes, without a slash at its end."""
    api: Api
    model: str | None = None

    @property
    def url(self) -> str:
        return self.address + ROUTES[self.api]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What all requests of a run have in common."""

    max_tokens: int
    timeout: float
    """Seconds that each may take as a whole."""
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Goes into each body; for the native form, into its ``sampling``."""

    def body(self, server: Server, prompt: str) -> dict[str, Any]:
        """What is off is left out: not every server knows everything."""
        sampling: dict[str, Any] = {"temperature": self.temperature}
        if self.ignore_eos:
            sampling["ignore_eos"] = True
        sampling.update(self.extra)
        if server.api is Api.NATIVE:
            return {"raw_prompt": prompt, "max_tokens": self.max_tokens, "sampling": sampling}
        body = {
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        if server.model is not None:
            body["model"] = server.model
        if server.api is Api.OPENAI:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body


@dataclass(frozen=True, slots=True)
class Access:
    """What a server may want of those who ask."""

    key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    """For ``https``; None: the usual authorities decide."""

    def open_client(self, **options: Any) -> httpx.AsyncClient:
        headers = {"accept-encoding": "identity"}  # what packs a stream may hold it back
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        return httpx.AsyncClient(
            headers=headers, verify=self.tls or True, trust_env=False, **options
        )


FREE = Access()


def open_client(access: Access = FREE) -> httpx.AsyncClient:
    """Without limits of its own: the plan says how many requests there are at once.

    Each request has a connection of its own, which counts as part of its time. To use one again is a
    race that some servers lose: llama-server promises to keep it and closes it after every stream.
    """
    return access.open_client(
        timeout=None,  # each request has one for the whole of it, see ask()
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


async def find_server(
    address: str, *, api: Api | None, model: str | None, access: Access = FREE
) -> Server:
    """Ask the address what it speaks, unless ``api`` says it, and for its first model, unless
    ``model`` names one or none is needed. Raises ``BenchError``.
    """
    address = address.rstrip("/").removesuffix("/v1")
    if api is Api.NATIVE:
        return Server(address, api)
    async with access.open_client(timeout=FIND_TIMEOUT) as client:
        if api is None and "agents" in await _get(client, f"{address}/api/v1/agents"):
            return Server(address, Api.NATIVE)
        models = {} if api and model else await _get(client, f"{address}/v1/models")
    if api is None and "data" not in models:
        raise BenchError(f"{address} speaks neither the native nor the OpenAI form")
    if model is None:
        with suppress(KeyError, IndexError, TypeError):  # then it must do without
            model = str(models["data"][0]["id"])
    return Server(address, api or Api.OPENAI, model)


async def _get(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """The JSON object there; empty if there is none. Raises ``BenchError`` if nobody answers."""
    try:
        response = await client.get(url)
        found = msgspec.json.decode(response.content) if response.is_success else {}
    except msgspec.DecodeError:
        return {}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"no answer from {url}: {_describe(error)}") from error
    return found if isinstance(found, dict) else {}


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


# One request


async def ask(
    client: httpx.AsyncClient,
    server: Server,
    asking: Asking,
    prompt: str,
    *,
    due: float | None = None,
    on_text: Callable[[], None] | None = None,
) -> Outcome:
    """Send one request and read its answer to the end. Whatever goes wrong is in the outcome.

    ``due``: when it should have been sent, by ``time.perf_counter``; None: now.
    ``on_text`` is called for each event that has text in it.
    """
    sent = time.perf_counter() if due is None else due
    answer = _Answer(READERS[server.api], on_text)
    try:
        async with asyncio.timeout(asking.timeout):
            await _read_answer(client, server, asking.body(server, prompt), answer)
        error = answer.error
    except TimeoutError:
        error = f"not over within {asking.timeout:g} s"
    except httpx.HTTPError as failure:
        error = _describe(failure)
    except msgspec.DecodeError as failure:
        error = f"unreadable answer: {failure}"
    return Outcome(
        sent=sent,
        texts=tuple(answer.texts),
        ended=time.perf_counter(),
        usage=answer.usage,
        error=None if error is None else reason(error),
    )


async def _read_answer(
    client: httpx.AsyncClient, server: Server, body: dict[str, Any], answer: "_Answer"
) -> None:
    async with client.stream("POST", server.url, json=body) as response:
        if response.status_code != 200:
            answer.failure = f"HTTP {response.status_code}: {await _read_refusal(response)}"
            return
        async for line in _lines(response.aiter_bytes()):
            answer.take(line, now=time.perf_counter())


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Cut at line feeds only: JSON may hold the other characters that Unicode calls line ends."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _read_refusal(response: httpx.Response) -> str:
    """Plain text as it stands; of JSON, the message in it."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MOST_OF_AN_ERROR:
            break
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode(body)["error"]["message"])
    return body.decode(errors="replace")


class _Answer:
    """What has been read of one answer."""

    def __init__(self, reader: "Reader", on_text: Callable[[], None] | None) -> None:
        self._reader = reader
        self._on_text = on_text
        self._is_whole = False
        self.texts: list[float] = []
        self.usage: Usage | None = None
        self.failure: str | None = None

    @property
    def error(self) -> str | None:
        """What is wrong with it, now that nothing more will come."""
        if self.failure is None and not self._is_whole:
            return "the answer was cut off"
        return self.failure

    def take(self, line: bytes, *, now: float) -> None:
        for fact in self._reader(line):
            match fact:
                case Text():
                    self.texts.append(now)
                    if self._on_text is not None:
                        self._on_text()
                case Usage():
                    self.usage = fact
                case End():
                    self._is_whole = True
                case Failure(message):
                    self.failure = message


# What a line of an answer says


@dataclass(frozen=True, slots=True)
class Text:
    """It carries some text."""


@dataclass(frozen=True, slots=True)
class End:
    """The answer is whole, though more may be said about it."""


@dataclass(frozen=True, slots=True)
class Failure:
    message: str


Fact: TypeAlias = Text | Usage | End | Failure
Reader: TypeAlias = Callable[[bytes], Iterator[Fact]]
"""Takes one line without its end. Raises ``msgspec.DecodeError`` if it cannot be read."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAiUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content)


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _OpenAiUsage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk)


def read_openai(line: bytes) -> Iterator[Fact]:
    name, _, data = line.partition(b":")
    data = data.strip()
    if name != b"data" or not data:
        return
    if data == b"[DONE]":
        yield End()
        return
    chunk = _chunk.decode(data)
    if chunk.error is not None:
        yield Failure(_message_of(chunk.error))
    for choice in chunk.choices:
        if choice.has_text:
            yield Text()
        if choice.finish_reason is not None:
            yield End()
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details or _Details()
        yield Usage(chunk.usage.prompt_tokens, details.cached_tokens, chunk.usage.completion_tokens)


def _message_of(error: Any) -> str:
    try:
        return str(error["message"])
    except (KeyError, TypeError):
        return str(error)


class _NativeUsage(msgspec.Struct):
    prompt_tokens: int
    cached_prompt_tokens: int
    content_tokens: int
    reasoning_tokens: int = 0
    tool_call_tokens: int = 0
    undeterminable_tokens: int = 0


class _Done(msgspec.Struct):
    usage: _NativeUsage


class _Generated(msgspec.Struct, rename={"results": "GeneratedToken"}):
    results: dict[str, Any]
    """One of them, by its name."""


class _Response(msgspec.Struct):
    response: _Generated


class _NativeError(msgspec.Struct):
    code: int
    description: str


class _ErrorEnvelope(msgspec.Struct):
    error: _NativeError


class _Message(msgspec.Struct, rename={"answer": "Response", "failure": "Error"}):
    answer: _Response | None = None
    failure: _ErrorEnvelope | None = None


_message = msgspec.json.Decoder(_Message)


def read_native(line: bytes) -> Iterator[Fact]:
    if not line.strip():
        return
    message = _message.decode(line)
    if message.failure is not None:
        error = message.failure.error
        yield Failure(f"{error.code}: {error.description}")
    results = {} if message.answer is None else message.answer.response.results
    for name, value in results.items():
        if name == "Done":
            usage = msgspec.convert(value, _Done).usage
            output_tokens = (
                usage.content_tokens
                + usage.reasoning_tokens
                + usage.tool_call_tokens
                + usage.undeterminable_tokens
            )
            yield Usage(usage.prompt_tokens, usage.cached_prompt_tokens, output_tokens)
            yield End()
        elif not name.endswith("Token"):
            yield Failure(f"{name}: {value}")
        elif value:
            yield Text()


READERS: Mapping[Api, Reader] = {
    Api.NATIVE: read_native,
    Api.OPENAI: read_openai,
    Api.OPENAI_COMPLETIONS: read_openai,
}


# All requests


class Bench:
    """One run. What it has measured can be read at any moment, also after it was cancelled."""

    def __init__(self, server: Server, asking: Asking, plan: Plan, access: Access = FREE) -> None:
        self._server = server
        self._access = access
        self._asking = asking
        self._plan = plan
        self._begun: float | None = None
        self._ended: float | None = None
        self._sent = 0
        self.outcomes: list[Outcome] = []

    @property
    def seconds(self) -> float:
        """From the first request that counts until now, or until the end; 0 before it."""
        if self._begun is None:
            return 0.0
        return (time.perf_counter() if self._ended is None else self._ended) - self._begun

    @property
    def unfinished(self) -> int:
        """Requests that were sent and whose end has not been seen."""
        return self._sent - len(self.outcomes)

    async def run(self) -> None:
        async with open_client(self._access) as client:
            for prompt in self._plan.warm_up:
                await ask(client, self._server, self._asking, prompt)
            self._begun = time.perf_counter()
            try:
                match self._plan.arrivals:
                    case Closed(clients):
                        await self._run_closed(client, clients)
                    case Open(times):
                        await self._run_open(client, self._begun, times)
            finally:
                self._ended = time.perf_counter()

    async def _run_closed(self, client: httpx.AsyncClient, clients: int) -> None:
        prompts = iter(self._plan.prompts)

        async def send_one_after_another() -> None:
            for prompt in prompts:
                await self._ask(client, prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(send_one_after_another())

    async def _run_open(
        self, client: httpx.AsyncClient, begun: float, times: tuple[float, ...]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for prompt, after in zip(self._plan.prompts, times, strict=True):
                due = begun + after
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._ask(client, prompt, due=due))

    async def _ask(
        self, client: httpx.AsyncClient, prompt: str, *, due: float | None = None
    ) -> None:
        self._sent += 1
        outcome = await ask(client, self._server, self._asking, prompt, due=due)
        self.outcomes.append(outcome)


# The command


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    address: str
    api: Api | None
    """None: find out."""
    model: str | None
    asking: Asking
    plan: Plan
    target: Target
    json_file: Path | None
    picture_file: Path | None
    access: Access = FREE
    told: Mapping[str, Any]
    """The options as they were given, to be repeated in the JSON."""


def run_bench(settings: BenchSettings, console: Console) -> int:
    """Run it, print and write what was measured; return the exit status: 1 if a request failed,
    130 if it was interrupted, which ends the run but not the report. Raises ``BenchError``.
    """
    server = asyncio.run(
        find_server(
            settings.address, api=settings.api, model=settings.model, access=settings.access
        )
    )
    model = f", {server.model}" if server.model else ""
    console.print(escape(one_line(f"{len(settings.plan.prompts)} requests to {server.url}{model}")))
    bench = Bench(server, settings.asking, settings.plan, settings.access)
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        console.print("interrupted; until then:")
        interrupted = True
    else:
        interrupted = False
    _report(settings, server, bench, console)
    if interrupted:
        return 130
    return 0 if all(outcome.ok for outcome in bench.outcomes) else 1


def _report(settings: BenchSettings, server: Server, bench: Bench, console: Console) -> None:
    outcomes = bench.outcomes
    figures = summarize(
        outcomes, seconds=bench.seconds, unfinished=bench.unfinished, target=settings.target
    )
    console.print(to_tables(figures))
    if settings.json_file is not None:
        told = {**settings.told, "api": server.api, "model": server.model}
        _write(settings.json_file, to_json(told, figures, outcomes))
    if settings.picture_file is not None:
        title = f"{figures.ok} requests to {server.url}"
        chosen = picture_format(settings.picture_file.name)
        _write(settings.picture_file, to_picture(outcomes, title=title, format=chosen))


def _write(file: Path, data: bytes) -> None:
    if file == STANDARD_OUTPUT:
        sys.stdout.buffer.write(data)
        return
    try:
        file.write_bytes(data)
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror}") from error
