"""JSON schemas as clients send them, before llguidance reads them. No I/O, no clock."""

import json
from typing import Any, NoReturn, cast

from common.errors import HeadraceError

MAX_BYTES = 64 * 1024

MAX_DEPTH = 64
"""Of values in a schema."""

WHITESPACE = r"[ \t]{0,2}|\r?\n[ \t]{0,40}"
"""Between the parts of a JSON text. JSON has no limit, and small models take it to heart."""

OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "lenient": False}
"""For llguidance: nothing that a schema says is ignored."""

FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
"""Those that llguidance can hold a text to (its ``json/formats.rs``). It refuses all others, which for
JSON Schema (2020-12, validation, 7.2.1) are but remarks.
"""

_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords with JSON that is no schema, whatever it looks like."""

_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords with schemas by names, which may be those of keywords."""


class SchemaError(HeadraceError):
    """Why a schema cannot be used."""


def check_schema(schema: str) -> str:
    """The schema as it is to be compiled. Raises ``SchemaError`` with the cause."""
    if len(schema.encode(errors="replace")) > MAX_BYTES:
        _refuse(f"it is longer than {MAX_BYTES} bytes")
    try:
        value = json.loads(schema, parse_constant=_no_constant)
    except RecursionError:
        _refuse(f"it is nested more than {MAX_DEPTH} deep")
    except ValueError as error:
        _refuse(f"it is not JSON: {error}")
    if _depth(value) > MAX_DEPTH:
        _refuse(f"it is nested more than {MAX_DEPTH} deep")
    if value is True:
        return "{}"
    if value is False:
        _refuse("it allows nothing")
    if not isinstance(value, dict):
        _refuse("it is neither an object nor a boolean")
    if "x-guidance" in value:
        _refuse("'x-guidance' is not supported")
    kept = _without_remarks(cast("dict[str, Any]", value))
    if kept == value:
        return schema
    # Not in ASCII alone, which could make it longer than it was allowed to be.
    written = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    try:
        written.encode()
    except UnicodeEncodeError:
        _refuse("it is not JSON: half of a surrogate pair is no character")
    return written


def _without_remarks(schema: dict[str, Any]) -> dict[str, Any]:
    """The same without the formats that are but remarks."""
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if keyword in _NAMED and isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            kept[keyword] = {name: _schemas_in(inner) for name, inner in named.items()}
        else:
            kept[keyword] = value if keyword in _VALUES else _schemas_in(value)
    return kept


def _schemas_in(value: Any) -> Any:
    """Keywords that are not known are looked into too: references may lead there."""
    match value:
        case dict():
            return _without_remarks(cast("dict[str, Any]", value))
        case list():
            return [_schemas_in(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def _refuse(cause: str) -> NoReturn:
    raise SchemaError(cause)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth(value: Any) -> int:
    depth = 0
    level: list[Any] = [value]
    while level:
        depth += 1
        below: list[Any] = []
        for outer in level:
            match outer:
                case dict():
                    below.extend(cast("dict[str, Any]", outer).values())
                case list():
                    below.extend(cast("list[Any]", outer))
                case _:
                    pass
        level = below
    return depth
