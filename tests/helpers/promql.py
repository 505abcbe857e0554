"""What an expression of PromQL speaks of: enough of its grammar to find metrics and labels."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r'\s+|(?P<string>"(?:\\.|[^"\\])*")|(?P<range>\[[^\]]*\])|(?P<name>[a-zA-Z_:][\w:]*)'
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^=<>(){},])"
)

GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}
FUNCTIONS = {"avg", "count", "histogram_quantile", "increase", "max", "min", "rate", "sum"}


@dataclass
class Spoken:
    metrics: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """By name, the patterns of their labels."""
    groups: set[str] = field(default_factory=set[str])
    """Labels by which is added up or compared."""


def spoken(expression: str) -> Spoken:
    """Raises ``ValueError`` for what it does not understand."""
    found = Spoken()
    tokens = list(_tokens(expression))
    position = 0
    metric: dict[str, str] = {}
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "{":
            end = tokens.index("}", position)
            metric.update(_matchers(tokens[position:end]))
            position = end + 1
        elif token in GROUPING:
            if position < len(tokens) and tokens[position] == "(":
                end = tokens.index(")", position)
                found.groups.update(t for t in tokens[position + 1 : end] if t != ",")
                position = end + 1
        elif re.fullmatch(r"[a-zA-Z_:][\w:]*", token) and token not in OPERATORS:
            following = tokens[position] if position < len(tokens) else ""
            if following == "(" or following in GROUPING:
                if token not in FUNCTIONS:
                    raise ValueError(f"no function that is known: {token}")
            else:
                metric = found.metrics.setdefault(token, {})
    return found


def _tokens(expression: str) -> Iterator[str]:
    position = 0
    while position < len(expression):
        match = TOKEN.match(expression, position)
        if match is None:
            raise ValueError(f"not understood: {expression[position:]}")
        position = match.end()
        if match.lastgroup is not None:
            yield match[0]


def _matchers(tokens: list[str]) -> Iterator[tuple[str, str]]:
    for start in range(0, len(tokens), 4):
        name, sign, value, *_ = tokens[start : start + 4]
        if sign not in {"=", "=~", "!=", "!~"} or value[0] != '"':
            raise ValueError(f"no matcher: {name} {sign} {value}")
        yield name, value[1:-1]
