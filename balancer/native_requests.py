"""The native protocol, inwards: clients' JSON becomes frames for agents.

A pure translator of the published wire format, for HTTP bodies and websocket messages alike.
Optional keys of our own stand next to the published ones: ``sampling``, ``seed``, ``stop``, ``n``,
``logprobs`` and ``cache_salt``.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from balancer.bodies import Items, Row, check_size
from balancer.content import marker_beside, read_images
from balancer.desired_state import Int, Strict
from balancer.limits import Limit, LimitError
from balancer.terms import Priority, Route, Terms
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import (
    L2,
    MAX_FRAME_BYTES,
    CallsTold,
    ChatMessage,
    Constraint,
    Conversation,
    Detokenize,
    Document,
    Embed,
    Gbnf,
    Generate,
    JsonSchema,
    Mirostat,
    Normalization,
    Pooling,
    Prompt,
    RawPrompt,
    RmsNorm,
    Sampling,
    Tokenize,
    Unchanged,
    encode,
)


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
    content: str | Items[ContentPart]

    @property
    def parts(self) -> list[ContentPart]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content

    def flatten(self, image_marker: str) -> ChatMessage:
        """Templates expect plain text, so parts become paragraphs, as in llama.cpp."""
        texts = [part.text if isinstance(part, TextPart) else image_marker for part in self.parts]
        return ChatMessage(self.role, "\n".join(texts))


class ToolParameters(Strict):
    type: str
    properties: dict[str, Any] | None = None
    required: Items[str] | None = None
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
        Annotated[Row[Annotated[str, Field(max_length=64)]], Field(max_length=16)] | None
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
        names = set(SamplingOptions.model_fields) - {"logit_bias"}
        said = self.model_dump(exclude_none=True, include=names)
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
        Annotated[Row[StopText], Field(max_length=16)] | None, BeforeValidator(_one_or_many)
    ] = None

    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only agents that serve it; None: any."""
    priority: Priority = Priority.NORMAL
    deadline_ms: Annotated[int, Field(ge=1, le=24 * 3600 * 1000)] | None = None
    """Until the answer must be complete. It also takes the place of the buffer's patience."""

    route: ClassVar[Route] = Route.OTHER

    @property
    def terms(self) -> Terms:
        seconds = None if self.deadline_ms is None else self.deadline_ms / 1000
        return Terms(self.model, self.priority, seconds, route=self.route)

    @abstractmethod
    def prompt(self, *, longest_image_side: int) -> Prompt:
        """Raises ``RequestError`` for what is not supported."""


class ContinueFromConversationHistory(GenerationParams):
    route: ClassVar[Route] = Route.CONVERSATION
    add_generation_prompt: bool
    conversation_history: Annotated[Items[ConversationMessage], Field(min_length=1)]
    enable_thinking: bool
    parse_tool_calls: bool = False
    tools: Row[Tool] = ()

    def prompt(self, *, longest_image_side: int) -> Prompt:
        if self.grammar is not None and self.enable_thinking:
            raise RequestError(
                ErrorCode.GRAMMAR_WITH_THINKING,
                "a grammar would hold for the thinking too: set enable_thinking to false",
            )
        history = self.conversation_history
        parts = [part for message in history for part in message.parts]
        marker = marker_beside(part.text for part in parts if isinstance(part, TextPart))
        return Conversation(
            messages=tuple(message.flatten(marker) for message in history),
            images=read_images(part.image_url.url for part in parts if isinstance(part, ImagePart)),
            image_marker=marker,
            longest_image_side=longest_image_side,
            tools=tuple(tool.model_dump(by_alias=True, exclude_none=True) for tool in self.tools),
            add_generation_prompt=self.add_generation_prompt,
            enable_thinking=self.enable_thinking,
            calls_told=CallsTold.CHECKED if self.parse_tool_calls else CallsTold.RAW,
        )


class ContinueFromRawPrompt(GenerationParams):
    route: ClassVar[Route] = Route.RAW_PROMPT
    raw_prompt: str

    def prompt(self, *, longest_image_side: int) -> Prompt:
        return RawPrompt(self.raw_prompt)


def generate(
    params: GenerationParams,
    request_id: RequestId,
    sampling: Sampling,
    *,
    longest_image_side: int = 1024,
) -> Generate:
    """The frame for an agent. ``sampling``: what holds where the client says nothing.
    ``longest_image_side``: in pixels; larger images are to be scaled down.

    Raises ``RequestError`` for what is not supported, so that nothing is ignored in silence.
    """
    said = {} if params.sampling is None else params.sampling.replacements()
    return Generate(
        request_id=request_id,
        prompt=params.prompt(longest_image_side=longest_image_side),
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
    input_batch: Row[InputDocument]
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

    @property
    def documents(self) -> tuple[Document, ...]:
        return tuple(Document(document.id, document.content) for document in self.input_batch)


def chunks(documents: Sequence[Document], *, agents: int, largest: int) -> list[Sequence[Document]]:
    """The documents in equal parts, the first ones perhaps one longer: one for each agent, but at
    most ``largest`` documents each and at least one.
    """
    count = min(len(documents), max(agents, math.ceil(len(documents) / largest)))
    if not count:
        return []
    size, longer = divmod(len(documents), count)
    bounds = [n * size + min(n, longer) for n in range(count + 1)]
    return [documents[start:end] for start, end in pairwise(bounds)]


def embed(
    documents: Sequence[Document],
    request_id: RequestId,
    *,
    pooling: Pooling,
    normalization: Normalization,
) -> Embed:
    return Embed(
        request_id=request_id,
        documents=tuple(documents),
        pooling=pooling,
        normalization=normalization,
    )


def encode_request(frame: Generate | Embed | Tokenize | Detokenize) -> bytes:
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
        raise LimitError(
            Limit.FRAME_BYTES, ErrorCode.BODY_TOO_LARGE, "the request is too large for an agent"
        )
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


LONGEST_COMPLAINT = 300
"""Characters of what a client said itself."""


def describe(error: ValidationError) -> str:
    """Of a request: one line that says which keys are wrong and why, without repeating their content."""
    return f"Invalid request parameters: {complaints(error, whole='body')}"


def complaints(error: ValidationError, *, whole: str) -> str:
    """``whole``: what to call that of which no single key is wrong."""
    problems = [
        f"{_cut('.'.join(str(step) for step in problem['loc'])) or whole}: {_cut(problem['msg'])}"
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return f"{'; '.join(problems[:5])}{more}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_COMPLAINT else f"{text[:LONGEST_COMPLAINT]} ..."


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(model: type[ModelT], body: bytes) -> ModelT:
    """From JSON. Raises ``RequestError`` (``invalid_request``) whose text is for the client."""
    check_size(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, describe(error)) from error


class Stop(Strict):
    """A websocket client does not wait for this request any longer."""

    request_id: str = Field(alias="StopRespondingTo")


LONGEST_ID = 1024
"""Characters of a name that a websocket's client gives to a request: each message of its answer has it."""


class SocketRequest(Strict):
    """A websocket client's request; ``id`` is of its own choice, unique among its open ones."""

    id: Annotated[str, Field(max_length=LONGEST_ID)]
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
        self,
        request_id: str | None,
        message: str,
        code: ErrorCode = ErrorCode.INVALID_REQUEST,
        limit: str | None = None,
    ) -> None:
        super().__init__(code, message)
        self.request_id = request_id
        self.limit = limit


def _named_id(text: str) -> str | None:
    """Of a request that is otherwise not to be understood: half a character of UTF-16 in it, or lists
    in lists in lists. Python's own reader takes both.
    """
    try:
        request_id = json.loads(text)["Request"]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    is_text = isinstance(request_id, str) and request_id.isprintable()
    return request_id if is_text else None


def parse_message(text: str) -> SocketRequest | Stop:
    """A websocket message. Raises ``MessageError`` for anything else."""
    try:
        check_size(text.encode(errors="replace"))
    except RequestError as error:
        raise MessageError(None, error.message, error.code, error.limit) from error
    try:
        envelope = _Envelope.model_validate_json(text)
    except ValidationError as error:
        raise MessageError(_named_id(text), describe(error)) from error
    if envelope.notification is not None:
        return envelope.notification
    assert envelope.request is not None, "see _exactly_one"
    try:
        return SocketRequest.model_validate(envelope.request)
    except ValidationError as error:
        named = envelope.request.get("id")
        request_id = named if isinstance(named, str) else None
        raise MessageError(request_id, describe(error)) from error
