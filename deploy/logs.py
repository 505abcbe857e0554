"""The log of each process of ours: one line for each record, plain or as JSON.

What is logged may come from anybody (a client's words, a server's answer): in neither format can it
make a second line, or one that looks like another's. Little is imported here, see ``deploy.keeper``.
"""

import enum
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger(__name__)


class LogFormat(enum.StrEnum):
    PLAIN = "plain"
    JSON = "json"


VARIABLE = "HEADRACE_LOG_FORMAT"
FILE_VARIABLE = "HEADRACE_LOG_FILE"
"""Of the environment. All processes add their lines to the one file."""

PLAIN = "%(asctime)s %(levelname)s %(name)s %(message)s"

PAIR = re.compile(r"([a-z_]+)=(?:(%[^\s%]*?[a-z])|([^\s%]+))(?=[\s:;,]|$)[:;,]? ?")
"""What a line of ours begins with, in its template: ``key=%s key=value ...``."""


def set_up(log_format: LogFormat, level: int = logging.INFO) -> None:
    """Of this process, on standard error and in the file that the environment names, unless that has
    been done.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    complaint = None
    if file := os.environ.get(FILE_VARIABLE):
        try:
            handlers.append(logging.FileHandler(file, encoding="utf-8"))
        except OSError as error:
            complaint = error
    for handler in handlers:
        handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level, handlers=handlers)
    if complaint is not None:
        log.warning("no line can be added to the file of the log: %s", complaint)


def told_format(environment: Mapping[str, str]) -> LogFormat:
    """As the environment says; plain if it says what nobody knows."""
    told = environment.get(VARIABLE)
    return LogFormat(told) if told in list(LogFormat) else LogFormat.PLAIN


def formatter(log_format: LogFormat) -> logging.Formatter:
    return JsonFormatter() if log_format is LogFormat.JSON else PlainFormatter(PLAIN)


class PlainFormatter(logging.Formatter):
    """For people. Only a traceback has lines of its own, which begin with blanks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


class JsonFormatter(logging.Formatter):
    """For programs: an object with ``time`` (RFC 3339), ``level``, ``logger``, ``message``, the pairs
    that the line begins with, and ``exception`` if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in pairs(record):
            told.setdefault(name, value)
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            told["stack"] = record.stack_info
        return json.dumps(told, default=str)


def pairs(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """What the line begins with, ``key=value ...``, from its template: a value may have blanks in it."""
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple):
        return
    values = iter(record.args)
    position = 0
    while match := PAIR.match(record.msg, position):
        name, place, literal = match.groups()
        yield name, literal if place is None else _plain_value(next(values, None))
        position = match.end()


def printable(text: str) -> str:
    """With escapes for all that could move a terminal's cursor, or begin another line."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _plain_value(value: object) -> object:
    """As JSON has it, if it has it."""
    match value:
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case _:
            return str(value)


def _indented(text: str) -> str:
    return "\n".join(f"  {printable(line)}" for line in text.splitlines())
