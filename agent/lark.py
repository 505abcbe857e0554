"""Grammars of ``agent.gbnf`` in llguidance's dialect of Lark (its ``docs/syntax.md``). No I/O.

llguidance splits a text into terminals by the longest match, of which GBNF knows nothing. So each
terminal is one character here: then there is but one way to split a text. What cannot be said with
the same meaning is refused, with the cause.
"""

from collections.abc import Collection, Iterator
from re import finditer

from agent.gbnf import (
    MAX_ELEMENTS,
    Alternatives,
    Character,
    Element,
    Group,
    Ranges,
    Reference,
    Repetition,
    Sequence,
    parse,
    refuse,
    used,
)

MAX_WRITTEN = 5 * MAX_ELEMENTS
"""When they are written for llguidance."""

MAX_INSERTED = 300
"""Elements of rules that are written where others use them."""

MAX_INSIDE = 10
"""Of such rules, one in the other."""

MAX_CHAIN = 500
"""Rules, of which each is first used by the one before: llguidance recurses so deep."""


def to_lark(grammar: str, root: str, *, first: str = "start") -> str:
    """``grammar``: in GBNF. ``first``: what to name the rule for all of it; the others are named by
    a letter and a number. Raises ``RequestError`` (``INVALID_GRAMMAR``) with the cause.
    """
    try:
        return _Writer(parse(grammar, root)).write(root, first)
    except RecursionError:
        refuse("it is nested too deep")


_EMPTY = '""'


class _Writer:
    """Writes what comes before a choice or a loop into its rule, at the beginning: ``a b*`` as
    ``m: a | m b``. llguidance keeps each rule once for each place in the text where it may have
    begun; so all begin where the whole does, however many ways there are to split the text.
    """

    def __init__(self, rules: dict[str, Alternatives]) -> None:
        self._rules = rules
        self._recursive = _on_cycles({name: set(used(rule)) for name, rule in rules.items()})
        self._right_recursive = _on_cycles({name: set(_ends(rule)) for name, rule in rules.items()})
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._bodies: dict[str, str] = {}
        self._made: dict[str, str] = {}
        """The names of rules that stand for parts of others, by what they consist of."""
        self._terminals: dict[Ranges, str] = {}
        self._may_insert = MAX_INSERTED
        self._inside = 0
        self._written = 0
        self._rules_made = 0

    def write(self, root: str, start: str) -> str:
        first = self._name(root)
        for name in self._waiting:  # which grows on the way
            write = self._states if name in self._right_recursive else self._rule
            self._bodies[self._names[name]] = write(name)
        if _chain(self._bodies, first) > MAX_CHAIN:
            refuse(f"it has a chain of more than {MAX_CHAIN} rules")
        return "\n".join(
            [
                # A forced text is not to be forced into certain tokens.
                '%llguidance {"no_forcing": true}',
                f"{start}: {first}",
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

    def _choice(self, before: str, alternatives: Alternatives) -> str:
        return " | ".join(self._sequence(before, sequence) or _EMPTY for sequence in alternatives)

    def _sequence(self, before: str, sequence: Sequence) -> str:
        """What matches ``before`` and then these; empty for the empty text."""
        for element in sequence:
            before = self._after(before, element)
        return before

    def _after(self, before: str, element: Element) -> str:
        self._written += 1
        if self._written > MAX_WRITTEN:
            refuse("it becomes too large: too many of its rules end with one another")
        match element:
            case Character(ranges):
                terminal = self._terminals.setdefault(ranges, f"C{len(self._terminals)}")
                return f"{before} {terminal}".strip()
            case Reference(name):
                rule = self._rules[name]
                size = sum(len(sequence) + 1 for sequence in rule)
                if name in self._recursive or size > self._may_insert or self._inside > MAX_INSIDE:
                    return f"{before} {self._name(name)}".strip()
                self._may_insert -= size
                self._inside += 1
                before = self._after(before, Group(rule))
                self._inside -= 1
                return before
            case Group([sequence]):
                return self._sequence(before, sequence)
            case Group(alternatives):
                return self._make(self._choice(self._make(before), alternatives))
            case Repetition(_, _, 0):
                return before
            case Repetition(repeated, 0, 1):
                return self._after(before, Group([[], [repeated]]))
            case Repetition(repeated, 0 | 1 as least, None):
                # Of ``m: a | n`` and ``n: m b``, m stands for ``a b*`` and n for ``a b+``.
                loop = self._new()
                once_more = self._make(self._after(loop, repeated))
                self._bodies[loop] = f"{before or _EMPTY} | {once_more}"
                return once_more if least else loop
            case Repetition(repeated, least, most):
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


def _class(ranges: Ranges) -> str:
    return "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in ranges)


def _ends(alternatives: Alternatives) -> Iterator[str]:
    """The rules that they end with."""
    for sequence in alternatives:
        match sequence[-1:]:
            case [Reference(name)]:
                yield name
            case [Group(inner) | Repetition(Group(inner), 0, 1)]:
                yield from _ends(inner)
            case _:
                pass


def _tails(
    alternatives: Alternatives, rules: Collection[str]
) -> Iterator[tuple[Sequence, str | None]]:
    """Each with the rule it ends with, if that is among these, apart."""
    for sequence in alternatives:
        match sequence:
            case [*start, Reference(name)] if name in rules:
                yield start, name
            case [*start, Group(inner) | Repetition(Group(inner), 0, 1) as last] if any(
                name in rules for name in _ends(inner)
            ):
                for more, name in _tails(inner, rules):
                    yield [*start, *more], name
                if isinstance(last, Repetition):
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
