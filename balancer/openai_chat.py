"""``/v1/chat/completions``, inwards: OpenAI's messages, tools and formats become a frame. No I/O here."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from balancer.bodies import Items
from balancer.content import marker_beside, read_images
from balancer.openai_errors import ParameterError
from balancer.openai_generation import GenerationBody, Said, TokenLimit, written_schema
from balancer.terms import Route
from common.ids import RequestId
from common.messages import (
    IMAGE_MARKER,
    CallsTold,
    ChatMessage,
    Constraint,
    Conversation,
    Generate,
    JsonSchema,
    Sampling,
    ToolCall,
)

LOW_DETAIL_SIDE = 512
"""In pixels: what OpenAI scales images of low detail down to."""

Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Said):
    type: Literal["text"]
    text: str


class RefusalPart(Said):
    type: Literal["refusal"]
    refusal: str


class ImageUrl(Said):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Said):
    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart: TypeAlias = Annotated[TextPart | ImagePart, Field(discriminator="type")]
AssistantPart: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Part: TypeAlias = TextPart | ImagePart | RefusalPart


class _Message(Said):
    name: Name | None = None


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: str | Items[TextPart]


class UserMessage(_Message):
    role: Literal["user"]
    content: str | Items[ContentPart]


class CalledFunction(Said):
    name: Name
    arguments: str
    parsed_arguments: Any = None
    """The same once more, by the official client's ``parse``. So is ``parsed`` in a message."""


class CalledTool(Said):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None
    """As streams have it, for those who put calls together and send them back."""

    def call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class AssistantMessage(_Message):
    """As a client may send back what it was sent."""

    role: Literal["assistant"]
    content: str | Items[AssistantPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[CalledTool] | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> "AssistantMessage":
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError("an assistant's message needs 'content' or 'tool_calls'")
        return self


class ToolMessage(_Message):
    role: Literal["tool"]
    content: str | Items[TextPart]
    tool_call_id: str


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Said):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Said):
    type: Literal["function"]
    function: Function


class NamedFunction(Said):
    name: Name


class NamedTool(Said):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Said):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1)]


class AllowedChoice(Said):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"]
    | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]
)


class TextFormat(Said):
    type: Literal["text"]


class JsonObjectFormat(Said):
    type: Literal["json_object"]
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """An addition of llama.cpp's."""


class NamedSchema(Said):
    name: Name
    description: str | None = None
    strict: bool | None = None
    """The schema is kept to in any case."""
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class JsonSchemaFormat(Said):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationBody):
    route: ClassVar[Route] = Route.CHAT_COMPLETIONS

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the model's template, as in llama.cpp."""

    modalities: Items[Literal["text"]] | None = None
    verbosity: None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    prompt_cache_retention: None = None

    @field_validator("tools")
    @classmethod
    def _each_once(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        return tools

    @property
    def longest_answer(self) -> int:
        limit = self.max_completion_tokens
        return super().longest_answer if limit is None else self._limited(limit)

    @property
    def alternatives(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ParameterError("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        return None

    def constraint(self) -> Constraint | None:
        constraint = super().constraint()
        schema = self._format_schema()
        if constraint is not None and schema is not None:
            raise ParameterError(
                "response_format", "'response_format' excludes 'grammar' and 'json_schema'."
            )
        return constraint or schema

    def _format_schema(self) -> JsonSchema | None:
        match self.response_format:
            case None | TextFormat():
                return None
            case JsonObjectFormat(json_schema=schema):
                return written_schema({"type": "object"} if schema is None else schema)
            case JsonSchemaFormat(json_schema=named):
                return written_schema(named.json_schema)

    def conversation(self, *, longest_image_side: int) -> Conversation:
        """Raises ``RequestError``. ``longest_image_side``: in pixels."""
        images = [
            part.image_url
            for message in self.messages
            for part in _parts(message.content)
            if isinstance(part, ImagePart)
        ]
        if images and all(image.detail == "low" for image in images):
            longest_image_side = min(longest_image_side, LOW_DETAIL_SIDE)
        tools, must_call = self._tools()
        arguments = self._template_arguments()
        marker = IMAGE_MARKER
        if images:
            shown = [text for message in self.messages for text in _shown(message)]
            marker = marker_beside([*shown, repr(tools), repr(arguments)])
        return Conversation(
            messages=tuple(_chat_message(message, marker) for message in self.messages),
            images=read_images(image.url for image in images),
            image_marker=marker,
            longest_image_side=longest_image_side,
            tools=tuple(tool.model_dump(exclude_none=True) for tool in tools),
            must_call=must_call,
            parallel_calls=self.parallel_tool_calls is not False,
            calls_told=CallsTold.STREAMED,
            constrains_content=True,
            enable_thinking=self.reasoning_effort != "none",
            template_arguments=arguments,
        )

    def _template_arguments(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        said = {} if effort is None or effort == "none" else {"reasoning_effort": effort}
        return said | (self.chat_template_kwargs or {})

    def _tools(self) -> tuple[Sequence[Tool], tuple[str, ...]]:
        """Those to be offered, and those of which one must be called, if one must be."""
        offered = self.tools or []
        names = [tool.function.name for tool in offered]
        chosen = names
        mode = "required"
        match self.tool_choice:
            case None | "auto":
                return offered, ()
            case "none":
                return [], ()
            case "required":
                pass
            case NamedTool(function=function):
                chosen = [function.name]
            case AllowedChoice(allowed_tools=allowed):
                mode = allowed.mode
                chosen = [tool.function.name for tool in allowed.tools]
        if not offered:
            raise ParameterError("tool_choice", "'tool_choice' needs 'tools'.")
        for name in chosen:
            if name not in names:
                raise ParameterError("tool_choice", f"'tools' has no function {name!r}.")
        if mode == "auto":
            return [tool for tool in offered if tool.function.name in chosen], ()
        return offered, tuple(chosen)


def chat_frame(
    params: ChatRequest, request_id: RequestId, sampling: Sampling, *, longest_image_side: int
) -> Generate:
    """Raises ``RequestError`` for what is not supported."""
    conversation = params.conversation(longest_image_side=longest_image_side)
    frame = params.generate(request_id, conversation, sampling)
    if conversation.must_call and frame.constraint is not None:
        raise ParameterError(
            "tool_choice", "an answer that must be a tool call cannot follow a format"
        )
    return frame


def _parts(content: str | Sequence[Part] | None) -> Sequence[Part]:
    if content is None:
        return []
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


def _shown(message: Message) -> Iterator[str]:
    """All that a template may show of it, beside images."""
    for part in _parts(message.content):
        if not isinstance(part, ImagePart):
            yield repr(part)
    yield message.model_dump_json(exclude={"content"})


def _flatten(content: str | Sequence[Part] | None, marker: str) -> str:
    """Templates expect plain text, so parts become paragraphs, as in llama.cpp."""
    texts: list[str] = []
    for part in _parts(content):
        match part:
            case TextPart(text=text) | RefusalPart(refusal=text):
                texts.append(text)
            case ImagePart():
                texts.append(marker)
    return "\n".join(texts)


def _chat_message(message: Message, marker: str) -> ChatMessage:
    content = _flatten(message.content, marker)
    match message:
        case SystemMessage():
            # Models were trained with the older name.
            return ChatMessage("system", content, message.name)
        case UserMessage():
            return ChatMessage("user", content, message.name)
        case AssistantMessage(refusal=refusal):
            return ChatMessage(
                "assistant",
                content if message.content is not None else refusal or "",
                message.name,
                message.reasoning_content,
                tuple(tool.call() for tool in message.tool_calls or ()),
            )
        case ToolMessage(tool_call_id=tool_call_id):
            return ChatMessage("tool", content, message.name, tool_call_id=tool_call_id)
