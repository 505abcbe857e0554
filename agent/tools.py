"""The tools that one request offers, and whether a model's calls keep to them. No I/O, no clock.

Schemas come from clients and calls from models, and calls are checked on the thread that decodes for
everybody: whatever they say, the work is bounded. ``agent.tool_schema`` sees to that.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from agent.tool_schema import ToolSchema, ToolSchemaError, TooMuchWorkError, Work
from common.errors import ErrorCode, RequestError
from common.messages import ToolCall

MAX_SCHEMA_BYTES = 64 * 1024
"""Of one tool."""

MAX_TOOLS_BYTES = 512 * 1024
"""Of all schemas of a request together."""

MOST_WORK = 20_000
"""For the calls of one section, in steps of some microseconds."""

MOST_ERRORS = 10
"""Told of one section."""


class Tools:
    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """``tools`` as in ``Conversation.tools``: of type ``function``, with a name and perhaps
        ``parameters``. Raises ``RequestError`` if a schema is none or cannot be checked here.
        """
        self._schemas: dict[str, ToolSchema | None] = {}
        total = 0
        for tool in tools:
            function = tool.get("function")
            name = cast("Mapping[str, Any]", function).get("name") if _is_object(function) else None
            if not isinstance(name, str) or not name:
                raise _refused("a tool has no name")
            parameters = cast("Mapping[str, Any]", function).get("parameters")
            schema = None
            if parameters is not None:
                encoded = _encoded(name, parameters)
                total += len(encoded)
                if total > MAX_TOOLS_BYTES:
                    raise _refused(f"the schemas have more than {MAX_TOOLS_BYTES} bytes together")
                try:
                    schema = ToolSchema.read(encoded)
                except ToolSchemaError as error:
                    raise _refused(f"{_short(name)}: {error}") from error
            self._schemas.setdefault(name, schema)

    def offers(self, name: str) -> bool:
        return name in self._schemas

    def takes_text(self, name: str, parameter: str) -> bool:
        """Is what a model writes for this parameter to be taken as it stands, not read as JSON?"""
        schema = self._schemas.get(name)
        return schema is not None and schema.takes_text(parameter)

    def check(self, calls: Sequence[ToolCall]) -> list[str]:
        """What is wrong with the calls, in few and short texts. Arguments that are not JSON are
        not looked at.
        """
        work = Work(MOST_WORK)
        errors: list[str] = []
        for call in calls:
            errors += [
                f"{_short(call.name)}: {complaint}"
                for complaint in self._complaints(call, work, at_most=MOST_ERRORS - len(errors))
            ]
            if len(errors) >= MOST_ERRORS:
                break
        return errors

    def _complaints(self, call: ToolCall, work: Work, *, at_most: int) -> Iterator[str]:
        if call.name not in self._schemas:
            yield "there is no such tool"
            return
        schema = self._schemas[call.name]
        if schema is None or not call.is_json:
            return
        try:
            yield from schema.complaints(json.loads(call.arguments), work, at_most=at_most)
        except TooMuchWorkError:
            yield "the arguments are too complicated to check"
        except RecursionError:
            yield "the arguments are nested too deeply to check"


def _encoded(name: str, parameters: Any) -> bytes:
    if not _is_object(parameters):
        raise _refused(f"{_short(name)}: parameters must be a JSON Schema object")
    try:
        encoded = msgspec.json.encode(parameters)
    except (RecursionError, TypeError, ValueError) as error:
        raise _refused(f"{_short(name)}: the schema cannot be written as JSON") from error
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise _refused(f"{_short(name)}: the schema has more than {MAX_SCHEMA_BYTES} bytes")
    return encoded


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _refused(cause: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_TOOL_SCHEMA, f"the tools cannot be used: {cause}")


def _short(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:63]}…"
