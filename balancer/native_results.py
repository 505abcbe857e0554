"""The native protocol, outwards: what happened to a request becomes JSON messages for its client.

A pure translator of the published wire format. Some of its variants the published Python client
cannot parse: it is told the same in words that it knows (see ``Dialect``).
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, assert_never

import msgspec

from balancer.native_requests import GenerateEmbeddingBatchParams
from common.errors import STATUS, ErrorCode
from common.messages import (
    Busy,
    Detokenized,
    DocumentFailed,
    DocumentTooLong,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Logprobs,
    Pooling,
    Segment,
    TokenClass,
    TokenGenerated,
    Tokenized,
    TokenLogprob,
    ToolCall,
    ToolCallFormatUnknown,
    ToolCallResult,
    ToolCallsEnded,
    ToolCallsInvalid,
    ToolCallsParsed,
    ToolCallsUnreadable,
    Usage,
)


class Dialect(enum.Enum):
    """Which variants a client can parse."""

    PUBLISHED = enum.auto()
    PYTHON_CLIENT = enum.auto()
    """Not ``TokenGenerationDisabled``, ``ToolSchemaInvalid`` and ``DocumentExceedsBatchSize``, and
    no notifications: on one of them it raises (paddler-client 4.0.0, ``inference_message.py``).
    """


PYTHON_CLIENTS = ("python-httpx/", "Python/")
"""How the libraries that it uses name themselves: httpx, and websockets, which begins so."""


def dialect(user_agent: str) -> Dialect:
    """By a request's ``User-Agent``. Others in Python are told the same as the published client."""
    is_python = user_agent.startswith(PYTHON_CLIENTS)
    return Dialect.PYTHON_CLIENT if is_python else Dialect.PUBLISHED


Message: TypeAlias = dict[str, Any]

TOKENS = {
    TokenClass.CONTENT: "ContentToken",
    TokenClass.REASONING: "ReasoningToken",
    TokenClass.TOOL_CALL: "ToolCallToken",
    TokenClass.UNDETERMINABLE: "UndeterminableToken",
}

FAILURES = {
    ErrorCode.CHAT_TEMPLATE_ERROR: "ChatTemplateError",
    ErrorCode.MULTIMODAL_NOT_SUPPORTED: "MultimodalNotSupported",
    ErrorCode.IMAGE_DECODING_FAILED: "ImageDecodingFailed",
    ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE: "ImageExceedsBatchSize",
    ErrorCode.INVALID_GRAMMAR: "GrammarInitializationFailed",
    ErrorCode.INVALID_SCHEMA: "GrammarSyntaxError",
    ErrorCode.GRAMMAR_REJECTED: "GrammarRejectedModelOutput",
    ErrorCode.GRAMMAR_WITH_THINKING: "GrammarIncompatibleWithThinking",
    ErrorCode.INVALID_TOOL_SCHEMA: "ToolSchemaInvalid",
    ErrorCode.GENERATION_DISABLED: "TokenGenerationDisabled",
}
"""Failures that the published format knows as results; the rest are ``Error`` envelopes."""

UNKNOWN_TO_PYTHON = {ErrorCode.INVALID_TOOL_SCHEMA, ErrorCode.GENERATION_DISABLED}

MOST_NAMED = 100
"""Documents that failed, in one message."""


class Teller:
    """Tells one client's request, under the id that the client knows."""

    def __init__(self, request_id: str, dialect: Dialect) -> None:
        self._request_id = request_id
        self._dialect = dialect

    def messages(
        self, generated_by: str | None, event: Event, index: int | None = None
    ) -> list[Message]:
        """What the client is told of an event, perhaps nothing.

        ``index``: which of several answers it belongs to; None if only one was asked for.
        """
        told = self._messages(generated_by, event)
        if index is not None:
            for message in told:
                message[next(iter(message))]["index"] = index
        return told

    def failure(
        self,
        generated_by: str | None,
        code: ErrorCode,
        message: str,
        figures: Mapping[str, int] | None = None,
    ) -> Message:
        """The request's last message: it could not be served, or not to its end.

        ``figures``: those of the message, which some results have in its place.
        """
        variant = FAILURES.get(code)
        if variant is None or (
            self._dialect is Dialect.PYTHON_CLIENT and code in UNKNOWN_TO_PYTHON
        ):
            error = {"code": STATUS[code], "description": message}
            return {"Error": {"request_id": self._request_id, "error": error}}
        return self._generated(generated_by, {variant: dict(figures) if figures else message})

    def embedding_messages(
        self,
        generated_by: str | None,
        event: Event,
        params: GenerateEmbeddingBatchParams,
        pooling: Pooling,
    ) -> Iterator[Message]:
        """What the client is told of an event of its embedding batch, perhaps nothing.

        A document has a message for each of its vectors: one, or with ``Pooling.NONE`` one for each
        of its tokens, in their order. What is not told here is for ``embedding_done``.
        """
        match event:
            case Embedded(document_id=document_id):
                method = params.model_dump(by_alias=True)["normalization_method"]
                for vector in event.vectors:
                    record = {
                        "embedding": vector,
                        "normalization_method": method,
                        "pooling_type": pooling.value,
                        "source_document_id": document_id,
                    }
                    yield self._embedding(generated_by, {"Embedding": record})
            case DocumentTooLong(document_id=document_id, tokens=tokens, limit=limit):
                if self._dialect is Dialect.PUBLISHED:
                    refusal = {
                        "document_tokens": tokens,
                        "n_batch": limit,
                        "source_document_id": document_id,
                    }
                    yield self._embedding(generated_by, {"DocumentExceedsBatchSize": refusal})
            case Failed(code=code, message=message):
                yield self.failure(generated_by, code, message)
            case (
                TokenGenerated()
                | ToolCallsEnded()
                | DocumentFailed()
                | Finished()
                | Tokenized()
                | Detokenized()
            ):
                return
            case Busy():
                raise AssertionError("an agent's refusal is between the dispatcher and the agent")
            case _:
                assert_never(event)

    def embedding_done(self, refused: Sequence[DocumentFailed | DocumentTooLong]) -> Message:
        """The batch's last message. The published format has no word for a document that failed
        while the others went on, so it is told here; and so is one that is too long, to a client
        that does not know the word for that.
        """
        told: list[str] = []
        for each in refused:
            match each:
                case DocumentFailed(document_id=document_id, message=message):
                    told.append(f"{document_id!r} ({message})")
                case DocumentTooLong(document_id=document_id, tokens=tokens, limit=limit):
                    if self._dialect is Dialect.PYTHON_CLIENT:
                        told.append(f"{document_id!r} ({tokens} tokens, the limit is {limit})")
        if not told:
            return self._embedding(None, "Done")
        if len(told) > MOST_NAMED:
            told[MOST_NAMED:] = [f"{len(told) - MOST_NAMED} more"]
        error = f"documents that could not be embedded: {', '.join(told)}"
        return self._embedding(None, {"Error": error})

    def _messages(self, generated_by: str | None, event: Event) -> list[Message]:
        match event:
            case TokenGenerated(segments=segments, logprobs=logprobs):
                told = [self._token(generated_by, segment) for segment in segments]
                if logprobs is not None:
                    told = told or [self._token(generated_by, Segment(TokenClass.CONTENT, ""))]
                    told[0]["Response"]["logprobs"] = _logprobs(logprobs)
                return told
            case ToolCallsEnded(result=result):
                return [self._generated(generated_by, _tool_calls(result))]
            case Finished(reason=FinishReason.CANCELLED):
                return []
            case Finished(usage=usage, segments=segments):
                tail = [self._token(generated_by, segment) for segment in segments]
                return [*tail, self._generated(generated_by, {"Done": {"usage": _usage(usage)}})]
            case Failed(code=code, message=message, figures=figures):
                return [self.failure(generated_by, code, message, figures)]
            case Embedded() | DocumentTooLong() | DocumentFailed() | Tokenized() | Detokenized():
                return []  # no answer to this request; an agent that sends it is at fault
            case Busy():
                raise AssertionError("an agent's refusal is between the dispatcher and the agent")
            case _:
                assert_never(event)

    def _token(self, generated_by: str | None, segment: Segment) -> Message:
        return self._generated(generated_by, {TOKENS[segment.token_class]: segment.text})

    def _generated(self, generated_by: str | None, result: Message) -> Message:
        return self._response(generated_by, {"GeneratedToken": result})

    def _embedding(self, generated_by: str | None, result: Message | str) -> Message:
        return self._response(generated_by, {"Embedding": result})

    def _response(self, generated_by: str | None, response: Message) -> Message:
        return {
            "Response": {
                "generated_by": generated_by,
                "request_id": self._request_id,
                "response": response,
            }
        }


def mode_notification(*, enable_embeddings: bool) -> Message:
    """Whether tokens are generated at all, for clients that know notifications."""
    mode = "TokenGenerationDisabled" if enable_embeddings else "TokenGenerationEnabled"
    return {"Notification": mode}


def _usage(usage: Usage) -> Message:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_prompt_tokens": usage.cached_prompt_tokens,
        "input_image_tokens": usage.input_image_tokens,
        "input_audio_tokens": 0,
        "content_tokens": usage.content_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "tool_call_tokens": usage.tool_call_tokens,
        "undeterminable_tokens": usage.undeterminable_tokens,
    }


def _tool_calls(result: ToolCallResult) -> Message:
    match result:
        case ToolCallsParsed(calls):
            return {"ToolCallParsed": [_tool_call(call) for call in calls]}
        case ToolCallsUnreadable(message):
            return {"ToolCallParseFailed": message}
        case ToolCallsInvalid(errors):
            return {"ToolCallValidationFailed": list(errors)}
        case ToolCallFormatUnknown(text, message):
            told = {"text": text, "ffi_error_message": message}
            return {"UnrecognizedToolCallFormat": told}


def _tool_call(call: ToolCall) -> Message:
    arguments: Message = {"InvalidJson": call.arguments}
    if call.is_json:
        # As the model wrote it, since numbers keep their digits so; but on one line.
        on_one_line = msgspec.json.format(call.arguments.encode(), indent=-1)
        arguments = {"ValidJson": msgspec.Raw(on_one_line)}
    return {"id": call.call_id, "name": call.name, "arguments": arguments}


def _logprobs(logprobs: Logprobs) -> Message:
    def tell(each: TokenLogprob) -> Message:
        text = each.piece.decode(errors="replace")
        return {"token_id": each.token, "token": text, "logprob": each.logprob}

    return {**tell(logprobs.chosen), "top_logprobs": [tell(each) for each in logprobs.top]}
