"""How long one token takes to choose: ours, and as a part of llama.cpp's own way (on one core).

Run by hand: ``python integration_tests/bench_sampling.py``. llama.cpp's way is
``llama_sampler_sample``, which needs the output of a model. For a vocabulary larger than the small
model's the same is done here: the array of all candidates is filled, in numpy, and the chain applied.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.llama_library import LlamaVocabulary, lib, start_library
from agent.llama_sampler import LlamaSamplers
from common.ids import TokenId
from common.messages import Sampling
from deploy.model import default_model

PROMPT_TOKENS = 500
TOKENS = 300
PASSES = 5

GREEDY = Sampling(temperature=0, penalty_repeat=1, penalty_presence=0)
SAMPLINGS = {
    "greedy": GREEDY,
    "penalties, top_k 40": Sampling(top_k=40, top_p=1, min_p=0, seed=1),
    "the defaults": Sampling(seed=1),
    "min_p only": Sampling(top_k=0, top_p=1, penalty_repeat=1, penalty_presence=0, seed=1),
    "temperature only": Sampling(
        top_k=0, top_p=1, min_p=0, penalty_repeat=1, penalty_presence=0, seed=1
    ),
}


class LargerVocabulary(LlamaVocabulary):
    """The same tokens, and then some."""

    def __init__(self, model: Any, size: int) -> None:
        super().__init__(model)
        self.known = self.size
        self.size = size

    def is_end(self, token: TokenId) -> bool:
        return token < self.known and super().is_end(token)

    def control(self) -> list[TokenId]:
        return []


def main() -> None:
    start_library()
    path = str(default_model()).encode()
    model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
    context = lib.llama_init_from_model(model, params)
    vocabulary = LlamaVocabulary(model)
    fed = vocabulary.tokenize("The capital of France is")
    tokens = (ctypes.c_int32 * len(fed))(*fed)
    assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(fed))) == 0
    output = lib.llama_get_logits_ith(context, -1)
    real = np.ctypeslib.as_array(output, (vocabulary.size,))
    larger = np.random.default_rng(0).permutation(np.resize(real, 151_936).astype(np.float32))

    def by_llama(chain: Any) -> None:
        lib.llama_sampler_sample(chain, context, -1)

    compare(model, vocabulary, real, by_llama)
    compare(model, LargerVocabulary(model, larger.size), larger, whole_array(larger))
    sys.stdout.flush()


def whole_array(row: NDArray[np.float32]) -> Callable[[Any], None]:
    data = np.empty(row.size, dtype=[("id", "i4"), ("logit", "f4"), ("p", "f4")])
    pointer: Any = ctypes.cast(data.ctypes.data, lib.llama_token_data_p)
    ids = np.arange(row.size, dtype=np.int32)

    def sample(chain: Any) -> None:
        data["id"] = ids
        data["logit"] = row
        data["p"] = 0
        candidates = lib.llama_token_data_array(pointer, row.size, -1, False)
        lib.llama_sampler_apply(chain, ctypes.byref(candidates))
        lib.llama_sampler_accept(chain, candidates.data[candidates.selected].id)

    return sample


def compare(
    model: Any,
    vocabulary: LlamaVocabulary,
    row: NDArray[np.float32],
    by_llama: Callable[[Any], None],
) -> None:
    samplers = LlamaSamplers(model, vocabulary, context=4096)
    words = np.random.default_rng(1).integers(0, row.size, PROMPT_TOKENS // 2).tolist()
    prompt: Sequence[TokenId] = [*words, *words]
    for name, sampling in SAMPLINGS.items():
        ours = samplers.make(prompt, sampling, None, None)
        theirs = samplers.make(prompt, sampling, None, None)
        mine = milliseconds(lambda ours=ours: ours.sample(row))
        llama = milliseconds(lambda theirs=theirs: by_llama(theirs.chain))
        sys.stdout.write(
            f"{row.size:>7} tokens  {name:<20} ours {mine:.3f} ms  llama.cpp {llama:.3f} ms"
            f"  ratio {mine / llama:.2f}\n"
        )


def milliseconds(choose: Callable[[], object]) -> float:
    """The best of some passes: others use this machine too."""
    best = float("inf")
    for _ in range(PASSES):
        start = time.perf_counter()
        for _ in range(TOKENS):
            choose()
        best = min(best, time.perf_counter() - start)
    return best / TOKENS * 1e3


if __name__ == "__main__":
    main()
