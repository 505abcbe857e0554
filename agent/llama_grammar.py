"""Grammars by llama.cpp's own sampler, and what no constraint may bring forth."""

import ctypes
import time
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.constraint import Allowed, Matcher
from agent.llama_candidates import CANDIDATE, CANDIDATE_POINTER
from agent.llama_library import because, forget_messages, lib
from common.errors import ErrorCode, RequestError
from common.ids import TokenId

MAX_GRAMMAR_SECONDS = 2.0
"""Of computing, for one step of a grammar. It holds up all other requests."""


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

    def __init__(self, vocab: Any, grammar: str, root: str, size: int) -> None:
        self._vocab = vocab
        self._size = size
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
        every = np.zeros(self._size, dtype=CANDIDATE)
        every["id"] = np.arange(self._size)
        self._apply(every)
        return every["logit"] == 0

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

    def __enter__(self) -> None:
        self._start = (
            time.thread_time()
        )  # whatever else the machine does is not the grammar's fault

    def __exit__(self, *_: object) -> None:
        if time.thread_time() - self._start > MAX_GRAMMAR_SECONDS:
            raise RequestError(
                ErrorCode.GRAMMAR_REJECTED, "the grammar is too ambiguous: one step takes seconds"
            )
