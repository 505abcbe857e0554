"""What an answer may be made to follow: JSON schemas and grammars, by the library llguidance.

``agent.llguidance_library`` bounds its work; here it is made to ignore nothing that a schema says.
"""

import json
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from agent.lark import to_lark
from agent.llguidance_library import Guide, GuideError, Tokenizer
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Constraint, Gbnf, JsonSchema

Allowed: TypeAlias = NDArray[np.bool_]
"""One entry a token of the vocabulary."""


class Matcher(Protocol):
    """Follows one answer. Raises ``RequestError`` (``GRAMMAR_REJECTED``) if it cannot go on."""

    def allows(self, token: TokenId) -> bool:
        """May the answer go on, or end, with this token?"""
        ...

    def allowed(self) -> Allowed:
        """The same of all tokens."""
        ...

    def accept(self, token: TokenId) -> None:
        """The answer went on with it. It must be allowed."""
        ...


MAX_BYTES = 64 * 1024

MAX_DEPTH = 64
"""Of values in a schema."""

WHITESPACE = r"[ \t]{0,2}|\r?\n[ \t]{0,40}"
"""Between the parts of a JSON text. JSON has no limit, and small models take it to heart."""


class ConstraintCompiler:
    """Builds matchers over one vocabulary. Safe to use from any thread."""

    def __init__(
        self,
        pieces: Callable[[], Sequence[bytes]],
        *,
        tokenize: Callable[[str], list[TokenId]],
        ends: Collection[TokenId],
        control: Collection[TokenId],
    ) -> None:
        """``pieces``: asked for all tokens' bytes when the first constraint comes.

        ``ends``: the tokens that end an answer; ``control``: those that are never text.
        """
        self._pieces = pieces
        self._tokenize = tokenize
        self._ends = sorted(ends)
        self._never_text = {*control, *ends}
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None

    def compile(self, constraint: Constraint) -> "GuidedMatcher":
        """Raises ``RequestError`` (``INVALID_SCHEMA`` or ``INVALID_GRAMMAR``) with the cause."""
        match constraint:
            case JsonSchema(schema):
                grammar, code, noun = (
                    _schema_grammar(schema),
                    ErrorCode.INVALID_SCHEMA,
                    "JSON schema",
                )
            case Gbnf(text, root):
                grammar, code, noun = to_lark(text, root), ErrorCode.INVALID_GRAMMAR, "grammar"
        tokenizer = self._vocabulary()
        try:
            matcher = GuidedMatcher(Guide(tokenizer, grammar), self._ends, noun)
        except GuideError as error:
            raise RequestError(code, f"the {noun} cannot be used: {error}") from error
        try:
            possible = bool(matcher.allowed().any())
        except RequestError as error:
            raise RequestError(code, error.message) from error
        if not possible:
            raise RequestError(code, f"the {noun} allows no answer in the model's tokens")
        return matcher

    def _vocabulary(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                pieces = list(self._pieces())
                for token in self._never_text:
                    pieces[token] = b""
                self._tokenizer = Tokenizer(
                    pieces,
                    _Forced(pieces, self._tokenize),
                    end=self._ends[0],
                    slices=LLTokenizer.json_slices(),
                )
            return self._tokenizer


class _Forced:
    """The tokens of a text that must come next. It may be but a part of a longer one."""

    def __init__(self, pieces: Sequence[bytes], tokenize: Callable[[str], list[TokenId]]) -> None:
        self._pieces = pieces
        self._tokenize = tokenize
        self._ids = {piece: TokenId(token) for token, piece in enumerate(pieces) if piece}
        self._longest = max(map(len, pieces))

    def __call__(self, text: bytes) -> list[TokenId]:
        tokens = self._tokenize(text.decode(errors="replace"))
        # Some tokenizers put a space in front, and others know the names of control tokens.
        exact = b"".join(self._pieces[token] for token in tokens) == text
        return tokens if exact else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[TokenId]:
        tokens: list[TokenId] = []
        at = 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (token := self._ids.get(text[at:end])) is not None:
                    tokens.append(token)
                    at = end
                    break
            else:
                break
        return tokens


class GuidedMatcher:
    """One answer that has to follow a schema or a grammar."""

    def __init__(self, guide: Guide, ends: Sequence[TokenId], noun: str) -> None:
        """``noun``: what it follows."""
        self._guide = guide
        self._ends = ends
        self._noun = noun

    def allows(self, token: TokenId) -> bool:
        with self._rejecting():
            return self._guide.may_end() if token in self._ends else self._guide.allows(token)

    def allowed(self) -> Allowed:
        with self._rejecting():
            allowed = self._guide.allowed()
            allowed[self._ends] = self._guide.may_end()
            return allowed

    def accept(self, token: TokenId) -> None:
        with self._rejecting():
            if token not in self._ends:
                self._guide.accept(token)

    @contextmanager
    def _rejecting(self) -> Generator[None]:
        try:
            yield
        except GuideError as error:
            raise RequestError(
                ErrorCode.GRAMMAR_REJECTED, f"the {self._noun} cannot be followed: {error}"
            ) from error


def _schema_grammar(schema: str) -> str:
    options: Any = {"whitespace_pattern": WHITESPACE, "lenient": False}
    try:
        grammar = LLMatcher.grammar_from_json_schema(check_schema(schema), overrides=options)
    except ValueError as error:
        _refuse_schema(str(error))
    _, complaints = LLMatcher.validate_grammar_with_warnings(grammar)
    if complaints:
        _refuse_schema("; ".join(complaints))
    return grammar


def check_schema(schema: str) -> str:
    """The schema as it is to be compiled. Raises ``RequestError`` (``INVALID_SCHEMA``)."""
    if len(schema.encode(errors="replace")) > MAX_BYTES:
        _refuse_schema(f"it is longer than {MAX_BYTES} bytes")
    try:
        value = json.loads(schema, parse_constant=_no_constant)
    except RecursionError:
        _refuse_schema(f"it is nested more than {MAX_DEPTH} deep")
    except ValueError as error:
        _refuse_schema(f"it is not JSON: {error}")
    if _depth(value) > MAX_DEPTH:
        _refuse_schema(f"it is nested more than {MAX_DEPTH} deep")
    if value is True:
        return "{}"
    if value is False:
        _refuse_schema("it allows nothing")
    if not isinstance(value, dict):
        _refuse_schema("it is neither an object nor a boolean")
    if "x-guidance" in value:
        _refuse_schema("'x-guidance' is not supported")
    return schema


def _refuse_schema(cause: str) -> NoReturn:
    raise RequestError(ErrorCode.INVALID_SCHEMA, f"the JSON schema cannot be used: {cause}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth(value: Any) -> int:
    depth = 0
    level: list[Any] = [value]
    while level:
        depth += 1
        below: list[Any] = []
        for outer in level:
            match outer:
                case dict():
                    below.extend(cast("dict[str, Any]", outer).values())
                case list():
                    below.extend(cast("list[Any]", outer))
                case _:
                    pass
        level = below
    return depth
