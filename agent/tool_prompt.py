"""Tools for models whose chat template knows none: described in words, called in the way of Hermes.

Such a template renders roles and texts, so everything becomes text: the tools a part of the system
message, calls what the assistant said, results what the user says. No I/O, no clock. The marks are
those of Hermes and Qwen, which small models have seen most often.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from common.messages import ChatMessage, Conversation, ToolCall


def has_tools(conversation: Conversation) -> bool:
    """Are there tools, or calls of tools, that the template would have to know?"""
    return bool(conversation.tools) or any(
        message.tool_calls or message.role == "tool" for message in conversation.messages
    )


def with_tools_in_words(conversation: Conversation, *, takes_system: bool) -> Conversation:
    """The same without tools, for the template. ``takes_system``: it renders system messages."""
    messages = [*_in_words(conversation.messages)]
    if conversation.tools:
        text = _description(conversation)
        role = "system" if takes_system else "user"
        at = next((n for n, message in enumerate(messages) if message.role == role), None)
        if takes_system and at != 0:
            messages.insert(0, ChatMessage("system", text))
        elif at is None:
            messages.insert(0, ChatMessage("user", text))
        elif takes_system:
            messages[at] = _with_content(messages[at], f"{messages[at].content}\n\n{text}")
        else:
            messages[at] = _with_content(messages[at], f"{text}\n\n{messages[at].content}")
    return msgspec.structs.replace(conversation, messages=tuple(messages), tools=())


def _in_words(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Results that follow each other are one message: many templates want roles to alternate."""
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if results:
            yield ChatMessage("user", "\n".join(results))
            results = []
        if message.tool_calls:
            parts = [message.content, *map(_call, message.tool_calls)]
            content = "\n".join(part for part in parts if part)
            yield msgspec.structs.replace(message, content=content, tool_calls=())
        else:
            yield message
    if results:
        yield ChatMessage("user", "\n".join(results))


def _with_content(message: ChatMessage, content: str) -> ChatMessage:
    return msgspec.structs.replace(message, content=content)


def _call(call: ToolCall) -> str:
    arguments = call.arguments if call.is_json else _json(call.arguments)
    return f'<tool_call>\n{{"name": {_json(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def _description(conversation: Conversation) -> str:
    signatures = "\n".join(_json(_signature(tool)) for tool in conversation.tools)
    lines = [
        "You can use tools. Each line between <tools> and </tools> describes one, as JSON:",
        f"<tools>\n{signatures}\n</tools>",
        "To use a tool, write its name and its arguments as one JSON object between "
        "<tool_call> and </tool_call>, like this:",
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>',
        "What the tool gives back is then told to you between <tool_response> and "
        "</tool_response>.",
    ]
    required = conversation.must_call
    if len(required) == 1:
        lines.append(f"Answer with a call of the tool {required[0]} now, and with nothing else.")
    elif required:
        lines.append(
            f"Answer with a call of one of these tools now, and with nothing else: "
            f"{', '.join(required)}."
        )
    else:
        lines.append("If no tool is of use, answer in words, without these marks.")
    lines.append(
        "Several calls stand one after the other, each between marks of its own."
        if conversation.parallel_calls
        else "Write one call at most."
    )
    return "\n".join(lines)


def _signature(tool: Mapping[str, Any]) -> Any:
    """What the model needs of it: clients also send what is for the server alone."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    wanted = ("name", "description", "parameters")
    described = cast("Mapping[str, Any]", function)
    return {key: described[key] for key in wanted if described.get(key) not in (None, "")}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
