"""The llama.cpp engine. The only module that imports ``llama_cpp``.

It uses llama.cpp's C API (as bound in ``llama_cpp.llama_cpp``; its meaning is documented in
``include/llama.h``): one context with one unified KV cache for all sequences, one sampler chain a
sequence. Cells are allotted so that each sequence can grow to the whole ``context``.
"""

import ctypes
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp

from agent.engine import Chunk
from common.errors import DecodeError, ModelError
from common.ids import SequenceId, TokenId
from common.messages import Sampling

log = logging.getLogger(__name__)

lib: Any = llama_cpp.llama_cpp  # its annotations name C types where ctypes returns plain numbers

DEFAULT_CONTEXT = 4096
"""Tokens of one request, prompt and answer, unless the model was trained for fewer."""

BATCH_SIZE = 512
"""Tokens in one ``decode`` at most."""

DECODE_ERRORS = {
    1: "no room in the KV cache",
    2: "aborted",
    -1: "invalid batch",
    -2: "out of memory",
    -3: "computation failed",
}

_ERROR_LEVELS = (3, 4)  # ggml's WARN and ERROR
_last_messages: list[str] = []


@lib.llama_log_callback
def _on_log(level: int, text: bytes, _user_data: object) -> None:
    if level in _ERROR_LEVELS:
        message = text.decode(errors="replace").strip()
        log.debug("llama.cpp: %s", message)
        _last_messages.append(message)
        del _last_messages[:-20]


class LlamaVocabulary:
    def __init__(self, model: Any) -> None:
        self._vocab: Any = lib.llama_model_get_vocab(model)
        self._pieces: dict[TokenId, bytes] = {}
        self.beginning = (
            TokenId(lib.llama_vocab_bos(self._vocab))
            if lib.llama_vocab_get_add_bos(self._vocab)
            else None
        )
        self.special_texts: Mapping[str, str] = {
            "bos_token": self._text(lib.llama_vocab_bos(self._vocab)),
            "eos_token": self._text(lib.llama_vocab_eos(self._vocab)),
            "nl_token": self._text(lib.llama_vocab_nl(self._vocab)),
        }
        self.size: int = lib.llama_vocab_n_tokens(self._vocab)
        self.longest_piece = max(
            len(self._bytes(TokenId(token), special=True)) for token in range(self.size)
        )

    def tokenize(self, text: str) -> list[TokenId]:
        data = text.encode(errors="replace")
        # A token covers at least one byte, but a tokenizer may put a space in front.
        capacity = len(data) + 8
        while True:
            tokens = (lib.llama_token * capacity)()
            count: int = lib.llama_tokenize(
                self._vocab, data, len(data), tokens, capacity, False, True
            )
            if count >= 0:
                return tokens[:count]
            capacity = -count  # a tokenizer that normalises can make text longer

    def piece(self, token: TokenId) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes(token, special=False)
        return piece

    def is_end(self, token: TokenId) -> bool:
        return lib.llama_vocab_is_eog(self._vocab, token)

    def _text(self, token: int) -> str:
        """The name of a special token, such as ``<|im_end|>``; empty if the model has none."""
        return "" if token < 0 else self._bytes(token, special=True).decode(errors="replace")

    def _bytes(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            length: int = lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if length >= 0:
                return buffer.raw[:length]
            size = -length


class _Batch:
    """llama.cpp's batch over memory of our own, so that whole runs are written at once."""

    def __init__(self, size: int) -> None:
        # llama_token, llama_pos and llama_seq_id are all 32-bit integers.
        row = ctypes.POINTER(ctypes.c_int32)
        self.tokens = (ctypes.c_int32 * size)()
        self.positions = (ctypes.c_int32 * size)()
        self.sequences = (ctypes.c_int32 * size)()
        self.wanted = (ctypes.c_int8 * size)()
        counts = (ctypes.c_int32 * size)(*([1] * size))
        start, step = ctypes.addressof(self.sequences), ctypes.sizeof(ctypes.c_int32)
        rows = (row * size)(*(ctypes.cast(start + n * step, row) for n in range(size)))
        self._keep = (counts, rows)  # llama.cpp reads them through the pointers below
        self.struct: Any = lib.llama_batch(
            0,
            ctypes.cast(self.tokens, row),
            None,
            ctypes.cast(self.positions, row),
            ctypes.cast(counts, row),
            ctypes.cast(rows, ctypes.POINTER(row)),
            ctypes.cast(self.wanted, ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, chunks: Sequence[Chunk]) -> list[tuple[SequenceId, int]]:
        """Write the chunks; return each sequence that wants a token, with its row."""
        wanting: list[tuple[SequenceId, int]] = []
        row = 0
        for chunk in chunks:
            count = len(chunk.tokens)
            end = row + count
            self.tokens[row:end] = chunk.tokens
            self.positions[row:end] = range(chunk.position, chunk.position + count)
            self.sequences[row:end] = [chunk.sequence_id] * count
            self.wanted[row:end] = [0] * count
            if chunk.wants_token:
                self.wanted[end - 1] = 1
                wanting.append((chunk.sequence_id, end - 1))
            row = end
        self.struct.n_tokens = row
        return wanting


class LlamaEngine:
    def __init__(
        self, model_path: str, *, slots: int, threads: int, context: int | None = None
    ) -> None:
        """Load the model; takes seconds. Raises ``ModelError``.

        ``context``: tokens of one request at most, prompt and answer; None: ``DEFAULT_CONTEXT``,
        or what the model was trained for if that is less.
        """
        lib.llama_log_set(_on_log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model: Any = _load(model_path)
        self._context_handle: Any = None
        self._chains: dict[SequenceId, Any] = {}
        try:
            trained: int = lib.llama_model_n_ctx_train(self._model)
            if context is not None and context > trained:
                raise ModelError(
                    f"a context of {context} tokens is too much: "
                    f"the model was trained for {trained}"
                )
            self.slots = slots
            self.context = min(DEFAULT_CONTEXT, trained) if context is None else context
            self.batch_size = max(BATCH_SIZE, slots)
            self.vocabulary = LlamaVocabulary(self._model)
            template = lib.llama_model_chat_template(self._model, None)
            self.chat_template = None if template is None else template.decode()
            self._context_handle = self._open_context(threads)
            self._memory: Any = lib.llama_get_memory(self._context_handle)
            self._batch = _Batch(self.batch_size)
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def start(
        self, sequence_id: SequenceId, prompt: Sequence[TokenId], sampling: Sampling, /
    ) -> None:
        chain = self._chains[sequence_id] = self._chain(sampling)
        # Penalties count the prompt's tokens too, as in llama.cpp's own server.
        if last := self._penalty_length(sampling):
            for token in prompt[-last:]:
                lib.llama_sampler_accept(chain, token)

    def decode(self, chunks: Sequence[Chunk], /) -> Mapping[SequenceId, TokenId]:
        wanting = self._batch.fill(chunks)
        code: int = lib.llama_decode(self._context_handle, self._batch.struct)
        if code != 0:
            reason = DECODE_ERRORS.get(code, f"code {code}")
            raise DecodeError(f"llama.cpp could not decode: {reason}")
        sample = lib.llama_sampler_sample
        return {
            sequence_id: TokenId(sample(self._chains[sequence_id], self._context_handle, row))
            for sequence_id, row in wanting
        }

    def forget(self, sequence_id: SequenceId, /) -> None:
        chain = self._chains.pop(sequence_id, None)
        if chain is not None:
            lib.llama_sampler_free(chain)
        removed: bool = lib.llama_memory_seq_rm(self._memory, sequence_id, -1, -1)
        assert removed, "llama.cpp promises that a whole sequence can be removed"

    def close(self) -> None:
        for chain in self._chains.values():
            lib.llama_sampler_free(chain)
        self._chains.clear()
        if self._context_handle is not None:
            lib.llama_free(self._context_handle)
            self._context_handle = None
        if self._model is not None:
            lib.llama_model_free(self._model)
            self._model = None

    def _open_context(self, threads: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = self.context * self.slots
        params.n_seq_max = self.slots
        params.n_batch = self.batch_size
        params.n_ubatch = self.batch_size
        params.n_threads = threads
        params.n_threads_batch = threads
        params.kv_unified = True
        params.no_perf = True
        handle = lib.llama_init_from_model(self._model, params)
        if handle is None:
            raise ModelError(
                f"no memory for {self.slots} slots of {self.context} tokens{_because()}"
            )
        return handle

    def _warm_up(self) -> None:
        """One pass reads all weights, so that the first client does not wait for the disk."""
        token = self.vocabulary.beginning or TokenId(0)
        self._batch.fill([Chunk(SequenceId(0), 0, (token,), wants_token=True)])
        lib.llama_decode(self._context_handle, self._batch.struct)
        lib.llama_memory_clear(self._memory, True)

    def _chain(self, sampling: Sampling) -> Any:
        """The samplers in llama.cpp's own default order."""
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        assert chain is not None

        def add(sampler: Any) -> None:
            lib.llama_sampler_chain_add(chain, sampler)

        add(
            lib.llama_sampler_init_penalties(
                self.vocabulary.size,
                self._penalty_length(sampling),
                sampling.penalty_repeat,
                sampling.penalty_frequency,
                sampling.penalty_presence,
            )
        )
        if sampling.temperature <= 0:
            add(lib.llama_sampler_init_greedy())
            return chain
        add(lib.llama_sampler_init_top_k(sampling.top_k))
        add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
        add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
        add(lib.llama_sampler_init_temp(sampling.temperature))
        seed = random.getrandbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF
        add(lib.llama_sampler_init_dist(seed))
        return chain

    def _penalty_length(self, sampling: Sampling) -> int:
        """How many of the latest tokens the penalties look at; 0 if there are none to apply."""
        penalties = (
            sampling.penalty_repeat - 1,
            sampling.penalty_frequency,
            sampling.penalty_presence,
        )
        if not any(penalties):
            return 0
        # llama.cpp allocates as many entries as it is told.
        longest = self.context
        return longest if sampling.penalty_last_n < 0 else min(sampling.penalty_last_n, longest)


def _load(model_path: str) -> Any:
    _last_messages.clear()
    model = lib.llama_model_load_from_file(model_path.encode(), lib.llama_model_default_params())
    if model is None:
        raise ModelError(f"{model_path} could not be loaded{_because()}")
    return model


def _because() -> str:
    return f": {_last_messages[-1]}" if _last_messages else ""
