"""What a client is told in place of an answer, or of the rest of one that was interrupted, in the words
of its protocol.

The rest is for whoever holds the client's connection when the balancer itself has gone: it saw the
answer pass. No I/O here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from balancer.native_results import Teller, dialect
from balancer.openai_errors import RETRY_AFTER, refusal
from balancer.server_events import data, named
from common.errors import STATUS, RequestError

ERROR_CODE = "x-headrace-error"
"""The header that tells a program which error it is, where the body is for people."""

SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


def whole_answer(path: str, error: RequestError) -> WholeAnswer:
    """To a request whose answer has not begun."""
    if path.startswith("/v1/"):
        told = refusal(error)
        headers = {"content-type": "application/json", **told.headers}
        return WholeAnswer(told.status, headers, msgspec.json.encode(told.body))
    status = STATUS[error.code]
    headers = {"content-type": "text/plain; charset=utf-8", ERROR_CODE: str(error.code)}
    if status in RETRY_AFTER:
        headers["retry-after"] = str(RETRY_AFTER[status])
    return WholeAnswer(status, headers, f"{error.message}\n".encode())


class LastWords(Protocol):
    """Of one answer, which comes in pieces."""

    def see(self, piece: bytes, /) -> None:
        """This was sent."""
        ...

    def end(self, error: RequestError, /) -> bytes:
        """What ends the answer after what was sent."""
        ...


def last_words(path: str, *, answer: Mapping[str, str], user_agent: str) -> LastWords | None:
    """``answer``: the headers, in lower case, with which it has begun. None: it is of a kind that
    has no word for an error, and can only be cut.
    """
    if "content-length" in answer:
        return None
    kind = answer.get("content-type", "").partition(";")[0]
    if path.startswith("/v1/") and kind == "text/event-stream":
        return _EventsEnd() if path == "/v1/responses" else _ChunksEnd()
    if path.startswith("/api/v1/") and kind == "application/json":
        return _LinesEnd(Teller(answer.get("x-request-id", ""), dialect(user_agent)))
    return None


class _LinesEnd:
    """As our own protocol has it."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._is_whole = True

    def see(self, piece: bytes) -> None:
        self._is_whole = piece.endswith(b"\n")

    def end(self, error: RequestError) -> bytes:
        message = self._teller.failure(None, error.code, error.message)
        return (b"" if self._is_whole else b"\n") + msgspec.json.encode(message) + b"\n"


class _ChunksEnd:
    """As chats and completions have it."""

    def __init__(self) -> None:
        self._is_whole = True

    def see(self, piece: bytes) -> None:
        self._is_whole = piece.endswith(b"\n\n")

    def end(self, error: RequestError) -> bytes:
        return (b"" if self._is_whole else b"\n\n") + data(refusal(error).body)


class _EventsEnd:
    """As responses have it: an event of its own, for the response as far as it had come is lost."""

    def __init__(self) -> None:
        self._is_whole = True
        self._numbered = b""

    def see(self, piece: bytes) -> None:
        self._is_whole = piece.endswith(b"\n\n")
        if b'"sequence_number":' in piece:
            self._numbered = piece

    def end(self, error: RequestError) -> bytes:
        numbers = SEQUENCE_NUMBER.findall(self._numbered)
        told = refusal(error).body["error"]
        event = {
            "type": "error",
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
            "code": told["code"],
            "message": told["message"],
            "param": told["param"],
        }
        return (b"" if self._is_whole else b"\n\n") + named([event])
