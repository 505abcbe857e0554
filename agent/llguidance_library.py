"""llguidance through its C interface (``llguidance.h``), which its Python package carries.

A grammar can be so ambiguous that one step takes hours, and llguidance's own limits count only
between the characters of a text. Through C, unlike Python, a computation can be cancelled; so none
here takes long.
"""

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import llguidance._lib
import numpy as np
from numpy.typing import NDArray

from common.ids import TokenId

MAX_SECONDS = 0.2
"""Of computing, for one step. It holds up all other requests."""

LOOK_EVERY = 0.02
"""Seconds between two looks at whether a step takes too long."""

MAX_BYTES = 128 * 1024
"""Of an answer. llguidance keeps what was possible after each of them."""

MAX_ITEMS_IN_ROW = 1000
"""What was possible after one: 8 bytes each. In ordinary grammars there are a few dozen."""

MAX_ITEMS_IN_STEP = 10_000_000
"""About: the time is what counts."""

MAX_LEXER_STATES = 20_000
"""Of 1 to 6 kB each."""

VERSION = b"llguidance@1.9."
"""Its structures, below, have no version of their own."""

lib: Any = ctypes.CDLL(llguidance._lib.__file__)

lib.llg_get_version.restype = ctypes.c_char_p
if not lib.llg_get_version().startswith(VERSION):
    raise ImportError(f"expected {VERSION.decode()}x, found {lib.llg_get_version().decode()}")
for _function in ("new_tokenizer_v2", "new_matcher", "matcher_get_cancellation_handle"):
    getattr(lib, f"llg_{_function}").restype = ctypes.c_void_p
lib.llg_matcher_get_error.restype = ctypes.c_char_p
lib.llg_matcher_get_mask_byte_size.restype = ctypes.c_size_t
for _function in ("is_error", "is_cancelled", "is_accepting"):
    getattr(lib, f"llg_matcher_{_function}").restype = ctypes.c_bool

_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_size_t,
)


class _TokenizerInit(ctypes.Structure):
    """``LlgTokenizerInitV2``"""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _Limits(ctypes.Structure):
    """``ParserLimits``"""

    _fields_ = (
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class _ConstraintInit(ctypes.Structure):
    """``LlgConstraintInit``"""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", _Limits),
    )


_TOO_AMBIGUOUS = "it is too ambiguous: one step takes too long"
_SIGNS = (
    ("NoExtension", "nothing can follow"),
    ("Current row has", _TOO_AMBIGUOUS),
    ("Too many items", _TOO_AMBIGUOUS),
)


class GuideError(Exception):
    """Why an answer cannot be guided."""


class Tokenizer:
    """A vocabulary in llguidance's form. Safe to use from any thread."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        tokenize: Callable[[bytes], Sequence[TokenId]],
        *,
        end: TokenId,
        slices: Sequence[str],
    ) -> None:
        """``pieces``: the bytes of all tokens, empty for those that are never text. ``tokenize``:
        into the model's own tokens; it must not raise. ``slices``: patterns of tokens to be allowed
        together, where possible.
        """
        self.pieces = pieces

        def write(
            _data: object, text: int, length: int, output: Any, capacity: int
        ) -> int:  # LlgTokenizeFn
            tokens = tokenize(ctypes.string_at(text, length))
            for at, token in enumerate(tokens[:capacity]):
                output[at] = token
            return len(tokens)

        self._callback: Any = _TOKENIZE(write)
        lengths = (ctypes.c_uint32 * len(pieces))(*map(len, pieces))
        patterns = (ctypes.c_char_p * (len(slices) + 1))(*(text.encode() for text in slices), None)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=len(pieces),
            tok_eos=end,
            token_lens=ctypes.addressof(lengths),
            token_bytes=b"".join(pieces),
            tokenize_assumes_string=True,
            tokenize_fn=self._callback,
            slices=ctypes.addressof(patterns),
        )
        message = ctypes.create_string_buffer(1000)
        handle = lib.llg_new_tokenizer_v2(
            ctypes.byref(init), message, ctypes.c_size_t(len(message))
        )
        if handle is None:
            raise GuideError(message.value.decode(errors="replace"))
        self.handle = ctypes.c_void_p(handle)
        weakref.finalize(self, lib.llg_free_tokenizer, self.handle)


class Guide:
    """Follows one answer. Used by one thread at a time. After an error all fails."""

    def __init__(self, tokenizer: Tokenizer, grammar: str) -> None:
        """``grammar``: in llguidance's dialect of Lark, or as its JSON.

        All methods raise ``GuideError`` with the cause.
        """
        self._tokenizer = tokenizer
        self._bytes_left = MAX_BYTES
        init = _ConstraintInit()
        lib.llg_constraint_init_set_defaults(ctypes.byref(init), tokenizer.handle)
        init.log_stderr_level = 0
        init.limits.max_items_in_row = MAX_ITEMS_IN_ROW
        init.limits.step_max_items = MAX_ITEMS_IN_STEP
        init.limits.max_lexer_states = MAX_LEXER_STATES
        init.limits.verbose_errors = False
        self._handle = ctypes.c_void_p(
            lib.llg_new_matcher(ctypes.byref(init), b"llguidance", grammar.encode())
        )
        weakref.finalize(self, lib.llg_free_matcher, self._handle)
        self._check()
        self._cancellation = ctypes.c_void_p(lib.llg_matcher_get_cancellation_handle(self._handle))
        weakref.finalize(self, lib.llg_free_cancellation_handle, self._cancellation)

    def may_end(self) -> bool:
        return self._step(lib.llg_matcher_is_accepting)

    def allows(self, token: TokenId) -> bool:
        """May the answer go on with this token of text?"""
        one = ctypes.byref(ctypes.c_uint32(token))
        return self._step(lib.llg_matcher_validate_tokens, one, ctypes.c_size_t(1)) == 1

    def allows_both(self, token: TokenId, following: TokenId) -> bool:
        """The first one, and then the second?"""
        both = (ctypes.c_uint32 * 2)(token, following)
        return self._step(lib.llg_matcher_validate_tokens, both, ctypes.c_size_t(2)) == 2

    def allowed(self) -> NDArray[np.bool_]:
        """The same of all tokens; that of the end means nothing."""
        mask = np.zeros(lib.llg_matcher_get_mask_byte_size(self._handle), dtype=np.uint8)
        self._step(
            lib.llg_matcher_compute_mask_into,
            ctypes.c_void_p(mask.ctypes.data),
            ctypes.c_size_t(mask.size),
        )
        bits = np.unpackbits(mask, count=len(self._tokenizer.pieces), bitorder="little")
        return bits.view(np.bool_)

    def accept(self, token: TokenId) -> None:
        self._bytes_left -= len(self._tokenizer.pieces[token])
        if self._bytes_left < 0:
            raise GuideError(f"the answer is longer than {MAX_BYTES} bytes")
        self._step(lib.llg_matcher_consume_token, ctypes.c_uint32(token))

    def cancel(self) -> None:
        """What it is computing, on another thread."""
        lib.llg_cancel(self._cancellation)

    def _step(self, function: Any, *arguments: object) -> Any:
        with _watch.over(self):
            result = function(self._handle, *arguments)
        self._check()
        return result

    def _check(self) -> None:
        if lib.llg_matcher_is_cancelled(self._handle):
            raise GuideError(_TOO_AMBIGUOUS)
        if lib.llg_matcher_is_error(self._handle):
            message = lib.llg_matcher_get_error(self._handle).decode(errors="replace")
            message = message.removesuffix("<non-verbose/>").strip()
            raise GuideError(next((told for sign, told in _SIGNS if sign in message), message))


class _Watch:
    """Cancels steps that take too long, from a thread of its own."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[Guide, Callable[[], float], float]] = {}
        """Under way, by their threads: with their clocks, and when they are to be over."""
        self._any = threading.Event()
        self._started = False

    @contextmanager
    def over(self, guide: Guide) -> Generator[None]:
        thread = threading.get_ident()
        clock = _cpu_time_of(thread)
        self._steps[thread] = (guide, clock, clock() + MAX_SECONDS)
        self._any.set()
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="llguidance-watch", daemon=True).start()
        try:
            yield
        finally:
            del self._steps[thread]

    def _run(self) -> None:
        while self._any.wait():
            time.sleep(LOOK_EVERY)
            for thread, step in list(self._steps.items()):
                guide, clock, end = step
                with suppress(OSError):  # the thread may have ended in between, and the step before
                    if clock() > end and self._steps.get(thread) is step:
                        guide.cancel()
            self._any.clear()
            if self._steps:
                self._any.set()


def _cpu_time_of(thread: int) -> Callable[[], float]:
    """Whatever else the machine does is not a grammar's fault."""
    if sys.platform != "linux":
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


_watch = _Watch()
