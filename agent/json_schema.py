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
    return schema


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
