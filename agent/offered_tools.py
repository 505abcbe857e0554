"""The tools of a conversation, as far as the grammars of their calls ask. No I/O, no clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from common.messages import Conversation


@dataclass(frozen=True, slots=True)
class OfferedTool:
    name: str
    schema: Mapping[str, Any] | None
    """Of its arguments; None: any object."""


def offered_tools(conversation: Conversation) -> dict[str, OfferedTool]:
    """By name, with their schemas; the first one of each name."""
    tools: dict[str, OfferedTool] = {}
    for tool in conversation.tools:
        function = _function(tool)
        name: Any = function.get("name")
        tools.setdefault(name, OfferedTool(name, function.get("parameters")))
    return tools


def tools_as_strict(conversation: Conversation) -> dict[str, OfferedTool]:
    """The same, those that are not strict with any object for their arguments."""
    strict = {_function(tool).get("name") for tool in conversation.tools if _is_strict(tool)}
    return {
        name: tool if name in strict else OfferedTool(name, None)
        for name, tool in offered_tools(conversation).items()
    }


def has_strict_tools(conversation: Conversation) -> bool:
    """Is there one whose calls, if there are any, have to follow its schema?"""
    return any(map(_is_strict, conversation.tools))


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return _function(tool).get("strict") is True


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}
