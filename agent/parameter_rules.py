"""The arguments of a call as rules: one JSON object, or each parameter in tags of its own.

A value in tags is JSON or, where ``agent.tools`` takes it as it stands, text. No I/O, no clock.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from agent.formats import OutputFormat
from agent.json_schema import SchemaError
from agent.lark_rules import Rules, Written, text_without
from agent.notations import Notation, Place
from agent.offered_tools import OfferedTool
from agent.tools import Tools
from common.errors import ErrorCode, RequestError

_SAYS_WHAT_IT_IS = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
"""A schema with none of these allows values of any type."""

_REMARKS = frozenset({"title", "description", "default", "examples", "deprecated"})
_IN_TAGS = _REMARKS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
}  # fmt: skip
"""What a tool's schema may say so that its parameters can stand in tags, one by one."""

_OF_TEXT = _REMARKS | {"type", "enum", "const"}
"""What may be said of a text in tags."""


def arguments_as_json(rules: Rules, tool: OfferedTool) -> str:
    """One object. Raises ``RequestError`` (``INVALID_TOOL_SCHEMA``)."""
    schema: Mapping[str, Any] = {} if tool.schema is None else tool.schema
    if not _SAYS_WHAT_IT_IS & schema.keys():
        schema = {"type": "object", **schema}
    return _json(rules, tool.name, schema)


class ParametersInTags:
    """Writes the parameters of these tools in the tags of a notation."""

    def __init__(
        self,
        rules: Rules,
        output: OutputFormat,
        notation: Notation,
        tools: Mapping[str, OfferedTool],
    ) -> None:
        """Raises ``RequestError`` (``INVALID_TOOL_SCHEMA``)."""
        self._rules = rules
        self._output = output
        self._notation = notation
        self._reads = Tools([_as_offered(tool) for tool in tools.values()])

    def parameters(self, tool: OfferedTool) -> str | None:
        """None: they cannot stand there, one by one.

        Raises ``RequestError`` (``INVALID_TOOL_SCHEMA``).
        """
        schema = tool.schema
        if not self._notation.text_parameter or schema is None:
            return None
        if not schema.keys() <= _IN_TAGS or schema.get("type") != "object":
            return None
        properties: Any = schema.get("properties")
        required: Any = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if not set(cast("list[str]", required)) <= properties.keys() or not _refers_to(
            properties, tuple(f"#/{key}/" for key in definitions)
        ):
            return None
        written: list[str] = []
        for key, value in cast("dict[str, Any]", properties).items():
            parameter = self._parameter(tool, key, value, definitions)
            if parameter is None:
                return None
            written.append(parameter if key in required else f"{parameter}?")
        return " ".join(written)

    def _parameter(
        self, tool: OfferedTool, key: str, schema: Any, definitions: Mapping[str, Any]
    ) -> str | None:
        if not isinstance(schema, dict) or not _fits_in_tag(key):
            return None
        said = cast("dict[str, Any]", schema)
        is_text = self._reads.takes_text(tool.name, key)
        parts = self._notation.text_parameter if is_text else self._notation.json_parameter
        at = parts.index(Place.VALUE)
        before = [key if part is Place.KEY else part for part in parts[:at]]
        close, *behind = parts[at + 1 :]
        assert isinstance(close, str)
        if is_text:
            value = self._text(said, close)
            if value is None:
                return None
        else:
            value = _json(self._rules, f"{tool.name}: {key}", {**said, **definitions})
            value = f"{value} {self._rules.literal(close)}"
        return self._rules.rule(self._rules.sequence([*before, Written(value), *behind]))

    def _text(self, schema: Mapping[str, Any], close: str) -> str | None:
        """A text, as it stands, up to and with ``close``; None: it cannot be told so."""
        assert self._output.calls is not None
        never = [
            close.strip(), "<![CDATA[", *self._output.calls.closes, *self._output.calls.inside,
        ]  # fmt: skip
        if not schema.keys() <= _OF_TEXT:
            return None
        if "enum" not in schema and "const" not in schema:
            return self._rules.up_to(text_without(never), close)
        values: Any = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        texts = [value for value in values if isinstance(value, str)]
        if not texts or any(
            mark in text or text != text.strip("\n") for text in texts for mark in never
        ):
            return None
        return self._rules.rule(" | ".join(self._rules.literal(text + close) for text in texts))


def _json(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    """``name``: to tell if the schema cannot be used."""
    try:
        return rules.json(name, json.dumps(schema))
    except SchemaError as error:
        raise RequestError(
            ErrorCode.INVALID_TOOL_SCHEMA, f"the tools cannot be used: {name}: {error}"
        ) from error


def _as_offered(tool: OfferedTool) -> Mapping[str, Any]:
    parameters = {} if tool.schema is None else {"parameters": tool.schema}
    return {"function": {"name": tool.name, **parameters}}


def _fits_in_tag(key: str) -> bool:
    return bool(key) and key == key.strip() and re.search(r'["<>\n]', key) is None


def _refers_to(value: Any, places: tuple[str, ...]) -> bool:
    """Do all references in it lead there?"""
    todo = [value]
    for inner in todo:  # which grows on the way
        if isinstance(inner, dict):
            items = cast("dict[str, Any]", inner)
            reference = items.get("$ref")
            if isinstance(reference, str) and not (places and reference.startswith(places)):
                return False
            if not {"$id", "$anchor", "$dynamicRef", "$defs", "definitions"}.isdisjoint(items):
                return False
            todo.extend(items.values())
        elif isinstance(inner, list):
            todo.extend(cast("list[Any]", inner))
    return True
