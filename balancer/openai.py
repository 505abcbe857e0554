"""OpenAI's routes: one request a body, the answer as one object or as server-sent events.

A request that fails before its answer has begun gets a status and OpenAI's error body; later the
stream carries one error event and ends. A client that goes away is a cancel, whatever it waits for.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from balancer.balancer import Balancer, new_id
from balancer.batch import Batch
from balancer.consultation import consult
from balancer.exchange import Told
from balancer.http import (
    ClosingStream,
    Refused,
    json_answer,
    paced,
    read_body,
    unless_gone,
)
from balancer.limits import check_documents, limit_answer
from balancer.native_requests import answers, chunks, embed, encode_request
from balancer.openai_chat import ChatRequest, chat_frame
from balancer.openai_chat_results import ChatAnswer, ChatStream
from balancer.openai_completion_results import CompletionAnswer, Completions, CompletionStream
from balancer.openai_completions import CompletionRequest
from balancer.openai_embeddings import EmbeddingAnswer, EmbeddingRequest, single_vector
from balancer.openai_errors import PARAMETERS, failure, parse, refusal
from balancer.openai_generation import GenerationBody
from balancer.openai_models import model_object
from balancer.openai_response_events import ResponseAnswer, ResponseHead, ResponseStream
from balancer.openai_responses import ResponsesRequest
from balancer.openai_results import Head, Json
from balancer.openai_tokens import TokensToText, detokenized, parse_text, tokenized
from balancer.server_events import data, named
from balancer.terms import Route, Terms, shown_id
from common.errors import ErrorCode, RequestError
from common.faults import fault
from common.ids import RequestId
from common.messages import (
    L2,
    Detokenize,
    Detokenized,
    Event,
    Failed,
    Generate,
    Tokenize,
    Tokenized,
)

log = logging.getLogger(__name__)

KEEP_ALIVE = 4.0
"""Seconds without a word after which a stream carries a comment, since things in between cut
connections that are silent; until then a request that fails has a status.
"""

COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

STARTED = int(time.time())


class Stream(Protocol):
    """How a stream is told."""

    def begin(self) -> bytes: ...

    def tell(self, told: Told, /) -> bytes:
        """What follows from an event that is no failure, perhaps nothing."""
        ...

    def fail(self, error: RequestError, /) -> bytes:
        """The end, if it is none."""
        ...

    def end(self) -> bytes: ...


class Answer(Protocol):
    """How one object is made."""

    def take(self, told: Told, /) -> None: ...

    def object(self) -> Json: ...


class _Chunks(Protocol):
    def chunks(self, told: Told, /) -> Sequence[Json]: ...


class ChunkStream:
    """As chats and completions have it."""

    def __init__(self, chunks: _Chunks) -> None:
        self._chunks = chunks

    def begin(self) -> bytes:
        return b""

    def tell(self, told: Told) -> bytes:
        return b"".join(map(data, self._chunks.chunks(told)))

    def fail(self, error: RequestError) -> bytes:
        return data(refusal(error).body)

    def end(self) -> bytes:
        return DONE


class EventStream:
    """As responses have it."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream

    def begin(self) -> bytes:
        return named(self._stream.begin())

    def tell(self, told: Told) -> bytes:
        return named(self._stream.events(told))

    def fail(self, error: RequestError) -> bytes:
        return named(self._stream.fail(error))

    def end(self) -> bytes:
        return b""


class OpenAI:
    def __init__(self, balancer: Balancer, *, keep_alive: float = KEEP_ALIVE) -> None:
        """``keep_alive``: in seconds; see ``KEEP_ALIVE``."""
        self._balancer = balancer
        self._keep_alive = keep_alive

    async def models(self, _request: Request) -> Response:
        models = [self._model(names) for names in self._balancer.models]
        return json_answer({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._balancer.check_model(name)
        # One that was just lost is known, but nobody serves it.
        names = next((names for names in self._balancer.models if name in names), [name])
        return json_answer(self._model(names) | {"id": name})

    def _model(self, names: Sequence[str]) -> Json:
        agents = (a for a in self._balancer.agents if names[0] in a.status.model_names)
        described = next((a.description for a in agents if a.description.metadata), None)
        return model_object(names, created=STARTED, described=described)

    async def chat(self, request: Request) -> Response:
        params = parse(ChatRequest, await read_body(request))
        ids = _ids(params.answers)
        named = "max_tokens" if params.max_completion_tokens is None else "max_completion_tokens"
        first = self._chat_frame(params, ids[0], longest=named)
        frames = {frame.request_id: encode_request(frame) for frame in answers(first, ids)}
        indices = {request_id: n for n, request_id in enumerate(ids)}
        kind = "chat.completion.chunk" if params.streams else "chat.completion"
        head = self._head("chatcmpl", kind, ids[0], params)
        if params.streams:
            stream = ChatStream(head, indices, tells_usage=params.tells_usage)
            return await self._stream(request, frames, params.terms, ChunkStream(stream))
        answer = ChatAnswer(head, indices, tells_logprobs=params.alternatives is not None)
        return await self._whole(request, frames, params.terms, answer)

    async def responses(self, request: Request) -> Response:
        params = parse(ResponsesRequest, await read_body(request))
        chat = params.chat()
        frame = self._chat_frame(chat, new_id(), longest="max_output_tokens")
        head = ResponseHead(
            id=f"resp_{frame.request_id}",
            created=int(time.time()),
            model=chat.model or self._model_name(),
            settings=params.settings(frame.sampling),
        )
        frames = {frame.request_id: encode_request(frame)}
        if chat.streams:
            stream = EventStream(ResponseStream(head))
            return await self._stream(request, frames, params.terms, stream)
        return await self._whole(request, frames, params.terms, ResponseAnswer(head))

    async def completions(self, request: Request) -> Response:
        params = parse(CompletionRequest, await read_body(request))
        parameters = self._balancer.parameters_for_tokens(params.model)
        given = params.prompts()
        ids = _ids(len(given) * params.answers)
        frames: dict[RequestId, bytes] = {}
        prompts: dict[RequestId, int] = {}
        for n, prompt in enumerate(given):
            mine = ids[n * params.answers : (n + 1) * params.answers]
            first = params.generate(mine[0], prompt, parameters.sampling)
            first = limit_answer(first, self._balancer.limits)
            for frame in answers(first, mine):
                frames[frame.request_id] = encode_request(frame)
                prompts[frame.request_id] = n
        head = self._head("cmpl", "text_completion", ids[0], params)
        completions = Completions(
            head, prompts, params.echoes(), tells_logprobs=params.alternatives is not None
        )
        if params.streams:
            stream = CompletionStream(completions, tells_usage=params.tells_usage)
            return await self._stream(request, frames, params.terms, ChunkStream(stream))
        return await self._whole(request, frames, params.terms, CompletionAnswer(completions))

    async def embeddings(self, request: Request) -> Response:
        params = parse(EmbeddingRequest, await read_body(request))
        parameters = self._balancer.desired_state.inference_parameters
        if not parameters.enable_embeddings:
            raise RequestError(ErrorCode.EMBEDDINGS_DISABLED, "embeddings are not enabled")
        check_documents(params.documents, self._balancer.limits, "input")
        self._balancer.check_model(params.model)
        pooling = single_vector(parameters.pooling_type)
        agents = max(1, len(self._balancer.agents))
        parts = chunks(params.documents, agents=agents, largest=parameters.embedding_batch_size)
        ids = _ids(len(parts))
        frames = {
            request_id: encode_request(
                embed(documents, request_id, pooling=pooling, normalization=L2())
            )
            for request_id, documents in zip(ids, parts, strict=True)
        }
        answer = EmbeddingAnswer(params, params.model or self._model_name())
        batch = self._submit(
            request, frames, Terms(params.model, route=Route.EMBEDDINGS), at_once=agents
        )
        return await self._collect(request, batch, answer)

    async def tokenize(self, request: Request) -> Response:
        params = parse_text(await read_body(request))
        event = await self._consult(request, params.frame, params.model)
        assert isinstance(event, Tokenized)
        return json_answer(tokenized(event, tells_pieces=params.tells_pieces))

    async def detokenize(self, request: Request) -> Response:
        params = parse(TokensToText, await read_body(request))
        event = await self._consult(request, params.frame, params.model)
        assert isinstance(event, Detokenized)
        return json_answer(detokenized(event))

    async def _consult(
        self,
        request: Request,
        frame: Callable[[RequestId], Tokenize | Detokenize],
        model: str | None,
    ) -> Event:
        self._balancer.check_model(model)
        told = await consult(self._balancer, request, frame, model)
        return self._unless_failed(told).event

    def _chat_frame(self, params: ChatRequest, request_id: RequestId, *, longest: str) -> Generate:
        """``longest``: which key says how long the answer may be."""
        parameters = self._balancer.parameters_for_tokens(params.model)
        frame = chat_frame(
            params,
            request_id,
            parameters.sampling,
            longest_image_side=parameters.image_resize_to_fit,
        )
        return limit_answer(frame, self._balancer.limits, longest)

    def _head(self, prefix: str, kind: str, request_id: RequestId, params: GenerationBody) -> Head:
        name = params.model or self._model_name()
        return Head(f"{prefix}-{request_id}", kind, int(time.time()), name)

    def _model_name(self) -> str:
        """Of an answer to a request that names none."""
        return next((names[0] for names in self._balancer.models), "")

    async def _stream(
        self,
        request: Request,
        frames: Mapping[RequestId, bytes],
        terms: Terms,
        stream: Stream,
    ) -> Response:
        """Begins with the first event, or with the first comment; until then it can be refused."""
        batch = self._begin(request, frames, terms)
        try:
            first = await unless_gone(request, self._next(batch))
            if first is not None:
                self._unless_failed(first)
        except BaseException:
            batch.cancel()
            raise
        headers = {
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-request-id": batch.name,
        }
        lines = paced(self._lines(batch, first, stream))
        return ClosingStream(lines, "text/event-stream", headers, closed=batch.cancel)

    def _error(self, event: Failed) -> RequestError:
        return failure(event, has_agents=bool(self._balancer.agents))

    def _unless_failed(self, told: Told) -> Told:
        if isinstance(told.event, Failed):
            raise self._error(told.event)
        return told

    async def _lines(
        self, batch: Batch, told: Told | None, stream: Stream
    ) -> AsyncGenerator[bytes, None]:
        """``told``: what has been read of the batch already; None: nothing, for a while."""
        text = stream.begin()
        while True:
            if told is None:
                text += COMMENT
            elif isinstance(told.event, Failed):
                yield text + stream.fail(self._error(told.event))
                return
            else:
                text += stream.tell(told)
                if batch.is_over:
                    yield text + stream.end()
                    return
            if text:
                yield text
            text = b""
            told = await self._next(batch)

    async def _next(self, batch: Batch) -> Told | None:
        """None: it is time for a comment."""
        if not batch.is_empty:
            return await anext(batch)
        try:
            async with asyncio.timeout(self._keep_alive):
                return await anext(batch)
        except TimeoutError:
            return None

    async def _whole(
        self,
        request: Request,
        frames: Mapping[RequestId, bytes],
        terms: Terms,
        answer: Answer,
    ) -> Response:
        return await self._collect(request, self._begin(request, frames, terms), answer)

    async def _collect(self, request: Request, batch: Batch, answer: Answer) -> Response:
        try:
            await unless_gone(request, self._read(batch, answer))
        finally:
            batch.cancel()
        return json_answer(answer.object(), headers={"x-request-id": batch.name})

    async def _read(self, batch: Batch, answer: Answer) -> None:
        async for told in batch:
            answer.take(self._unless_failed(told))

    def _begin(self, request: Request, frames: Mapping[RequestId, bytes], terms: Terms) -> Batch:
        """As many at once as there are slots, so that a large batch leaves room in the buffer."""
        slots = sum(agent.status.slots_total for agent in self._balancer.agents)
        return self._submit(request, frames, terms, at_once=max(1, slots))

    def _submit(
        self, request: Request, frames: Mapping[RequestId, bytes], terms: Terms, *, at_once: int
    ) -> Batch:
        terms = replace(terms, client_id=_client_id(request))
        batch = Batch(self._balancer, frames, terms, at_once=at_once)
        request.state.request_id = batch.name
        log.info(
            "request_id=%s client_request_id=%s %s: %d requests",
            batch.name,
            terms.client_id,
            request.url.path,
            len(frames),
        )
        return batch


def _ids(count: int) -> list[RequestId]:
    """Those of one client's request, alike but for their ends."""
    first = new_id()
    return [first, *(RequestId(f"{first}-{n}") for n in range(1, count))]


def _client_id(request: Request) -> str | None:
    """What the client calls its request."""
    return shown_id(request.headers.get("x-client-request-id", ""))


Endpoint = Callable[[Request], Awaitable[Response]]


def openai_errors(
    endpoint: Endpoint,
    parameters: Mapping[ErrorCode, str] = PARAMETERS,
    *,
    refused: Refused,
) -> Endpoint:
    """Errors before an answer begins, with the fitting status. ``parameters``: which one is to blame,
    where the error does not say it. ``refused``: is told of what has not become a request.
    """

    @wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            if not hasattr(request.state, "request_id"):
                refused(error)
            return _refused(request, error, parameters)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads this
        except Exception as error:
            request_id = getattr(request.state, "request_id", None)
            log.error("request_id=%s fault=%s in %s", request_id, fault(error), request.url.path)  # noqa: TRY400
            told = RequestError(ErrorCode.INTERNAL_ERROR, "a fault of this server")
            return _refused(request, told, parameters)

    return wrapped


def _refused(
    request: Request, error: RequestError, parameters: Mapping[ErrorCode, str]
) -> Response:
    told = refusal(error, parameters)
    name = getattr(request.state, "request_id", None)
    headers = told.headers if name is None else {**told.headers, "x-request-id": name}
    return json_answer(told.body, status=told.status, headers=headers)
