"""Clients that ask in each protocol and leave in each way, on sockets of their own."""

import asyncio
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from between import Between, reset
from exposition import by_label
from websockets.asyncio.client import ClientConnection, connect

PATIENCE = 60.0
"""Seconds after which a test has failed."""


class Way(enum.StrEnum):
    """How a client leaves."""

    CLOSES = "it closes its connection"
    RESETS = "it crashes: its connection is reset"
    HALF_CLOSES = "it says that it will send no more, and goes on reading"
    IS_CUT = "what is in between closes both sides"
    IS_FROZEN = "what is in between stops forwarding, and resets later"
    STOPS = "it says that it does not wait for this answer any longer"

    @property
    def needs_proxy(self) -> bool:
        return self in {Way.IS_CUT, Way.IS_FROZEN}


HTTP_WAYS = [way for way in Way if way is not Way.STOPS]
SOCKET_WAYS = [Way.CLOSES, Way.RESETS, Way.IS_CUT, Way.IS_FROZEN, Way.STOPS]


def leave_by_proxy(way: Way, proxy: Between | None) -> bool:
    """False: this is not the proxy's business."""
    if way is Way.IS_CUT:
        assert proxy is not None
        proxy.cut()
    elif way is Way.IS_FROZEN:
        assert proxy is not None
        proxy.freeze()  # nobody can know it yet; resetting it is the test's next step
    else:
        return False
    return True


class Client(Protocol):
    async def begun(self) -> None:
        """Wait until some of the answer's text has come."""
        ...

    def leave(self, way: Way, proxy: Between | None) -> None: ...

    async def close(self) -> None:
        """Whatever is left of its connection."""
        ...


class HttpClient:
    """One request, written by hand, and what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(cls, port: int, path: str, body: Any, *, missing: int = 0) -> "HttpClient":
        """``missing``: bytes at the end that are promised and not sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nuser-agent: test\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data[: len(data) - missing])
        await writer.drain()
        return cls(reader, writer)

    async def begun(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not (line := await self._reader.readline()).startswith((b"data:", b"{")):
                assert line, "the answer is over"

    async def rest(self) -> bytes:
        """All that still comes, until the connection ends."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self._reader.read()
            except ConnectionError:
                return b""

    def leave(self, way: Way, proxy: Between | None) -> None:
        if leave_by_proxy(way, proxy):
            return
        match way:
            case Way.CLOSES:
                self._writer.close()
            case Way.RESETS:
                reset(self._writer)
            case _:
                self._writer.write_eof()

    async def close(self) -> None:
        reset(self._writer)


class SocketClient:
    """One request on a websocket of its own."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def ask(cls, port: int, path: str, body: Any) -> "SocketClient":
        socket = await connect(f"ws://127.0.0.1:{port}{path}", proxy=None, close_timeout=1)
        request = {"ContinueFromRawPrompt": body}
        await socket.send(json.dumps({"Request": {"id": "x", "request": request}}))
        return cls(socket)

    async def begun(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._socket.recv()

    async def whole(self) -> bytes:
        """All of the answer, a message a line."""
        lines: list[str] = []
        async with asyncio.timeout(PATIENCE):
            while not lines or '"Done"' not in lines[-1]:
                lines.append(await self._socket.recv(decode=True))
        return "\n".join(lines).encode()

    def leave(self, way: Way, proxy: Between | None) -> None:
        if leave_by_proxy(way, proxy):
            return
        if way is Way.RESETS:
            reset(self._socket.transport)
        elif way is Way.STOPS:
            stop = json.dumps({"Notification": {"StopRespondingTo": "x"}})
            self._closing = asyncio.create_task(self._socket.send(stop))
        else:
            self._closing = asyncio.create_task(self._socket.close())

    async def close(self) -> None:
        if self._closing is not None:
            await self._closing
        reset(self._socket.transport)


Body: TypeAlias = Callable[[str, int], dict[str, Any]]
"""Of a prompt, and how many tokens the answer is to have."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A protocol and a route."""

    name: str
    path: str
    body: Body
    said: Callable[[Any], str]
    """The text in one piece of an answer."""
    streams: bool = True
    is_socket: bool = False

    @property
    def ways(self) -> list[Way]:
        return SOCKET_WAYS if self.is_socket else HTTP_WAYS

    def text(self, answer: bytes) -> str:
        """What an answer says."""
        lines = [line.removeprefix(b"data: ") for line in answer.splitlines()]
        parts = [json.loads(line) for line in lines if line.startswith(b"{")]
        return "".join(map(self.said, parts))

    async def ask(self, port: int, prompt: str, max_tokens: int) -> Client:
        body = self.body(prompt, max_tokens)
        if self.is_socket:
            return await SocketClient.ask(port, self.path, body)
        return await HttpClient.ask(port, self.path, body)


def _native(prompt: str, max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True}
    return {"raw_prompt": prompt, "max_tokens": max_tokens, "sampling": sampling}


def _conversation(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {
        "conversation_history": [{"role": "user", "content": prompt}],
        "add_generation_prompt": True,
        "enable_thinking": False,
        "max_tokens": max_tokens,
        "sampling": {"temperature": 0, "ignore_eos": True},
    }


def _native_text(part: Any) -> str:
    return part["Response"]["response"]["GeneratedToken"].get("ContentToken", "")


def _chat_text(part: Any) -> str:
    name = "delta" if part["object"].endswith("chunk") else "message"
    return "".join(choice[name].get("content") or "" for choice in part["choices"])


def _completion_text(part: Any) -> str:
    return "".join(choice["text"] for choice in part["choices"])


def _response_text(part: Any) -> str:
    if "output" in part:
        return "".join(content["text"] for item in part["output"] for content in item["content"])
    return part["delta"] if part["type"] == "response.output_text.delta" else ""


def _openai(name: str, value: Callable[[str], Any], limit: str, *, streams: bool) -> Body:
    def body(prompt: str, max_tokens: int) -> dict[str, Any]:
        more = {"temperature": 0, "ignore_eos": True, "stream": streams}
        return {name: value(prompt), limit: max_tokens, **more}

    return body


def _openai_kinds() -> list[Kind]:
    kinds: list[Kind] = []
    for streams in (True, False):
        how = "streamed" if streams else "whole"
        chat = _openai(
            "messages", lambda text: [{"role": "user", "content": text}], "max_tokens",
            streams=streams,
        )  # fmt: skip
        text = _openai("prompt", str, "max_tokens", streams=streams)
        response = _openai("input", str, "max_output_tokens", streams=streams)
        kinds += [
            Kind(f"chat, {how}", "/v1/chat/completions", chat, _chat_text, streams),
            Kind(f"completion, {how}", "/v1/completions", text, _completion_text, streams),
            Kind(f"response, {how}", "/v1/responses", response, _response_text, streams),
        ]
    return kinds


NATIVE = Kind("native", "/api/v1/continue_from_raw_prompt", _native, _native_text)
SOCKET = Kind("websocket", "/api/v1/inference_socket", _native, _native_text, is_socket=True)
KINDS = [
    NATIVE,
    Kind("native chat", "/api/v1/continue_from_conversation_history", _conversation, _native_text),
    SOCKET,
    *_openai_kinds(),
]


def _no_text(_: Any) -> str:
    return ""


EMBEDDING_KINDS = [
    Kind(
        "native embeddings",
        "/api/v1/generate_embedding_batch",
        lambda text, count: {
            "input_batch": [{"id": str(n), "content": text} for n in range(count)],
            "normalization_method": "L2",
        },
        _no_text,
    ),
    Kind(
        "embeddings",
        "/v1/embeddings",
        lambda text, count: {"input": [text] * count},
        _no_text,
        streams=False,
    ),
]


def outcomes(metrics: str) -> dict[str, int]:
    """How many requests have ended in which way."""
    counts = by_label(metrics, "headrace_requests_total", "outcome")
    return {outcome: int(count) for outcome, count in counts.items()}
