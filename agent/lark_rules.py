"""Rules and terminals of one grammar, in llguidance's dialect of Lark (its ``docs/syntax.md``).

What is written here are expressions; a *body* is what a terminal consists of. No I/O, no clock.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from agent.json_schema import OPTIONS, check_schema
from agent.notations import Part, Perhaps, Place
from common.errors import ErrorCode, RequestError
from common.ids import TokenId

_ANY = "/(?s:.*)/"
_SOME = "/(?s:.+)/"
_SPACE = r"/[ \t\r\n]/"

LITTLE_SPACE = r"/[ \t\r\n]{0,4}/"
"""A body: white space that a reader skips."""


@dataclass(frozen=True, slots=True)
class Written:
    """What stands in a place of a notation: an expression already."""

    expression: str


class Rules:
    """All of one grammar but its ``start``. Equal rules are kept once. Their names begin with ``x``
    or ``X``, which those of ``agent.lark`` never do.
    """

    def __init__(self, tokens: Mapping[str, TokenId], ends: Collection[str]) -> None:
        """``tokens``: marks that are control tokens; ``ends``: those of them that end an answer."""
        self._tokens = tokens
        self._ends = ends
        names = sorted(tokens, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._names: dict[tuple[str, str], str] = {}
        """By their first letter and the line that defines them, without the name."""
        self.schemas: list[tuple[str, str]] = []
        """Those that are in it, each behind the name to tell when it cannot be used."""
        self.space = f"{self.terminal(_SPACE)}{{0,4}}"

    def write(self, *lines: str) -> str:
        """The whole grammar. ``lines``: its ``start``, and rules that were written elsewhere."""
        # A forced text is not to be forced into certain tokens.
        defined = (f"{name}{line}" for (_, line), name in self._names.items())
        return "\n".join(['%llguidance {"no_forcing": true}', *lines, *defined])

    def rule(self, expression: str) -> str:
        return self._define(f": {expression}", "x")

    def terminal(self, body: str) -> str:
        return self._define(f": {body}", "X")

    def _define(self, line: str, letter: str) -> str:
        return self._names.setdefault((letter, line), f"{letter}{len(self._names)}")

    # Marks

    def is_token(self, mark: str) -> bool:
        return mark in self._tokens

    def ends_answer(self, mark: str) -> bool:
        return mark in self._ends

    def literal(self, text: str) -> str:
        """This text, in which marks that are control tokens are these tokens."""
        lead, rest = self._split(text)
        return f"{_quoted(lead)} {rest}".strip() if lead else rest

    def closing(self, mark: str) -> str:
        """Where the answer may end: a mark that ends it needs not be said."""
        return "" if self.ends_answer(mark) else self.literal(mark)

    def _split(self, text: str) -> tuple[str, str]:
        """The text before the first control token, and the expression for what follows."""
        first = self._marks.search(text)
        if first is None:
            return text, ""
        pieces: list[str] = []
        at = first.start()
        for mark in self._marks.finditer(text, at):
            if self.ends_answer(mark.group()):
                raise RequestError(
                    ErrorCode.NOT_SUPPORTED,
                    f"{mark.group()} ends an answer of this model, so that nothing can follow it",
                )
            if mark.start() > at:
                pieces.append(_quoted(text[at : mark.start()]))
            pieces.append(f"<[{self._tokens[mark.group()]}]>")
            at = mark.end()
        if at < len(text):
            pieces.append(_quoted(text[at:]))
        return text[: first.start()], " ".join(pieces)

    # Text of which only a body is known

    def some(self, body: str) -> str:
        """Text of this kind, or none."""
        return f"{self.terminal(f'({body}) & {_SOME}')}?"

    def up_to(self, body: str, mark: str) -> str:
        """The same, and the mark behind it."""
        lead, rest = self._split(mark)
        if not rest:
            # It ends where it can.
            return self._define(f"[lazy]: {self.terminal(f'({body}) {_quoted(lead)}')}", "x")
        if not lead:
            return f"{self.some(body)} {rest}"
        return f"{self.terminal(f'({body}) {_quoted(lead)}')} {rest}"

    # What is made of parts

    def json(self, name: str, schema: str) -> str:
        """``name``: to tell if the schema cannot be used. Raises ``SchemaError``."""
        schema = check_schema(schema)
        if (name, schema) not in self.schemas:
            self.schemas.append((name, schema))
        options = f'{{"x-guidance": {json.dumps(OPTIONS)}'
        inner = schema.strip()[1:].lstrip()
        return self.rule(f"%json {options}{'' if inner.startswith('}') else ', '}{inner}")

    def sequence(self, parts: Iterable[Part | Written]) -> str:
        """Parts of a notation, in which names, arguments and values are in their places already."""
        written: list[str] = []
        text = ""  # a mark may reach from one part into the next
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                written += [self.literal(text), self._part(part)]
                text = ""
        return " ".join(filter(None, [*written, self.literal(text)]))

    def _part(self, part: Place | Perhaps | Written) -> str:
        match part:
            case Written(expression):
                return expression
            case Perhaps(text):
                return f"{self.rule(self.literal(text))}?"
            case Place.SPACE:
                return self.space
            case Place.NUMBER:
                return self.terminal("/[0-9]{1,3}/")
            case Place.MISTRAL_ID:
                return self.terminal("/[a-zA-Z0-9]{9}/")
            case Place.SOLAR_ID:
                return self.terminal("/[a-z0-9]{10}/")
            case (
                Place.NAME
                | Place.NAME_IN_JSON
                | Place.ARGUMENTS
                | Place.PARAMETERS
                | Place.KEY
                | Place.VALUE
            ):
                raise AssertionError(f"nothing is in the place of {part.name}")
            case _:
                assert_never(part)


def text_without(marks: Iterable[str]) -> str:
    """The body of a terminal: any text that holds none of them."""
    inner = "|".join("".join(map(_escaped, mark)) for mark in dict.fromkeys(marks))
    return f"{_ANY} & ~/(?s:.*)(?:{inner})(?s:.*)/" if inner else _ANY


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(character: str) -> str:
    return (
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
    )
