"""The keys of those who may ask for inference. No I/O here."""

import hashlib
import hmac
from collections.abc import Iterable

from common.errors import HeadraceError

SHORTEST_KEY = 16
"""In characters."""


class KeysError(HeadraceError):
    """Its text never repeats a key."""


class Keys:
    """Only sums of them are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def allow(self, authorization: str | None) -> bool:
        """``authorization``: a request's header, ``Bearer KEY``. It takes as long for any key."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(fits)


def read_keys(text: str) -> Keys:
    """One a line; empty lines and what follows a ``#`` at the beginning do not count. Raises
    ``KeysError``.
    """
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise KeysError("there is no key in it")
    for number, line in enumerate(lines, 1):
        if line in keys and (len(line) < SHORTEST_KEY or not line.isascii() or " " in line):
            raise KeysError(
                f"the key in line {number} is not {SHORTEST_KEY} or more ASCII characters "
                "without spaces"
            )
    return Keys(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
