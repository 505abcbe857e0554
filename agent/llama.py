"""The llama.cpp engine.

It uses llama.cpp's C API (as bound in ``llama_cpp.llama_cpp``; its meaning is documented in
``include/llama.h``): one context for all sequences, one sampler for each request. Flash attention
is left to llama.cpp's choice unless somebody says otherwise: on a CPU it passes over the cells of
other sequences at little cost.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.engine import (
    Capacity,
    Chunk,
    Decoded,
    Guidance,
    ImageRun,
    Sampler,
    SamplerPlace,
)
from agent.llama_candidates import Row
from agent.llama_embedder import LlamaEmbedder
from agent.llama_library import LlamaVocabulary, because, forget_messages, lib, start_library
from agent.llama_progress import NodeCounter
from agent.llama_sampler import LlamaSampler, LlamaSamplers
from agent.llama_vision import LlamaEncoding, LlamaVision
from common.errors import DecodeError, ModelError, RequestError
from common.ids import SequenceId, TokenId
from common.messages import Logprobs, Sampling
from common.models import CacheType, FlashAttention, KvLayout

DEFAULT_CONTEXT = 4096
"""Tokens of one request, prompt and answer, unless the model was trained for fewer."""

SMALLEST_CONTEXT = 16

BATCH_SIZE = 512
"""Tokens in one ``decode`` at most."""

ATTENTION_TILE = 64
"""Tokens in one pass from which on llama.cpp's flash attention has another kernel on a CPU
(``GGML_FA_TILE_Q`` in ``ggml-cpu/common.h``): faster for long prompts, but what it makes of a token
depends on the cells where the others are, and differs from what smaller passes make of it.
"""

ALIKE = 256
"""Tokens from a sequence's beginning that are computed alike whatever else is in the pass, so that an
answer goes on elsewhere as it would have here: so much of a prompt is read a little more slowly for it.
"""

EMBEDDING_BATCH_SIZE = 2048
"""Tokens in one ``embed`` at most, and in one document; that of the published wire format."""

IMAGE_BATCH_SIZE = 2048
"""Tokens in a piece of an image at most; that of the published wire format."""

ALL_LAYERS = 2**31 - 1

FINGERPRINT_BYTES = 2**20

FLASH_ATTENTION = {
    FlashAttention.AUTO: lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    FlashAttention.ON: lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    FlashAttention.OFF: lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

GGML_TYPE_BF16 = 30
"""From ``ggml.h``; the binding leaves it out."""

CACHE_TYPES = {
    CacheType.F32: lib.GGML_TYPE_F32,
    CacheType.F16: lib.GGML_TYPE_F16,
    CacheType.BF16: GGML_TYPE_BF16,
    CacheType.Q8_0: lib.GGML_TYPE_Q8_0,
    CacheType.Q4_0: lib.GGML_TYPE_Q4_0,
    CacheType.Q4_1: lib.GGML_TYPE_Q4_1,
    CacheType.IQ4_NL: lib.GGML_TYPE_IQ4_NL,
    CacheType.Q5_0: lib.GGML_TYPE_Q5_0,
    CacheType.Q5_1: lib.GGML_TYPE_Q5_1,
}

FLOATS = {CacheType.F32, CacheType.F16, CacheType.BF16}


@dataclass(frozen=True, slots=True)
class Device:
    """Where the model's layers are."""

    gpu_layers: int = 0
    """On GPUs; negative: all."""
    tensor_split: tuple[float, ...] = ()
    """The part of each GPU; empty: as llama.cpp divides them."""
    main_gpu: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    flash: FlashAttention = FlashAttention.AUTO
    k_cache: CacheType = CacheType.F16
    v_cache: CacheType = CacheType.F16


CPU = Device()
DEFAULT_ATTENTION = Attention()

DECODE_ERRORS = {
    1: "no room in the KV cache",
    2: "aborted",
    -1: "invalid batch",
    -2: "out of memory",
    -3: "computation failed",
}


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
        rest = (
            ctypes.cast(counts, row),
            ctypes.cast(rows, ctypes.POINTER(row)),
            ctypes.cast(self.wanted, ctypes.POINTER(ctypes.c_int8)),
        )
        tokens, positions = ctypes.cast(self.tokens, row), ctypes.cast(self.positions, row)
        self.struct: Any = lib.llama_batch(0, tokens, None, positions, *rest)
        self.image: Any = lib.llama_batch(0, None, None, positions, *rest)
        """With embeddings in place of tokens."""

    def fill_with_image(
        self, chunk: Chunk, embeddings: NDArray[np.float32], positions: NDArray[np.int32]
    ) -> None:
        """``positions``: a row for each of their dimensions. The arrays must be contiguous, and
        outlive the decode.
        """
        count = len(chunk.tokens)
        self.sequences[:count] = [chunk.sequence_id] * count
        ctypes.memset(self.wanted, 0, count)
        self.wanted[count - 1] = chunk.wants_token
        # By address, since a pointer of numpy's would keep the arrays after the request's end.
        self.image.embd = ctypes.cast(embeddings.ctypes.data, ctypes.POINTER(ctypes.c_float))
        self.image.pos = ctypes.cast(positions.ctypes.data, ctypes.POINTER(ctypes.c_int32))
        self.image.n_tokens = count

    def fill(self, chunks: Sequence[tuple[Chunk, int]]) -> list[tuple[SequenceId, int]]:
        """Write the chunks, each with its first position; return each sequence that wants a token,
        with its row.
        """
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanting: list[tuple[SequenceId, int]] = []
        for chunk, position in chunks:
            count = len(chunk.tokens)
            tokens += chunk.tokens
            positions += range(position, position + count)
            sequences += [chunk.sequence_id] * count
            if chunk.wants_token:
                wanting.append((chunk.sequence_id, len(tokens) - 1))
        count = len(tokens)
        self.tokens[:count] = tokens
        self.positions[:count] = positions
        self.sequences[:count] = sequences
        ctypes.memset(self.wanted, 0, count)
        for _, row in wanting:
            self.wanted[row] = 1
        self.struct.n_tokens = count
        return wanting


class _Positions:
    """Where a sequence's tokens are for the model. In some models an image takes fewer positions
    than it has tokens, so that behind it a token's position is less than its index.
    """

    def __init__(self) -> None:
        self._skips: dict[SequenceId, list[tuple[int, int, int]]] = {}
        """Of each image in a sequence: the index behind it, the position there, its own last one."""

    def next(self, sequence_id: SequenceId, index: int) -> int:
        """Of the token with this index, which is not inside an image."""
        for end, position, _ in reversed(self._skips.get(sequence_id, ())):
            if end <= index:
                return position + index - end
        return index

    def last(self, sequence_id: SequenceId, length: int) -> int:
        """The highest one of the first tokens, if the sequence holds so many."""
        for end, _, last in reversed(self._skips.get(sequence_id, ())):
            if end == length:
                return last
        return self.next(sequence_id, length) - 1

    def skip(self, sequence_id: SequenceId, end: int, position: int, *, last: int) -> None:
        """An image has been fed."""
        self._skips.setdefault(sequence_id, []).append((end, position, last))

    def share(self, source: SequenceId, destination: SequenceId, length: int) -> None:
        skips = [skip for skip in self._skips.get(source, ()) if skip[0] <= length]
        if skips:
            self._skips[destination] = skips

    def forget(self, sequence_id: SequenceId) -> None:
        self._skips.pop(sequence_id, None)


def split_alike(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """The chunks of one pass in parts, to be decoded one after another.

    1. What must be computed alike, single tokens and the first ``ALIKE`` ones of sequences, in parts
       of less than a tile.
    2. The rest of long prompts behind it, in one part: there the faster kernel pays. If there is
       such a rest, single tokens are in its part: each part reads all weights, and beside a long
       prompt that would take nearly half as long again.
    """
    parts: list[list[Chunk]] = []
    rest: list[Chunk] = []
    room = 0
    has_rest = any(len(c.tokens) > 1 and c.position + len(c.tokens) > ALIKE for c in chunks)
    for chunk in chunks:
        position, end = chunk.position, chunk.position + len(chunk.tokens)
        if len(chunk.tokens) == 1:
            alike = position if has_rest else end
        else:
            alike = min(end, max(position, ALIKE))
        while position < alike:
            if room == 0:
                parts.append([])
                room = ATTENTION_TILE - 1
            count = min(alike - position, room)
            room -= count
            parts[-1].append(_cut(chunk, position, position + count))
            position += count
        if position < end:
            rest.append(_cut(chunk, position, end))
    return [*parts, rest] if rest else parts


def _cut(chunk: Chunk, start: int, end: int) -> Chunk:
    first, last = start - chunk.position, end - chunk.position
    if first == 0 and last == len(chunk.tokens):
        return chunk
    wants_token = chunk.wants_token and last == len(chunk.tokens)
    return Chunk(chunk.sequence_id, start, chunk.tokens[first:last], wants_token)


class LlamaEngine:
    def __init__(
        self,
        model_path: str,
        *,
        slots: int,
        threads: int,
        context: int = DEFAULT_CONTEXT,
        cells: int | None = None,
        layout: KvLayout = KvLayout.UNIFIED,
        samplers: SamplerPlace = SamplerPlace.AUTO,
        embedding_batch_size: int = EMBEDDING_BATCH_SIZE,
        projector_path: str | None = None,
        image_batch_size: int = IMAGE_BATCH_SIZE,
        device: Device = CPU,
        attention: Attention = DEFAULT_ATTENTION,
        warms_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the model; takes seconds. Raises ``ModelError``.

        ``context``: tokens of one request at most, prompt and answer, and never more than the model
        was trained for; 0: as many as that. ``cells``: tokens of all requests together, in the
        unified layout; None: as many as one may have. ``embedding_batch_size``: tokens of one
        document, and of those that are embedded together, at most. ``projector_path``: with it the
        model sees images, each piece of which has ``image_batch_size`` tokens at most. ``warms_up``:
        called when all is loaded, and only the first pass is to be made yet.
        """
        start_library()
        self._model: Any = _load(model_path, device)
        self._handle: Any = None
        self._samplers: dict[SequenceId, LlamaSampler] = {}
        self._positions = _Positions()
        trained: int = lib.llama_model_n_ctx_train(self._model)
        most = max(trained, EMBEDDING_BATCH_SIZE)  # more could not be used, and takes memory
        self._counter = NodeCounter()
        self.embedder = LlamaEmbedder(
            self._model,
            threads=threads,
            batch_size=min(embedding_batch_size, most),
            counter=self._counter,
        )
        self.vision: LlamaVision | None = None
        try:
            self.capacity = self._plan_capacity(slots, context, cells, layout)
            if projector_path is not None:
                self.vision = LlamaVision(
                    projector_path,
                    self._model,
                    threads=max(1, threads // 2),  # the model decodes meanwhile
                    longest_run=min(image_batch_size, self.capacity.cells),
                    use_gpu=device.gpu_layers != 0,
                )
            self.vocabulary = LlamaVocabulary(self._model)
            template = lib.llama_model_chat_template(self._model, None)
            self.chat_template = None if template is None else template.decode(errors="replace")
            attach = samplers is SamplerPlace.CONTEXT or (
                samplers is SamplerPlace.AUTO and lib.llama_supports_gpu_offload()
            )
            # Other devices have other kernels; and llama.cpp keeps no logits for its own samplers.
            self._splits = device.gpu_layers == 0 and not attach
            self.metadata = _metadata(self._model)
            self.fingerprint = _fingerprint(model_path)
            self._handle = self._open_context(threads, layout, attention)
            self._memory: Any = lib.llama_get_memory(self._handle)
            self._row_type: Any = ctypes.c_float * self.vocabulary.size
            self._batch = _Batch(self._batch_size)
            self._make_sampler = LlamaSamplers(
                self._model, self.vocabulary, context=self.capacity.context, attach=attach
            ).make
            warms_up()
            self._warm_up()
        except BaseException:
            self.close()
            raise

    @property
    def progress(self) -> int:
        return self._counter.value

    def sampler(
        self,
        prompt: Sequence[TokenId],
        sampling: Sampling,
        constraint: Guidance | None,
        logprobs: int | None,
        resumed: Sequence[TokenId] = (),
        /,
    ) -> Sampler:
        words = [token for token in prompt if token >= 0]  # samplers know nothing of images
        return self._make_sampler(words, sampling, constraint, logprobs, resumed)

    def start(self, sequence_id: SequenceId, sampler: Sampler, /) -> None:
        assert isinstance(sampler, LlamaSampler)
        self._samplers[sequence_id] = sampler
        if sampler.attached:
            lib.llama_set_sampler(self._handle, sequence_id, sampler.chain)

    def stop(self, sequence_id: SequenceId, /) -> None:
        sampler = self._samplers.pop(sequence_id)
        if sampler.attached:
            lib.llama_set_sampler(self._handle, sequence_id, None)
        sampler.close()

    def share(self, source: SequenceId, destination: SequenceId, length: int, /) -> bool:
        self._positions.share(source, destination, length)
        end = self._positions.next(destination, length)
        # Only in the unified layout can a part be copied; elsewhere llama.cpp asserts that it is all.
        if self.capacity.shares_cells and self.capacity.shares_part:
            lib.llama_memory_seq_cp(self._memory, source, destination, 0, end)
        else:
            lib.llama_memory_seq_cp(self._memory, source, destination, -1, -1)
        cut: bool = lib.llama_memory_seq_rm(self._memory, destination, end, -1)
        last: int = lib.llama_memory_seq_pos_max(self._memory, destination)
        first: int = lib.llama_memory_seq_pos_min(self._memory, destination)
        # Recurrent models hold one state, that after the last token; a window may have lost the first.
        whole = first == 0 or not self.capacity.shares_part
        if cut and last == self._positions.last(destination, length) and whole:
            return True
        self.forget(destination)
        return False

    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        tokens: dict[SequenceId, TokenId] = {}
        logprobs: dict[SequenceId, Logprobs] = {}
        refused: dict[SequenceId, RequestError] = {}
        wanting, kept = self._compute(chunks)
        for sequence_id, row in wanting:
            sampler = self._samplers[sequence_id]
            if sampler.attached:
                tokens[sequence_id] = TokenId(
                    lib.llama_sampler_sample(sampler.chain, self._handle, row)
                )
                continue
            logits = kept[sequence_id] if sequence_id in kept else self._logits(row)
            try:
                token = tokens[sequence_id] = sampler.sample(logits)
            except RequestError as error:
                refused[sequence_id] = error
            else:
                if sampler.tells_logprobs:
                    logprobs[sequence_id] = sampler.logprobs(logits, token)
        return Decoded(tokens, logprobs, refused)

    def _compute(
        self, chunks: Sequence[Chunk]
    ) -> tuple[list[tuple[SequenceId, int]], dict[SequenceId, Row]]:
        """The sequences that want a token, each with its row; and the logits of those whose rows
        another part has taken. Nothing is sampled before all parts are computed: if one of them
        fails, all are fed again, and no sampler may have gone on.
        """
        kept: dict[SequenceId, Row] = {}
        if (image := chunks[0].image) is not None:
            return self._decode_image(chunks[0], image), kept
        *parts, last = split_alike(chunks) if self._splits else [chunks]
        wanting: list[tuple[SequenceId, int]] = []
        for part in parts:
            rows = self._decode_text(part)
            kept |= {sequence_id: self._logits(row).copy() for sequence_id, row in rows}
            wanting += rows
        return wanting + self._decode_text(last), kept

    def _decode_text(self, chunks: Sequence[Chunk]) -> list[tuple[SequenceId, int]]:
        wanting = self._batch.fill(
            [(chunk, self._positions.next(chunk.sequence_id, chunk.position)) for chunk in chunks]
        )
        self._decode(self._batch.struct)
        return wanting

    def _decode_image(self, chunk: Chunk, image: ImageRun) -> list[tuple[SequenceId, int]]:
        """Tokens and embeddings cannot be in one batch, hence an image is alone in its pass."""
        sequence_id, encoding = chunk.sequence_id, image.encoding
        assert isinstance(encoding, LlamaEncoding)
        count = len(chunk.tokens)
        part = slice(chunk.position - image.start, chunk.position - image.start + count)
        if encoding.positions is None:
            positions = np.arange(chunk.position, chunk.position + count, dtype=np.int32)
        else:
            positions = np.ascontiguousarray(encoding.positions[:, part])
        self._batch.fill_with_image(chunk, encoding.embeddings[part], positions)
        lib.llama_set_causal_attn(self._handle, image.divisible)
        try:
            self._decode(self._batch.image)
        finally:
            lib.llama_set_causal_attn(self._handle, True)
        if encoding.positions is not None and chunk.position + count == image.end:
            last = int(encoding.positions[0].max())
            self._positions.skip(sequence_id, image.end, encoding.next_position, last=last)
        return [(sequence_id, count - 1)] if chunk.wants_token else []

    def _decode(self, batch: Any) -> None:
        self._counter.start_over()
        code: int = lib.llama_decode(self._handle, batch)
        if code != 0:
            reason = DECODE_ERRORS.get(code, f"code {code}")
            raise DecodeError(f"llama.cpp could not decode: {reason}")

    def forget(self, sequence_id: SequenceId, /) -> None:
        self._positions.forget(sequence_id)
        removed: bool = lib.llama_memory_seq_rm(self._memory, sequence_id, -1, -1)
        assert removed, "llama.cpp promises that a whole sequence can be removed"

    def close(self) -> None:
        self.embedder.close()
        if self.vision is not None:
            self.vision.close()
        if self._handle is not None:
            lib.llama_free(self._handle)
            self._handle = None
        for sampler in self._samplers.values():
            sampler.close()
        self._samplers.clear()
        if self._model is not None:
            lib.llama_model_free(self._model)
            self._model = None

    def _plan_capacity(
        self, slots: int, context: int, cells: int | None, layout: KvLayout
    ) -> Capacity:
        trained: int = lib.llama_model_n_ctx_train(self._model)
        if trained <= 0:
            raise ModelError("its file says that it can have no context")
        wanted = context or trained
        context = min(wanted, trained)
        if context < SMALLEST_CONTEXT:
            raise ModelError(
                f"a context of {context} tokens is too small: at least {SMALLEST_CONTEXT}"
            )
        most: int = lib.llama_max_parallel_sequences()
        if slots > most:
            raise ModelError(f"{slots} slots are too many: llama.cpp allows {most} sequences")
        unified = layout is KvLayout.UNIFIED
        sequences = min(most, slots + (max(8, slots) if unified else max(1, slots // 4)))
        if not unified:
            cells = context * sequences
        elif cells is None:
            # llama.cpp aborts if a batch, which is never larger, could not have all sequences.
            cells = max(wanted, sequences)
        elif cells < context:
            raise ModelError(f"{cells} KV cells cannot hold one request of {context} tokens")
        keeps_one_state: bool = lib.llama_model_is_recurrent(
            self._model
        ) or lib.llama_model_is_hybrid(self._model)
        return Capacity(
            slots=slots,
            sequences=sequences,
            context=context,
            cells=cells,
            batch_size=max(BATCH_SIZE, sequences),
            shares_cells=unified,
            shares_part=not keeps_one_state,
        )

    @property
    def _batch_size(self) -> int:
        """An image that must be fed whole has to fit; nothing else is fed in larger pieces for it."""
        if self.vision is None or self.vision.is_divisible:
            return self.capacity.batch_size
        return max(self.capacity.batch_size, self.vision.longest_run)

    def _open_context(self, threads: int, layout: KvLayout, attention: Attention) -> Any:
        if attention.flash is FlashAttention.OFF and attention.v_cache not in FLOATS:
            raise ModelError(
                f"values in the KV cache as {attention.v_cache} need flash attention, which is off"
            )
        capacity = self.capacity
        params = lib.llama_context_default_params()
        params.n_ctx = capacity.cells
        params.n_seq_max = capacity.sequences
        params.n_batch = self._batch_size
        params.n_ubatch = self._batch_size
        params.n_threads = threads
        params.n_threads_batch = threads
        params.kv_unified = layout is KvLayout.UNIFIED
        params.n_outputs_max_per_seq = 1
        params.no_perf = True
        params.flash_attn_type = FLASH_ATTENTION[attention.flash]
        params.type_k = CACHE_TYPES[attention.k_cache]
        params.type_v = CACHE_TYPES[attention.v_cache]
        self._counter.count_for(params)
        forget_messages()
        handle = lib.llama_init_from_model(self._model, params)
        if handle is None:
            raise ModelError(f"no memory for {capacity.cells} tokens in the KV cache{because()}")
        return handle

    def _warm_up(self) -> None:
        """One pass reads all weights, so that the first client does not wait for the disk."""
        token = self.vocabulary.beginning or TokenId(0)
        self._batch.fill([(Chunk(SequenceId(0), 0, (token,), wants_token=True), 0)])
        lib.llama_decode(self._handle, self._batch.struct)
        lib.llama_memory_clear(self._memory, True)

    def _logits(self, row: int) -> Row:
        """llama.cpp's own memory, valid until the next decode."""
        pointer = lib.llama_get_logits_ith(self._handle, row)
        memory: Any = self._row_type.from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memory, np.float32)


def check_loadable(model_path: str) -> None:
    """Read all but the weights. Raises ``ModelError`` if llama.cpp cannot make sense of the file."""
    start_library()
    lib.llama_model_free(_load(model_path, CPU, vocab_only=True))


def _load(model_path: str, device: Device, *, vocab_only: bool = False) -> Any:
    params = lib.llama_model_default_params()
    params.vocab_only = vocab_only
    params.n_gpu_layers = ALL_LAYERS if device.gpu_layers < 0 else device.gpu_layers
    params.main_gpu = device.main_gpu
    most: int = lib.llama_max_devices()
    if len(device.tensor_split) > most:
        raise ModelError(f"tensor_split names more than {most} devices")
    split = (ctypes.c_float * most)(*device.tensor_split)
    if device.tensor_split:
        params.tensor_split = split
    forget_messages()
    model = lib.llama_model_load_from_file(model_path.encode(), params)
    if model is None:
        raise ModelError(f"{model_path} could not be loaded{because()}")
    return model


def _fingerprint(model_path: str) -> str:
    """Of the file: its size, its beginning, where all that describes the model stands, and its end,
    where weights are. All of it would take seconds to read.
    """
    with Path(model_path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        file.seek(0)
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(0, size - FINGERPRINT_BYTES))
        digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def _metadata(model: Any) -> dict[str, str]:
    """All keys with one value; llama.cpp keeps no lists."""
    count: int = lib.llama_model_meta_count(model)
    return {
        _string(lib.llama_model_meta_key_by_index, model, n): _string(
            lib.llama_model_meta_val_str_by_index, model, n
        )
        for n in range(count)
    }


def _string(function: Any, model: Any, index: int) -> str:
    """What a function of llama.cpp writes into a buffer; it says how long it would have to be."""
    length: int = function(model, index, None, 0)
    buffer = ctypes.create_string_buffer(max(0, length) + 1)
    function(model, index, buffer, len(buffer))
    return buffer.value.decode(errors="replace")
