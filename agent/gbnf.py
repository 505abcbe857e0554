"""Grammars in llama.cpp's notation (GBNF), written for llguidance. No I/O, no clock.

The notation is that of ``grammars/README.md`` and ``src/llama-grammar.cpp`` of llama.cpp. llguidance
takes a dialect of Lark (its ``docs/syntax.md``), and splits a text into terminals by the longest
match, of which GBNF knows nothing. So each terminal is one character here: then there is but one
way to split a text. What cannot be said with the same meaning is refused, with the cause.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from re import finditer
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

MAX_WRITTEN = 5 * MAX_ELEMENTS
"""When they are written for llguidance."""

MAX_INSERTED = 300
"""Elements of rules that are written where others use them."""

MAX_INSIDE = 10
"""Of such rules, one in the other."""

MAX_CHAIN = 500
"""Rules, of which each is first used by the one before: llguidance recurses so deep."""


def to_lark(grammar: str, root: str) -> str:
    """Raises ``RequestError`` (``INVALID_GRAMMAR``) with the cause."""
    if len(grammar.encode(errors="replace")) > MAX_BYTES:
        _refuse(f"it is longer than {MAX_BYTES} bytes")
    if grammar.lstrip().startswith("%llguidance"):
        _refuse("it is for llguidance; only llama.cpp's own notation (GBNF) is supported")
    try:
        parser = _Parser(grammar)
        parser.parse()
        for rule in parser.rules.values():
            for name in _used(rule):
                if name not in parser.rules:
                    _refuse(f"rule '{name}' is used but not defined")
        if root not in parser.rules:
            _refuse(f"it has no rule '{root}' to begin with")
        return _Writer(parser.rules).write(root)
    except RecursionError:
        _refuse("it is nested too deep")


def _refuse(cause: str) -> NoReturn:
    raise RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {cause}")


_Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last characters, in order, without overlap."""


@dataclass(frozen=True, slots=True)
class _Character:
    """One of these."""

    ranges: _Ranges


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str


@dataclass(frozen=True, slots=True)
class _Group:
    alternatives: "_Alternatives"


@dataclass(frozen=True, slots=True)
class _Repetition:
    element: "_Element"
    least: int
    most: int | None


_Element: TypeAlias = _Character | _Reference | _Group | _Repetition
_Sequence: TypeAlias = list[_Element]
_Alternatives: TypeAlias = list[_Sequence]

_TEXT: _Ranges = ((1, 0xD7FF), (0xE000, sys.maxunicode))
"""What a text may consist of. To llama.cpp a null character is its end."""


def _merged(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _others(ranges: _Ranges) -> _Ranges:
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
        self.rules: dict[str, _Alternatives] = {}

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
        _refuse(f"line {line}: {cause}")

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

    def _count(self, elements: int = 1) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            self._fail(f"it has over {MAX_ELEMENTS} elements")

    def _alternatives(self, *, nested: bool) -> _Alternatives:
        alternatives = [self._sequence(nested=nested)]
        while self._char == "|":
            self._at += 1
            self._count()
            self._space(newlines=True)
            alternatives.append(self._sequence(nested=nested))
        return alternatives

    def _sequence(self, *, nested: bool) -> _Sequence:
        sequence: _Sequence = []
        last: _Element | None = None
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
                last = sequence[-1] = _Repetition(last, least, most)
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
                last = _Character(_TEXT)
            elif _is_word(char):
                last = _Reference(self._while(_is_word))
            elif char in "<!":
                self._fail("tokens are not supported, only their text")
            else:
                break
            self._space(newlines=nested)
            if last is not None:
                sequence.append(last)
        return sequence

    def _literal(self) -> _Element | None:
        self._at += 1
        characters: _Sequence = []
        while self._char != '"':
            character = self._character()
            characters.append(self._one_of([(character, character)]))
            self._count()
        self._at += 1
        return _Group([characters]) if characters else None

    def _class(self) -> _Character:
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

    def _one_of(self, ranges: list[tuple[int, int]], *, negated: bool = False) -> _Character:
        excluded = _merged(ranges) if negated else _others(_merged(ranges))
        possible = _others(_merged((*excluded, *_others(_TEXT))))
        if not possible:
            self._fail("no text has such a character")
        return _Character(possible)

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

    def _group(self) -> _Group:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"brackets are nested more than {MAX_DEPTH} deep")
        self._at += 1
        self._space(newlines=True)
        group = _Group(self._alternatives(nested=True))
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


_EMPTY = '""'


class _Writer:
    """Writes what comes before a choice or a loop into its rule, at the beginning: ``a b*`` as
    ``m: a | m b``. llguidance keeps each rule once for each place in the text where it may have
    begun; so all begin where the whole does, however many ways there are to split the text.
    """

    def __init__(self, rules: dict[str, _Alternatives]) -> None:
        self._rules = rules
        self._recursive = _on_cycles({name: set(_used(rule)) for name, rule in rules.items()})
        self._right_recursive = _on_cycles({name: set(_ends(rule)) for name, rule in rules.items()})
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._bodies: dict[str, str] = {}
        self._made: dict[str, str] = {}
        """The names of rules that stand for parts of others, by what they consist of."""
        self._terminals: dict[_Ranges, str] = {}
        self._may_insert = MAX_INSERTED
        self._inside = 0
        self._written = 0
        self._rules_made = 0

    def write(self, root: str) -> str:
        first = self._name(root)
        for name in self._waiting:  # which grows on the way
            write = self._states if name in self._right_recursive else self._rule
            self._bodies[self._names[name]] = write(name)
        if _chain(self._bodies, first) > MAX_CHAIN:
            _refuse(f"it has a chain of more than {MAX_CHAIN} rules")
        return "\n".join(
            [
                # A forced text is not to be forced into certain tokens.
                '%llguidance {"no_forcing": true}',
                f"start: {first}",
                *(f"{name}: {body}" for name, body in self._bodies.items()),
                *(f"{name}: /[{_class(c)}]/" for c, name in self._terminals.items()),
            ]
        )

    def _name(self, rule: str) -> str:
        if rule not in self._names:
            self._names[rule] = f"r{len(self._names)}"
            self._waiting.append(rule)
        return self._names[rule]

    def _rule(self, name: str) -> str:
        return self._choice("", self._rules[name])

    def _states(self, first: str) -> str:
        """Of ``a ::= x a | y``: what comes before another ``a``, as ``m: "" | m x``, and ``m y``.

        Else llguidance would end, after each element of a list, all lists that end there, one by
        one. With ``b`` at the end of ``a``, and so on, there is one such rule for each of them.
        """
        names = {first: self._new()}
        before = {first: [_EMPTY]}
        whole: list[str] = []
        todo = [first]
        for state in todo:  # which grows on the way
            may_end = False
            for start, end in _tails(self._rules[state], self._right_recursive):
                text = self._sequence(names[state], start)
                if end is None:
                    whole.append(text)
                    may_end = True
                    continue
                if end not in names:
                    names[end] = self._new()
                    before[end] = []
                    todo.append(end)
                before[end].append(text)
            if not may_end:
                # What nothing else mentions is not looked for, even where it is to go on for ever.
                never = self._new()
                self._bodies[never] = f"{never} {never}"
                whole.append(f"{names[state]} {never}")
        for state, name in names.items():
            self._bodies[name] = " | ".join(before[state])
        return " | ".join(whole)

    def _choice(self, before: str, alternatives: _Alternatives) -> str:
        return " | ".join(self._sequence(before, sequence) or _EMPTY for sequence in alternatives)

    def _sequence(self, before: str, sequence: _Sequence) -> str:
        """What matches ``before`` and then these; empty for the empty text."""
        for element in sequence:
            before = self._after(before, element)
        return before

    def _after(self, before: str, element: _Element) -> str:
        self._written += 1
        if self._written > MAX_WRITTEN:
            _refuse("it becomes too large: too many of its rules end with one another")
        match element:
            case _Character(ranges):
                terminal = self._terminals.setdefault(ranges, f"C{len(self._terminals)}")
                return f"{before} {terminal}".strip()
            case _Reference(name):
                rule = self._rules[name]
                size = sum(len(sequence) + 1 for sequence in rule)
                if name in self._recursive or size > self._may_insert or self._inside > MAX_INSIDE:
                    return f"{before} {self._name(name)}".strip()
                self._may_insert -= size
                self._inside += 1
                before = self._after(before, _Group(rule))
                self._inside -= 1
                return before
            case _Group([sequence]):
                return self._sequence(before, sequence)
            case _Group(alternatives):
                return self._make(self._choice(self._make(before), alternatives))
            case _Repetition(_, _, 0):
                return before
            case _Repetition(repeated, 0, 1):
                return self._after(before, _Group([[], [repeated]]))
            case _Repetition(repeated, 0 | 1 as least, None):
                # Of ``m: a | n`` and ``n: m b``, m stands for ``a b*`` and n for ``a b+``.
                loop = self._new()
                once_more = self._make(self._after(loop, repeated))
                self._bodies[loop] = f"{before or _EMPTY} | {once_more}"
                return once_more if least else loop
            case _Repetition(repeated, least, most):
                text = self._make(self._after("", repeated))
                bounds = f"{{{least},{'' if most is None else most}}}"
                return f"{before} {text or _EMPTY}{bounds}".strip()

    def _make(self, body: str) -> str:
        """One name for it."""
        if not body or body.isalnum():
            return body
        if body not in self._made:
            self._made[body] = self._new()
            self._bodies[self._made[body]] = body
        return self._made[body]

    def _new(self) -> str:
        self._rules_made += 1
        return f"m{self._rules_made}"


def _used(alternatives: _Alternatives) -> Iterator[str]:
    for sequence in alternatives:
        for element in sequence:
            while isinstance(element, _Repetition):
                element = element.element
            match element:
                case _Reference(name):
                    yield name
                case _Group(inner):
                    yield from _used(inner)
                case _:
                    pass


def _class(ranges: _Ranges) -> str:
    return "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in ranges)


def _ends(alternatives: _Alternatives) -> Iterator[str]:
    """The rules that they end with."""
    for sequence in alternatives:
        match sequence[-1:]:
            case [_Reference(name)]:
                yield name
            case [_Group(inner) | _Repetition(_Group(inner), 0, 1)]:
                yield from _ends(inner)
            case _:
                pass


def _tails(
    alternatives: _Alternatives, rules: Collection[str]
) -> Iterator[tuple[_Sequence, str | None]]:
    """Each with the rule it ends with, if that is among these, apart."""
    for sequence in alternatives:
        match sequence:
            case [*start, _Reference(name)] if name in rules:
                yield start, name
            case [*start, _Group(inner) | _Repetition(_Group(inner), 0, 1) as last] if any(
                name in rules for name in _ends(inner)
            ):
                for more, name in _tails(inner, rules):
                    yield [*start, *more], name
                if isinstance(last, _Repetition):
                    yield start, None
            case _:
                yield sequence, None


def _on_cycles(edges: dict[str, set[str]]) -> Collection[str]:
    """What lies on a cycle, or between two."""
    for _ in range(2):  # without what leads to none, and then, backwards, what comes from none
        back: dict[str, set[str]] = {name: set() for name in edges}
        for name, others in edges.items():
            for other in others:
                back[other].add(name)
        missing = {name: len(others) for name, others in edges.items()}
        gone = [name for name, count in missing.items() if not count]
        for name in gone:  # which grows on the way
            for user in back[name]:
                missing[user] -= 1
                if not missing[user]:
                    gone.append(user)
        without = set(gone)
        edges = {name: back[name] - without for name in edges if name not in without}
    return edges


def _chain(bodies: dict[str, str], first: str) -> int:
    """The most rules that are on the way at once when each is read where it is first used."""

    def used(name: str) -> Iterator[str]:
        return (match[0] for match in finditer(r"[rm]\d+", bodies[name]))

    seen = {first}
    open_rules = [used(first)]
    longest = 1
    while open_rules:
        following = next((name for name in open_rules[-1] if name not in seen), None)
        if following is None:
            open_rules.pop()
        else:
            seen.add(following)
            open_rules.append(used(following))
            longest = max(longest, len(open_rules))
    return longest
