"""Reads values as they stand in programs: strings, numbers, lists, dictionaries, calls.

Models write tool calls like this, but what they write is never run. No I/O, no clock.
"""

import json
import re
from typing import Any, NoReturn

from common.errors import HeadraceError

DEEPEST = 64
"""Lists and dictionaries in each other."""

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(
    r"-?(?:0|[1-9][0-9]{0,300})(?:\.[0-9]{1,300})?(?:[eE][+-]?[0-9]{1,2})?(?![\w.])"
)
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_KEY = re.compile(r"[^\s:{}\[\],\"'<>]+")
_CONSTANTS = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CODE_POINT = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U000([0-9a-fA-F]{5})")


class LiteralError(HeadraceError):
    """Its text says where and why, and is short."""


class Scanner:
    def __init__(self, text: str, *, quotes: tuple[str, ...] = ()) -> None:
        """``quotes``: marks between which text stands as it is, beside quotation marks."""
        self._text = text
        self._quotes = quotes
        self._at = 0
        self._skip_space()

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """``name(key=value, ...)``, alone, one after the other or in a list."""
        calls: list[tuple[str, dict[str, Any]]] = []
        in_list = self._take("[")
        while not self._is_at_end and not (in_list and self._take("]")):
            name = self._name()
            self._expect("(")
            calls.append((name, self._items(")", "=")))
            if not self._take(","):
                self._take(";")
        if not self._is_at_end:
            self._fail("nothing more")
        return calls

    def braced_calls(self) -> list[tuple[str, dict[str, Any]]]:
        """``call:name{key:value, ...}``, one after the other."""
        calls: list[tuple[str, dict[str, Any]]] = []
        while not self._is_at_end:
            self._expect("call:")
            name = self._name()
            self._expect("{")
            calls.append((name, self._items("}", ":")))
            self._take(",")
        return calls

    @property
    def _is_at_end(self) -> bool:
        return self._at == len(self._text)

    def _items(self, end: str, between: str, depth: int = 0) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self._take(end):
            key = self._key(_NAME if between == "=" else _KEY)
            self._expect(between)
            items[key] = self._value(depth + 1)
            if not self._take(","):
                self._expect(end)
                break
        return items

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST:
            self._fail("something less deep")
        if self._take("{"):
            return self._items("}", ":", depth)
        if self._take("["):
            values: list[Any] = []
            while not self._take("]"):
                values.append(self._value(depth + 1))
                if not self._take(","):
                    self._expect("]")
                    break
            return values
        text = self._string()
        if text is not None:
            return text
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._move(number.end())
            return json.loads(number.group())
        name = _NAME.match(self._text, self._at)
        if name is not None and name.group() in _CONSTANTS:
            self._move(name.end())
            return _CONSTANTS[name.group()]
        return self._fail("a value")

    def _key(self, bare: re.Pattern[str]) -> str:
        text = self._string()
        return self._name(bare) if text is None else text

    def _name(self, pattern: re.Pattern[str] = _NAME) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            self._fail("a name")
        self._move(found.end())
        return found.group()

    def _string(self) -> str | None:
        for quote in self._quotes:
            if self._text.startswith(quote, self._at):
                start = self._at + len(quote)
                end = self._text.find(quote, start)
                if end < 0:
                    self._fail("a string that ends")
                self._move(end + len(quote))
                return self._text[start:end]
        quote = self._text[self._at : self._at + 1]
        return self._escaped(quote) if quote in ('"', "'") else None

    def _escaped(self, quote: str) -> str:
        plain = re.compile(rf"[^{quote}\\]*")
        pieces: list[str] = []
        at = self._at + 1
        while True:
            found = plain.match(self._text, at)
            assert found is not None
            pieces.append(found.group())
            at = found.end()
            if at + 1 >= len(self._text) and self._text[at:] != quote:
                self._fail("a string that ends")
            if self._text[at] == quote:
                self._move(at + 1)
                return "".join(pieces)
            point = _CODE_POINT.match(self._text, at + 1)
            if point is not None:
                pieces.append(chr(int(next(filter(None, point.groups())), 16)))
                at = point.end()
            else:
                escaped = self._text[at + 1]
                pieces.append(_ESCAPES.get(escaped, escaped))
                at += 2

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._move(self._at + len(text))
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            self._fail(text)

    def _move(self, at: int) -> None:
        self._at = at
        self._skip_space()

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _fail(self, expected: str) -> NoReturn:
        raise LiteralError(f"expected {expected} at character {self._at}")
