"""Where the operator's wishes are kept, so that they outlive the balancer.

``memory://`` forgets them; ``file:///PATH`` is one JSON file, written whole and put in place of the
old one in one act, so that whatever ends the process leaves the one or the other.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from balancer.stored_state import StoredState
from common.errors import HeadraceError


class StateError(HeadraceError):
    """What is kept cannot be read or written; the text says what the operator can do."""


class StateStore(Protocol):
    """Its methods block."""

    def load(self) -> StoredState | None:
        """None: nothing was kept yet. Raises ``StateError``."""
        ...

    def save(self, state: StoredState, /) -> None:
        """Raises ``StateError``; then what was kept before is kept still."""
        ...


def open_store(url: str) -> StateStore:
    """Raises ``StateError`` if the address is not one of a store."""
    if url == "memory://":
        return MemoryStore()
    parts = urlsplit(url)
    is_path_only = not (parts.netloc or parts.query or parts.fragment)
    if url.startswith("file:///") and is_path_only and len(parts.path) > 1:
        return FileStore(Path(unquote(parts.path)))
    raise StateError(f"{url!r} is neither memory:// nor file:///PATH")


class MemoryStore:
    def load(self) -> StoredState | None:
        return None

    def save(self, state: StoredState, /) -> None:
        pass


class FileStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = path.with_name(f".{path.name}.new")
        """Beside it, since only inside a file system is a file put in another's place in one act."""

    def load(self) -> StoredState | None:
        with suppress(OSError):
            self._new.unlink()  # of a balancer that was ended while it wrote
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"{self._path} cannot be read: {error.strerror}") from error
        if not text.strip():
            return None
        try:
            state = StoredState.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"])) or "the file"
            raise StateError(
                f"{self._path} is not a desired state ({where}: {problem['msg']}); "
                "mend it or move it away"
            ) from error
        # The published format does not say when, but somebody has put it.
        return state if state.latest else state.put(*state.parts, at=1)

    def save(self, state: StoredState, /) -> None:
        text = state.model_dump_json(by_alias=True, indent=2) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._new.unlink(missing_ok=True)  # of another one, ended since this one has begun
            # Addresses of models may have keys in them.
            with open(self._new, "x", encoding="utf-8", opener=_for_the_owner_only) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self._new.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with suppress(OSError):
                self._new.unlink(missing_ok=True)
            raise StateError(f"{self._path} cannot be written: {error.strerror}") from error


def _for_the_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)
