"""What observers are told: a state of named parts, whose changes have numbers.

An observer says which number it saw last, and is told what is different now. So one that is slow
misses what lay between, and nothing is kept for anybody: all of them together cost one state. No
I/O here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

Part: TypeAlias = tuple[str, str]
"""A section and a key in it."""

State: TypeAlias = Mapping[str, Mapping[str, bytes]]
"""Each part as JSON text, by section and key."""

MOST_REMOVALS = 4096
"""Removed parts that are remembered: who has missed more begins anew."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell, as server-sent events have it."""

    name: str
    number: int
    """Of what the observer knows then."""
    text: bytes
    """JSON: keys and their values by section; null: it is no more."""


class Board:
    def __init__(self) -> None:
        self.number = 0
        self._parts: dict[Part, bytes] = {}
        self._changes: OrderedDict[Part, int] = OrderedDict()
        """When each part was changed or removed, latest last."""
        self._removed: OrderedDict[Part, int] = OrderedDict()
        self._forgotten = 0
        """The number of the latest removal that is not remembered."""
        self._sections: tuple[str, ...] = ()
        self._told: dict[int | None, Event] = {}
        """What was told lately, by what its observers knew: most of them know the same."""

    def update(self, state: State) -> bool:
        """True: something is different."""
        self._sections = tuple(state)
        parts = {
            (section, key): text for section, its in state.items() for key, text in its.items()
        }
        changed = [part for part, text in parts.items() if self._parts.get(part) != text]
        removed = [part for part in self._parts if part not in parts]
        if not changed and not removed:
            return False
        self.number += 1
        self._told.clear()
        self._parts = parts
        for part in (*changed, *removed):
            self._changes[part] = self.number
            self._changes.move_to_end(part)
        for part in removed:
            self._removed[part] = self.number
            self._removed.move_to_end(part)
        for part in changed:
            self._removed.pop(part, None)
        while len(self._removed) > MOST_REMOVALS:
            part, self._forgotten = self._removed.popitem(last=False)
            del self._changes[part]
        return True

    def since(self, number: int | None) -> Event | None:
        """What is different for who knows the state of this number. None: nothing. Who knows none, or
        one that is too old, is told all.
        """
        if number == self.number:
            return None
        known = None if number is None or not self._forgotten <= number < self.number else number
        if known not in self._told:
            self._told[known] = self._snapshot() if known is None else self._difference(known)
        return self._told[known]

    def _snapshot(self) -> Event:
        return Event("snapshot", self.number, self._text(self._parts))

    def _difference(self, number: int) -> Event:
        parts: list[Part] = []
        for part in reversed(self._changes):
            if self._changes[part] <= number:
                break
            parts.append(part)
        return Event("change", self.number, self._text(reversed(parts), only=True))

    def _text(self, parts: Iterable[Part], *, only: bool = False) -> bytes:
        """``only``: leave out sections of which there is nothing."""
        sections: dict[str, list[bytes]] = {} if only else {name: [] for name in self._sections}
        for section, key in parts:
            text = self._parts.get((section, key), b"null")
            sections.setdefault(section, []).append(_json(key) + b":" + text)
        told = (
            _json(name) + b":{" + b",".join(entries) + b"}" for name, entries in sections.items()
        )
        return b"{" + b",".join(told) + b"}"


_json = msgspec.json.encode
