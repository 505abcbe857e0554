"""Keeps a model that kills its process from being loaded again and again.

A note lies on the disk while a model is loaded. Who finds it at the next start knows how the last
one ended.
"""

import hashlib
import json
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import ModelError

log = logging.getLogger(__name__)

MOST_DEATHS = 2
"""One may be somebody's ``kill``."""


class Attempts:
    def __init__(self, folder: Path, agent: str) -> None:
        """``agent``: what tells it apart from others that share the folder."""
        self._note = folder / f"{hashlib.sha256(agent.encode()).hexdigest()}.json"

    def check(self, model: str) -> None:
        """``model``: all that makes a load the same. Raises ``ModelError`` if this process has died
        of it too often; the next time it may be tried again.
        """
        if self._deaths(model) >= MOST_DEATHS:
            self._remove()
            raise ModelError(f"the process ended {MOST_DEATHS} times while it was loaded")

    @contextmanager
    def noted(self, model: str) -> Generator[None]:
        """While it is loaded."""
        note = {"model": _digest(model), "deaths": self._deaths(model) + 1}
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(json.dumps(note))
        except OSError as error:
            log.warning("no note of the load can be made: %s", error)
        try:
            yield
        finally:
            self._remove()

    def _deaths(self, model: str) -> int:
        try:
            note = json.loads(self._note.read_text())
            return int(note["deaths"]) if note["model"] == _digest(model) else 0
        except (OSError, ValueError, LookupError, TypeError):
            return 0

    def _remove(self) -> None:
        with suppress(OSError):
            self._note.unlink(missing_ok=True)


def _digest(model: str) -> str:
    return hashlib.sha256(model.encode()).hexdigest()
