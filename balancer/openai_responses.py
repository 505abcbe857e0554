"""``/v1/responses``, inwards: OpenAI's items become the messages of a chat request. No I/O here.

What is said otherwise than in a chat is read here; sampling, tools, formats, images and the frame
itself are the chat request's, which ``ResponsesRequest.chat`` returns. Nothing is stored, so what
points to stored responses is refused, and so is what has no counterpart.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticKnownError

from balancer.bodies import Items
from balancer.openai_chat import (
    AllowedChoice,
    AllowedTools,
    AssistantMessage,
    AssistantPart,
    CalledFunction,
    CalledTool,
    ChatRequest,
    ContentPart,
    Function,
    ImagePart,
    ImageUrl,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    Name,
    NamedFunction,
    NamedSchema,
    NamedTool,
    ReasoningEffort,
    RefusalPart,
    ResponseFormat,
    SystemMessage,
    TextFormat,
    TextPart,
    Tool,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from balancer.openai_errors import ParameterError, parameters_of
from balancer.openai_generation import GenerationBody, Said, StreamOptions, TokenLimit
from balancer.terms import Route
from common.errors import ErrorCode
from common.messages import Sampling

RESPONSES_PARAMETERS = {**parameters_of("input"), ErrorCode.INVALID_SCHEMA: "text.format"}
"""What is to blame, where the code of an error alone says it."""

LOGPROBS = "message.output_text.logprobs"

Include: TypeAlias = Literal[
    "message.output_text.logprobs",
    # There are no such items here, or they are told whole in any case.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


# Parts of a message


class InputText(Said):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: None = None

    def part(self) -> TextPart:
        return TextPart(type="text", text=self.text)


class InputImage(Said):
    type: Literal["input_image"]
    image_url: str
    """A data URI."""
    detail: Literal["auto", "low", "high"] | None = None
    file_id: None = None
    prompt_cache_breakpoint: None = None

    def part(self) -> ImagePart:
        return ImagePart(
            type="image_url", image_url=ImageUrl(url=self.image_url, detail=self.detail)
        )


class OutputText(Said):
    """As it was sent, or as the official client has it after it has parsed it."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None

    def part(self) -> TextPart:
        return TextPart(type="text", text=self.text)


class Refusal(Said):
    type: Literal["refusal"]
    refusal: str

    def part(self) -> RefusalPart:
        return RefusalPart(type="refusal", refusal=self.refusal)


UserPart: TypeAlias = Annotated[InputText | InputImage, Field(discriminator="type")]
SpokenPart: TypeAlias = Annotated[OutputText | InputText | Refusal, Field(discriminator="type")]


# Items


class _Item(Said):
    """What items have that were sent once: it changes nothing."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _MessageItem(_Item):
    type: Literal["message"] | None = None


class SystemItem(_MessageItem):
    role: Literal["system", "developer"]
    content: str | Items[InputText]

    def parts(self) -> list[TextPart]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return [part.part() for part in self.content]


class UserItem(_MessageItem):
    role: Literal["user"]
    content: str | Items[UserPart]

    def message(self) -> UserMessage:
        if isinstance(self.content, str):
            return UserMessage(role="user", content=self.content)
        content: list[ContentPart] = [part.part() for part in self.content]
        return UserMessage(role="user", content=content)


class SpokenItem(_MessageItem):
    """A message of the model's."""

    role: Literal["assistant"]
    content: str | Items[SpokenPart]
    phase: Literal["commentary", "final_answer"] | None = None

    def parts(self) -> list[AssistantPart]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return [part.part() for part in self.content]


class SummaryText(Said):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Said):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Items[SummaryText] | None = None
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None
    """Of another server: nobody here can read it."""

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


class _CallItem(_Item):
    caller: None = None
    namespace: None = None


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    asynchronous: Literal[False] | None = Field(default=None, alias="async")
    asynchronous_dumped: Literal[False] | None = Field(default=None, alias="async_")
    """So the official client's ``model_dump`` writes it."""
    parsed_arguments: Any = None

    def call(self) -> CalledTool:
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return CalledTool(id=self.call_id, type="function", function=function)


class FunctionOutputItem(_CallItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputText]
    name: Name | None = None

    def message(self) -> ToolMessage:
        output = self.output
        return ToolMessage(
            role="tool",
            content=output if isinstance(output, str) else [part.part() for part in output],
            name=self.name,
            tool_call_id=self.call_id,
        )


def _kind(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = cast("dict[str, Any]", item).get("type")
    if kind is None:
        return "message"
    return kind if isinstance(kind, str) else None


InputMessage: TypeAlias = Annotated[SystemItem | UserItem | SpokenItem, Field(discriminator="role")]
AssistantItem: TypeAlias = SpokenItem | ReasoningItem | FunctionCallItem
InputItem: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


# Tools and formats, flat where a chat has them nested


def _only_functions(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"there are no tools of type {kind!r} here, only functions")
    return kind


class FunctionTool(Said):
    type: Annotated[Literal["function"], BeforeValidator(_only_functions)]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: None = None
    asynchronous: Literal[False] | None = Field(default=None, alias="async")
    defer_loading: Literal[False] | None = None
    output_schema: None = None

    def tool(self) -> Tool:
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return Tool(type="function", function=function)

    def told(self) -> dict[str, Any]:
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


class FunctionChoice(Said):
    type: Literal["function"]
    name: Name

    def choice(self) -> NamedTool:
        return NamedTool(type="function", function=NamedFunction(name=self.name))


class AllowedFunctions(Said):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[FunctionChoice], Field(min_length=1)]

    def choice(self) -> AllowedChoice:
        allowed = AllowedTools(mode=self.mode, tools=[tool.choice() for tool in self.tools])
        return AllowedChoice(type="allowed_tools", allowed_tools=allowed)


ResponseToolChoice: TypeAlias = (
    Literal["none", "auto", "required"]
    | Annotated[FunctionChoice | AllowedFunctions, Field(discriminator="type")]
)


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


class TextSettings(Said):
    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: None = None

    def response_format(self) -> ResponseFormat | None:
        if isinstance(self.format, SchemaFormat):
            return JsonSchemaFormat(type="json_schema", json_schema=self.format)
        return self.format


class Reasoning(Said):
    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    """Reasoning is told whole, so the best summary there is of it, as "auto" asks for, is none."""
    context: Literal["auto"] | None = None
    """The model's template decides what it gives to the model of earlier reasoning."""
    mode: Literal["standard"] | None = None
    generate_summary: None = None


class ResponsesRequest(GenerationBody):
    route: ClassVar[Route] = Route.RESPONSES

    input: str | Items[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: Items[Include] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    client_metadata: dict[str, str] | None = None
    """What Codex says of itself. It changes nothing."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the model's template, as in llama.cpp."""

    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    context_management: None = None
    moderation: None = None
    background_options: None = None
    access_programs: None = None
    image: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None

    @field_validator("n", "max_tokens")
    @classmethod
    def _of_other_routes(cls, value: Any) -> Any:
        if value is not None:
            raise PydanticKnownError("none_required")
        return value

    @field_validator("stream_options")
    @classmethod
    def _usage_comes_anyway(cls, value: StreamOptions | None) -> StreamOptions | None:
        if value is not None and value.include_usage is not None:
            raise ValueError("'include_usage' is not of this route: its last event has the usage")
        return value

    @field_validator("tools")
    @classmethod
    def _each_once(cls, tools: Items[FunctionTool] | None) -> list[FunctionTool] | None:
        if len({tool.name for tool in tools or ()}) < len(tools or ()):
            raise ValueError("two tools have the same name")
        return tools

    @property
    def longest_answer(self) -> int:
        return self._limited(self.max_output_tokens)

    @property
    def alternatives(self) -> int | None:
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ParameterError("top_logprobs", f"'top_logprobs' needs {LOGPROBS!r} in 'include'.")
        return None

    @property
    def _effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def chat(self) -> ChatRequest:
        """The same, said as a chat. Raises ``ParameterError``; what is found wrong of the chat
        later has the same name in both, or is in ``RESPONSES_PARAMETERS``.
        """
        response_format = None if self.text is None else self.text.response_format()
        if isinstance(response_format, JsonObjectFormat | JsonSchemaFormat) and (
            self.grammar is not None or self.json_schema is not None
        ):
            raise ParameterError(
                "text.format", "'text.format' excludes 'grammar' and 'json_schema'."
            )
        alternatives = self.alternatives
        said = {name: getattr(self, name) for name in GenerationBody.model_fields}
        said |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [tool.tool() for tool in self.tools],
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": response_format,
            "reasoning_effort": self._effort,
            "logprobs": alternatives is not None,
            "top_logprobs": alternatives,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatRequest.model_validate(said, by_alias=False, by_name=True)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """What a response repeats of its request. ``sampling``: as the frame has it."""
        text_format = None if self.text is None else self.text.format
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self._effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {
                "format": {"type": "text"}
                if text_format is None
                else text_format.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": self._said_choice(),
            "tools": [tool.told() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def _said_choice(self) -> str | dict[str, Any]:
        choice = self.tool_choice
        return choice.model_dump() if isinstance(choice, Said) else choice or "auto"

    def _choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        return choice.choice() if isinstance(choice, FunctionChoice | AllowedFunctions) else choice

    def _messages(self) -> list[Message]:
        """Neighbours of one side become one message: only one answers, and most templates allow one
        system message, at the beginning.
        """
        messages: list[Message] = []
        for side, group in groupby(self._items(), key=_side):
            match side:
                case "system":
                    parts = [p for i in group if isinstance(i, SystemItem) for p in i.parts()]
                    messages.append(SystemMessage(role="system", content=parts))
                case "assistant":
                    spoken = [item for item in group if isinstance(item, AssistantItem)]
                    messages += _assistant_messages(spoken)
                case "user" | "tool":
                    others = [i for i in group if isinstance(i, UserItem | FunctionOutputItem)]
                    messages += [item.message() for item in others]
        if not messages:
            raise ParameterError("input", "'input' has nothing in it that can be read here.")
        return messages

    def _items(self) -> list[InputItem]:
        items: list[InputItem] = []
        if self.instructions:
            items.append(SystemItem(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*items, UserItem(role="user", content=self.input)]
        return [*items, *self.input]


def _side(item: InputItem) -> Literal["system", "user", "assistant", "tool"]:
    match item:
        case SystemItem():
            return "system"
        case UserItem():
            return "user"
        case SpokenItem() | ReasoningItem() | FunctionCallItem():
            return "assistant"
        case FunctionOutputItem():
            return "tool"


def _assistant_messages(items: Sequence[AssistantItem]) -> list[AssistantMessage]:
    """One, or none if nothing in the items can be read."""
    parts = [part for item in items if isinstance(item, SpokenItem) for part in item.parts()]
    calls = [item.call() for item in items if isinstance(item, FunctionCallItem)]
    thoughts = [item.text for item in items if isinstance(item, ReasoningItem) and item.text]
    if not any(isinstance(item, SpokenItem) for item in items) and not calls and not thoughts:
        return []
    message = AssistantMessage(
        role="assistant",
        content=parts or (None if calls else ""),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )
    return [message]
