"""Messages with tool calls, in the shape that a chat template expects. No I/O, no clock.

Templates were written for one library and differ in what they take: arguments as values or as JSON
text, no content as an empty text or as nothing, any id for a call or only some. What a template takes
is found by trying (llama.cpp does likewise, in ``common/jinja/caps.cpp``).
"""

import enum
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from typing import Any, TypeAlias

import msgspec

from common.errors import RequestError
from common.messages import ChatMessage, ToolCall

Message: TypeAlias = dict[str, Any]
"""As templates know it."""


class Ids(enum.Enum):
    AS_GIVEN = enum.auto()
    NINE = enum.auto()
    """Nine letters or digits: Mistral's templates refuse others."""
    NUMBERED = enum.auto()
    """``functions.NAME:NUMBER``: in Kimi's prompts a call has no other name."""


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """What a template takes."""

    arguments_are_text: bool = False
    empty_content: str | None = ""
    """Of a message that is calls and nothing else."""
    ids: Ids = Ids.AS_GIVEN
    reasoning: str = "reasoning_content"
    """What a message's reasoning is called."""
    reasons_beside_content: bool = True
    """False: it refuses calls with both."""


_NINE = re.compile(r"[a-zA-Z0-9]{9}")

# What a trial says, which no template says by itself.
_NAME, _KEY, _VALUE, _ID = "tried_tool", "tried_key", "tried_value", "call_0123456789abcdef"
_TRIED_CALL = ToolCall(_ID, _NAME, json.dumps({_KEY: _VALUE}))
_TRIAL = (
    ChatMessage("user", "Hi"),
    ChatMessage("assistant", "", tool_calls=(_TRIED_CALL,)),
    ChatMessage("tool", "done", tool_call_id=_ID),
)
_TRIED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "other_tool",
        "description": "Another one.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}

Render: TypeAlias = Callable[[list[Message], list[dict[str, Any]]], str]
"""A template: messages and tools. Raises ``RequestError``."""


def find_form(source: str, render: Render) -> HistoryForm:
    """What the template takes whose source it is. If nothing works, the usual form."""
    if "tool_calls" not in source:
        return HistoryForm(reasoning=_reasoning(source))
    ids = (Ids.AS_GIVEN, Ids.NINE, Ids.NUMBERED)
    if "<|tool_call_argument_begin|>" in source:
        ids = (Ids.NUMBERED, *ids)
    usual = HistoryForm(reasoning=_reasoning(source))
    for id_form, content, is_text in product(ids, ("", None), (False, True)):
        form = replace(usual, arguments_are_text=is_text, empty_content=content, ids=id_form)
        text = _tried(form, render, _TRIAL)
        if text is not None and _tells_the_call(text):
            return replace(form, reasons_beside_content=_reasons_beside_content(form, render))
    return usual


def _tried(form: HistoryForm, render: Render, messages: Sequence[ChatMessage]) -> str | None:
    try:
        return render(written(messages, form, names_results=False), [_TRIED_TOOL])
    except RequestError:
        return None


def _tells_the_call(text: str) -> bool:
    """All of it, and not as Python writes values."""
    return all(part in text for part in (_NAME, _KEY, _VALUE)) and f"'{_KEY}':" not in text


def _reasons_beside_content(form: HistoryForm, render: Render) -> bool:
    user, calls, result = _TRIAL
    messages = (user, msgspec.structs.replace(calls, content="a", reasoning="b"), result)
    return _tried(form, render, messages) is not None


def _reasoning(source: str) -> str:
    names = ("reasoning_content", "reasoning", "thinking")
    return next((name for name in names if re.search(rf"[.'\"]{name}\b", source)), names[0])


def written(
    messages: Sequence[ChatMessage], form: HistoryForm, *, names_results: bool = True
) -> list[Message]:
    """``names_results``: say with each result which tool it is from, if the message does not."""
    ids = _Renaming(form.ids)
    names = {call.call_id: call.name for message in messages for call in message.tool_calls}
    return [
        dict(_fields(message, form, ids, names if names_results else {})) for message in messages
    ]


def _fields(
    message: ChatMessage, form: HistoryForm, ids: "_Renaming", names: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """What is not there has no key: templates ask whether it is defined."""
    yield "role", message.role
    yield (
        "content",
        message.content if message.content or not message.tool_calls else form.empty_content,
    )
    name = message.name
    if name is None and message.tool_call_id is not None:
        name = names.get(message.tool_call_id)
    if name is not None:
        yield "name", name
    is_too_much = message.tool_calls and message.content and not form.reasons_beside_content
    if message.reasoning is not None and not is_too_much:
        yield form.reasoning, message.reasoning
    if message.tool_calls:
        yield (
            "tool_calls",
            [
                {
                    "id": ids.of_call(call),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call, form)},
                }
                for call in message.tool_calls
            ],
        )
    if message.tool_call_id is not None:
        yield "tool_call_id", ids.of_result(message.tool_call_id)


def _arguments(call: ToolCall, form: HistoryForm) -> Any:
    """What a model wrote instead of JSON stays a text: some templates can do with that, too."""
    if form.arguments_are_text or not call.is_json:
        return call.arguments
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments


class _Renaming:
    """The ids of one conversation's calls."""

    def __init__(self, form: Ids) -> None:
        self._form = form
        self._numbered: dict[str, str] = {}

    def of_call(self, call: ToolCall) -> str:
        if self._form is Ids.NUMBERED:
            self._numbered[call.call_id] = f"functions.{call.name}:{len(self._numbered)}"
        return self.of_result(call.call_id)

    def of_result(self, call_id: str) -> str:
        if self._form is Ids.NINE and _NINE.fullmatch(call_id) is None:
            return sha256(call_id.encode()).hexdigest()[:9]
        return self._numbered.get(call_id, call_id)
