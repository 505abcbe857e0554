"""What the model thinks of a prompt with images when llama.cpp's own helper feeds it.

The helper (``tools/mtmd/mtmd-helper.h``) is what its command line uses: one sequence, one prompt.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.images import open_image
from agent.llama_library import lib, mtmd, start_library
from common.messages import IMAGE_MARKER


@lib.llama_log_callback
def _silent(_level: int, _text: bytes, _user_data: object) -> None:
    pass


def reference_logprobs(
    model_path: Path, projector_path: Path, text: str, images: Sequence[bytes]
) -> NDArray[np.float64]:
    """Of each token of the vocabulary, as the one that follows."""
    mtmd.mtmd_helper_log_set(_silent, ctypes.c_void_p(0))
    start_library()
    model = lib.llama_model_load_from_file(
        str(model_path).encode(), lib.llama_model_default_params()
    )
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 1024
    params.n_threads = params.n_threads_batch = 1
    context = lib.llama_init_from_model(model, params)
    settings = mtmd.mtmd_context_params_default()
    settings.n_threads = 1
    settings.print_timings = False
    projector = mtmd.mtmd_init_from_file(str(projector_path).encode(), model, settings)
    try:
        return _evaluate(model, context, projector, text, images)
    finally:
        mtmd.mtmd_free(projector)
        lib.llama_free(context)
        lib.llama_model_free(model)


def _evaluate(
    model: Any, context: Any, projector: Any, text: str, images: Sequence[bytes]
) -> NDArray[np.float64]:
    bitmaps: list[Any] = []
    for data in images:
        file = open_image(data, longest_side=1024)
        pixels = file.pixels()
        memory = (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels)
        bitmaps.append(mtmd.mtmd_bitmap_init(*file.size, memory))
    words = text.replace(IMAGE_MARKER, mtmd.mtmd_default_marker().decode()).encode()
    told = mtmd.mtmd_input_text(words, len(words), add_special=True, parse_special=True)
    pointers = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
    chunks = mtmd.mtmd_input_chunks_init()
    code = mtmd.mtmd_tokenize(projector, chunks, ctypes.byref(told), pointers, len(bitmaps))
    assert code == 0
    end = lib.llama_pos()
    code = mtmd.mtmd_helper_eval_chunks(
        projector, context, chunks, 0, 0, 1024, True, ctypes.byref(end)
    )
    assert code == 0
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (size,)).astype(float)
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())
