"""How far llama.cpp is inside a pass, without its help.

On CPUs it asks after each node of a graph whether to go on, by ``bool (*)(void *)``. To ask Python
thousands of times a pass would take too long; but ``sem_post`` of the C library has this very shape:
it adds one to a semaphore and returns 0, which is llama.cpp's word for going on.
"""

import ctypes
import sys
from typing import Any

from agent.llama_library import lib

_ROOM = ctypes.c_long * 16
"""More than a ``sem_t`` takes anywhere."""


class NodeCounter:
    """For contexts of one thread. On systems where it is not known to work it stays at 0."""

    def __init__(self) -> None:
        self._semaphore = _ROOM()
        self._libc: Any = None
        # macOS has the functions, but no semaphores without names: ``sem_post`` would fail there,
        # and so say that the pass is to be aborted.
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            if libc.sem_init(self._semaphore, 0, 0) == 0:
                self._libc = libc

    def count_for(self, params: Any) -> None:
        """Have a context that is opened with these count. This must outlive the context."""
        if self._libc is not None:
            address = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value
            params.abort_callback = lib.ggml_abort_callback(address)
            params.abort_callback_data = ctypes.addressof(self._semaphore)

    def start_over(self) -> None:
        """Before each pass, on the contexts' thread: at 2^31 a semaphore is full, and says so."""
        if self._libc is not None:
            self._libc.sem_init(self._semaphore, 0, 0)

    @property
    def value(self) -> int:
        """How many nodes the present pass has computed, or the latest. From any thread."""
        if self._libc is None:
            return 0
        value = ctypes.c_int()
        self._libc.sem_getvalue(self._semaphore, ctypes.byref(value))
        return value.value
