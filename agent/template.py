"""Chat templates: a conversation becomes the text that the model was trained on.

Templates come with model files from anywhere, so they run in Jinja's sandbox, without access to
attributes, modules or files. No I/O here. Variables are those of the published wire format.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, cast

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Filter, For, Node, Template
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agent.history import HistoryForm, Message, find_form, written
from common.errors import ErrorCode, RequestError
from common.messages import ChatMessage, Conversation

MOST_STEPS = 1_000_000
"""Of all loops and calls in one rendering. A template is trusted no further than its prompts need."""

BOUNDED = "__bounded"
"""A filter."""

LARGEST_NUMBER = 10**18
LONGEST_TEXT = 16 * 2**20
"""Characters, or items, that a multiplication may make."""


class _Steps:
    """That are left for one rendering."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def take(self, count: int = 1) -> None:
        self._left -= count
        if self._left < 0:
            raise TemplateError(f"more than {MOST_STEPS} steps")

    def through(self, items: Any) -> Any:
        """The same, to go through."""
        if isinstance(items, Sized):
            self.take(len(items))
            return items
        return self._one_by_one(items)

    def _one_by_one(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.take()
            yield item


_steps = ContextVar[_Steps]("_steps")
"""Of the rendering that is going on."""


class _Environment(ImmutableSandboxedEnvironment):
    """Its arithmetic and its steps are bounded: a power, or loops in loops, could stop the whole process."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> Template:
        """Each loop goes through a filter of ours, which counts."""
        parsed = super()._parse(source, name, filename)
        for loop in parsed.find_all(For):
            loop.iter = Filter(loop.iter, BOUNDED, [], [], None, None, lineno=loop.lineno)
        return parsed

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        _steps.get().take()  # a macro may call itself, twice each time
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if operator == "**" and abs(left) > 1 and abs(right) > 64:
                raise TemplateError("the power is too large")
        elif operator == "*":
            lengths = [len(value) for value in (left, right) if isinstance(value, Sized)]
            counts = [value for value in (left, right) if isinstance(value, int)]
            if lengths and counts and lengths[0] * counts[0] > LONGEST_TEXT:
                raise TemplateError("the text is too long")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) > LARGEST_NUMBER:
            raise TemplateError("the number is too large")
        return result


class ChatTemplate:
    def __init__(
        self,
        source: str,
        special_texts: Mapping[str, str],
        *,
        strftime: Callable[[str], str] = lambda form: datetime.now().astimezone().strftime(form),
    ) -> None:
        """``strftime``: the time of now, for templates that tell it to the model.

        Raises ``RequestError`` if the source does not compile.
        """
        environment = _Environment(
            optimized=False,  # else constants are computed, whatever that takes, when it is compiled
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.filters[BOUNDED] = lambda items: _steps.get().through(items)
        environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]
        environment.globals["strftime_now"] = strftime  # pyright: ignore[reportArgumentType]
        self._source = source
        self._special_texts = dict(special_texts)
        self._reserved = {
            "messages", "tools", "add_generation_prompt", *special_texts, *environment.globals,
        }  # fmt: skip
        """Names that no argument may have."""
        try:
            self._template = environment.from_string(source)
        # Jinja makes Python of it, and Python has limits of its own.
        except (
            TemplateError,
            MemoryError,
            OverflowError,
            RecursionError,
            SyntaxError,
            ValueError,
        ) as error:
            raise _failed(error) from error

    def render(self, conversation: Conversation) -> str:
        """Raises ``RequestError`` if the template refuses the conversation or fails on it."""
        arguments = conversation.template_arguments
        taken = sorted(self._reserved.intersection(arguments))
        if taken:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"no template argument may be called {', '.join(taken)}"
            )
        return self._render(
            {"enable_thinking": conversation.enable_thinking}
            | arguments
            | {"add_generation_prompt": conversation.add_generation_prompt},
            written(conversation.messages, self._form),
            list(conversation.tools),
        )

    @cached_property
    def takes_system(self) -> bool:
        """Does a system message come through?"""
        messages = (ChatMessage("system", "tried system"), ChatMessage("user", "Hi"))
        try:
            return "tried system" in self.render(Conversation(messages))
        except RequestError:
            return False

    # Tried when they are first needed, on a thread where that may take its time.

    @cached_property
    def _form(self) -> HistoryForm:
        return find_form(self._source, self._try)

    def _try(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        return self._render({"add_generation_prompt": True}, messages, tools)

    def _render(
        self, variables: Mapping[str, Any], messages: list[Message], tools: list[dict[str, Any]]
    ) -> str:
        counted = _steps.set(_Steps())
        try:
            # Without tools the variable is not there at all, as in llama.cpp: templates go through
            # it, or ask whether it is defined.
            return self._template.render(
                {
                    **variables,
                    **self._special_texts,
                    **({"tools": tools} if tools else {}),
                    "range": _bounded_range,
                    "messages": messages,
                }
            )
        # A template is a program by somebody else: it can fail in any of these ways.
        except (
            TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError,
            RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise _failed(error) from error
        finally:
            _steps.reset(counted)


def _failed(error: BaseException) -> RequestError:
    return RequestError(ErrorCode.CHAT_TEMPLATE_ERROR, f"the chat template failed: {error}")


def _bounded_range(*arguments: int) -> range:
    """Lists may be made of it without a loop."""
    numbers = range(*arguments)
    _steps.get().take(len(numbers))
    return numbers


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: Any) -> list[Any]:
    """What filters make of a list is written as one."""
    if isinstance(value, Iterator):
        return list(cast("Iterator[Any]", value))
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


class _GenerationTag(Extension):
    """``{% generation %}`` marks, for training, what the model says; here it is only what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
