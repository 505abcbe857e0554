"""Images for a llama.cpp model, by its library mtmd (``tools/mtmd/mtmd.h``) and a projector's file.

A projector has a context and a compute graph of its own and only reads the model's vocabulary, so
images are encoded on other threads while the model decodes. It encodes one at a time.
"""

import ctypes
import hashlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from agent.engine import ImageRun, MixedPrompt, Picture
from agent.llama_library import because, forget_messages, lib, mtmd
from common.errors import ErrorCode, ProjectorError, RequestError
from common.ids import TokenId

M_ROPE_SECTIONS = 4
"""Positions of each token of an image where the model's positions have several dimensions."""
MOST_KEPT_BYTES = 64 * 2**20
"""Of the embeddings of images that no request has any more: encoding takes much longer than reading
them again.
"""

_PartPointer = cast("Any", ctypes.POINTER(mtmd.mtmd_input_part))


@dataclass(frozen=True, slots=True)
class LlamaEncoding:
    """See ``agent.engine.Encoding``."""

    embeddings: NDArray[np.float32]
    """One row for each token, as wide as the model's input."""
    positions: NDArray[np.int32] | None
    """``M_ROPE_SECTIONS`` rows with a position for each token; None: they are counted on."""
    next_position: int
    """Where the text goes on behind it."""


class _NoPicture:
    """A size only."""

    size = (2048, 1024)

    def pixels(self) -> bytes:
        raise AssertionError("only its size is asked for")


class LlamaVision:
    def __init__(
        self, path: str, model: Any, *, threads: int, longest_run: int, use_gpu: bool
    ) -> None:
        """Raises ``ProjectorError``. ``model``: llama.cpp's handle, to be freed after this."""
        self.longest_run = longest_run
        self._lock = threading.Lock()
        self._width: int = lib.llama_model_n_embd_inp(model)
        self._known: WeakValueDictionary[bytes, NDArray[np.float32]] = WeakValueDictionary()
        """By digest: those of requests that are not over, which share them, and the latest ones."""
        self._latest: dict[bytes, NDArray[np.float32]] = {}
        """Least recently used first."""
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = use_gpu
        params.n_threads = threads
        params.print_timings = False
        forget_messages()
        self._handle: Any = mtmd.mtmd_init_from_file(path.encode(), model, params)
        if self._handle is None:
            raise ProjectorError(f"{path} could not be loaded{because()}")
        if not mtmd.mtmd_support_vision(self._handle):
            self.close()
            raise ProjectorError(f"{path} is not for images")
        self.is_divisible: bool = not mtmd.mtmd_decode_use_non_causal(self._handle, None)
        """May an image be fed in parts? Not if its tokens attend to those behind them."""
        self._uses_m_rope: bool = mtmd.mtmd_decode_use_mrope(self._handle)
        if not self._fits_vocabulary():
            self.close()
            raise ProjectorError(f"{path} needs tokens that the model does not have")

    def _fits_vocabulary(self) -> bool:
        """mtmd puts special tokens around an image and its pieces, or -1 if there is none of that
        name; seen in an image that is large enough to be cut in pieces.
        """
        with self._chunks(["", ""], [_NoPicture()]) as chunks:
            return all(token >= 0 for chunk in chunks for token in _text_tokens(chunk))

    def close(self) -> None:
        """Waits for the image that is being encoded; later ones are refused."""
        with self._lock:
            self._latest.clear()
            if self._handle is not None:
                mtmd.mtmd_free(self._handle)
                self._handle = None

    def read(
        self,
        texts: Sequence[str],
        pictures: Sequence[Picture],
        *,
        proceed: Callable[[int], None],
    ) -> MixedPrompt:
        """See ``agent.engine.Vision``.

        First all is counted, with images of which mtmd is told the size only. Then the images are
        read and encoded one after the other, so that only one is there in full at any time.
        """
        tokens: list[TokenId] = []
        with self._chunks(texts, pictures) as chunks:
            for chunk in chunks:
                tokens += _text_tokens(chunk)
            for chunk in filter(_is_image, chunks):
                self._check_length(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        runs: list[ImageRun] = []
        for n, picture in enumerate(pictures):
            proceed(len(tokens))  # before its pixels are read, and before each piece is encoded
            pixels = picture.pixels()
            digest = hashlib.sha256(f"{picture.size}".encode() + pixels).digest()
            with self._chunks(texts, pictures, shown=(n, pixels)) as chunks:
                start = position = 0
                pieces = 0
                for chunk in chunks:
                    length: int = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
                    if _is_image(chunk) and mtmd.mtmd_input_chunk_get_id(chunk) == b"%d" % n:
                        key = hashlib.sha256(digest + b"%d %d" % (pieces, length)).digest()
                        proceed(len(tokens))
                        encoding = self._encode(chunk, key, position)
                        runs.append(ImageRun(start, length, encoding, self.is_divisible))
                        tokens[start : start + length] = _pseudo_tokens(key, length)
                        pieces += 1
                    start += length
                    position += mtmd.mtmd_input_chunk_get_n_pos(chunk)
        return MixedPrompt(tokens, tuple(runs))

    def _check_length(self, length: int) -> None:
        if length > self.longest_run:
            raise RequestError(
                ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE,
                f"an image has {length} tokens; n_batch allows {self.longest_run}",
                {"image_tokens": length, "n_batch": self.longest_run},
            )

    @contextmanager
    def _chunks(
        self,
        texts: Sequence[str],
        pictures: Sequence[Picture],
        *,
        shown: tuple[int, bytes] | None = None,
    ) -> Generator[list[Any]]:
        """mtmd's chunks of the prompt: text, and pieces of images, by the image's number as their id.

        ``shown``: the number of the only image of which more than the size is told, and its pixels.
        """
        bitmaps: list[Any] = []
        output = mtmd.mtmd_input_chunks_init()
        try:
            for n, picture in enumerate(pictures):
                pixels = None
                if shown is not None and n == shown[0]:
                    pixels = (ctypes.c_uint8 * len(shown[1])).from_buffer_copy(shown[1])
                bitmaps.append(mtmd.mtmd_bitmap_init(*picture.size, pixels))
                mtmd.mtmd_bitmap_set_id(bitmaps[-1], b"%d" % n)
            parts, pointers = _parts(texts, bitmaps)
            with self._lock:
                handle = self._open_handle()
                forget_messages()
                code: int = mtmd.mtmd_tokenize_from_parts(
                    handle, output, pointers, len(parts), False
                )
            if code != 0:
                raise RequestError(
                    ErrorCode.IMAGE_DECODING_FAILED,
                    f"an image is not what the model can see{because()}",
                )
            count: int = mtmd.mtmd_input_chunks_size(output)
            yield [mtmd.mtmd_input_chunks_get(output, n) for n in range(count)]
        finally:
            for bitmap in bitmaps:
                mtmd.mtmd_bitmap_free(bitmap)
            mtmd.mtmd_input_chunks_free(output)

    def _encode(self, chunk: Any, key: bytes, position: int) -> LlamaEncoding:
        with self._lock:
            handle = self._open_handle()
            embeddings = self._known.get(key)
            if embeddings is None:
                embeddings = self._known[key] = self._compute(handle, chunk)
            self._keep(key, embeddings)
        return LlamaEncoding(
            embeddings,
            _positions(chunk, position) if self._uses_m_rope else None,
            position + mtmd.mtmd_input_chunk_get_n_pos(chunk),
        )

    def _keep(self, key: bytes, embeddings: NDArray[np.float32]) -> None:
        """For the next turn of the conversation, which has the same image in it."""
        self._latest.pop(key, None)
        self._latest[key] = embeddings
        size = sum(each.nbytes for each in self._latest.values())
        while size > MOST_KEPT_BYTES:
            oldest = next(iter(self._latest))
            size -= self._latest.pop(oldest).nbytes

    def _compute(self, handle: Any, chunk: Any) -> NDArray[np.float32]:
        forget_messages()
        if mtmd.mtmd_encode_chunk(handle, chunk) != 0:
            raise RequestError(
                ErrorCode.DECODE_FAILED, f"llama.cpp could not encode an image{because()}"
            )
        shape = (mtmd.mtmd_input_chunk_get_n_tokens(chunk), self._width)
        # mtmd's own memory, valid until the next image.
        return np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(handle), shape).copy()

    def _open_handle(self) -> Any:
        if self._handle is None:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the model has been unloaded")
        return self._handle


def check_projector(path: str) -> None:
    """What can be told without loading it. Raises ``ProjectorError``."""
    try:
        with Path(path).open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ProjectorError(f"{path} could not be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ProjectorError(f"{path} is no GGUF file")


def _parts(texts: Sequence[str], bitmaps: Sequence[Any]) -> tuple[list[Any], Any]:
    """And an array of pointers to them, which does not keep them."""
    parts: list[Any] = []
    for n, text in enumerate(texts):
        data = text.encode(errors="replace")
        told = mtmd.mtmd_input_text(data, len(data), add_special=False, parse_special=True)
        parts.append(mtmd.mtmd_input_part(text=ctypes.pointer(told)))
        if n < len(bitmaps):
            parts.append(mtmd.mtmd_input_part(bitmap=bitmaps[n]))
    return parts, (_PartPointer * len(parts))(*(ctypes.pointer(part) for part in parts))


def _is_image(chunk: Any) -> bool:
    return mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE


def _text_tokens(chunk: Any) -> list[TokenId]:
    """Of an image none are known yet: so many zeros."""
    count = ctypes.c_size_t(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
    if _is_image(chunk):
        return [TokenId(0)] * count.value
    tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
    return tokens[: count.value]


def _pseudo_tokens(key: bytes, length: int) -> list[TokenId]:
    """Negative, and with 128 bits of the key, so that nobody finds another image with the same."""
    first = int.from_bytes(key[:16])
    return [TokenId(-1 - first - n) for n in range(length)]


def _positions(chunk: Any, position: int) -> NDArray[np.int32]:
    """``position``: of the piece's first token."""
    image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
    length: int = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
    positions = np.zeros((M_ROPE_SECTIONS, length), np.int32)
    for n in range(length):
        at = mtmd.mtmd_image_tokens_get_decoder_pos(image, position, n)
        positions[:, n] = at.t, at.y, at.x, at.z  # in this order, as in mtmd-helper-common.h
    return positions
