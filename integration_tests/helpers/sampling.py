"""The real model's vocabulary, samplers over it, and llama.cpp's own as the reference."""

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent.llama_candidates import Row
from agent.llama_library import LlamaVocabulary, lib
from agent.llama_sampler import LlamaSampler, LlamaSamplers
from common.ids import TokenId
from common.messages import Constraint, Mirostat, Sampling

CONTEXT = 200
SMALL = 5003
PLAIN = Sampling(
    temperature=1, top_k=0, top_p=1, min_p=0, penalty_repeat=1, penalty_presence=0, seed=1
)
GREEDY = Sampling(temperature=0, penalty_repeat=1, penalty_presence=0)


class FewTokens(LlamaVocabulary):
    """The first tokens of the model; no multiple of anything."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.size = SMALL


def make(
    samplers: LlamaSamplers,
    sampling: Sampling = PLAIN,
    *,
    prompt: Sequence[int] = (),
    constraint: Constraint | None = None,
    logprobs: int | None = None,
) -> LlamaSampler:
    return samplers.make([TokenId(t) for t in prompt], sampling, constraint, logprobs)


def random_row(seed: int, size: int, spread: float = 4) -> Row:
    """No two are the same: among equals llama.cpp's sorting knows no order."""
    chance = np.random.default_rng(seed)
    values = np.unique(chance.normal(0, spread, 2 * size).astype(np.float32))
    return chance.permutation(values)[:size].copy()


class Reference:
    """llama.cpp's chain in its own order, with all samplers, over all candidates."""

    def __init__(self, model: Any, sampling: Sampling, prompt: Sequence[int], size: int) -> None:
        vocab = lib.llama_model_get_vocab(model)
        self.chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        weakref.finalize(self, lib.llama_sampler_free, self.chain)
        self.size = size
        bias = [*sampling.logit_bias]
        if sampling.ignore_eos:
            bias += [
                (TokenId(t), -math.inf) for t in range(size) if lib.llama_vocab_is_eog(vocab, t)
            ]
        biases = (lib.llama_logit_bias * len(bias))(*(lib.llama_logit_bias(*b) for b in bias))
        seed = sampling.seed
        breakers = [text.encode() for text in sampling.dry_sequence_breakers]
        self._add(lib.llama_sampler_init_logit_bias(size, len(bias), biases))
        if sampling.mirostat is Mirostat.OFF:
            self._add(
                lib.llama_sampler_init_penalties(
                    size,
                    window(sampling.penalty_last_n),
                    sampling.penalty_repeat,
                    sampling.penalty_frequency,
                    sampling.penalty_presence,
                )
            )
            self._add(
                lib.llama_sampler_init_dry(
                    vocab,
                    sampling.dry_multiplier,
                    sampling.dry_base,
                    sampling.dry_allowed_length,
                    window(sampling.dry_penalty_last_n),
                    (ctypes.c_char_p * len(breakers))(*breakers),
                    len(breakers),
                )
            )
            if sampling.temperature <= 0:
                self._add(lib.llama_sampler_init_greedy())
            else:
                self._add(lib.llama_sampler_init_top_k(sampling.top_k))
                self._add(lib.llama_sampler_init_typical(sampling.typical_p, 1))
                self._add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
                self._add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
                self._add(
                    lib.llama_sampler_init_xtc(
                        sampling.xtc_probability, sampling.xtc_threshold, 1, seed
                    )
                )
                self._add(lib.llama_sampler_init_temp(sampling.temperature))
                self._add(lib.llama_sampler_init_dist(seed))
        else:
            tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
            self._add(lib.llama_sampler_init_temp(max(sampling.temperature, 0)))
            if sampling.mirostat is Mirostat.V1:
                self._add(lib.llama_sampler_init_mirostat(size, seed, tau, eta, 100))
            else:
                self._add(lib.llama_sampler_init_mirostat_v2(seed, tau, eta))
        for token in prompt:
            lib.llama_sampler_accept(self.chain, token)

    def _add(self, sampler: Any) -> None:
        lib.llama_sampler_chain_add(self.chain, sampler)

    def draw(self, row: Row) -> int:
        data = np.zeros(self.size, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
        data["id"] = np.arange(self.size)
        data["logit"] = row
        pointer = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
        candidates = lib.llama_token_data_array(pointer, self.size, -1, False)
        lib.llama_sampler_apply(self.chain, ctypes.byref(candidates))
        return candidates.data[candidates.selected].id

    def sample(self, row: Row) -> int:
        token = self.draw(row)
        lib.llama_sampler_accept(self.chain, token)
        return token


def window(last_n: int) -> int:
    return CONTEXT if last_n < 0 else last_n
