"""What an answer may be made to follow: JSON schemas and grammars, by the library llguidance.

``agent.llguidance_library`` bounds its work; here it is made to ignore nothing that a schema says,
but for remarks (``agent.json_schema``).
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from agent.engine import AnswerGrammar, Guidance
from agent.json_schema import OPTIONS, SchemaError, check_schema
from agent.lark import to_lark
from agent.llguidance_library import Guide, GuideError, Tokenizer
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Gbnf, JsonSchema

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
        self._known_texts: _Texts | None = None

    def compile(self, constraint: Guidance) -> "GuidedMatcher":
        """Raises ``RequestError`` (``INVALID_SCHEMA``, ``INVALID_GRAMMAR``, or what an
        ``AnswerGrammar`` says) with the cause.
        """
        try:
            return self._compile(constraint)
        except RequestError:
            if not isinstance(constraint, AnswerGrammar) or constraint.otherwise is None:
                raise
        return self.compile(constraint.otherwise)

    def _compile(self, constraint: Guidance) -> "GuidedMatcher":
        match constraint:
            case JsonSchema():
                code, noun = ErrorCode.INVALID_SCHEMA, "JSON schema"
            case Gbnf():
                code, noun = ErrorCode.INVALID_GRAMMAR, "grammar"
            case AnswerGrammar(code=code, noun=noun):
                pass
        tokenizer = self._vocabulary()
        never = constraint.never if isinstance(constraint, AnswerGrammar) else ()
        try:
            guide = Guide(tokenizer, _lark(constraint))
            watch = _Watch(guide, self._texts(tokenizer), never) if never else None
            matcher = GuidedMatcher(guide, self._ends, noun, watch)
        except (GuideError, SchemaError) as error:
            raise RequestError(code, f"the {noun} cannot be used: {error}") from error
        try:
            possible = bool(matcher.allowed().any())
        except RequestError as error:
            raise RequestError(code, error.message) from error
        if not possible:
            raise RequestError(code, f"the {noun} allows no answer in the model's tokens")
        return matcher

    def _texts(self, tokenizer: Tokenizer) -> "_Texts":
        with self._lock:
            if self._known_texts is None:
                self._known_texts = _Texts(tokenizer.pieces)
            return self._known_texts

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


class _Texts:
    """Finds tokens by their bytes. Safe to use from any thread."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self._in_order = sorted((piece, TokenId(t)) for t, piece in enumerate(pieces) if piece)
        self._holding: dict[bytes, list[TokenId]] = {}

    def holding(self, text: bytes) -> list[TokenId]:
        if text not in self._holding:
            found = [TokenId(t) for t, piece in enumerate(self.pieces) if text in piece]
            self._holding[text] = found
        return self._holding[text]

    def beginning_with(self, text: bytes) -> Iterator[TokenId]:
        for at in range(bisect_left(self._in_order, (text,)), len(self._in_order)):
            piece, token = self._in_order[at]
            if not piece.startswith(text):
                return
            yield token


class _Watch:
    """Keeps marks out of strings in JSON, over the edges of tokens too."""

    def __init__(self, guide: Guide, texts: _Texts, never: Sequence[str]) -> None:
        self._guide = guide
        self._texts = texts
        self._never = [mark.encode() for mark in never]
        self._keeps = max(map(len, self._never)) - 1
        self._tilde, self._break = (next(texts.beginning_with(c), None) for c in (b"~", b"\n"))
        """A string in JSON is where the first may stand and the second not."""
        self._tail = b""

    def forbids(self, token: TokenId) -> bool:
        """Of a token that the grammar allows."""
        text = self._tail + self._texts.pieces[token]
        before = len(self._tail)
        return (
            any(text.find(mark, max(0, before - len(mark) + 1)) >= 0 for mark in self._never)
            and self._tilde is not None
            and self._guide.allows_both(token, self._tilde)
            and not (self._break is not None and self._guide.allows_both(token, self._break))
        )

    def candidates(self) -> Iterator[TokenId]:
        """The tokens that could complete a mark here."""
        for mark in self._never:
            yield from self._texts.holding(mark)
            for length in range(1, len(mark)):
                if self._tail.endswith(mark[:length]):
                    yield from self._texts.beginning_with(mark[length:])

    def accept(self, token: TokenId) -> None:
        piece = self._texts.pieces[token]
        self._tail = (self._tail + piece)[-self._keeps :] if piece else b""


class GuidedMatcher:
    """One answer that has to follow a schema or a grammar."""

    def __init__(
        self, guide: Guide, ends: Sequence[TokenId], noun: str, watch: _Watch | None
    ) -> None:
        """``noun``: what it follows."""
        self._guide = guide
        self._ends = ends
        self._noun = noun
        self._watch = watch

    def allows(self, token: TokenId) -> bool:
        with self._rejecting():
            if token in self._ends:
                return self._guide.may_end()
            return self._guide.allows(token) and not (
                self._watch is not None and self._watch.forbids(token)
            )

    def allowed(self) -> Allowed:
        with self._rejecting():
            allowed = self._guide.allowed()
            if self._watch is not None:
                for token in self._watch.candidates():
                    allowed[token] = allowed[token] and not self._watch.forbids(token)
            allowed[self._ends] = self._guide.may_end()
            return allowed

    def accept(self, token: TokenId) -> None:
        with self._rejecting():
            if token not in self._ends:
                self._guide.accept(token)
                if self._watch is not None:
                    self._watch.accept(token)

    @contextmanager
    def _rejecting(self) -> Generator[None]:
        try:
            yield
        except GuideError as error:
            raise RequestError(
                ErrorCode.GRAMMAR_REJECTED, f"the {self._noun} cannot be followed: {error}"
            ) from error


def _lark(constraint: Guidance) -> str:
    """Or llguidance's JSON. Raises ``SchemaError``, or ``RequestError`` for what is in GBNF."""
    match constraint:
        case JsonSchema(schema):
            return _schema_grammar(schema)
        case Gbnf(text, root):
            return to_lark(text, root)
        case AnswerGrammar(grammar=grammar, schemas=schemas):
            for name, schema in schemas:
                try:
                    _schema_grammar(schema)
                except SchemaError as error:
                    raise SchemaError(f"{name}: {error}" if name else str(error)) from error
            return grammar


def _schema_grammar(schema: str) -> str:
    """Raises ``SchemaError``."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(check_schema(schema), overrides=OPTIONS)
    except ValueError as error:
        raise SchemaError(str(error)) from error
    _, complaints = LLMatcher.validate_grammar_with_warnings(grammar)
    if complaints:
        raise SchemaError("; ".join(complaints))
    return grammar
