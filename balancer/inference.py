"""The inference routes: one request a body over HTTP, many at once over a websocket.

Over HTTP the answer is one JSON message a line; over the websocket the same messages, one a frame.
A client that goes away, or says that it does not wait any longer, is a cancel.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from balancer.balancer import Balancer, new_id
from balancer.batch import Batch
from balancer.exchange import Exchange
from balancer.http import ClosingStream, paced, read_body
from balancer.keys import SUBPROTOCOL
from balancer.limits import Limit, LimitError, check_documents, limit_answer
from balancer.native_requests import (
    ContinueFromConversationHistory,
    ContinueFromRawPrompt,
    GenerateEmbeddingBatchParams,
    GenerationParams,
    MessageError,
    SocketRequest,
    Stop,
    answers,
    chunks,
    embed,
    encode_request,
    generate,
    parse,
    parse_message,
)
from balancer.native_results import Dialect, Message, Teller, dialect, mode_notification
from balancer.terms import Route, Terms, shown_id
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import DocumentFailed, DocumentTooLong, Pooling

log = logging.getLogger(__name__)

MOST_UNSENT = 256
"""Messages that may wait for a slow websocket before its requests stop being read."""

GOOD_BYE_TIMEOUT = 1.0
"""Seconds for the last messages when the balancer ends."""

GOING_AWAY = 1001
MESSAGE_TOO_BIG = 1009


class Inference:
    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    async def conversation(self, request: Request) -> Response:
        return await self._generate(request, ContinueFromConversationHistory)

    async def raw_prompt(self, request: Request) -> Response:
        return await self._generate(request, ContinueFromRawPrompt)

    async def embeddings(self, request: Request) -> Response:
        """The documents in chunks, each one request to one agent, and as many of them at once as
        there are agents. A chunk that fails is told, and the others go on.
        """
        parameters = self._balancer.desired_state.inference_parameters
        if not parameters.enable_embeddings:
            raise RequestError(ErrorCode.EMBEDDINGS_DISABLED, "embeddings are not enabled")
        params = parse(GenerateEmbeddingBatchParams, await read_body(request))
        check_documents(params.documents, self._balancer.limits, "input_batch")
        agents = max(1, len(self._balancer.agents))  # without any, the first chunk waits for one
        pooling = parameters.pooling_type
        frames: dict[RequestId, bytes] = {}
        for documents in chunks(
            params.documents, agents=agents, largest=parameters.embedding_batch_size
        ):
            request_id = new_id()
            frame = embed(
                documents, request_id, pooling=pooling, normalization=params.normalization
            )
            frames[request_id] = encode_request(frame)
        name = next(iter(frames), new_id())
        teller = Teller(name, _dialect(request))
        lines = self._embedding_lines(frames, agents, teller, params, pooling)
        return _ndjson(paced(lines), name)

    async def socket(self, socket: WebSocket) -> None:
        await _Session(self._balancer, socket).run()

    async def _generate(self, request: Request, model: type[GenerationParams]) -> Response:
        params = parse(model, await read_body(request))
        frames = _new_requests(self._balancer, params)
        name = next(iter(frames))
        teller = Teller(name, _dialect(request))
        return _ndjson(self._lines(frames, params.terms, teller), name)

    async def _lines(
        self, frames: Mapping[RequestId, bytes], terms: Terms, teller: Teller
    ) -> AsyncGenerator[bytes, None]:
        try:
            exchange = self._balancer.submit_all(frames, terms)
            async for message in _messages(exchange, teller, frames):
                yield msgspec.json.encode(message) + b"\n"
        finally:
            _cancel(self._balancer, frames)

    async def _embedding_lines(
        self,
        frames: Mapping[RequestId, bytes],
        at_once: int,
        teller: Teller,
        params: GenerateEmbeddingBatchParams,
        pooling: Pooling,
    ) -> AsyncGenerator[bytes, None]:
        terms = Terms(route=Route.EMBEDDING_BATCH)
        batch = Batch(self._balancer, frames, terms, at_once=at_once)
        refused: list[DocumentFailed | DocumentTooLong] = []
        try:
            async for told in batch:
                event = told.event
                if isinstance(event, DocumentFailed | DocumentTooLong):
                    refused.append(event)
                for message in teller.embedding_messages(told.generated_by, event, params, pooling):
                    yield msgspec.json.encode(message) + b"\n"
        finally:
            batch.cancel()
        yield msgspec.json.encode(teller.embedding_done(refused)) + b"\n"


def _dialect(connection: HTTPConnection) -> Dialect:
    return dialect(connection.headers.get("user-agent", ""))


def _ndjson(lines: AsyncGenerator[bytes, None], name: RequestId) -> ClosingStream:
    return ClosingStream(
        lines,
        media_type="application/json",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": name},
    )


def _new_requests(balancer: Balancer, params: GenerationParams) -> Mapping[RequestId, bytes]:
    """For each answer that is asked for a new id of our own, and the frame for an agent. Raises
    ``RequestError`` for what is not supported, switched off or cannot be carried.
    """
    parameters = balancer.parameters_for_tokens(params.model)
    request_ids = [new_id() for _ in range(params.n)]
    first = generate(
        params,
        request_ids[0],
        parameters.sampling,
        longest_image_side=parameters.image_resize_to_fit,
    )
    first = limit_answer(first, balancer.limits)
    return {frame.request_id: encode_request(frame) for frame in answers(first, request_ids)}


async def _messages(
    exchange: Exchange, teller: Teller, frames: Mapping[RequestId, bytes]
) -> AsyncGenerator[Message, None]:
    indices = {request_id: n for n, request_id in enumerate(frames)} if len(frames) > 1 else {}
    async for told in exchange:
        index = indices.get(told.event.request_id)
        for message in teller.messages(told.generated_by, told.event, index):
            yield message


def _cancel(balancer: Balancer, request_ids: Iterable[RequestId]) -> None:
    """In one act: one that waits must not begin because another one stops."""
    for request_id in request_ids:
        balancer.cancel(request_id)


class _Session:
    """One websocket: a reader, a writer, and a task for each open request."""

    def __init__(self, balancer: Balancer, socket: WebSocket) -> None:
        self._balancer = balancer
        self._socket = socket
        self._dialect = _dialect(socket)
        self._open: dict[str, asyncio.Task[None]] = {}
        self._outbox: asyncio.Queue[str | int] = asyncio.Queue(MOST_UNSENT)
        """Messages, and at the end perhaps a close code."""

    async def run(self) -> None:
        """Serve until the client has gone; then all its requests are cancelled."""
        offered = self._socket.scope.get("subprotocols", ())
        await self._socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._write())
                self._tasks.create_task(self._close_with_balancer())
                if self._dialect is Dialect.PUBLISHED:
                    self._tasks.create_task(self._tell_mode())
                await self._read()
        except* WebSocketDisconnect:
            pass

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            text = message.get("text")
            if text is None:
                continue  # binary frames have no meaning in this protocol
            most = self._balancer.limits.body_bytes
            if len(text) > most or len(text.encode()) > most:
                self._balancer.records.refused(
                    LimitError(
                        Limit.BODY_BYTES,
                        ErrorCode.BODY_TOO_LARGE,
                        f"the message is larger than {most} bytes",
                    )
                )
                await self._outbox.put(MESSAGE_TOO_BIG)
                return
            try:
                self._received(parse_message(text))
            except MessageError as error:
                self._balancer.records.refused(error)
                if error.request_id is None:
                    log.info("a websocket message was ignored: %s", error.code)
                    continue
                teller = Teller(error.request_id, self._dialect)
                await self._send(teller.failure(None, error.code, error.message))

    def _received(self, message: SocketRequest | Stop) -> None:
        """Raises ``MessageError`` if the request cannot be taken on; the others go on."""
        if isinstance(message, Stop):
            if task := self._open.pop(message.request_id, None):
                task.cancel()
            return
        client_id = message.id
        if client_id in self._open:
            raise MessageError(client_id, "a request with this id is open already")
        most = self._balancer.limits.socket_requests
        try:
            if len(self._open) >= most:
                raise LimitError(
                    Limit.SOCKET_REQUESTS,
                    ErrorCode.OVERLOADED,
                    f"more than {most} open requests on one websocket",
                )
            params = message.request.params
            frames = _new_requests(self._balancer, params)
        except RequestError as error:
            raise MessageError(client_id, error.message, error.code, error.limit) from error
        terms = replace(params.terms, client_id=shown_id(client_id))
        exchange = self._balancer.submit_all(frames, terms)
        task = self._tasks.create_task(self._forward(client_id, exchange, frames))
        self._open[client_id] = task
        # A callback, since a task that is cancelled before its first step never runs its finally.
        task.add_done_callback(lambda task: self._end(client_id, task, frames))

    async def _forward(
        self, client_id: str, exchange: Exchange, frames: Mapping[RequestId, bytes]
    ) -> None:
        async for message in _messages(exchange, Teller(client_id, self._dialect), frames):
            await self._send(message)

    def _end(
        self, client_id: str, task: asyncio.Task[None], frames: Mapping[RequestId, bytes]
    ) -> None:
        if self._open.get(client_id) is task:  # else cancelled, and perhaps used again since
            del self._open[client_id]
        _cancel(self._balancer, frames)

    async def _close_with_balancer(self) -> None:
        await self._balancer.closed.wait()
        with suppress(TimeoutError):  # each open request has its last message already
            async with asyncio.timeout(GOOD_BYE_TIMEOUT):
                await asyncio.gather(*self._open.values(), return_exceptions=True)
                await self._outbox.join()
        await self._outbox.put(GOING_AWAY)

    async def _tell_mode(self) -> None:
        """At once if tokens are not generated, and then whenever that changes."""
        changes = self._balancer.mode_changes
        told = False
        while True:
            count = changes.count
            disabled = self._balancer.desired_state.inference_parameters.enable_embeddings
            if disabled is not told:
                told = disabled
                await self._send(mode_notification(enable_embeddings=disabled))
            await changes.after(count)

    async def _send(self, message: Message) -> None:
        await self._outbox.put(msgspec.json.encode(message).decode())

    async def _write(self) -> None:
        """Send what there is to send. It alone sends, so it closes too, and then ends the session."""
        while True:
            item = await self._outbox.get()
            if isinstance(item, int):
                await self._socket.close(item)
                raise WebSocketDisconnect(item)
            await self._socket.send_text(item)
            self._outbox.task_done()
