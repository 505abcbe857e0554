"""llama.cpp's samplers for one request, in a chain, and what they must not be asked for."""

import ctypes
import math
import random
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

from agent.llama_library import lib
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Mirostat, Sampling

LEAST_TEMPERATURE = 1e-5
"""Below it nothing but the likeliest token is ever drawn, and the division may overflow."""

LARGEST_PENALTY = 1e6
LARGEST_FACTOR = 1e3

MAX_BREAKERS = 32
MAX_BREAKER_BYTES = 40
"""llama.cpp cuts longer ones."""

_MIROSTAT_CANDIDATES = 100  # as in llama.cpp's common/sampling.cpp
_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp takes this one for "any"
_INT32_MAX = 2**31 - 1


class Chain:
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


def is_attachable(sampling: Sampling) -> bool:
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


def check_sampling(sampling: Sampling, size: int) -> None:
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
            refuse(
                f"{name} must be a number between -{LARGEST_PENALTY:.0f} and {LARGEST_PENALTY:.0f}"
            )
    if not 1 / LARGEST_FACTOR <= sampling.penalty_repeat <= LARGEST_FACTOR:
        refuse(f"penalty_repeat must be between {1 / LARGEST_FACTOR} and {LARGEST_FACTOR:.0f}")
    if sampling.dry_multiplier < 0:
        refuse("dry_multiplier must not be negative")
    if len(sampling.dry_sequence_breakers) > MAX_BREAKERS:
        refuse(f"more than {MAX_BREAKERS} dry_sequence_breakers")
    for text in sampling.dry_sequence_breakers:
        if len(text.encode(errors="replace")) > MAX_BREAKER_BYTES or "\0" in text:
            refuse(
                f"a dry_sequence_breaker is longer than {MAX_BREAKER_BYTES} bytes "
                "or contains a null character"
            )
    for token, bias in sampling.logit_bias:
        if not 0 <= token < size:
            refuse(f"logit_bias: the model has no token {token}, only 0 to {size - 1}")
        if not (abs(bias) <= LARGEST_PENALTY or bias == -math.inf):
            refuse(
                f"logit_bias: {bias} for token {token} must be between -{LARGEST_PENALTY:.0f} "
                f"and {LARGEST_PENALTY:.0f}, or minus infinity"
            )


def refuse(message: str) -> NoReturn:
    raise RequestError(ErrorCode.INVALID_REQUEST, message)
