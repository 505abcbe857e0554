"""Grammars by llama.cpp's own sampler, and what no constraint may bring forth."""

import ctypes
import time
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.constraint import Allowed, Matcher
from agent.llama_candidates import CANDIDATE, CANDIDATE_POINTER, Ids
from agent.llama_library import because, forget_messages, lib
from common.errors import ErrorCode, RequestError
from common.ids import TokenId

MAX_GRAMMAR_SECONDS = 0.5
"""Of computing, for one step of a grammar. It holds up all other requests."""

SLICE = 16
"""Tokens that llama.cpp is asked about at once: nothing can interrupt it, but between two of them
it can be seen that a grammar takes too long. Short tokens come first, since what is ambiguous
takes the longer the longer a token is.
"""


class TextMatcher:
    """Another matcher, but for control tokens: their names may look like text that is allowed."""

    def __init__(self, matcher: Matcher, never_text: Allowed) -> None:
        self._matcher = matcher
        self._never_text = never_text
        self.accept = matcher.accept

    def allows(self, token: TokenId) -> bool:
        return not self._never_text[token] and self._matcher.allows(token)

    def allowed(self) -> Allowed:
        return self._matcher.allowed() & ~self._never_text


class GbnfMatcher:
    """llama.cpp's own grammar sampler. It aborts the process when it is to accept what it does not
    allow, so that is never done.
    """

    def __init__(self, vocab: Any, grammar: str, root: str, by_length: Ids) -> None:
        """``by_length``: all tokens, those with the shortest pieces first."""
        self._vocab = vocab
        self._by_length = by_length
        forget_messages()
        self._sampler: Any = lib.llama_sampler_init_grammar(vocab, grammar.encode(), root.encode())
        if self._sampler is None:
            raise RequestError(
                ErrorCode.INVALID_GRAMMAR, f"llama.cpp does not take the grammar{because()}"
            )
        weakref.finalize(self, lib.llama_sampler_free, self._sampler)

    def allows(self, token: TokenId) -> bool:
        one = np.array([(token, 0.0, 0.0)], dtype=CANDIDATE)
        self._apply(one)
        return bool(one["logit"][0] == 0)

    def allowed(self) -> Allowed:
        every = np.zeros(self._by_length.size, dtype=CANDIDATE)
        every["id"] = self._by_length
        with _CpuTime() as spent:
            for start in range(0, every.size, SLICE):
                self._apply(every[start : start + SLICE])
                spent.check()
        allowed = np.empty(every.size, dtype=np.bool_)
        allowed[self._by_length] = every["logit"] == 0
        return allowed

    def accept(self, token: TokenId) -> None:
        if not lib.llama_vocab_is_eog(self._vocab, token):
            with _CpuTime():
                lib.llama_sampler_accept(self._sampler, token)

    def _apply(self, tokens: NDArray[np.void]) -> None:
        pointer: Any = ctypes.cast(tokens.ctypes.data, CANDIDATE_POINTER)
        struct = lib.llama_token_data_array(pointer, tokens.size, -1, False)
        with _CpuTime():
            lib.llama_sampler_apply(self._sampler, ctypes.byref(struct))


class _CpuTime:
    """Raises ``RequestError`` when a step of a grammar has taken too much of it."""

    def __enter__(self) -> "_CpuTime":
        # Of this thread: whatever else the machine does is not the grammar's fault.
        self._start = time.thread_time()
        return self

    def check(self) -> None:
        if time.thread_time() - self._start > MAX_GRAMMAR_SECONDS:
            raise RequestError(
                ErrorCode.GRAMMAR_REJECTED, "the grammar is too ambiguous: one step takes too long"
            )

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.check()
