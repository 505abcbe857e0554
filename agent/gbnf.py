"""Checks grammars in llama.cpp's notation (GBNF) before llama.cpp sees them. No I/O, no clock.

llama.cpp's grammar sampler trusts its input: some grammars overflow its stack, fill the memory or
never end. So the notation (``grammars/README.md`` of llama.cpp) is read here by rules of its own, and
refused, with the cause, is all that is not sure to be harmless.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from common.errors import ErrorCode, RequestError

MAX_BYTES = 64 * 1024

MAX_DEPTH = 64
"""Of brackets: llama.cpp's parser is recursive."""

MAX_REPETITIONS = 2000
"""llama.cpp's own bound; above it, it takes an upper limit for none."""

MAX_ELEMENTS = 200_000
"""Characters and references of a grammar after its repetitions are written out."""

MAX_LEFTMOST_PATHS = 100_000
"""llama.cpp walks every one of them in its search for left recursion."""

MAX_LEFTMOST_DEPTH = 1000
"""And recurses so deep."""

MAX_STACKS = 512
"""Ways to read the same text that llama.cpp would have to follow at once."""

MAX_TRIES = 40_000
"""Bounds the search for such a text, to about 0.1 s."""

MAX_TRIES_OF_A_RULE = 4_000
"""So that one that is large, but harmless, does not keep the search from the others."""

LONGEST_TRY = 24
"""Characters of the texts tried from each rule."""


def check_gbnf(grammar: str, root: str) -> frozenset[str]:
    """Raises ``RequestError`` (``INVALID_GRAMMAR``) with the cause.

    Returns the tokens that the grammar names, as it writes them: ``<name>`` or ``<[id]>``.
    """
    if len(grammar.encode(errors="replace")) > MAX_BYTES:
        _refuse(f"it is longer than {MAX_BYTES} bytes")
    if grammar.lstrip().startswith("%llguidance"):
        _refuse("it is for llguidance; only llama.cpp's own notation (GBNF) is supported")
    parser = _Parser(grammar)
    parser.parse()
    rules = parser.rules
    for name, rule_id in parser.ids.items():
        if rule_id not in rules:
            _refuse(f"rule '{name}' is used but not defined")
    if root not in parser.ids:
        _refuse(f"it has no rule '{root}' to begin with")
    names = {rule_id: name for name, rule_id in parser.ids.items()} | parser.made_for
    _check_recursion(rules, names)
    _check_ambiguity(rules, names, first=parser.ids[root])
    return frozenset(parser.tokens)


def _refuse(cause: str) -> NoReturn:
    raise RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {cause}")


@dataclass(frozen=True, slots=True)
class _Character:
    ranges: tuple[tuple[int, int], ...]
    """First and last, in order, without overlap."""
    negated: bool = False

    def matches(self, character: int) -> bool:
        at = bisect_right(self.ranges, (character, sys.maxunicode))
        return (at > 0 and character <= self.ranges[at - 1][1]) != self.negated


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str


@dataclass(frozen=True, slots=True)
class _Reference:
    rule_id: int


_Element: TypeAlias = _Character | _Token | _Reference
_Sequence: TypeAlias = tuple[_Element, ...]
_Rule: TypeAlias = tuple[_Sequence, ...]
"""Alternatives."""

_ANY = _Character((), negated=True)

_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {char: char for char in '\\"[]-'}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def _is_word(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char == "-")


def _is_digit(char: str) -> bool:
    return char.isascii() and char.isdigit()


class _Parser:
    """Writes repetitions and groups out as llama.cpp does, in rules of their own, to count them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._elements = 0
        self._made = 0
        self.rules: dict[int, _Rule] = {}
        self.ids: dict[str, int] = {}
        self.made_for: dict[int, str] = {}
        """The rules that were made for brackets and repetitions, and in whose definition."""
        self.tokens: set[str] = set()

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
        rule_id = self._id(name)
        self.rules[rule_id] = self._alternatives(name, nested=False)
        if self._char and self._char not in "\r\n":
            self._fail(f"expected the end of the rule, found {self._found}")
        self._space(newlines=True)

    def _id(self, name: str) -> int:
        return self.ids.setdefault(name, len(self.ids) + self._made)

    def _make_rule(self, name: str) -> int:
        rule_id = len(self.ids) + self._made
        self._made += 1
        self.made_for[rule_id] = name
        return rule_id

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            self._fail(f"with its repetitions written out it has over {MAX_ELEMENTS} elements")

    def _alternatives(self, name: str, *, nested: bool) -> _Rule:
        alternatives = [self._sequence(name, nested=nested)]
        while self._char == "|":
            self._at += 1
            self._space(newlines=True)
            alternatives.append(self._sequence(name, nested=nested))
        return tuple(alternatives)

    def _sequence(self, name: str, *, nested: bool) -> _Sequence:
        sequence: list[_Element] = []
        last: Sequence[_Element] = ()
        rules_in_last = 1
        while char := self._char:
            if char in "*+?{":
                least, most = self._repetition(nested=nested)
                if not last:
                    self._fail("there is nothing to repeat")
                written = most or least or 1
                if rules_in_last * written > MAX_REPETITIONS:
                    self._fail(f"repeated more than {MAX_REPETITIONS} times, all in all")
                rules_in_last *= written
                del sequence[len(sequence) - len(last) :]
                last = self._repeated(last, name, least=least, most=most)
                sequence.extend(last)
                continue
            rules_before = len(self.ids) + self._made
            if char == '"':
                last = self._literal()
            elif char == "[":
                last = self._class()
            elif char in "<!":
                last = (self._token(),)
            elif char == "(":
                last = (self._group(name),)
            elif char == ".":
                self._at += 1
                last = (_ANY,)
            elif _is_word(char):
                last = (_Reference(self._id(self._while(_is_word))),)
            else:
                break
            self._count(len(last))
            rules_in_last = max(1, len(self.ids) + self._made - rules_before) if char == "(" else 1
            self._space(newlines=nested)
            sequence.extend(last)
        return tuple(sequence)

    def _literal(self) -> list[_Element]:
        self._at += 1
        characters: list[_Element] = []
        while self._char != '"':
            character = self._character()
            characters.append(_Character(((character, character),)))
        self._at += 1
        return characters

    def _class(self) -> list[_Element]:
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
        self._at += 1
        self._count(len(ranges))
        if not ranges:
            self._fail("brackets without a character between them match nothing")
        return [_Character(_merged(ranges), negated=negated)]

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

    def _token(self) -> _Token:
        if self._char == "!":
            self._at += 1
        start = self._at
        self._expect("<")
        if self._char == "[":
            self._at += 1
            number = self._while(_is_digit)
            if not number or len(number) > 10:
                self._fail("expected the number of a token")
            self._expect("]")
            self._expect(">")
        else:
            end = self._text.find(">", self._at)
            if end < 0:
                self._fail("the name of a token has no end")
            self._at = end + 1
        text = self._text[start : self._at]
        self.tokens.add(text)
        return _Token(text)

    def _group(self, name: str) -> _Reference:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"brackets are nested more than {MAX_DEPTH} deep")
        self._at += 1
        self._space(newlines=True)
        rule_id = self._make_rule(name)
        self.rules[rule_id] = self._alternatives(name, nested=True)
        self._expect(")")
        self._depth -= 1
        return _Reference(rule_id)

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

    def _repeated(
        self, elements: Sequence[_Element], name: str, *, least: int, most: int | None
    ) -> list[_Element]:
        """S{m,n} is S m times, then n-m rules, each S and the next one, or nothing."""
        optional = 1 if most is None else most - least
        self._count(len(elements) * (least + optional) + 2 * optional)
        written = list(elements) * least
        inner: int | None = None
        for _ in range(optional):
            rule_id = self._make_rule(name)
            follower = rule_id if most is None else inner
            rest = () if follower is None else (_Reference(follower),)
            self.rules[rule_id] = ((*elements, *rest), ())
            inner = rule_id
        return written if inner is None else [*written, _Reference(inner)]


@dataclass(frozen=True, slots=True)
class _Leftmost:
    """That a rule can begin with another one."""

    rule_id: int
    grows: bool
    """Something is left to be read after it, which llama.cpp notes down."""


def _check_recursion(rules: dict[int, _Rule], names: dict[int, str]) -> None:
    """llama.cpp finds most left recursion, by walking all paths. What it misses never ends there:
    it looks for empty alternatives, but not for alternatives of rules that can all be empty.
    """
    plain = {rule_id for rule_id, rule in rules.items() if () in rule}
    seen_by_llama = {rule_id: list(_leftmost(rule, plain)) for rule_id, rule in rules.items()}
    order, on_cycle = _walk(seen_by_llama)
    if on_cycle is None:
        nullable = _nullable(rules)
        all_edges = {rule_id: list(_leftmost(rule, nullable)) for rule_id, rule in rules.items()}
        on_cycle = _growing_cycle(all_edges)
    if on_cycle is not None:
        _refuse(f"rule '{names[on_cycle]}' can begin with itself (left recursion)")
    paths: dict[int, int] = {}
    depths: dict[int, int] = {}
    for rule_id in order:
        edges = seen_by_llama[rule_id]
        paths[rule_id] = 1 + sum(paths[edge.rule_id] for edge in edges)
        depths[rule_id] = 1 + max((depths[edge.rule_id] for edge in edges), default=0)
        if paths[rule_id] > MAX_LEFTMOST_PATHS or depths[rule_id] > MAX_LEFTMOST_DEPTH:
            _refuse(f"rule '{names[rule_id]}' can begin in too many ways")


def _leftmost(rule: _Rule, nullable: Collection[int]) -> Iterator[_Leftmost]:
    for sequence in rule:
        for at, element in enumerate(sequence):
            if not isinstance(element, _Reference):
                break
            yield _Leftmost(element.rule_id, grows=at + 1 < len(sequence))
            if element.rule_id not in nullable:
                break


def _nullable(rules: dict[int, _Rule]) -> set[int]:
    """The rules that can match the empty text."""
    nullable: set[int] = set()
    used_by: dict[int, list[tuple[int, int]]] = {}
    missing: dict[tuple[int, int], int] = {}
    ready: list[int] = []
    for rule_id, rule in rules.items():
        for number, sequence in enumerate(rule):
            references = [e.rule_id for e in sequence if isinstance(e, _Reference)]
            if len(references) < len(sequence):
                continue
            missing[rule_id, number] = len(references)
            for reference in references:
                used_by.setdefault(reference, []).append((rule_id, number))
            if not references:
                ready.append(rule_id)
    while ready:
        rule_id = ready.pop()
        if rule_id in nullable:
            continue
        nullable.add(rule_id)
        for user in used_by.get(rule_id, ()):
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user[0])
    return nullable


def _walk(edges: dict[int, list[_Leftmost]]) -> tuple[list[int], int | None]:
    """All rules, each after those it can begin with; or one that lies on a cycle."""
    order: list[int] = []
    done: set[int] = set()
    under_way: set[int] = set()
    for start in edges:
        todo: list[tuple[int, Iterator[_Leftmost]]] = [(start, iter(edges[start]))]
        if start in done:
            continue
        under_way.add(start)
        while todo:
            rule_id, rest = todo[-1]
            edge = next(rest, None)
            if edge is None:
                todo.pop()
                under_way.discard(rule_id)
                done.add(rule_id)
                order.append(rule_id)
            elif edge.rule_id in under_way:
                return order, edge.rule_id
            elif edge.rule_id not in done:
                under_way.add(edge.rule_id)
                todo.append((edge.rule_id, iter(edges[edge.rule_id])))
    return order, None


def _growing_cycle(edges: dict[int, list[_Leftmost]]) -> int | None:
    """A rule on a cycle that notes down more on each round: inside one component, an edge grows."""
    component = _components({rule: [edge.rule_id for edge in out] for rule, out in edges.items()})
    for rule_id, out in edges.items():
        for edge in out:
            if edge.grows and component[edge.rule_id] == component[rule_id]:
                return rule_id
    return None


def _components(edges: dict[int, list[int]]) -> dict[int, int]:
    """Which strongly connected component each rule belongs to (Kosaraju, without recursion)."""
    finished: list[int] = []
    seen: set[int] = set()
    for start in edges:
        todo: list[tuple[int, Iterator[int]]] = []
        if start not in seen:
            seen.add(start)
            todo.append((start, iter(edges[start])))
        while todo:
            rule_id, rest = todo[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                todo.pop()
                finished.append(rule_id)
            else:
                seen.add(following)
                todo.append((following, iter(edges[following])))
    backwards: dict[int, list[int]] = {rule_id: [] for rule_id in edges}
    for rule_id, out in edges.items():
        for other in out:
            backwards[other].append(rule_id)
    component: dict[int, int] = {}
    for start in reversed(finished):
        reached = [start] if start not in component else []
        while reached:
            rule_id = reached.pop()
            if rule_id not in component:
                component[rule_id] = start
                reached.extend(backwards[rule_id])
    return component


_Stack: TypeAlias = tuple[int, ...]
"""What is still to be read, the next element last, as places in all elements."""


class _TooManyError(Exception):
    """Ways to read one text."""


class _TriesUsedUpError(Exception):
    pass


class _Simulation:
    """llama.cpp's way to read: all stacks at once, each with a character or a token on top."""

    def __init__(self, rules: dict[int, _Rule]) -> None:
        self.elements: list[_Element | None] = []
        """All sequences, each followed by None."""
        self._starts: dict[int, list[int]] = {}
        self._tries = 0
        self._tries_left = MAX_TRIES
        for rule_id, rule in rules.items():
            starts = self._starts[rule_id] = []
            for sequence in rule:
                starts.append(len(self.elements))
                self.elements.extend(sequence)
                self.elements.append(None)

    def begin(self, rule_id: int) -> set[_Stack]:
        self._tries_left += self._tries
        self._tries = min(MAX_TRIES_OF_A_RULE, self._tries_left)
        self._tries_left -= self._tries
        return self._expand(self._push((), start) for start in self._starts[rule_id])

    def read(self, stacks: Collection[_Stack], character: int) -> set[_Stack]:
        self._tries -= len(stacks) // 16
        return self._expand(
            self._push(stack[:-1], stack[-1] + 1)
            for stack in stacks
            if stack
            and isinstance(top := self.elements[stack[-1]], _Character)
            and top.matches(character)
        )

    def _push(self, stack: _Stack, place: int) -> _Stack:
        return stack if self.elements[place] is None else (*stack, place)

    def _expand(self, stacks: Iterable[_Stack]) -> set[_Stack]:
        todo = list(stacks)
        seen: set[_Stack] = set()
        found: set[_Stack] = set()
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            self._tries -= 1
            if len(seen) > 4 * MAX_STACKS or len(found) > MAX_STACKS:
                raise _TooManyError
            if self._tries <= 0:
                raise _TriesUsedUpError
            top = self.elements[stack[-1]] if stack else None
            if isinstance(top, _Reference):
                rest = self._push(stack[:-1], stack[-1] + 1)
                todo.extend(self._push(rest, start) for start in self._starts[top.rule_id])
            else:
                found.add(stack)
        return found


def _check_ambiguity(rules: dict[int, _Rule], names: dict[int, str], *, first: int) -> None:
    """Look for a text that can be read in very many ways: with ``e ::= "(" e ")" | "(" e "]"``
    their number doubles with each bracket, and with it the time and memory of llama.cpp.

    From each rule it goes on with the character that leaves the most ways open. That finds what
    grows, not all that grows: whoever runs the grammar should watch its time as well.
    """
    simulation = _Simulation(rules)
    for rule_id in _reachable(rules, first):
        try:
            stacks = simulation.begin(rule_id)
            for _ in range(LONGEST_TRY):
                samples = _samples(simulation.elements[stack[-1]] for stack in stacks if stack)
                if not samples:
                    break
                stacks = max((simulation.read(stacks, c) for c in samples), key=len)
        except _TooManyError:
            _refuse(f"rule '{names[rule_id]}' is too ambiguous: one text can be read in many ways")
        except _TriesUsedUpError:
            continue


def _reachable(rules: dict[int, _Rule], first: int) -> Iterable[int]:
    """The rules that an answer can come to."""
    found = {first: None}
    todo = [first]
    while todo:
        for sequence in rules[todo.pop()]:
            for element in sequence:
                if isinstance(element, _Reference) and element.rule_id not in found:
                    found[element.rule_id] = None
                    todo.append(element.rule_id)
    return found


def _samples(elements: Iterable[_Element | None]) -> set[int]:
    """Some characters that can come next; one for each kind, a few at most."""
    samples: set[int] = set()
    for element in elements:
        if isinstance(element, _Character) and not any(map(element.matches, samples)):
            candidates = (
                (low for low, _ in element.ranges) if not element.negated else range(32, 127)
            )
            samples.update([next(filter(element.matches, candidates), 0x4E00)])
        if len(samples) >= 8:
            break
    return samples
