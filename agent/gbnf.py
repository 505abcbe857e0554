"""Reads grammars in llama.cpp's notation (GBNF). No I/O, no clock.

The notation is that of ``grammars/README.md`` and ``src/llama-grammar.cpp`` of llama.cpp.
``agent.lark`` writes what was read for llguidance.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from common.errors import ErrorCode, RequestError

MAX_BYTES = 64 * 1024

MAX_DEPTH = 64
"""Of brackets."""

MAX_REPEATED = 4
"""Repetitions of repetitions, without brackets between them."""

MAX_REPETITIONS = 2000
"""llama.cpp's own bound."""

MAX_ELEMENTS = 20_000
"""Characters, references and brackets. llguidance takes the square of it to begin with."""


def refuse(cause: str) -> NoReturn:
    raise RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {cause}")


Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last characters, in order, without overlap."""


@dataclass(frozen=True, slots=True)
class Character:
    """One of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Group:
    alternatives: "Alternatives"


@dataclass(frozen=True, slots=True)
class Repetition:
    element: "Element"
    least: int
    most: int | None


Element: TypeAlias = Character | Reference | Group | Repetition
Sequence: TypeAlias = list[Element]
Alternatives: TypeAlias = list[Sequence]

_TEXT: Ranges = ((1, 0xD7FF), (0xE000, sys.maxunicode))
"""What a text may consist of. To llama.cpp a null character is its end."""


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _others(ranges: Ranges) -> Ranges:
    """All numbers that are not in them."""
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), sys.maxunicode + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((low + 1, high - 1) for low, high in gaps if low + 1 < high)


_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {char: char for char in '\\"[]-'}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def _is_word(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char == "-")


def _is_digit(char: str) -> bool:
    return char.isascii() and char.isdigit()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._elements = 0
        self.rules: dict[str, Alternatives] = {}

    def parse(self) -> None:
        if "\0" in self._text:
            self._fail("it contains a null character")
        self._space(newlines=True)
        while self._char:
            self._rule()

    @property
    def _char(self) -> str:
        """Empty at the end."""
        return self._text[self._at : self._at + 1]

    def _fail(self, cause: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        refuse(f"line {line}: {cause}")

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            self._fail(f"expected {text!r}, found {self._found}")
        self._at += len(text)

    @property
    def _found(self) -> str:
        found = self._text[self._at : self._at + 20].split("\n")[0]
        return repr(found) if found else "the end of the line" if self._char else "the end"

    def _space(self, *, newlines: bool) -> None:
        blank = " \t\r\n" if newlines else " \t"
        while (char := self._char) and (char in blank or char == "#"):
            if char == "#":
                while self._char and self._char not in "\r\n":
                    self._at += 1
            else:
                self._at += 1

    def _while(self, wanted: Callable[[str], bool]) -> str:
        start = self._at
        while self._char and wanted(self._char):
            self._at += 1
        return self._text[start : self._at]

    def _rule(self) -> None:
        name = self._while(_is_word)
        if not name:
            self._fail(f"expected the name of a rule, found {self._found}")
        self._space(newlines=False)
        self._expect("::=")
        self._space(newlines=True)
        self.rules[name] = self._alternatives(nested=False)
        if self._char and self._char not in "\r\n":
            self._fail(f"expected the end of the rule, found {self._found}")
        self._space(newlines=True)

    def _count(self) -> None:
        self._elements += 1
        if self._elements > MAX_ELEMENTS:
            self._fail(f"it has over {MAX_ELEMENTS} elements")

    def _alternatives(self, *, nested: bool) -> Alternatives:
        alternatives = [self._sequence(nested=nested)]
        while self._char == "|":
            self._at += 1
            self._count()
            self._space(newlines=True)
            alternatives.append(self._sequence(nested=nested))
        return alternatives

    def _sequence(self, *, nested: bool) -> Sequence:
        sequence: Sequence = []
        last: Element | None = None
        repeated = 0
        while char := self._char:
            self._count()
            if char in "*+?{":
                least, most = self._repetition(nested=nested)
                if last is None:
                    self._fail("there is nothing to repeat")
                repeated += 1
                if repeated > MAX_REPEATED:
                    self._fail(f"more than {MAX_REPEATED} repetitions of one another")
                last = sequence[-1] = Repetition(last, least, most)
                continue
            repeated = 0
            if char == '"':
                last = self._literal()
            elif char == "[":
                last = self._class()
            elif char == "(":
                last = self._group()
            elif char == ".":
                self._at += 1
                last = Character(_TEXT)
            elif _is_word(char):
                last = Reference(self._while(_is_word))
            elif char in "<!":
                self._fail("tokens are not supported, only their text")
            else:
                break
            self._space(newlines=nested)
            if last is not None:
                sequence.append(last)
        return sequence

    def _literal(self) -> Element | None:
        self._at += 1
        characters: Sequence = []
        while self._char != '"':
            character = self._character()
            characters.append(self._one_of([(character, character)]))
            self._count()
        self._at += 1
        return Group([characters]) if characters else None

    def _class(self) -> Character:
        self._at += 1
        negated = self._char == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._char != "]":
            low = high = self._character()
            if self._char == "-" and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = self._character()
            if low > high:
                self._fail("a range of characters goes backwards")
            ranges.append((low, high))
            self._count()
        self._at += 1
        if not ranges:
            self._fail("brackets without a character between them match nothing")
        return self._one_of(ranges, negated=negated)

    def _one_of(self, ranges: list[tuple[int, int]], *, negated: bool = False) -> Character:
        excluded = _merged(ranges) if negated else _others(_merged(ranges))
        possible = _others(_merged((*excluded, *_others(_TEXT))))
        if not possible:
            self._fail("no text has such a character")
        return Character(possible)

    def _character(self) -> int:
        char = self._char
        if not char:
            self._fail("the grammar ends too early")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._char
        if kind in _HEX_DIGITS:
            count = _HEX_DIGITS[kind]
            digits = self._text[self._at + 1 : self._at + 1 + count]
            if len(digits) < count or any(c not in "0123456789abcdefABCDEF" for c in digits):
                self._fail(f"\\{kind} wants {count} hexadecimal digits")
            self._at += 1 + count
            return int(digits, 16)
        if kind not in _ESCAPES:
            self._fail(f"unknown escape \\{kind}")
        self._at += 1
        return ord(_ESCAPES[kind])

    def _group(self) -> Group:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"brackets are nested more than {MAX_DEPTH} deep")
        self._at += 1
        self._space(newlines=True)
        group = Group(self._alternatives(nested=True))
        self._expect(")")
        self._depth -= 1
        return group

    def _repetition(self, *, nested: bool) -> tuple[int, int | None]:
        """How often at least and at most; None: no limit."""
        char = self._char
        self._at += 1
        self._space(newlines=nested)
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        least = self._number(nested=nested)
        most: int | None = least
        if self._char == ",":
            self._at += 1
            self._space(newlines=nested)
            most = self._number(nested=nested) if _is_digit(self._char) else None
        self._expect("}")
        self._space(newlines=nested)
        if most is not None and least > most:
            self._fail(f"repeated at least {least} times but at most {most}")
        return least, most

    def _number(self, *, nested: bool) -> int:
        digits = self._while(_is_digit)
        if not digits:
            self._fail(f"expected a number, found {self._found}")
        self._space(newlines=nested)
        # The length comes first: Python itself refuses to read very long numbers.
        if len(digits) > 9 or int(digits) > MAX_REPETITIONS:
            self._fail(f"more than {MAX_REPETITIONS} repetitions")
        return int(digits)


def used(alternatives: Alternatives) -> Iterator[str]:
    """The names of the rules that they refer to."""
    for sequence in alternatives:
        for element in sequence:
            while isinstance(element, Repetition):
                element = element.element
            match element:
                case Reference(name):
                    yield name
                case Group(inner):
                    yield from used(inner)
                case _:
                    pass


def parse(grammar: str, root: str) -> dict[str, Alternatives]:
    """The rules by their names; all that are used are there, ``root`` too.

    Raises ``RequestError`` (``INVALID_GRAMMAR``) with the cause.
    """
    if len(grammar.encode(errors="replace")) > MAX_BYTES:
        refuse(f"it is longer than {MAX_BYTES} bytes")
    if grammar.lstrip().startswith("%llguidance"):
        refuse("it is for llguidance; only llama.cpp's own notation (GBNF) is supported")
    parser = _Parser(grammar)
    parser.parse()
    for rule in parser.rules.values():
        for name in used(rule):
            if name not in parser.rules:
                refuse(f"rule '{name}' is used but not defined")
    if root not in parser.rules:
        refuse(f"it has no rule '{root}' to begin with")
    return parser.rules
