"""What an answer may be made to follow, and JSON schemas, which the library llguidance follows.

llguidance bounds its own work; here it is made to ignore nothing that a schema says. (Grammars in
llama.cpp's notation are checked in ``agent.gbnf`` and followed by llama.cpp.)
"""

import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from common.errors import ErrorCode, RequestError
from common.ids import TokenId

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


class SchemaCompiler:
    """Builds matchers for JSON schemas over one vocabulary. Safe to use from any thread."""

    def __init__(
        self,
        pieces: Callable[[], Sequence[bytes]],
        *,
        tokenize: Callable[[str], list[TokenId]],
        ends: Collection[TokenId],
        control: Collection[TokenId],
    ) -> None:
        """``pieces``: asked for all tokens' bytes when the first schema comes.

        ``ends``: the tokens that end an answer; ``control``: those that are never text.
        """
        self._pieces = pieces
        self._tokenize = tokenize
        self._ends = sorted(ends)
        self._control = sorted({*control, *ends})
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, schema: str) -> "SchemaMatcher":
        """Raises ``RequestError`` (``INVALID_SCHEMA``) with the cause."""
        options: Any = {"whitespace_pattern": WHITESPACE, "lenient": False}
        try:
            grammar = LLMatcher.grammar_from_json_schema(check_schema(schema), overrides=options)
        except ValueError as error:
            _refuse_schema(str(error))
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0)
        if matcher.is_error():
            _refuse_schema(_first_lines(matcher.get_error()))
        if warnings := matcher.get_grammar_warnings():
            _refuse_schema("; ".join(warnings))
        return SchemaMatcher(matcher, self._ends, self._size)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                vocabulary = _Vocabulary(
                    self._pieces(),
                    eos_token_id=self._ends[0],
                    special_token_ids=self._control,
                    tokenize=self._tokenize,
                )
                self._size = len(vocabulary.tokens)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary), slices=LLTokenizer.json_slices()
                )
            return self._tokenizer


class _Vocabulary:
    """In the form that llguidance asks for."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        eos_token_id: TokenId,
        special_token_ids: Sequence[TokenId],
        tokenize: Callable[[str], list[TokenId]],
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = special_token_ids
        self._tokenize = tokenize
        special = set(special_token_ids)
        self._ids = {
            piece: TokenId(token) for token, piece in enumerate(tokens) if token not in special
        }
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes) -> list[TokenId]:
        """The tokens of a text that must come next. It may be but a part of a longer one."""
        tokens = self._tokenize(text.decode(errors="replace"))
        # Some tokenizers put a space in front, and others know the names of control tokens.
        exact = b"".join(self.tokens[token] for token in tokens) == text
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


class SchemaMatcher:
    """One answer that has to follow a schema."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[TokenId], size: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._size = size

    def allows(self, token: TokenId) -> bool:
        allowed = (
            self._matcher.is_accepting()
            if token in self._ends
            else self._matcher.validate_tokens([token]) == 1
        )
        self._check()
        return allowed

    def allowed(self) -> Allowed:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self._size, bitorder="little").astype(np.bool_)
        allowed[list(self._ends)] = self._matcher.is_accepting()
        return allowed

    def accept(self, token: TokenId) -> None:
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first_lines(self._matcher.get_error())
            if reason.startswith("NoExtension"):
                reason = "nothing can follow"
            raise RequestError(
                ErrorCode.GRAMMAR_REJECTED, f"the JSON schema cannot be followed: {reason}"
            )


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


def _first_lines(message: str) -> str:
    """Without the internal state that llguidance adds."""
    for mark in ("<state>", "<grammar>", "<backtrace>"):
        message = message.split(mark)[0]
    return message.strip()
