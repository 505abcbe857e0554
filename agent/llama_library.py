"""What all modules over llama.cpp share: the library, its last words, the vocabulary.

llama.cpp reports why it refused something only in its log, on the thread that asked; so the last
messages are kept for each thread.
"""

import ctypes
import logging
import threading
from collections.abc import Mapping
from typing import Any

import llama_cpp.llama_cpp
import llama_cpp.mtmd_cpp

from common.ids import TokenId

log = logging.getLogger(__name__)

lib: Any = llama_cpp.llama_cpp  # its annotations name C types where ctypes returns plain numbers
mtmd: Any = llama_cpp.mtmd_cpp  # images; a library of its own over the other one

_ERROR_LEVELS = (3, 4)  # ggml's WARN and ERROR
_KEPT_MESSAGES = 20


class _Messages(threading.local):
    def __init__(self) -> None:
        self.last: list[str] = []


_messages = _Messages()


@lib.llama_log_callback
def _on_log(level: int, text: bytes, _user_data: object) -> None:
    if level in _ERROR_LEVELS:
        message = text.decode(errors="replace").strip()
        log.debug("llama.cpp: %s", message)
        _messages.last.append(message)
        del _messages.last[:-_KEPT_MESSAGES]


def start_library() -> None:
    """To be called before the first model is loaded; again does no harm."""
    lib.llama_log_set(_on_log, ctypes.c_void_p(0))
    mtmd.mtmd_log_set(_on_log, ctypes.c_void_p(0))
    lib.llama_backend_init()


def forget_messages() -> None:
    """So that ``because`` tells only of what this thread asks for from now on."""
    _messages.last.clear()


def because() -> str:
    """llama.cpp's last warning or error on this thread as the end of a sentence, or nothing."""
    return f": {_messages.last[-1]}" if _messages.last else ""


def tokenize(vocab: Any, text: str, *, add_special: bool) -> list[TokenId]:
    """With the names of special tokens recognised. ``vocab``: llama.cpp's handle; any thread."""
    data = text.encode(errors="replace")
    # A token covers at least one byte, but a tokenizer may put a space in front.
    capacity = len(data) + 8
    while True:
        tokens = (lib.llama_token * capacity)()
        count: int = lib.llama_tokenize(vocab, data, len(data), tokens, capacity, add_special, True)
        if count >= 0:
            return tokens[:count]
        capacity = -count  # a tokenizer that normalises can make text longer


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
        return tokenize(self._vocab, text, add_special=False)

    def piece(self, token: TokenId) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes(token, special=False)
        return piece

    def written(self, token: TokenId) -> bytes:
        return self._bytes(token, special=True)

    def pieces(self) -> list[bytes]:
        """Of all tokens; unlike ``piece`` it keeps nothing, and takes a moment."""
        return [self._bytes(TokenId(token), special=False) for token in range(self.size)]

    def is_end(self, token: TokenId) -> bool:
        return lib.llama_vocab_is_eog(self._vocab, token)

    def ends(self) -> list[TokenId]:
        """All tokens that end a generation."""
        return [TokenId(token) for token in range(self.size) if self.is_end(TokenId(token))]

    def control(self) -> list[TokenId]:
        """All tokens that are never text: control, unknown and unused ones."""
        silent = (
            lib.LLAMA_TOKEN_ATTR_CONTROL
            | lib.LLAMA_TOKEN_ATTR_UNKNOWN
            | lib.LLAMA_TOKEN_ATTR_UNUSED
        )
        attributes = lib.llama_vocab_get_attr
        return [TokenId(t) for t in range(self.size) if attributes(self._vocab, t) & silent]

    def suppressed(self) -> list[TokenId]:
        """The tokens that the model's file says must never be generated."""
        count = ctypes.c_int32()
        tokens = lib.llama_vocab_get_suppress_tokens(self._vocab, ctypes.byref(count))
        return [TokenId(tokens[n]) for n in range(count.value)]

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
