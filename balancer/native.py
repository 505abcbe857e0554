"""The native protocol: clients' JSON to frames for agents, and events back to JSON messages.

A pure translator of the published wire format, for HTTP bodies and websocket messages alike.
Optional keys of our own stand next to the published ones: ``sampling``, ``seed``, ``stop``, ``n``,
``logprobs`` and ``cache_salt``.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, assert_never

from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from balancer.desired_state import Int, Strict
from common.errors import STATUS, ErrorCode, RequestError
from common.ids import RequestId
from common.messages import (
    L2,
    MAX_FRAME_BYTES,
    Busy,
    ChatMessage,
    Constraint,
    Conversation,
    Document,
    DocumentFailed,
    DocumentTooLong,
    Embed,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Gbnf,
    Generate,
    JsonSchema,
    Logprobs,
    Mirostat,
    Normalization,
    Pooling,
    Prompt,
    RawPrompt,
    RmsNorm,
    Sampling,
    TokenGenerated,
    TokenLogprob,
    Unchanged,
    encode,
)

# What clients send


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart: TypeAlias = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ConversationMessage(Strict):
    role: str
    content: str | list[ContentPart]

    def flatten(self) -> ChatMessage:
        """Templates expect plain text, so text parts become paragraphs, as in llama.cpp."""
        if isinstance(self.content, str):
            return ChatMessage(self.role, self.content)
        texts: list[str] = []
        for part in self.content:
            match part:
                case TextPart(text=text):
                    texts.append(text)
                case ImagePart():
                    raise RequestError(
                        ErrorCode.MULTIMODAL_NOT_SUPPORTED, "images are not supported yet"
                    )
        return ChatMessage(self.role, "\n".join(texts))


class ToolParameters(Strict):
    type: str
    properties: dict[str, Any] | None = None
    required: list[str] | None = None
    additional_properties: Any = Field(default=None, alias="additionalProperties")

    @model_validator(mode="after")
    def _required_must_exist(self) -> "ToolParameters":
        if self.properties is not None and self.required is not None:
            missing = [name for name in self.required if name not in self.properties]
            if missing:
                raise ValueError(f"required but not in properties: {', '.join(missing)}")
        return self


class ToolFunction(Strict):
    name: str
    description: str
    parameters: ToolParameters | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


FORBIDDEN = -100.0
"""As a bias, in OpenAI's sense: the token is never chosen."""


class SamplingOptions(Strict):
    """Each key replaces that one value of the balancer's inference parameters."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Int | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    penalty_repeat: Annotated[float, Field(gt=0, le=100)] | None = None
    penalty_frequency: Annotated[float, Field(ge=-100, le=100)] | None = None
    penalty_presence: Annotated[float, Field(ge=-100, le=100)] | None = None
    penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    dry_sequence_breakers: (
        Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=16)] | None
    ) = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=1024),
        ]
        | None
    ) = None
    """By token id; -100 forbids a token."""
    ignore_eos: bool | None = None

    def replacements(self) -> dict[str, Any]:
        """What is said, as ``Sampling`` has it."""
        said = self.model_dump(exclude_none=True, exclude={"logit_bias"})
        if self.logit_bias is not None:
            said["logit_bias"] = tuple(
                (token, -math.inf if bias <= FORBIDDEN else bias)
                for token, bias in self.logit_bias.items()
            )
        return said


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class GbnfConstraint(Strict):
    type: Literal["gbnf"]
    grammar: str
    root: str


class JsonSchemaConstraint(Strict):
    type: Literal["json_schema"]
    text: str = Field(alias="schema")


GrammarConstraint: TypeAlias = Annotated[
    GbnfConstraint | JsonSchemaConstraint, Field(discriminator="type")
]

MOST_ANSWERS = 16

StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class GenerationParams(Strict):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    grammar: GrammarConstraint | None = None
    sampling: SamplingOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    """So many answers to the one prompt, told apart by ``index``."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Tell each token's log probability, and those of so many alternatives."""
    cache_salt: Annotated[str, Field(max_length=128)] | None = None
    """Cached prompts are shared only between requests of the same salt."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    stop: Annotated[
        Annotated[tuple[StopText, ...], Field(max_length=16)] | None, BeforeValidator(_one_or_many)
    ] = None

    @abstractmethod
    def prompt(self) -> Prompt:
        """Raises ``RequestError`` for what is not supported."""


class ContinueFromConversationHistory(GenerationParams):
    add_generation_prompt: bool
    conversation_history: Annotated[list[ConversationMessage], Field(min_length=1)]
    enable_thinking: bool
    parse_tool_calls: bool = False
    tools: tuple[Tool, ...] = ()

    def prompt(self) -> Prompt:
        if self.grammar is not None and self.enable_thinking:
            raise RequestError(
                ErrorCode.GRAMMAR_WITH_THINKING,
                "a grammar would hold for the thinking too: set enable_thinking to false",
            )
        if self.parse_tool_calls:
            raise RequestError(ErrorCode.NOT_SUPPORTED, "parse_tool_calls is not supported yet")
        return Conversation(
            messages=tuple(message.flatten() for message in self.conversation_history),
            tools=tuple(tool.model_dump(by_alias=True, exclude_none=True) for tool in self.tools),
            add_generation_prompt=self.add_generation_prompt,
            enable_thinking=self.enable_thinking,
        )


class ContinueFromRawPrompt(GenerationParams):
    raw_prompt: str

    def prompt(self) -> Prompt:
        return RawPrompt(self.raw_prompt)


def generate(params: GenerationParams, request_id: RequestId, sampling: Sampling) -> Generate:
    """The frame for an agent. ``sampling``: what holds where the client says nothing.

    Raises ``RequestError`` for what is not supported, so that nothing is ignored in silence.
    """
    said = {} if params.sampling is None else params.sampling.replacements()
    return Generate(
        request_id=request_id,
        prompt=params.prompt(),
        max_tokens=params.max_tokens,
        sampling=replace(sampling, **said, seed=params.seed),
        stop=params.stop or (),
        constraint=_constraint(params.grammar),
        logprobs=params.logprobs,
        cache_salt=params.cache_salt or "",
        # Several answers are not alone in the batch anyway, and had better share their prompt.
        cache_prompt=params.seed is None or params.n > 1,
    )


def answers(first: Generate, request_ids: Sequence[RequestId]) -> list[Generate]:
    """One frame for each answer to the same prompt. With a seed each has its own, the first one
    that which was given.
    """
    frames: list[Generate] = []
    for n, request_id in enumerate(request_ids):
        seed = first.sampling.seed
        sampling = first.sampling if seed is None else replace(first.sampling, seed=seed + n)
        frames.append(replace(first, request_id=request_id, sampling=sampling))
    return frames


def _constraint(grammar: GbnfConstraint | JsonSchemaConstraint | None) -> Constraint | None:
    match grammar:
        case None:
            return None
        case GbnfConstraint(grammar=text, root=root):
            return Gbnf(text, root)
        case JsonSchemaConstraint(text=text):
            return JsonSchema(text)


class InputDocument(Strict):
    content: str
    id: str


class RmsNormOptions(Strict):
    epsilon: Annotated[float, Field(ge=0)]


class RmsNormMethod(Strict):
    options: RmsNormOptions = Field(alias="RmsNorm")


class GenerateEmbeddingBatchParams(Strict):
    input_batch: tuple[InputDocument, ...]
    normalization_method: Literal["None", "L2"] | RmsNormMethod

    @property
    def normalization(self) -> Normalization:
        match self.normalization_method:
            case "None":
                return Unchanged()
            case "L2":
                return L2()
            case RmsNormMethod(options=options):
                return RmsNorm(options.epsilon)

    def portions(self, size: int) -> Iterator[tuple[InputDocument, ...]]:
        """The documents, at most ``size`` of them at a time."""
        for start in range(0, len(self.input_batch), size):
            yield self.input_batch[start : start + size]


def embed(
    documents: Sequence[InputDocument],
    request_id: RequestId,
    *,
    pooling: Pooling,
    normalization: Normalization,
) -> Embed:
    return Embed(
        request_id=request_id,
        documents=tuple(Document(document.id, document.content) for document in documents),
        pooling=pooling,
        normalization=normalization,
    )


def encode_request(frame: Generate | Embed) -> bytes:
    """As it travels to an agent. Done before anything else, so that content which no frame can
    carry is its sender's error and never a link's. Raises ``RequestError``.
    """
    try:
        data = encode(frame)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"Invalid request parameters: {error}"
        ) from error
    if len(data) > MAX_FRAME_BYTES:
        raise RequestError(ErrorCode.BODY_TOO_LARGE, "the request is too large for an agent")
    return data


class InferenceRequest(Strict):
    """The ``Request`` that a websocket carries: exactly one of its two variants."""

    conversation: ContinueFromConversationHistory | None = Field(
        default=None, alias="ContinueFromConversationHistory"
    )
    raw_prompt: ContinueFromRawPrompt | None = Field(default=None, alias="ContinueFromRawPrompt")

    @property
    def params(self) -> GenerationParams:
        params = self.conversation or self.raw_prompt
        assert params is not None, "see _exactly_one"
        return params

    @model_validator(mode="after")
    def _exactly_one(self) -> "InferenceRequest":
        if (self.conversation is None) == (self.raw_prompt is None):
            raise ValueError("exactly one of its two variants is expected")
        return self


def describe(error: ValidationError) -> str:
    """One line that says which keys are wrong and why, without repeating their content."""
    problems = [
        f"{'.'.join(str(step) for step in problem['loc']) or 'body'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return f"Invalid request parameters: {'; '.join(problems[:5])}{more}"


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(model: type[ModelT], body: bytes) -> ModelT:
    """From JSON. Raises ``RequestError`` (``invalid_request``) whose text is for the client."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, describe(error)) from error


class Stop(Strict):
    """A websocket client does not wait for this request any longer."""

    request_id: str = Field(alias="StopRespondingTo")


class Request(Strict):
    """A websocket client's request; ``id`` is of its own choice, unique among its open ones."""

    id: str
    request: InferenceRequest


class _Envelope(BaseModel):
    """Exactly one of its keys. ``Error``, which clients may send too, tells us nothing."""

    request: dict[str, Any] | None = Field(default=None, alias="Request")
    notification: Stop | None = Field(default=None, alias="Notification")

    @model_validator(mode="after")
    def _exactly_one(self) -> "_Envelope":
        if (self.request is None) == (self.notification is None):
            raise ValueError("a Request or a Notification is expected")
        return self


class MessageError(RequestError):
    """A websocket message that cannot be served, with the request id that it names, if any."""

    def __init__(
        self, request_id: str | None, message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST
    ) -> None:
        super().__init__(code, message)
        self.request_id = request_id


def parse_message(text: str) -> Request | Stop:
    """A websocket message. Raises ``MessageError`` for anything else."""
    try:
        envelope = _Envelope.model_validate_json(text)
    except ValidationError as error:
        raise MessageError(None, describe(error)) from error
    if envelope.notification is not None:
        return envelope.notification
    assert envelope.request is not None, "see _exactly_one"
    try:
        return Request.model_validate(envelope.request)
    except ValidationError as error:
        named = envelope.request.get("id")
        request_id = named if isinstance(named, str) else None
        raise MessageError(request_id, describe(error)) from error


# What clients are sent

Message: TypeAlias = dict[str, Any]


def messages(
    request_id: str, generated_by: str | None, event: Event, index: int | None = None
) -> list[Message]:
    """What the client is told of an event, perhaps nothing. ``request_id``: as it knows it.

    ``index``: which of several answers it belongs to; None if only one was asked for.
    """
    told = _messages(request_id, generated_by, event)
    if index is not None:
        for message in told:
            message[next(iter(message))]["index"] = index
    return told


def _messages(request_id: str, generated_by: str | None, event: Event) -> list[Message]:
    match event:
        case TokenGenerated(text=text, logprobs=logprobs):
            message = _token(request_id, generated_by, text)
            if logprobs is not None:
                message["Response"]["logprobs"] = _logprobs(logprobs)
                return [message]
            return [message] if text else []
        case Finished(reason=FinishReason.CANCELLED):
            return []
        case Finished(usage=usage, text=text):
            done = {
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "cached_prompt_tokens": usage.cached_prompt_tokens,
                    "input_image_tokens": 0,
                    "input_audio_tokens": 0,
                    "content_tokens": usage.content_tokens,
                    "reasoning_tokens": 0,
                    "tool_call_tokens": 0,
                    "undeterminable_tokens": 0,
                }
            }
            tail = [_token(request_id, generated_by, text)] if text else []
            return [*tail, _response(request_id, generated_by, {"Done": done})]
        case Failed(code=code, message=message):
            return [failure(request_id, generated_by, code, message)]
        case Embedded() | DocumentTooLong() | DocumentFailed():
            return []  # no answer to this request; an agent that sends it is at fault
        case Busy():
            raise AssertionError("an agent's refusal is between the dispatcher and the agent")
        case _:
            assert_never(event)


def embedding_messages(
    request_id: str,
    generated_by: str | None,
    event: Event,
    params: GenerateEmbeddingBatchParams,
    pooling: Pooling,
) -> Iterator[Message]:
    """What the client is told of an event of its embedding batch, perhaps nothing.

    A document has a message for each of its vectors: one, or with ``Pooling.NONE`` one for each of
    its tokens, in their order. The end of the batch is not told here: see ``embedding_done``.
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
                yield _embedding(request_id, generated_by, {"Embedding": record})
        case DocumentTooLong(document_id=document_id, tokens=tokens, limit=limit):
            refusal = {
                "document_tokens": tokens,
                "n_batch": limit,
                "source_document_id": document_id,
            }
            yield _embedding(request_id, generated_by, {"DocumentExceedsBatchSize": refusal})
        case Failed(code=code, message=message):
            yield failure(request_id, generated_by, code, message)
        case TokenGenerated() | DocumentFailed() | Finished():
            return
        case Busy():
            raise AssertionError("an agent's refusal is between the dispatcher and the agent")
        case _:
            assert_never(event)


MOST_NAMED = 100
"""Documents that failed, in one message."""


def embedding_done(request_id: str, failed: Sequence[DocumentFailed]) -> Message:
    """The last message of a batch that nothing has ended early. The published format has no word
    for a document that failed while the others went on, so it is told at the end.
    """
    if not failed:
        return _embedding(request_id, None, "Done")
    told = [f"{each.document_id!r} ({each.message})" for each in failed[:MOST_NAMED]]
    if len(failed) > MOST_NAMED:
        told.append(f"{len(failed) - MOST_NAMED} more")
    error = f"documents that could not be embedded: {', '.join(told)}"
    return _embedding(request_id, None, {"Error": error})


_FAILURES = {
    ErrorCode.CHAT_TEMPLATE_ERROR: "ChatTemplateError",
    ErrorCode.MULTIMODAL_NOT_SUPPORTED: "MultimodalNotSupported",
    ErrorCode.INVALID_GRAMMAR: "GrammarInitializationFailed",
    ErrorCode.INVALID_SCHEMA: "GrammarSyntaxError",
    ErrorCode.GRAMMAR_REJECTED: "GrammarRejectedModelOutput",
    ErrorCode.GRAMMAR_WITH_THINKING: "GrammarIncompatibleWithThinking",
}
"""Failures that the published format knows as results; the rest are ``Error`` envelopes."""


def failure(request_id: str, generated_by: str | None, code: ErrorCode, message: str) -> Message:
    """The request's last message: it could not be served, or not to its end."""
    if variant := _FAILURES.get(code):
        return _response(request_id, generated_by, {variant: message})
    error = {"code": STATUS[code], "description": message}
    return {"Error": {"request_id": request_id, "error": error}}


def _logprobs(logprobs: Logprobs) -> Message:
    def tell(each: TokenLogprob) -> Message:
        text = each.piece.decode(errors="replace")
        return {"token_id": each.token, "token": text, "logprob": each.logprob}

    return {**tell(logprobs.chosen), "top_logprobs": [tell(each) for each in logprobs.top]}


def _token(request_id: str, generated_by: str | None, text: str) -> Message:
    return _response(request_id, generated_by, {"ContentToken": text})


def _response(request_id: str, generated_by: str | None, result: Message) -> Message:
    return _told(request_id, generated_by, {"GeneratedToken": result})


def _embedding(request_id: str, generated_by: str | None, result: Message | str) -> Message:
    return _told(request_id, generated_by, {"Embedding": result})


def _told(request_id: str, generated_by: str | None, response: Message) -> Message:
    return {
        "Response": {
            "generated_by": generated_by,
            "request_id": request_id,
            "response": response,
        }
    }
