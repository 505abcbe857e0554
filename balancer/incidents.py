"""What went wrong lately, for operators: alike ones are one, with their number. No I/O here."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import STATUS, ErrorCode
from common.ids import RequestId

MOST_INCIDENTS = 50

QUOTING = {ErrorCode.NOT_SUPPORTED, ErrorCode.GRAMMAR_REJECTED}
"""Their messages may quote what a client or a model wrote, as those of clients' errors may."""


@dataclass(frozen=True, slots=True)
class Incident:
    at: float
    """Seconds since 1970, of the latest one."""
    code: ErrorCode
    message: str
    count: int
    request_id: RequestId | None
    """That of the latest one, if it was one's."""
    agent: str | None
    """The name of the one that it is about."""


class Incidents:
    def __init__(self) -> None:
        self._numbered: OrderedDict[int, Incident] = OrderedDict()
        self._numbers: dict[tuple[ErrorCode, str | None], int] = {}
        self._newest = 0

    @property
    def numbered(self) -> Mapping[int, Incident]:
        """Oldest first. One that happens again has a new number."""
        return self._numbered

    def add(
        self,
        code: ErrorCode,
        message: str | None = None,
        *,
        at: float,
        request_id: RequestId | None = None,
        agent: str | None = None,
    ) -> None:
        """``message``: fit for operators; see ``told``."""
        kind = (code, agent)
        before = self._numbers.pop(kind, None)
        count = 1 if before is None else self._numbered.pop(before).count + 1
        self._newest += 1
        self._numbers[kind] = self._newest
        self._numbered[self._newest] = Incident(at, code, message or "", count, request_id, agent)
        if len(self._numbered) > MOST_INCIDENTS:
            _, oldest = self._numbered.popitem(last=False)
            del self._numbers[oldest.code, oldest.agent]


def told(code: ErrorCode, message: str) -> str | None:
    """The part of a failure's message that operators may see: prompts and keys are not theirs."""
    return message if STATUS[code] >= 500 and code not in QUOTING else None
