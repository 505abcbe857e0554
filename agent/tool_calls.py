"""Reads what models write when they call tools, in each family's own notation. No I/O, no clock.

A reader gets one section, cut at the marks in it, and the tools that are offered. It returns the
calls in their order or raises ``ToolCallError``. Arguments that are not JSON are not its business:
they are handed on as they were written. Cost is linear in the section.

The notations are those of the models' chat templates; llama.cpp has them in ``models/templates``.
"""

# ruff: noqa: RUF001 - DeepSeek's marks are written with a wide vertical line

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

from agent.literals import LiteralError, Scanner
from agent.tools import Tools
from common.errors import HeadraceError
from common.messages import ToolCall

LONGEST_NAME = 256
"""In characters; what is longer is no name of a tool."""

MOST_CALLS = 1000
"""In one section."""


class ToolCallError(HeadraceError):
    """Its text says why, and is short."""


class Part(NamedTuple):
    mark: str
    """Empty for text that opened a section by itself."""
    text: str
    """What follows the mark, up to the next one."""


class WrittenCall(NamedTuple):
    name: str
    arguments: str | dict[str, Any] | list[Any] | float | None
    """A text is what the model wrote, JSON or not; else values that have been read already."""
    call_id: str | None = None


ReadCalls: TypeAlias = Callable[[Sequence[Part], Tools], list[WrittenCall]]


def made_calls(written: Sequence[WrittenCall], *, make_id: Callable[[], str]) -> list[ToolCall]:
    """Raises ``ToolCallError`` if there are none, or far too many, or one has no proper name."""
    if not written:
        raise ToolCallError("there is no call in the section of tool calls")
    if len(written) > MOST_CALLS:
        raise ToolCallError(f"{len(written)} calls in one section; {MOST_CALLS} are allowed")
    calls: list[ToolCall] = []
    taken: set[str] = set()
    for call in written:
        name = call.name.strip()
        if not name or len(name) > LONGEST_NAME or not _is_text(name):
            raise ToolCallError(f"call {len(calls) + 1} has no proper name")
        call_id = call.call_id or make_id()
        if call_id in taken or len(call_id) > LONGEST_NAME or not _is_text(call_id):
            call_id = make_id()
        taken.add(call_id)
        arguments, is_json = _arguments(call.arguments)
        calls.append(ToolCall(call_id, name, arguments, is_json))
    return calls


def _arguments(written: Any) -> tuple[str, bool]:
    """JSON text and True, or what was written instead and False."""
    if written is None:
        return "{}", True
    if isinstance(written, str):
        text = written.strip()
        if not text:
            return "{}", True
        try:
            _decoder.decode(text)
        except (ValueError, RecursionError):
            return text if _is_text(text) else ascii(text), False
        return text if _is_text(text) else json.dumps(_decoder.decode(text)), True
    try:
        text = json.dumps(written, ensure_ascii=False)
        return text if _is_text(text) else json.dumps(written), True
    except (ValueError, RecursionError):
        return "arguments that are nested too deeply", False


def _is_text(text: str) -> bool:
    """Halves of surrogate pairs, which JSON can name, cannot be sent to anybody."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
_lenient = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant, strict=False)
"""Takes line breaks inside strings too, which models write now and then."""


# JSON: {"name": ..., "arguments": ...}

_BETWEEN_VALUES = re.compile(r"[\s,;]*")


def read_json(parts: Sequence[Part], tools: Tools) -> list[WrittenCall]:
    """Objects, or arrays of them, one after the other."""
    return [call for part in parts for call in _json_calls(part.text)]


def _json_calls(text: str) -> Iterable[WrittenCall]:
    for value in _json_values(text):
        for call in cast("list[Any]", value) if isinstance(value, list) else [value]:
            yield _json_call(call)


def _json_values(text: str) -> Iterable[Any]:
    at = _end_of_space(text, 0)
    while at < len(text):
        try:
            value, at = _lenient.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ToolCallError(f"not JSON at character {error.pos}: {error.msg}") from error
        except ValueError as error:
            raise ToolCallError("a number is too large, or none") from error
        except RecursionError as error:
            raise ToolCallError("nested too deeply") from error
        yield value
        at = _end_of_space(text, at)


def _end_of_space(text: str, at: int) -> int:
    found = _BETWEEN_VALUES.match(text, at)
    return found.end() if found else at


def _json_call(value: Any) -> WrittenCall:
    """Names of the keys: most models; Command R; Llama 3 (also with a nested object); Apertus."""
    if not isinstance(value, dict):
        raise ToolCallError("a call is not an object")
    call = cast("dict[str, Any]", value)
    function = call.get("function")
    if isinstance(function, dict):
        call = {**cast("dict[str, Any]", function), **call}
    name = call.get("name", call.get("tool_name", function))
    if name is None and len(call) == 1:
        name, arguments = next(iter(call.items()))
        return WrittenCall(name, arguments)
    if not isinstance(name, str):
        raise ToolCallError("a call has no name")
    arguments = call.get("arguments", call.get("parameters"))
    call_id = call.get("id")
    return WrittenCall(name, arguments, call_id if isinstance(call_id, str) else None)


# Blocks, whose inside may be JSON or tags

_CALL_TAG = re.compile(r'<(?:｜DSML｜)?(?:function|invoke)(?:=|\s+name=")([^"<>]*)"?\s*>')
_PARAMETER_TAG = re.compile(
    r'\s*<(?:｜DSML｜)?(parameter|param)(?:=|\s+name=")([^"<>]*)"?(?:\s+string="(true|false)")?\s*>'
)
_CDATA = "<![CDATA["
_CLOSED_CALL = re.compile(r"</(?:｜DSML｜)?(?:function|invoke)>")
_NAME = re.compile(r"\s*([\w.:/-]+)\s*")


def read_blocks(parts: Sequence[Part], tools: Tools) -> list[WrittenCall]:
    """Each block as it looks: JSON; ``<function=..>`` or ``<invoke name="..">`` with parameters in
    tags, or with JSON; a name with ``<arg_key>`` and ``<arg_value>``.
    """
    calls: list[WrittenCall] = []
    for part in parts:
        text = part.text.strip()
        begins = text[:1]
        if not begins:
            continue
        if begins in "{[":
            calls += _json_calls(text)
        elif begins == "<":
            calls += _tagged_calls(text, tools)
        else:
            calls.append(_call_with_keys(text, tools))
    return calls


def _tagged_calls(text: str, tools: Tools) -> Iterable[WrittenCall]:
    at = _end_of_space(text, 0)
    while at < len(text):
        found = _CALL_TAG.match(text, at)
        if found is None:
            raise ToolCallError(f"no call begins at character {at}")
        name = found.group(1).strip()
        at = found.end()
        if _PARAMETER_TAG.match(text, at) is None:
            closed = _CLOSED_CALL.search(text, at)
            yield WrittenCall(name, text[at : closed.start() if closed else len(text)])
            at = _end_of_space(text, closed.end()) if closed else len(text)
            continue
        arguments: dict[str, Any] = {}
        while found := _PARAMETER_TAG.match(text, at):
            tag, key, is_string = found.groups()
            prefix = "</｜DSML｜" if "｜DSML｜" in found.group() else "</"
            start, close = found.end(), f"{prefix}{tag}>"
            if text.startswith(_CDATA, start):
                start, close = start + len(_CDATA), f"]]>{close}"
            end = text.find(close, start)
            if end < 0:
                raise ToolCallError("a parameter is not finished")
            value = text[start:end]
            at = end + len(close)
            arguments[key.strip()] = _value(value, name, key.strip(), tools, is_string=is_string)
        yield WrittenCall(name, arguments)
        at = _end_of_space(text, at)
        closed = _CLOSED_CALL.match(text, at)
        at = _end_of_space(text, closed.end()) if closed else at


def _call_with_keys(text: str, tools: Tools) -> WrittenCall:
    found = _NAME.match(text)
    if found is None:
        raise ToolCallError("a call has no name")
    name, at = found.group(1), found.end()
    arguments: dict[str, Any] = {}
    while at < len(text):
        key, at = _tagged(text, at, "arg_key")
        value, at = _tagged(text, _end_of_space(text, at), "arg_value")
        at = _end_of_space(text, at)
        arguments[key.strip()] = _value(value, name, key.strip(), tools)
    return WrittenCall(name, arguments)


def _tagged(text: str, at: int, tag: str) -> tuple[str, int]:
    """What stands in the tag, and where it ends."""
    end = text.find(f"</{tag}>", at)
    if not text.startswith(f"<{tag}>", at) or end < 0:
        raise ToolCallError(f"there should be a whole <{tag}> at character {at}")
    return text[at + len(tag) + 2 : end], end + len(tag) + 3


def _value(
    text: str, name: str, parameter: str, tools: Tools, *, is_string: str | None = None
) -> Any:
    """What stands in a tag is text or JSON: the tag says so, or the tool's schema, or its looks."""
    text = text.removeprefix("\n").removesuffix("\n")
    if is_string == "true" or (is_string is None and tools.takes_text(name, parameter)):
        return text
    try:
        return _decoder.decode(text.strip())
    except (ValueError, RecursionError):
        return text


# Names and arguments in places of their own


@dataclass(frozen=True)
class Places:
    """Which mark stands before what. ``name`` begins a call."""

    name: str
    arguments: str
    call_id: str = ""

    def __call__(self, parts: Sequence[Part], tools: Tools) -> list[WrittenCall]:
        calls: list[WrittenCall] = []
        for part in parts:
            if part.mark == self.name:
                calls += self._begun(part.text, tools)
            elif part.mark == self.call_id and calls:
                calls[-1] = calls[-1]._replace(call_id=part.text.strip())
            elif part.mark == self.arguments:
                if not calls:
                    raise ToolCallError("arguments without a call")
                calls[-1] = self._with_arguments(calls[-1], part.text)
        return calls

    def _begun(self, text: str, tools: Tools) -> Iterable[WrittenCall]:
        """Older Mistral models write JSON behind the mark, or a name and JSON."""
        begins = text.lstrip()[:1]
        if begins and begins in "{[":
            return _json_calls(text)
        name, bracket, rest = text.partition("{")
        return [WrittenCall(plain_name(name, tools), bracket + rest)] if text.strip() else []

    def _with_arguments(self, call: WrittenCall, text: str) -> WrittenCall:
        """DeepSeek R1 writes ``function``, the mark, the name, and JSON between fences."""
        if call.name == "function" and not text.lstrip().startswith("{"):
            name, _, text = text.strip().partition("\n")
            call = call._replace(name=name)
        text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
        return call._replace(arguments=text)


def plain_name(name: str, tools: Tools) -> str:
    """``functions.name:0`` is how Kimi K2 numbers its calls; gpt-oss has no number."""
    name = name.strip()
    if tools.offers(name):
        return name
    return re.sub(r":\d+\Z", "", name.removeprefix("functions."))


RECIPIENT = re.compile(r"to=([^\s<]+)")


def read_harmony(parts: Sequence[Part], tools: Tools) -> list[WrittenCall]:
    """gpt-oss: the recipient stands in the header, the arguments are the message."""
    calls: list[WrittenCall] = []
    for part in parts:
        recipient = RECIPIENT.search(part.mark)
        if recipient is not None:
            calls.append(WrittenCall(plain_name(recipient.group(1), tools), ""))
        elif part.mark == "<|message|>" and calls:
            calls[-1] = calls[-1]._replace(arguments=part.text)
    return calls


# Like a programming language


def read_python(parts: Sequence[Part], tools: Tools) -> list[WrittenCall]:
    """``name(key=value, ...)``, alone or in a list."""
    return [call for part in parts for call in _python_calls(part.text)]


def _python_calls(text: str) -> list[WrittenCall]:
    scanner = Scanner(text)
    try:
        calls = [WrittenCall(*call) for call in scanner.calls()]
    except LiteralError as error:
        raise ToolCallError(str(error)) from error
    return calls


def read_llama(parts: Sequence[Part], tools: Tools) -> list[WrittenCall]:
    """Llama 3.x: JSON; or ``name.call(key=value)`` for tools that it knows; or a program."""
    calls: list[WrittenCall] = []
    for part in parts:
        text = part.text.strip()
        if text[:1] == "<":
            calls += _tagged_calls(text, tools)
        elif part.mark == "<|python_tag|>" and text[:1] not in ("{", "["):
            calls += _program(text)
        else:
            calls += _json_calls(text)
    return calls


def _program(text: str) -> list[WrittenCall]:
    if re.match(r"\w+\.call\(", text):
        return [call._replace(name=call.name.removesuffix(".call")) for call in _python_calls(text)]
    return [WrittenCall("python", {"code": text})] if text else []


def read_gemma(parts: Sequence[Part], tools: Tools) -> list[WrittenCall]:
    """``call:name{key:value, ...}``, with marks of its own around strings."""
    calls: list[WrittenCall] = []
    for part in parts:
        scanner = Scanner(part.text, quotes=('<|"|>', "<escape>"))
        try:
            calls += [WrittenCall(*call) for call in scanner.braced_calls()]
        except LiteralError as error:
            raise ToolCallError(str(error)) from error
    return calls
