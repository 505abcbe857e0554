"""The tokens that can win: found by numpy, and given to llama.cpp's samplers alone.

Whatever the samplers do first, they pick from what is found here the same token as from the whole
vocabulary.
"""

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.llama_library import lib
from common.errors import ErrorCode, RequestError
from common.ids import TokenId

Row = NDArray[np.float32]
"""The logits of one output, one entry a token of the vocabulary."""

Ids = NDArray[np.intp]

LARGEST_LOGIT = 1e30
"""Above it a row is not to be trusted, and penalties could make infinities of it."""

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
CANDIDATE_POINTER: Any = lib.llama_token_data_p


class Candidates:
    """The array that a chain works on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._data = np.empty(size, dtype=CANDIDATE)
        self._all = np.arange(size, dtype=np.int32)
        self._pointer: Any = ctypes.cast(self._data.ctypes.data, CANDIDATE_POINTER)
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


def largest_of(row: Row) -> float:
    """Raises ``RequestError`` if there is anything that is no number: llama.cpp's sorting would
    leave its array.
    """
    largest = float(row.max())
    if not largest < LARGEST_LOGIT:  # neither is NaN
        raise RequestError(ErrorCode.DECODE_FAILED, "the model's logits are not numbers")
    return largest


def likeliest_of(row: Row, others: Ids) -> TokenId:
    """Of all but the others."""
    values = row[others]
    row[others] = -np.inf
    likeliest = int(row.argmax())
    largest = row[likeliest]
    row[others] = values
    largest_of(largest)
    return TokenId(likeliest)


def largest_and(row: Row, others: Ids, *, count: int) -> Ids:
    """The tokens with the largest logits, so many at least, and the others; in ascending order."""
    values = row[others]
    row[others] = -np.inf
    try:
        bound = lower_bound(row, count)
        row[others] = np.inf
        return np.flatnonzero(row >= bound if bound > -np.inf else row > bound)
    finally:
        row[others] = values


def likely_and(row: Row, others: Ids, *, least: float) -> Ids:
    """The tokens that are at least so likely as the likeliest, in parts of it, and the others."""
    values = row[others]
    row[others] = -np.inf
    try:
        largest = largest_of(row)
        # llama.cpp computes the bound in single precision: rather one token too many.
        bound = largest + math.log(least) - 1e-5 * max(1.0, abs(largest))
        row[others] = np.inf
        return np.flatnonzero(row >= np.float32(bound) if largest > -np.inf else row > largest)
    finally:
        row[others] = values


def lower_bound(row: Row, count: int) -> np.float32:
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
    largest_of(largest)
    return np.partition(largest, largest.size - count)[largest.size - count]
