"""How the next token is chosen: llama.cpp's own samplers, shown only the tokens that can win.

llama.cpp copies the whole vocabulary into an array of candidates for each token and sorts in it.
Here numpy finds first which tokens can come out at all: those that a penalty changes, and the
likeliest of the others. The chain of samplers gets these alone and picks the same token.
"""

import ctypes
import math
import random
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from agent.constraint import Allowed, Matcher, SchemaCompiler
from agent.gbnf import check_gbnf
from agent.llama_library import LlamaVocabulary, because, forget_messages, lib
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import (
    Constraint,
    Gbnf,
    JsonSchema,
    Logprobs,
    Mirostat,
    Sampling,
    TokenLogprob,
)

Row = NDArray[np.float32]
"""The logits of one output, one entry a token of the vocabulary."""

Ids = NDArray[np.intp]

LEAST_TEMPERATURE = 1e-5
"""Below it nothing but the likeliest token is ever drawn, and the division may overflow."""

LARGEST_LOGIT = 1e30
"""Above it a row is not to be trusted, and penalties could make infinities of it."""

LARGEST_PENALTY = 1e6
LARGEST_FACTOR = 1e3

MAX_BREAKERS = 32
MAX_BREAKER_BYTES = 40
"""llama.cpp cuts longer ones."""

MAX_GRAMMAR_SECONDS = 2.0
"""Of computing, for one step of a grammar. It holds up all other requests."""

_MIROSTAT_CANDIDATES = 100  # as in llama.cpp's common/sampling.cpp
_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp takes this one for "any"
_INT32_MAX = 2**31 - 1
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_CANDIDATE_POINTER: Any = lib.llama_token_data_p


class LlamaSamplers:
    """Makes the samplers of a loaded model, which must outlive them."""

    def __init__(
        self, model_handle: Any, vocabulary: LlamaVocabulary, *, context: int, attach: bool = False
    ) -> None:
        """``context``: tokens of one sequence at most. ``attach``: make samplers for llama.cpp to
        apply itself, as a part of its computation, where it has all that they need.
        """
        self._attach = attach
        self._vocab: Any = lib.llama_model_get_vocab(model_handle)
        self._vocabulary = vocabulary
        self._context = context
        self._ends = vocabulary.ends()
        self._suppressed = vocabulary.suppressed()
        control = vocabulary.control()
        self._never_text = np.zeros(vocabulary.size, dtype=np.bool_)
        self._never_text[control] = True
        self._never_text[self._ends] = False
        self._candidates = _Candidates(vocabulary.size)
        self._schemas = SchemaCompiler(
            vocabulary.pieces, tokenize=vocabulary.tokenize, ends=self._ends, control=control
        )

    def make(
        self,
        prompt: Sequence[TokenId],
        sampling: Sampling,
        constraint: Constraint | None,
        logprobs: int | None,
    ) -> "LlamaSampler":
        """A sampler for one request; may be called on any thread, and may take a while.

        Raises ``RequestError``: ``INVALID_REQUEST`` for what llama.cpp would not survive or would
        cut off in silence, ``INVALID_GRAMMAR`` or ``INVALID_SCHEMA`` with the cause.
        """
        _check(sampling, self._vocabulary.size)
        if logprobs is not None and logprobs < 0:
            _refuse("logprobs must not be negative")
        matcher = self._matcher(constraint)
        bias = self._bias(sampling)
        attached = (
            self._attach and matcher is None and logprobs is None and _is_attachable(sampling)
        )
        return LlamaSampler(
            _Chain(
                self._vocab,
                sampling,
                size=self._vocabulary.size,
                context=self._context,
                bias=bias if attached else {},
            ),
            prompt,
            bias=bias,
            attached=attached,
            matcher=matcher,
            logprobs=logprobs,
            vocabulary=self._vocabulary,
            ends=self._ends,
            candidates=self._candidates,
        )

    def _bias(self, sampling: Sampling) -> dict[TokenId, float]:
        bias: dict[TokenId, float] = {}
        for token, value in sampling.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        never = (*self._suppressed, *(self._ends if sampling.ignore_eos else ()))
        return bias | dict.fromkeys(never, -math.inf)

    def _matcher(self, constraint: Constraint | None) -> Matcher | None:
        if constraint is None:
            return None
        if not self._ends:
            raise RequestError(
                ErrorCode.NOT_SUPPORTED,
                "the model has no token that could end a constrained answer",
            )
        match constraint:
            case JsonSchema(schema):
                code = ErrorCode.INVALID_SCHEMA
                matcher: Matcher = self._schemas.compile(schema)
            case Gbnf(grammar, root):
                code = ErrorCode.INVALID_GRAMMAR
                for token in check_gbnf(grammar, root):
                    self._check_token(token)
                matcher = _GbnfMatcher(self._vocab, grammar, root, self._candidates.size)
        matcher = _TextMatcher(matcher, self._never_text)
        try:
            possible = bool(matcher.allowed().any())
        except RequestError as error:
            raise RequestError(code, error.message) from error
        if not possible:
            raise RequestError(
                code,
                "the grammar or schema allows no answer in the model's tokens",
            )
        return matcher

    def _check_token(self, text: str) -> None:
        """One that a grammar names, as ``<name>`` or ``<[id]>``."""
        if text.startswith("<["):
            tokens = [TokenId(int(text[2:-2]))]
        else:
            tokens = self._vocabulary.tokenize(text)
        if len(tokens) != 1 or tokens[0] >= self._vocabulary.size:
            cause = "is not a token of the model"
        elif self._never_text[tokens[0]] or tokens[0] in self._ends:
            cause = "is a control token, which an answer cannot contain"
        else:
            return
        raise RequestError(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {text} {cause}")


class LlamaSampler:
    """Chooses the tokens of one request. It remembers those it chose, and the end of the prompt.

    Used by one thread at a time, and all samplers of one model by the same one: they share their
    working memory.
    """

    def __init__(
        self,
        chain: "_Chain",
        prompt: Sequence[TokenId],
        *,
        bias: dict[TokenId, float],
        attached: bool,
        matcher: Matcher | None,
        logprobs: int | None,
        vocabulary: LlamaVocabulary,
        ends: Sequence[TokenId],
        candidates: "_Candidates",
    ) -> None:
        self.chain: Any = chain.handle
        self._close = chain.close
        self._plan = chain
        self._biased: Ids = np.fromiter(bias, dtype=np.intp)
        self._bias = np.fromiter(bias.values(), dtype=np.float32)
        self._forbids = bool(np.isneginf(self._bias).any())
        self._matcher = matcher
        self._logprobs = logprobs
        self.tells_logprobs = logprobs is not None
        """Has the request asked for ``logprobs``?"""
        self._vocabulary = vocabulary
        self._ends = ends
        self._candidates = candidates
        self._penalised = _Recent(chain.memory)
        self.attached = attached
        """llama.cpp applies the chain itself (``llama_set_sampler``, ``llama_sampler_sample``):
        ``sample`` is not to be called, and the chain must be detached before this object goes.
        """
        if chain.memory:
            for token in prompt[-chain.memory :]:
                if 0 <= token < vocabulary.size:
                    self._remember(token)

    def sample(self, logits: Row) -> TokenId:
        """Choose the next token. The row is as before afterwards.

        Raises ``RequestError``: ``GRAMMAR_REJECTED`` if the constraint leaves nothing to choose,
        ``DECODE_FAILED`` if the logits are no numbers.
        """
        if not self._biased.size:
            return self._sample(logits)
        plain = logits[self._biased]
        logits[self._biased] = plain + self._bias
        try:
            return self._sample(logits)
        finally:
            logits[self._biased] = plain

    def _sample(self, logits: Row) -> TokenId:
        token = self._draw(logits, sparse=self._forbids)
        if token is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "logit_bias forbids all tokens")
        matcher = self._matcher
        if matcher is not None:
            if not matcher.allows(token):
                token = self._draw_allowed(logits, matcher.allowed())
            matcher.accept(token)
        if self._plan.memory:
            self._remember(token)
        return token

    def logprobs(self, logits: Row, token: TokenId) -> Logprobs:
        """What the model itself thought of the token, and of the likeliest ones."""
        count = min(self._logprobs or 0, logits.size)
        largest = _largest(logits)
        total = largest + math.log(float(np.exp(logits - largest).sum(dtype=np.float64)))
        top: Ids = np.empty(0, dtype=np.intp)
        if count:
            found = np.flatnonzero(logits >= _lower_bound(logits, count))
            top = found[np.argsort(-logits[found], kind="stable")][:count]

        def tell(token: TokenId) -> TokenLogprob:
            piece = self._vocabulary.piece(token)
            return TokenLogprob(token, float(logits[token]) - total, piece)

        return Logprobs(tell(token), tuple(tell(TokenId(int(t))) for t in top))

    def close(self) -> None:
        """Free the chain now. Happens by itself when the object goes."""
        self._close()
        self.chain = None

    def _remember(self, token: TokenId) -> None:
        lib.llama_sampler_accept(self.chain, token)
        self._penalised.add(token)

    def _draw_allowed(self, logits: Row, allowed: Allowed) -> TokenId:
        """Draw again, from what the constraint allows: as llama.cpp does it, so a new random number."""
        ends = [token for token in self._ends if allowed[token]]
        if ends and np.count_nonzero(allowed) == len(ends):
            # Nothing can follow, so the answer ends, even if it was not to end (``ignore_eos``).
            return max(ends, key=lambda token: logits[token])
        token = self._draw(np.where(allowed, logits, np.float32(-np.inf)), sparse=True)
        if token is None or not allowed[token]:
            raise RequestError(
                ErrorCode.GRAMMAR_REJECTED,
                "no token that the grammar allows can follow"
                if not allowed.any()
                else "logit_bias forbids all tokens that the grammar allows here",
            )
        return token

    def _draw(self, logits: Row, *, sparse: bool) -> TokenId | None:
        """One token; None if all logits are minus infinity.

        ``sparse``: there may be such logits, and they are to be left out.
        """
        plan, penalised = self._plan, self._penalised.tokens
        if plan.greedy:
            likeliest = _likeliest(logits, penalised)
            if not penalised.size:
                return likeliest if logits[likeliest] > -np.inf else None
            found = np.append(penalised, likeliest)
            found.sort()  # of equals, the first one wins
        elif plan.largest_only:
            found = _largest_and(logits, penalised, count=plan.largest_only)
        elif plan.least_ratio:
            found = _likely_and(logits, penalised, least=plan.least_ratio)
        elif sparse:
            found = np.flatnonzero(logits > -np.inf)
            _largest(logits)
        else:
            _largest(logits)
            return self._candidates.pick_from_all(self.chain, logits)
        values = logits[found]
        if sparse:
            possible = values > -np.inf
            found, values = found[possible], values[possible]
        if not found.size:
            return None
        _largest(values)
        return self._candidates.pick(self.chain, found, values)


class _Chain:
    """The samplers of one request in llama.cpp's default order, without those that are off."""

    def __init__(
        self,
        vocab: Any,
        sampling: Sampling,
        *,
        size: int,
        context: int,
        bias: Mapping[TokenId, float],
    ) -> None:
        """``bias``: what the chain itself adds to logits, before all else."""
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        self.handle: Any = lib.llama_sampler_chain_init(params)
        assert self.handle is not None
        self.close = weakref.finalize(self, lib.llama_sampler_free, self.handle)
        self.memory = 0
        """How many of the latest tokens matter."""
        self.greedy = False
        self.largest_only = 0
        """All but so many of the largest logits are left out first; 0: they are not."""
        self.least_ratio = 0.0
        """All tokens less likely than this part of the likeliest are left out first; 0: not."""
        self._add_bias(bias, size=size)
        self._build(vocab, sampling, size=size, context=context)

    def _add(self, sampler: Any) -> None:
        assert sampler is not None
        lib.llama_sampler_chain_add(self.handle, sampler)

    def _build(self, vocab: Any, sampling: Sampling, *, size: int, context: int) -> None:
        temperature = sampling.temperature if sampling.temperature >= LEAST_TEMPERATURE else 0.0
        seed = random.getrandbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF
        seed = min(seed, _RANDOM_SEED - 1)
        if sampling.mirostat is not Mirostat.OFF:
            self._add(lib.llama_sampler_init_temp(temperature))
            tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
            self._add(
                lib.llama_sampler_init_mirostat(size, seed, tau, eta, _MIROSTAT_CANDIDATES)
                if sampling.mirostat is Mirostat.V1
                else lib.llama_sampler_init_mirostat_v2(seed, tau, eta)
            )
            return
        self._add_penalties(sampling, size=size, context=context)
        self._add_dry(vocab, sampling, context=context)
        if temperature == 0:
            self._add(lib.llama_sampler_init_greedy())
            self.greedy = True
            return
        top_k = min(sampling.top_k, size)
        if top_k > 0:
            self._add(lib.llama_sampler_init_top_k(top_k))
        if sampling.typical_p < 1:
            self._add(lib.llama_sampler_init_typical(sampling.typical_p, 1))
        if sampling.top_p < 1:
            self._add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
        min_p = min(sampling.min_p, 1.0)
        if min_p > 0:
            self._add(lib.llama_sampler_init_min_p(min_p, 1))
        if sampling.xtc_probability > 0 and sampling.xtc_threshold <= 0.5:
            probability, threshold = sampling.xtc_probability, sampling.xtc_threshold
            self._add(lib.llama_sampler_init_xtc(probability, threshold, 1, seed))
        if temperature != 1:
            self._add(lib.llama_sampler_init_temp(temperature))
        self._add(lib.llama_sampler_init_dist(seed))
        if 0 < top_k <= size // 8:
            self.largest_only = top_k
        elif top_k <= 0 and sampling.typical_p >= 1 and sampling.top_p >= 1:
            self.least_ratio = max(min_p, 0.0)

    def _add_bias(self, bias: Mapping[TokenId, float], *, size: int) -> None:
        if bias:
            entries = (lib.llama_logit_bias * len(bias))(*bias.items())
            self._add(lib.llama_sampler_init_logit_bias(size, len(bias), entries))

    def _add_penalties(self, sampling: Sampling, *, size: int, context: int) -> None:
        repeat = sampling.penalty_repeat
        frequency, presence = sampling.penalty_frequency, sampling.penalty_presence
        length = _length(sampling.penalty_last_n, context)
        if length and (repeat != 1 or frequency != 0 or presence != 0):
            self._add(lib.llama_sampler_init_penalties(size, length, repeat, frequency, presence))
            self.memory = length

    def _add_dry(self, vocab: Any, sampling: Sampling, *, context: int) -> None:
        length = _length(sampling.dry_penalty_last_n, context)
        if not length or sampling.dry_multiplier == 0 or sampling.dry_base < 1:
            return
        breakers = [
            text.encode(errors="replace") for text in sampling.dry_sequence_breakers if text
        ]
        self._add(
            lib.llama_sampler_init_dry(
                vocab,
                sampling.dry_multiplier,
                sampling.dry_base,
                min(max(sampling.dry_allowed_length, 0), _INT32_MAX),
                length,
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        )
        self.memory = max(self.memory, length)


def _is_attachable(sampling: Sampling) -> bool:
    """Are there only samplers that llama.cpp has on its backends too (``backend_apply``)?"""
    return (
        sampling.mirostat is Mirostat.OFF
        and sampling.dry_multiplier == 0
        and sampling.typical_p >= 1
        and sampling.xtc_probability == 0
    )


def _length(last_n: int, context: int) -> int:
    # llama.cpp allocates as many entries as it is told.
    return context if last_n < 0 else min(last_n, context)


class _Recent:
    """The distinct tokens among the latest ones; for a while also some that are not any more."""

    def __init__(self, length: int) -> None:
        self._latest = deque[TokenId](maxlen=length)
        self._known: set[TokenId] = set()
        self._array: Ids = np.empty(64, dtype=np.intp)
        self._clean_at = 0
        self.tokens = self._array[:0]

    def add(self, token: TokenId) -> None:
        self._latest.append(token)
        if token in self._known:
            return
        if len(self._known) >= self._clean_at:
            self._known = set(self._latest)
            self._clean_at = 2 * len(self._known) + 256
            self._array = np.empty(self._clean_at + 1, dtype=np.intp)
            self._array[: len(self._known)] = list(self._known)
        else:
            self._array[len(self._known)] = token
            self._known.add(token)
        self.tokens = self._array[: len(self._known)]


class _Candidates:
    """The array that a chain works on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._data = np.empty(size, dtype=_CANDIDATE)
        self._all = np.arange(size, dtype=np.int32)
        self._pointer: Any = ctypes.cast(self._data.ctypes.data, _CANDIDATE_POINTER)
        self._struct: Any = lib.llama_token_data_array(self._pointer, 0, -1, False)

    def pick(self, sampler: Any, tokens: Ids, logits: Row) -> TokenId:
        count = tokens.size
        data = self._data[:count]
        data["id"] = tokens
        data["logit"] = logits
        return self._apply(sampler, count)

    def pick_from_all(self, sampler: Any, logits: Row) -> TokenId:
        self._data["id"] = self._all
        self._data["logit"] = logits
        return self._apply(sampler, self.size)

    def _apply(self, sampler: Any, count: int) -> TokenId:
        struct = self._struct
        struct.data = self._pointer  # samplers may have moved it
        struct.size = count
        struct.selected = -1
        struct.sorted = False
        lib.llama_sampler_apply(sampler, ctypes.byref(struct))
        if not 0 <= struct.selected < struct.size:
            raise RequestError(ErrorCode.DECODE_FAILED, "no token could be chosen")
        return TokenId(struct.data[struct.selected].id)


def _largest(row: Row) -> float:
    """Raises ``RequestError`` if there is anything that is no number: llama.cpp's sorting would
    leave its array.
    """
    largest = float(row.max())
    if not largest < LARGEST_LOGIT:  # neither is NaN
        raise RequestError(ErrorCode.DECODE_FAILED, "the model's logits are not numbers")
    return largest


def _likeliest(row: Row, others: Ids) -> TokenId:
    """Of all but the others."""
    values = row[others]
    row[others] = -np.inf
    likeliest = int(row.argmax())
    largest = row[likeliest]
    row[others] = values
    _largest(largest)
    return TokenId(likeliest)


def _largest_and(row: Row, others: Ids, *, count: int) -> Ids:
    """The tokens with the largest logits, so many at least, and the others; in ascending order."""
    values = row[others]
    row[others] = -np.inf
    try:
        bound = _lower_bound(row, count)
        row[others] = np.inf
        return np.flatnonzero(row >= bound if bound > -np.inf else row > bound)
    finally:
        row[others] = values


def _likely_and(row: Row, others: Ids, *, least: float) -> Ids:
    """The tokens that are at least so likely as the likeliest, in parts of it, and the others."""
    values = row[others]
    row[others] = -np.inf
    try:
        largest = _largest(row)
        # llama.cpp computes the bound in single precision: rather one token too many.
        bound = largest + math.log(least) - 1e-5 * max(1.0, abs(largest))
        row[others] = np.inf
        return np.flatnonzero(row >= np.float32(bound) if largest > -np.inf else row > largest)
    finally:
        row[others] = values


def _lower_bound(row: Row, count: int) -> np.float32:
    """At least ``count`` logits are as large: seen as columns, so many have their maximum there."""
    columns = 512
    while columns < 4 * count:
        columns *= 2
    rows = row.size // columns
    if not rows:
        largest = row
    else:
        largest = row[: rows * columns].reshape(rows, columns).max(axis=0)
        rest = row[rows * columns :]
        np.maximum(largest[: rest.size], rest, out=largest[: rest.size])
    _largest(largest)
    return np.partition(largest, largest.size - count)[largest.size - count]


class _TextMatcher:
    """Another matcher, but for control tokens: their names may look like text that is allowed."""

    def __init__(self, matcher: Matcher, never_text: Allowed) -> None:
        self._matcher = matcher
        self._never_text = never_text
        self.accept = matcher.accept

    def allows(self, token: TokenId) -> bool:
        return not self._never_text[token] and self._matcher.allows(token)

    def allowed(self) -> Allowed:
        return self._matcher.allowed() & ~self._never_text


class _GbnfMatcher:
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
        one = np.array([(token, 0.0, 0.0)], dtype=_CANDIDATE)
        self._apply(one)
        return bool(one["logit"][0] == 0)

    def allowed(self) -> Allowed:
        every = np.zeros(self._size, dtype=_CANDIDATE)
        every["id"] = np.arange(self._size)
        self._apply(every)
        return every["logit"] == 0

    def accept(self, token: TokenId) -> None:
        if not lib.llama_vocab_is_eog(self._vocab, token):
            with _CpuTime():
                lib.llama_sampler_accept(self._sampler, token)

    def _apply(self, tokens: NDArray[np.void]) -> None:
        pointer: Any = ctypes.cast(tokens.ctypes.data, _CANDIDATE_POINTER)
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


def _check(sampling: Sampling, size: int) -> None:
    """Raises ``RequestError`` (``INVALID_REQUEST``) for what makes llama.cpp's sums overflow, after
    which its sorting reads past its array, and for what it would cut off.
    """
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "penalty_frequency",
        "penalty_presence",
        "typical_p",
        "dry_multiplier",
        "dry_base",
        "xtc_probability",
        "xtc_threshold",
        "mirostat_tau",
        "mirostat_eta",
    ):
        if not abs(getattr(sampling, name)) <= LARGEST_PENALTY:  # neither is NaN
            _refuse(
                f"{name} must be a number between -{LARGEST_PENALTY:.0f} and {LARGEST_PENALTY:.0f}"
            )
    if not 1 / LARGEST_FACTOR <= sampling.penalty_repeat <= LARGEST_FACTOR:
        _refuse(f"penalty_repeat must be between {1 / LARGEST_FACTOR} and {LARGEST_FACTOR:.0f}")
    if sampling.dry_multiplier < 0:
        _refuse("dry_multiplier must not be negative")
    if len(sampling.dry_sequence_breakers) > MAX_BREAKERS:
        _refuse(f"more than {MAX_BREAKERS} dry_sequence_breakers")
    for text in sampling.dry_sequence_breakers:
        if len(text.encode(errors="replace")) > MAX_BREAKER_BYTES or "\0" in text:
            _refuse(
                f"a dry_sequence_breaker is longer than {MAX_BREAKER_BYTES} bytes "
                "or contains a null character"
            )
    for token, bias in sampling.logit_bias:
        if not 0 <= token < size:
            _refuse(f"logit_bias: the model has no token {token}, only 0 to {size - 1}")
        if not (abs(bias) <= LARGEST_PENALTY or bias == -math.inf):
            _refuse(
                f"logit_bias: {bias} for token {token} must be between -{LARGEST_PENALTY:.0f} "
                f"and {LARGEST_PENALTY:.0f}, or minus infinity"
            )


def _refuse(message: str) -> NoReturn:
    raise RequestError(ErrorCode.INVALID_REQUEST, message)
