"""One tool's JSON Schema (draft 2020-12), and how arguments are checked against it.

Neither schemas nor arguments are to be trusted, so the work is bounded. No I/O, no clock.

- The schema is rewritten for the library, ``jsonschema``. Only what checks something is kept;
  ``$schema`` and ``$id`` go too, since for a ``$schema`` inside, the library would change over to a
  validator class of its own. References must stay in the schema and are resolved beforehand.
- Every keyword that is looked at is paid for from a ``Work``.
- Patterns are matched by an engine that does not backtrack (``agent.patterns``).
"""

import functools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeAlias, cast

import msgspec
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import create  # pyright: ignore[reportUnknownVariableType]
from referencing import Registry

from agent.patterns import Pattern, PatternError
from common.errors import HeadraceError

MAX_OBJECTS = 1000
"""In one schema. The library takes up to 0.2 ms to see whether one is right."""

DEEPEST = 64
"""Objects and arrays of a schema in each other."""

LARGEST_CACHED = 8 * 1024
"""Bytes of a schema that is remembered, since most requests of a client offer the same tools."""

_NOTHING_ELSE = Registry[Any]()
"""The documents that a schema can refer to, beside itself."""

Schema: TypeAlias = bool | dict[str, Any]


class ToolSchemaError(HeadraceError):
    """Its text says why, and is short."""


class TooMuchWorkError(HeadraceError):
    """There is nothing left to spend."""


class Work:
    """What may be spent on checks."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.sizes: dict[int, int] = {}
        """Characters of each container of the arguments that are being checked, by its id."""

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooMuchWorkError("too complicated to check")


_work: ContextVar[Work] = ContextVar("work")
"""Of the check that goes on; keywords get nothing from the library but what it passes to all."""


class ToolSchema:
    def __init__(self, encoded: bytes) -> None:
        schema = msgspec.json.decode(encoded)
        _measure_schema(schema)
        try:
            # Its formats are not checked: one would have Python compile every pattern.
            Draft202012Validator.check_schema(schema, format_checker=FormatChecker(formats=()))
        except SchemaError as error:
            where = "/".join(map(str, error.absolute_path))
            raise ToolSchemaError(_cut(f"no JSON Schema, at {where or 'its root'}")) from error
        self._original = cast("dict[str, Any]", schema)
        rewritten = _Rewriter(self._original).rewritten(self._original)
        self._validator = _BoundedValidator(rewritten, registry=_NOTHING_ELSE)

    @classmethod
    def read(cls, encoded: bytes) -> "ToolSchema":
        """From JSON. Raises ``ToolSchemaError``."""
        try:
            return _remembered(encoded) if len(encoded) <= LARGEST_CACHED else cls(encoded)
        except RecursionError as error:
            raise ToolSchemaError("the schema is nested too deeply") from error

    def takes_text(self, parameter: str) -> bool:
        """Does the schema say that this parameter is always a text?"""
        properties = self._original.get("properties", {})
        schema = properties.get(parameter)
        if not isinstance(schema, dict):
            return False
        schema = cast("dict[str, Any]", schema)
        if "type" not in schema and "enum" in schema:
            return all(isinstance(value, str) for value in schema["enum"])
        return schema.get("type") in ("string", ["string"])

    def complaints(self, arguments: Any, work: Work, *, at_most: int) -> list[str]:
        """Raises ``TooMuchWorkError`` or ``RecursionError`` if it cannot be said."""
        work.sizes.clear()
        _measure(arguments, work.sizes)
        token = _work.set(work)
        try:
            errors = islice(self._validator.iter_errors(arguments), at_most)
            return [_complaint(error) for error in errors]
        except ArithmeticError:  # numbers that only fit integers, by a multiple that is none
            return ["a number is too large to check"]
        finally:
            _work.reset(token)
            work.sizes.clear()


@functools.lru_cache(maxsize=512)
def _remembered(encoded: bytes) -> ToolSchema:
    return ToolSchema(encoded)


def _measure_schema(schema: Any) -> None:
    """Before anything recursive looks at it."""
    objects = 0
    level: list[Any] = [schema]
    for _ in range(DEEPEST):
        inside: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                objects += 1
                inside += cast("dict[str, Any]", value).values()
            elif isinstance(value, list):
                inside += cast("list[Any]", value)
        if objects > MAX_OBJECTS:
            raise ToolSchemaError(f"the schema has more than {MAX_OBJECTS} objects")
        if not inside:
            return
        level = inside
    raise ToolSchemaError("the schema is nested too deeply")


def _measure(value: Any, sizes: dict[int, int]) -> int:
    """Characters of a value, roughly; those of containers are written down."""
    if isinstance(value, str):
        return len(value) + 4
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        size = 2 + sum(len(key) + 4 + _measure(inside, sizes) for key, inside in items)
    elif isinstance(value, list):
        size = 2 + sum(_measure(inside, sizes) for inside in cast("list[Any]", value))
    elif isinstance(value, int):
        return 8 + value.bit_length() // 3
    else:
        return 8
    sizes[id(cast("Any", value))] = size
    return size


# Rewriting


class _Rewritten(dict[str, Any]):
    """The library writes schemas into its messages, which nobody reads."""

    def __repr__(self) -> str:
        return "{...}"


class _Reference:
    schema: Schema


class _Choices:
    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)
        self.keys = frozenset(map(_key, self.values))


def _key(value: Any) -> Hashable:
    """Equal for what JSON Schema holds to be equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return "object", frozenset((key, _key(inside)) for key, inside in items)
    if isinstance(value, list):
        return "array", tuple(map(_key, cast("list[Any]", value)))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "other", repr(value)  # hashes of numbers could be made to collide


_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "dependentSchemas")
_PLAIN = (
    "type", "required", "dependentRequired", "uniqueItems", "multipleOf",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties",
)  # fmt: skip
_REFUSED = ("$dynamicRef", "unevaluatedItems", "unevaluatedProperties")
"""Seldom seen in tools; the library's way to check them can take for ever."""


class _Rewriter:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._subschemas = {id(schema) for schema in _subschemas(root)}
        self._references: dict[str, _Reference] = {}

    def rewritten(self, schema: Schema) -> Schema:
        """Raises ``ToolSchemaError``. The schema has been checked to be one."""
        if isinstance(schema, bool):
            return schema
        new = _Rewritten()
        for keyword, value in schema.items():
            if keyword in _PLAIN:
                new[keyword] = value
            elif keyword in _ONE:
                new[keyword] = self.rewritten(value)
            elif keyword in _LIST:
                new[keyword] = [self.rewritten(each) for each in value]
            elif keyword in _NAMED:
                new[keyword] = {name: self.rewritten(each) for name, each in value.items()}
            elif keyword == "patternProperties":
                new[keyword] = {
                    _pattern_of(name): self.rewritten(each) for name, each in value.items()
                }
            elif keyword == "pattern":
                new[keyword] = _pattern_of(value)
            elif keyword == "enum":
                new[keyword] = _Choices(value)
            elif keyword == "const":
                new[keyword] = _Choices([value])
            elif keyword == "$ref":
                new[keyword] = self._reference(value)
            elif keyword in _REFUSED:
                raise ToolSchemaError(f"{keyword} cannot be checked here")
        return new

    def _reference(self, path: str) -> _Reference:
        reference = self._references.get(path)
        if reference is None:
            self._references[path] = reference = _Reference()
            reference.schema = self.rewritten(self._at(path))
        return reference

    def _at(self, path: str) -> Schema:
        where, *keys = path.split("/")
        value: Any = self._root
        for key in keys:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isascii() and key.isdecimal():
                value = dict(enumerate(cast("list[Any]", value))).get(int(key[:9]))
            else:
                value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
        if where != "#" or id(value) not in self._subschemas:
            raise ToolSchemaError(_cut(f"a reference leads to no part of the schema: {path}"))
        return cast("Schema", value)


def _pattern_of(source: str) -> Pattern:
    try:
        return Pattern(source)
    except PatternError as error:
        raise ToolSchemaError(f"pattern {_cut(source)}: {_cut(str(error))}") from error


def _subschemas(root: dict[str, Any]) -> Iterator[Schema]:
    """All that the library has checked to be schemas; ``true`` and ``false`` among them."""
    waiting: list[Schema] = [root]
    while waiting:
        schema = waiting.pop()
        yield schema
        if isinstance(schema, bool):
            continue
        for keyword, value in schema.items():
            if keyword in _ONE:
                waiting.append(value)
            elif keyword in _LIST:
                waiting += value
            elif keyword in (*_NAMED, "patternProperties", "$defs", "definitions"):
                waiting += value.values()


# The library's validator, with bounds

Keyword: TypeAlias = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]


def _paid(keyword: Keyword) -> Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        work = _work.get()
        # Messages quote what is wrong, and that takes time.
        steps = 1 + _size(instance, work) // 1000
        for each in (value, instance):
            if isinstance(each, dict | list):
                steps += len(cast("list[Any]", each))
        work.spend(steps)
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _size(value: Any, work: Work) -> int:
    return len(value) if isinstance(value, str) else work.sizes.get(id(value), 8)


def _ref(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    return validator.descend(instance, value.schema)


def _finds(pattern: Pattern, text: str) -> bool:
    _work.get().spend(1 + pattern.cost(text) // 1000)
    return pattern.is_found_in(text)


def _pattern(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _finds(value, instance):
        yield ValidationError("")


def _choices(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    _work.get().spend(_size(instance, _work.get()) // 20)
    if _key(instance) not in value.keys:
        yield ValidationError("")


def _unique_items(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if value and isinstance(instance, list):
        _work.get().spend(_size(instance, _work.get()) // 20)
        items = cast("list[Any]", instance)
        if len(set(map(_key, items))) < len(items):
            yield ValidationError("")


def _pattern_properties(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, inside in value.items():
            for name, each in cast("dict[str, Any]", instance).items():
                if _finds(pattern, name):
                    yield from validator.descend(each, inside, path=name)


def _additional_properties(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known: Mapping[str, Any] = schema.get("properties", {})
    patterns: Mapping[Pattern, Any] = schema.get("patternProperties", {})
    for name, each in cast("dict[str, Any]", instance).items():
        if name in known or any(_finds(pattern, name) for pattern in patterns):
            continue
        if value is False:
            yield ValidationError(f"{_cut(name)!r} is not expected")
        else:
            yield from validator.descend(each, value, path=name)


_KEYWORDS: dict[str, Keyword] = {
    keyword: _paid(cast("Keyword", Draft202012Validator.VALIDATORS[keyword]))
    for keyword in (*_PLAIN, *_ONE, *_LIST, *_NAMED)
    if keyword in Draft202012Validator.VALIDATORS  # others only say something to their neighbours
} | {
    "$ref": _paid(_ref),
    "pattern": _paid(_pattern),
    "enum": _paid(_choices),
    "const": _paid(_choices),
    "uniqueItems": _paid(_unique_items),
    "patternProperties": _paid(_pattern_properties),
    "additionalProperties": _paid(_additional_properties),
}

_BoundedValidator: Any = create(
    meta_schema=Draft202012Validator.META_SCHEMA,
    validators=cast("Any", _KEYWORDS),
    type_checker=Draft202012Validator.TYPE_CHECKER,
)


# What is told


def _complaint(error: ValidationError) -> str:
    where = _cut("/".join(map(str, error.absolute_path))) or "arguments"
    keyword, value = cast("Any", error.validator), cast("Any", error.validator_value)
    match keyword:
        case None:
            what = "is not expected"
        case "required" | "additionalProperties":
            what = _cut(error.message)
        case "enum" | "const":
            what = f"must be one of {_cut(json.dumps(value.values, ensure_ascii=False))}"
        case "pattern":
            what = f"does not match {_cut(value.source)}"
        case _ if isinstance(value, str | int | float):
            what = f"breaks {keyword}: {_cut(str(value))}"
        case "type":
            what = f"breaks type: {_cut(' or '.join(value))}"
        case _:
            what = f"breaks {keyword}"
    return f"{where}: {what}"


def _cut(text: str, longest: int = 100) -> str:
    """Fit for a message: short, and without halves of surrogate pairs, which cannot be sent."""
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return text.encode("utf-8", "replace").decode()
