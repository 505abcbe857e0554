"""Clients of all protocols and manners, each of which writes in the ledger what it saw."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from integration_tests.chaos.ledger import LONGEST, Ledger, Outcome, Record
from integration_tests.chaos.plan import Manner, Protocol, Question, Visit

RAW_PROMPT = "/api/v1/continue_from_raw_prompt"
CONVERSATION = "/api/v1/continue_from_conversation_history"
SOCKET = "/api/v1/inference_socket"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

GREEDY = {"temperature": 0, "ignore_eos": True}

REQUEST_ID = "x-request-id"

LONGEST_PAUSE = 1.5
"""Seconds between two looks of a slow reader."""

LONGEST_STAY = 0.5
"""Seconds after which one that leaves at once has left."""

LONGEST_WAIT = 4.0
"""The same of one that would be answered whole."""

RUBBISH: list[tuple[str, bytes]] = [
    (RAW_PROMPT, b"not JSON"),
    (RAW_PROMPT, b'{"raw_prompt": "a"}'),
    (RAW_PROMPT, b'{"raw_prompt": "a", "max_tokens": 1, "nobody_knows": 1}'),
    (CONVERSATION, b'{"conversation_history": "no list", "max_tokens": 1}'),
    (CONVERSATION, b"[" * 10_000),
    (RAW_PROMPT, b'{"raw_prompt": "\xff", "max_tokens": 1}'),
    (CHAT, b"{}"),
    (CHAT, b'{"model": "nobody has it", "messages": [{"role": "user", "content": "a"}]}'),
    (COMPLETIONS, b'{"prompt": {}}'),
]


class LeftError(Exception):
    """The client goes, in the middle of what it does."""


class EndedError(Exception):
    """The stream is over: its connection was lost, or never made."""


SOCKET_RUBBISH: list[str | bytes] = ["", "not JSON", "[]", '{"Request": 1}', b"\x00\xff"]

UNREACHED = (httpx.ConnectError, ConnectionRefusedError, InvalidHandshake, InvalidMessage)
LOST = (httpx.TransportError, OSError, EndedError, ConnectionClosed)


class Clients:
    def __init__(self, address: str, model: str, ledger: Ledger, http: httpx.AsyncClient) -> None:
        self._address = address
        self._model = model
        self._ledger = ledger
        self._http = http

    async def come(self, visit: Visit) -> bool:
        """From the first word to the last outcome. False: the connection could not be had or kept."""
        if visit.manner is Manner.SENDS_RUBBISH:
            return await self._send_rubbish(visit)
        records = [
            self._ledger.open(
                f"{visit.number}.{n}", visit.protocol, visit.manner, question, now=monotonic()
            )
            for n, question in enumerate(visit.questions)
        ]
        try:
            async with asyncio.timeout(LONGEST):
                await self._ask(visit, records)
        except LeftError:
            _end(records, Outcome.LEFT)
        except TimeoutError:
            pass  # it has no outcome, which the ledger tells
        except UNREACHED as error:
            _end(records, Outcome.UNREACHED, f"{type(error).__name__}: {error}")
            return False
        except LOST as error:
            _end(records, Outcome.CUT, f"{type(error).__name__}: {error}")
            return False
        return True

    async def _ask(self, visit: Visit, records: list[Record]) -> None:
        if visit.manner is Manner.HALF_CLOSES:
            await self._half_close(visit.questions[0])
            raise LeftError
        asking = self._over_socket if visit.protocol is Protocol.SOCKET else self._over_http
        stay = _stay(visit)
        if stay is None:
            await asking(visit, records)
            return
        task = asyncio.create_task(asking(visit, records))
        await asyncio.wait({task}, timeout=stay)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise LeftError
        task.result()

    # Over HTTP

    async def _over_http(self, visit: Visit, records: list[Record]) -> None:
        (record,) = records
        (question,) = visit.questions
        match visit.protocol:
            case Protocol.NATIVE:
                await self._stream(RAW_PROMPT, raw_prompt(question), _native, visit, record)
            case Protocol.CONVERSATION:
                await self._stream(CONVERSATION, conversation(question), _native, visit, record)
            case Protocol.CHAT_STREAM:
                await self._stream(CHAT, self._chat(question, stream=True), _chat, visit, record)
            case Protocol.COMPLETION_STREAM:
                body = self._completion(question)
                await self._stream(COMPLETIONS, body, _completion, visit, record)
            case Protocol.CHAT_WHOLE:
                await self._whole(question, record)
            case Protocol.SOCKET:
                raise AssertionError("not over HTTP")

    async def _stream(
        self,
        route: str,
        body: dict[str, Any],
        read: Callable[[AsyncIterator[str], Record], AsyncGenerator[None, None]],
        visit: Visit,
        record: Record,
    ) -> None:
        async with self._http.stream("POST", route, json=body) as response:
            if not response.is_success:
                await response.aread()
                _refused(record, response)
                return
            record.request_id = response.headers.get(REQUEST_ID)
            pieces = 0
            async with aclosing(read(response.aiter_lines(), record)) as reading:
                async for _ in reading:
                    pieces += 1
                    if visit.manner is Manner.LEAVES and pieces >= visit.after:
                        raise LeftError
                    if visit.manner is Manner.READS_SLOWLY and pieces % 50 == 0:
                        await asyncio.sleep(visit.haste * LONGEST_PAUSE)
        if record.ending is None:
            raise EndedError("without a last message")

    async def _whole(self, question: Question, record: Record) -> None:
        response = await self._http.post(CHAT, json=self._chat(question, stream=False))
        record.request_id = response.headers.get(REQUEST_ID)
        if not response.is_success:
            _refused(record, response)
            return
        answer = response.json()
        record.heard(answer["choices"][0]["message"]["content"], now=monotonic())
        _count_openai(record, answer["usage"])
        record.ended(Outcome.COMPLETE, now=monotonic())

    def _chat(self, question: Question, *, stream: bool) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question.prompt}],
            **_openai(question, stream=stream),
        }

    def _completion(self, question: Question) -> dict[str, Any]:
        return {"model": self._model, "prompt": question.prompt, **_openai(question, stream=True)}

    async def _half_close(self, question: Question) -> None:
        """Send all, close our half, and read what comes."""
        url = urlsplit(self._address)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            body = json.dumps(raw_prompt(question)).encode()
            head = f"POST {RAW_PROMPT} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.write_eof()
            while await reader.read(2**16):
                pass
        finally:
            writer.close()

    async def _send_rubbish(self, visit: Visit) -> bool:
        """As ``come`` does."""
        record = self._ledger.open(
            f"{visit.number}", visit.protocol, visit.manner, None, now=monotonic()
        )
        try:
            if visit.protocol is Protocol.SOCKET:
                await self._send_rubbish_over_socket(record)
            else:
                route, body = RUBBISH[int(visit.haste * len(RUBBISH))]
                response = await self._http.post(route, content=body)
                told = f"{response.status_code}: {response.text[:60]}"
                is_refused = 400 <= response.status_code < 500
                outcome = Outcome.REFUSED if is_refused else Outcome.ERROR
                record.ended(outcome, now=monotonic(), code=told)
        except (*UNREACHED, *LOST) as error:
            record.ended(Outcome.UNREACHED, now=monotonic(), code=type(error).__name__)
            return False
        return True

    async def _send_rubbish_over_socket(self, record: Record) -> None:
        """What names a request is answered with an error, the rest ignored; the socket stays."""
        async with connect(self._socket, proxy=None, close_timeout=1.0) as socket:
            for rubbish in SOCKET_RUBBISH:
                await socket.send(rubbish)
            await socket.send(json.dumps({"Request": {"id": record.name, "request": {}}}))
            message = json.loads(await socket.recv())
            if "Error" in message and message["Error"]["request_id"] == record.name:
                record.ended(Outcome.REFUSED, now=monotonic())
            else:
                record.ended(Outcome.ERROR, now=monotonic(), code=f"answered with {message}")

    # Over a websocket

    @property
    def _socket(self) -> str:
        return self._address.replace("http", "ws", 1) + SOCKET

    async def _over_socket(self, visit: Visit, records: list[Record]) -> None:
        async with connect(self._socket, proxy=None, close_timeout=1.0) as socket:
            for record, question in zip(records, visit.questions, strict=True):
                request = {"ContinueFromRawPrompt": raw_prompt(question)}
                asked = {"Request": {"id": record.name, "request": request}}
                await socket.send(json.dumps(asked))
            await self._converse(socket, visit, {record.name: record for record in records})

    async def _converse(
        self, socket: ClientConnection, visit: Visit, records: dict[str, Record]
    ) -> None:
        pieces = 0
        while any(record.ending is None for record in records.values()):
            message = json.loads(await socket.recv())
            pieces += 1
            envelope = next(iter(message.values()))
            record = records[envelope["request_id"]]
            if not (visit.manner is Manner.STOPS and record.ended_as(Outcome.LEFT)):
                take_native(record, message)
            if visit.manner is Manner.LEAVES and pieces >= visit.after:
                raise LeftError
            if visit.manner is Manner.STOPS and pieces == visit.after and record.ending is None:
                stop = {"Notification": {"StopRespondingTo": record.name}}
                await socket.send(json.dumps(stop))
                record.ended(Outcome.LEFT, now=monotonic())
            if visit.manner is Manner.READS_SLOWLY and pieces % 50 == 0:
                await asyncio.sleep(visit.haste * LONGEST_PAUSE)


def _stay(visit: Visit) -> float | None:
    """Seconds until the client goes, whatever has come; None: it does not go by the clock."""
    if visit.manner is Manner.LEAVES_AT_ONCE:
        return visit.haste * LONGEST_STAY
    if visit.manner is Manner.LEAVES and visit.protocol is Protocol.CHAT_WHOLE:
        return visit.haste * LONGEST_WAIT  # there are no pieces to wait for
    return None


def _end(records: list[Record], outcome: Outcome, code: str = "") -> None:
    for record in records:
        if record.ending is None:
            record.ended(outcome, now=monotonic(), code=code)


def raw_prompt(question: Question) -> dict[str, Any]:
    return {"raw_prompt": question.prompt, **_limits(question), **_sampling(question)}


def conversation(question: Question) -> dict[str, Any]:
    return {
        "conversation_history": [{"role": "user", "content": question.prompt}],
        "add_generation_prompt": True,
        "enable_thinking": False,
        **_limits(question),
        **_sampling(question),
    }


def _limits(question: Question) -> dict[str, Any]:
    stop = {} if question.stop is None else {"stop": [question.stop]}
    return {"max_tokens": question.max_tokens, **stop}


def _sampling(question: Question) -> dict[str, Any]:
    return {} if question.answer is not None else {"sampling": GREEDY}


def _openai(question: Question, *, stream: bool) -> dict[str, Any]:
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {**_limits(question), **({} if question.answer is not None else GREEDY), **streamed}


def _refused(record: Record, response: httpx.Response) -> None:
    """A status in place of an answer: it is said before anything else, and clearly."""
    outcome = Outcome.ERROR if response.status_code >= 429 else Outcome.REFUSED
    record.ended(outcome, now=monotonic(), code=f"{response.status_code} {_named(response.text)}")


async def _native(lines: AsyncIterator[str], record: Record) -> AsyncGenerator[None, None]:
    async for line in lines:
        message = json.loads(line)
        record.request_id = next(iter(message.values()))["request_id"]
        take_native(record, message)
        yield


def take_native(record: Record, message: dict[str, Any]) -> None:
    now = monotonic()
    if "Error" in message:
        error = message["Error"]["error"]
        record.ended(Outcome.ERROR, now=now, code=f"{error['code']} {_named(error['description'])}")
        return
    response = message["Response"]
    for kind, value in response["response"]["GeneratedToken"].items():
        match kind:
            case "ContentToken" | "UndeterminableToken":
                record.heard(value, now=now, agent=response["generated_by"])
            case "Done":
                usage = value["usage"]
                record.counted(prompt=usage["prompt_tokens"], answer=usage["content_tokens"])
                record.ended(Outcome.COMPLETE, now=now)
            case _:
                record.ended(Outcome.ERROR, now=now, code=kind)


def _events(
    text_of: Callable[[dict[str, Any]], str],
) -> Callable[[AsyncIterator[str], Record], AsyncGenerator[None, None]]:
    """Reads OpenAI's server-sent events. ``text_of``: the text of a choice."""

    async def read(lines: AsyncIterator[str], record: Record) -> AsyncGenerator[None, None]:
        reasons = 0
        async for line in lines:
            now = monotonic()
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                if reasons != 1:
                    record.faults.append(f"[DONE] after {reasons} finish reasons")
                record.ended(Outcome.COMPLETE, now=now)
                yield
                continue
            event = json.loads(data)
            if "error" in event:
                error = event["error"]
                record.ended(Outcome.ERROR, now=now, code=str(error["code"] or error["type"]))
                yield
                continue
            for choice in event["choices"]:
                reasons += choice["finish_reason"] is not None
                if text := text_of(choice):
                    record.heard(text, now=now)
                    yield
            if event.get("usage"):
                _count_openai(record, event["usage"])

    return read


_chat = _events(lambda choice: choice["delta"].get("content") or "")
_completion = _events(lambda choice: choice["text"])


def _count_openai(record: Record, usage: dict[str, Any]) -> None:
    record.counted(prompt=usage["prompt_tokens"], answer=usage["completion_tokens"])


NAMES = {
    "agent that served": "agent_lost",
    "balancer was lost": "balancer_lost",
    "no agent serves the model": "model_not_found",
    "shutting down": "shutting_down",
    "not read": "slow_client",
    "no slot": "buffer_timeout",
    "waiting for a slot": "buffer_full",
    "deadline": "deadline_exceeded",
}
"""What errors are called here, by words of their description."""


def _named(description: str) -> str:
    named = (name for words, name in NAMES.items() if words in description)
    return next(named, description[:60].strip())
