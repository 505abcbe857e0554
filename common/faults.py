"""A fault of ours, for the log: what and where, without its text, which may quote a client's words."""

import traceback
from collections.abc import Iterator

MOST_FRAMES = 6
"""The innermost ones."""


def fault(error: BaseException) -> str:
    """In one line: ``KeyError at prompt.py:120 < service.py:390, from ValueError at ...``."""
    return ", from ".join(_place(each) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    last: BaseException | None = error
    while last is not None and id(last) not in seen:
        seen.add(id(last))
        yield last
        last = last.__cause__ or (None if last.__suppress_context__ else last.__context__)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames)]
    return f"{type(error).__name__} at {' < '.join(places) or 'no place'}"
