"""Chat templates: a conversation becomes the text that the model was trained on.

Templates come with model files from anywhere, so they run in Jinja's sandbox, without access to
attributes, modules or files. No I/O here. Variables are those of the published wire format.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ErrorCode, RequestError
from common.messages import Conversation


class ChatTemplate:
    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """Raises ``RequestError`` if the source does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]
        self._special_texts = dict(special_texts)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise _failed(error) from error

    def render(self, conversation: Conversation) -> str:
        """Raises ``RequestError`` if the template refuses the conversation or fails on it."""
        try:
            return self._template.render(
                **self._special_texts,
                messages=[
                    {"role": message.role, "content": message.content}
                    for message in conversation.messages
                ],
                tools=list(conversation.tools) or None,
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


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
