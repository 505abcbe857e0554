"""The keys of those who may use the balancer, and for what. No I/O here.

Each key has a role: one for inference may not manage, and the other way round. A role for which
there is no key is open to everybody.
"""

import base64
import enum
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import ErrorCode, HeadraceError, RequestError

SHORTEST_KEY = 16
LONGEST_KEY = 512
"""In characters; a longer one would not fit a request's headers beside others."""

MOST_KEYS = 1000
"""Each request is compared with all."""


SUBPROTOCOL = "headrace"
"""Of a websocket that offers any: a browser wants one of those that it offers to be taken."""

KEY_SUBPROTOCOL = "headrace.key."


class Role(enum.StrEnum):
    INFERENCE = "inference"
    MANAGEMENT = "management"
    AGENT = "agent"


class KeysError(HeadraceError):
    """Its text never repeats a key."""


@dataclass(frozen=True, slots=True)
class _Digest:
    role: Role
    digest: bytes


class Keys:
    """Only sums of them are kept."""

    def __init__(self, keys: Iterable[tuple[Role, str]]) -> None:
        self._digests = [_Digest(role, _digest(key)) for role, key in keys]
        self._roles = {each.role for each in self._digests}

    @property
    def missing(self) -> tuple[Role, ...]:
        """The roles that are open to everybody."""
        return tuple(role for role in Role if role not in self._roles)

    def check(self, key: str | None, role: Role) -> None:
        """Raises ``RequestError`` if the role wants a key and this is none of its keys. It takes as
        long for any key.
        """
        if role not in self._roles:
            return
        given = _digest(key or "")
        fits = [hmac.compare_digest(given, each.digest) for each in self._digests]
        roles = {each.role for each, fit in zip(self._digests, fits, strict=True) if fit}
        if key is None:
            raise RequestError(
                ErrorCode.UNAUTHORIZED, f"a key for {role} is needed: Authorization: Bearer KEY"
            )
        if not roles:
            raise RequestError(ErrorCode.UNAUTHORIZED, "this key is not known")
        if role not in roles:
            raise RequestError(ErrorCode.FORBIDDEN, f"this key is not one for {role}")


OPEN = Keys([])
"""Everybody may do everything."""


def given_key(*, authorization: str | None, api_key: str | None = None) -> str | None:
    """The key in two headers of a request: ``Authorization: Bearer KEY``, or else ``X-API-Key: KEY``.

    None: there is none.
    """
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip() or None
    return (api_key or "").strip() or None


def key_in_subprotocols(offered: Iterable[str]) -> str | None:
    """The key that a browser shows, whose websockets have no headers of their own: beside
    ``SUBPROTOCOL`` it offers one more, in base64 for URLs without padding.
    """
    for name in offered:
        if name.startswith(KEY_SUBPROTOCOL):
            text = name.removeprefix(KEY_SUBPROTOCOL)
            try:
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode() or None
            except ValueError:
                return None
    return None


def read_keys(text: str) -> Keys:
    """``ROLE KEY`` in each line; a key alone is one for inference. Empty lines, and lines that begin
    with ``#``, do not count. Raises ``KeysError``.
    """
    return Keys((role or Role.INFERENCE, key) for role, key in _parse(text))


def first_key(text: str, role: Role) -> str:
    """What somebody with this role has to show: the first of its keys, or the first of a text in
    which none has a role. Raises ``KeysError`` if there is none.
    """
    keys = _parse(text)
    wanted = role if any(given for given, _ in keys) else None
    for given, key in keys:
        if given == wanted:
            return key
    raise KeysError(f"there is no key for {role} in it")


def write_keys(keys: Iterable[tuple[Role, str]]) -> str:
    """What ``read_keys`` reads."""
    return "".join(f"{role} {key}\n" for role, key in keys)


def _parse(text: str) -> list[tuple[Role | None, str]]:
    keys: list[tuple[Role | None, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        match line.split():
            case []:
                continue
            case [first, *_] if first.startswith("#"):
                continue
            case [key]:
                role = None
            case [name, key] if name in list(Role):
                role = Role(name)
            case [_, _]:
                roles = ", ".join(Role)
                raise KeysError(f"line {number} does not begin with one of {roles}")
            case _:
                raise KeysError(f"line {number} is not ROLE KEY")
        if not SHORTEST_KEY <= len(key) <= LONGEST_KEY or not (key.isascii() and key.isprintable()):
            raise KeysError(
                f"the key in line {number} is not {SHORTEST_KEY} to {LONGEST_KEY} ASCII characters "
                "without spaces"
            )
        keys.append((role, key))
        if len(keys) > MOST_KEYS:
            raise KeysError(f"there are more than {MOST_KEYS} keys in it")
    if not keys:
        raise KeysError("there is no key in it")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
