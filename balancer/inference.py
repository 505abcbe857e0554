"""The inference routes: one request a body over HTTP, many at once over a websocket.

Over HTTP the answer is one JSON message a line; over the websocket the same messages, one a frame.
A client that goes away, or says that it does not wait any longer, is a cancel.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from balancer import native
from balancer.balancer import Balancer
from balancer.exchange import Exchange
from balancer.http import MAX_BODY_BYTES, ClosingStream, read_body
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import DocumentFailed, Failed, Pooling

log = logging.getLogger(__name__)

MOST_UNSENT = 256
"""Messages that may wait for a slow websocket before its requests stop being read."""

MOST_OPEN = 1024
"""Requests that one websocket may have open at once."""

GOOD_BYE_TIMEOUT = 1.0
"""Seconds for the last messages when the balancer ends."""

GOING_AWAY = 1001
MESSAGE_TOO_BIG = 1009


class Inference:
    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    async def conversation(self, request: Request) -> Response:
        return await self._generate(request, native.ContinueFromConversationHistory)

    async def raw_prompt(self, request: Request) -> Response:
        return await self._generate(request, native.ContinueFromRawPrompt)

    async def embeddings(self, request: Request) -> Response:
        """The documents in portions, each one request to one agent, one after the other. A portion
        that fails ends the answer.
        """
        parameters = self._balancer.desired_state.inference_parameters
        if not parameters.enable_embeddings:
            raise RequestError(ErrorCode.NOT_SUPPORTED, "embeddings are not enabled")
        params = native.parse(native.GenerateEmbeddingBatchParams, await read_body(request))
        if not self._balancer.agents:
            raise RequestError(ErrorCode.NO_AGENTS, "no agents are connected")
        pooling = parameters.pooling_type
        frames: dict[RequestId, bytes] = {}
        for documents in params.portions(parameters.embedding_batch_size):
            request_id = _new_id()
            frame = native.embed(
                documents, request_id, pooling=pooling, normalization=params.normalization
            )
            frames[request_id] = native.encode_request(frame)
        return _ndjson(self._embedding_lines(frames, params, pooling))

    async def socket(self, socket: WebSocket) -> None:
        await _Session(self._balancer, socket).run()

    async def _generate(self, request: Request, model: type[native.GenerationParams]) -> Response:
        params = native.parse(model, await read_body(request))
        frames = _new_requests(self._balancer, params)
        return _ndjson(self._lines(frames))

    async def _lines(self, frames: Mapping[RequestId, bytes]) -> AsyncGenerator[bytes, None]:
        request_id = next(iter(frames))
        try:
            async for message in _messages(self._balancer.submit_all(frames), request_id, frames):
                yield msgspec.json.encode(message) + b"\n"
        finally:
            _cancel(self._balancer, frames)

    async def _embedding_lines(
        self,
        frames: Mapping[RequestId, bytes],
        params: native.GenerateEmbeddingBatchParams,
        pooling: Pooling,
    ) -> AsyncGenerator[bytes, None]:
        client_id = _new_id()
        failed: list[DocumentFailed] = []
        for request_id, frame in frames.items():
            try:
                async for told in self._balancer.submit(request_id, frame):
                    if isinstance(told.event, DocumentFailed):
                        failed.append(told.event)
                    for message in native.embedding_messages(
                        client_id, told.generated_by, told.event, params, pooling
                    ):
                        yield msgspec.json.encode(message) + b"\n"
                    if isinstance(told.event, Failed):
                        return
            finally:
                self._balancer.cancel(request_id)
        yield msgspec.json.encode(native.embedding_done(client_id, failed)) + b"\n"


def _ndjson(lines: AsyncGenerator[bytes, None]) -> ClosingStream:
    return ClosingStream(
        lines,
        media_type="application/json",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


def _new_id() -> RequestId:
    return RequestId(uuid.uuid4().hex)


def _new_requests(balancer: Balancer, params: native.GenerationParams) -> Mapping[RequestId, bytes]:
    """For each answer that is asked for a new id of our own, and the frame for an agent. Raises
    ``RequestError`` for what is not supported or cannot be carried.
    """
    request_ids = [_new_id() for _ in range(params.n)]
    sampling = balancer.desired_state.inference_parameters.sampling
    first = native.generate(params, request_ids[0], sampling)
    return {
        frame.request_id: native.encode_request(frame)
        for frame in native.answers(first, request_ids)
    }


async def _messages(
    exchange: Exchange, client_id: str, frames: Mapping[RequestId, bytes]
) -> AsyncGenerator[native.Message, None]:
    """What the client is told, under the id that it knows."""
    indices = {request_id: n for n, request_id in enumerate(frames)} if len(frames) > 1 else {}
    async for told in exchange:
        index = indices.get(told.event.request_id)
        for message in native.messages(client_id, told.generated_by, told.event, index):
            yield message


def _cancel(balancer: Balancer, frames: Mapping[RequestId, bytes]) -> None:
    """In one act: an answer that waits must not begin because another one stops."""
    for request_id in frames:
        balancer.cancel(request_id)


class _Session:
    """One websocket: a reader, a writer, and a task for each open request."""

    def __init__(self, balancer: Balancer, socket: WebSocket) -> None:
        self._balancer = balancer
        self._socket = socket
        self._open: dict[str, asyncio.Task[None]] = {}
        self._outbox: asyncio.Queue[str | int] = asyncio.Queue(MOST_UNSENT)
        """Messages, and at the end perhaps a close code."""

    async def run(self) -> None:
        """Serve until the client has gone; then all its requests are cancelled."""
        await self._socket.accept()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._write())
                self._tasks.create_task(self._close_with_balancer())
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
            if len(text) > MAX_BODY_BYTES or len(text.encode()) > MAX_BODY_BYTES:
                await self._outbox.put(MESSAGE_TOO_BIG)
                return
            try:
                self._received(native.parse_message(text))
            except native.MessageError as error:
                if error.request_id is None:
                    log.info("a websocket message was ignored: %s", error)
                    continue
                await self._send(native.failure(error.request_id, None, error.code, error.message))

    def _received(self, message: native.Request | native.Stop) -> None:
        """Raises ``MessageError`` if the request cannot be taken on; the others go on."""
        if isinstance(message, native.Stop):
            if task := self._open.pop(message.request_id, None):
                task.cancel()
            return
        client_id = message.id
        if client_id in self._open:
            raise native.MessageError(client_id, "a request with this id is open already")
        if len(self._open) >= MOST_OPEN:
            raise native.MessageError(client_id, f"more than {MOST_OPEN} open requests")
        try:
            frames = _new_requests(self._balancer, message.request.params)
        except RequestError as error:
            raise native.MessageError(client_id, error.message, error.code) from error
        exchange = self._balancer.submit_all(frames)
        task = self._tasks.create_task(self._forward(client_id, exchange, frames))
        self._open[client_id] = task
        # A callback, since a task that is cancelled before its first step never runs its finally.
        task.add_done_callback(lambda task: self._end(client_id, task, frames))

    async def _forward(
        self, client_id: str, exchange: Exchange, frames: Mapping[RequestId, bytes]
    ) -> None:
        async for message in _messages(exchange, client_id, frames):
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

    async def _send(self, message: native.Message) -> None:
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
