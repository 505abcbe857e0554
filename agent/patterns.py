"""Regular expressions from strangers, matched in bounded time. No I/O, no clock.

The engine is Rust's ``regex``, which does not backtrack; ``pydantic_core`` brings it along. It knows
neither look-around nor back-references.
"""

import re

from pydantic_core import SchemaError, SchemaValidator, core_schema

from common.errors import HeadraceError

LARGEST_PATTERN = 50_000
"""States of its automaton, roughly."""


class PatternError(HeadraceError):
    """Its text says why the pattern cannot be used."""


class Pattern:
    def __init__(self, source: str) -> None:
        """Raises ``PatternError``."""
        self.source = source
        self._size = _size(source)
        if self._size > LARGEST_PATTERN:
            raise PatternError("too complicated")
        try:
            self._matcher = SchemaValidator(
                core_schema.str_schema(pattern=source, regex_engine="rust-regex", strict=True)
            )
        except SchemaError as error:
            raise PatternError(str(error).rstrip().rpartition("error: ")[2]) from error

    def cost(self, text: str) -> int:
        """At most so many small steps, of some nanoseconds, does it take to look for it."""
        return len(text) * self._size

    def is_found_in(self, text: str) -> bool:
        """Anywhere in the text, as JSON Schema has it."""
        return self._matcher.isinstance_python(text)

    def __repr__(self) -> str:
        return self.source


_QUANTITY = re.compile(r"\{(\d{1,6})(?:(,)(\d{1,6})?)?\}")


def _size(source: str) -> int:
    """States of the automaton, roughly: characters, times how often they may be repeated."""
    sizes = [0]
    latest = 0
    at = 0
    while at < len(source):
        character = source[at]
        quantity = _QUANTITY.match(source, at)
        at += 1
        if character == "\\":
            # Classes that hold all the letters of the world take many states.
            latest = 100 if source[at : at + 1] in tuple("wWdDsSpP") else 2
            at += 1
        elif character == "[":
            end = source.find("]", at + 1)
            inside = source[at : end if end > 0 else len(source)]
            latest = 100 if "\\" in inside or inside.startswith("^") else 4
            at += len(inside)
        elif character == "(":
            sizes.append(0)
            continue
        elif character == ")" and len(sizes) > 1:
            latest = sizes.pop()
        elif quantity is not None:
            least, _, most = quantity.groups()
            latest *= max(int(most or least), 1) - 1
            at = quantity.end()
        elif character == ".":
            latest = 10
        else:
            latest = 2
        sizes[-1] += latest
    return sum(sizes)
