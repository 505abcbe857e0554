"""Chat templates: a conversation becomes the text that the model was trained on.

Templates come with model files from anywhere, so they run in Jinja's sandbox, without access to
attributes, modules or files. No I/O here. Variables are those of the published wire format.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ErrorCode, RequestError
from common.messages import Conversation


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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]
        environment.globals["strftime_now"] = strftime  # pyright: ignore[reportArgumentType]
        self._special_texts = dict(special_texts)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise _failed(error) from error

    def render(self, conversation: Conversation) -> str:
        """Raises ``RequestError`` if the template refuses the conversation or fails on it."""
        try:
            # Without tools the variable is not there at all, as in llama.cpp: templates go through
            # it, or ask whether it is defined.
            tools = {"tools": list(conversation.tools)} if conversation.tools else {}
            return self._template.render(
                **self._special_texts,
                **tools,
                messages=[
                    {"role": message.role, "content": message.content}
                    for message in conversation.messages
                ],
                add_generation_prompt=conversation.add_generation_prompt,
                enable_thinking=conversation.enable_thinking,
            )
        # A template is a program by somebody else: it can fail in any of these ways.
        except (
            TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError,
            RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise _failed(error) from error


def _failed(error: BaseException) -> RequestError:
    return RequestError(ErrorCode.CHAT_TEMPLATE_ERROR, f"the chat template failed: {error}")


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
    )


class _GenerationTag(Extension):
    """``{% generation %}`` marks, for training, what the model says; here it is only what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
