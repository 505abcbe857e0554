"""One line for each record, whatever is in it."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ErrorCode
from deploy.logs import FILE_VARIABLE, VARIABLE, LogFormat, formatter, told_format

FORGED = "gone\n2026-01-01 00:00:00,000 INFO headrace.audit action=drain\x1b[2J\u2028\x9b"


def record(template: str, *arguments: object, error: BaseException | None = None) -> Any:
    told = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("a.logger", logging.INFO, "a.py", 1, template, arguments, told)
    made.created, made.msecs = 1_792_000_000.25, 250.0
    return made


def as_json(template: str, *arguments: object, error: BaseException | None = None) -> Any:
    line = formatter(LogFormat.JSON).format(record(template, *arguments, error=error))
    assert line.isprintable()
    return json.loads(line)


def plain(template: str, *arguments: object, error: BaseException | None = None) -> str:
    return formatter(LogFormat.PLAIN).format(record(template, *arguments, error=error))


def raised(make: Callable[[], BaseException]) -> BaseException:
    try:
        raise make()
    except BaseException as error:
        return error


def test_what_a_line_is_about_becomes_fields() -> None:
    assert as_json("request_id=%s agent_id=%s dispatched", "r1", "a1") == {
        "time": "2026-10-14T17:46:40.250Z",
        "level": "INFO",
        "logger": "a.logger",
        "message": "request_id=r1 agent_id=a1 dispatched",
        "request_id": "r1",
        "agent_id": "a1",
    }


@pytest.mark.parametrize(
    ("template", "arguments", "fields"),
    [
        ("agent=%s has ended: %s", ("a b=c", "why"), {"agent": "a b=c"}),
        ("action=drain wait=%g of=%d x", (1.5, 3), {"action": "drain", "wait": 1.5, "of": 3}),
        ("request_id=%s: a fault", ("r",), {"request_id": "r"}),
        ("code=%s name=%s", (ErrorCode.NO_AGENTS, None), {"code": "no_agents", "name": None}),
        ("rate=%s", (float("nan"),), {"rate": "nan"}),
        ("linked to %s, key=%s", ("x", "y"), {}),
        ("nothing=", (), {}),
    ],
)
def test_values_are_exact(
    template: str, arguments: tuple[object, ...], fields: dict[str, object]
) -> None:
    told = as_json(template, *arguments)

    for name in ("time", "level", "logger", "message"):
        del told[name]
    assert told == fields


def test_a_field_cannot_take_the_place_of_ours() -> None:
    assert as_json("level=%s logger=%s", "x", "y")["level"] == "INFO"


def test_the_first_line_of_a_text_is_the_only_one() -> None:
    line = plain("agent=%s left: %s", "a", FORGED)

    assert line.isprintable()
    assert "\\n2026-01-01" in line
    assert as_json("agent=%s left: %s", FORGED, "why")["agent"] == FORGED


def test_a_traceback_cannot_be_taken_for_lines_of_the_log() -> None:
    error = raised(lambda: ValueError(FORGED))

    head, *rest = plain("request_id=%s broke", "r", error=error).split("\n")

    assert head.endswith("request_id=r broke")
    assert len(rest) > 3
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert "ValueError: gone" in as_json("broke", error=error)["exception"]


def test_names_that_cannot_be_encoded_are_told_all_the_same() -> None:
    assert "\\udce9" in plain("agent=%s", "caf\udce9")
    assert as_json("agent=%s", "caf\udce9")["agent"] == "caf\udce9"


def test_the_environment_may_say_the_format() -> None:
    assert told_format({}) is LogFormat.PLAIN
    assert told_format({VARIABLE: "json"}) is LogFormat.JSON
    assert told_format({VARIABLE: "xml"}) is LogFormat.PLAIN


def test_lines_of_others_are_records_too() -> None:
    others = logging.LogRecord("x", logging.INFO, "a.py", 1, {"not": "text"}, None, None)
    told = json.loads(formatter(LogFormat.JSON).format(others))
    named = logging.LogRecord("x", logging.INFO, "a.py", 1, "a=%(a)s", ({"a": 1},), None)

    assert told["message"] == "{'not': 'text'}"
    assert json.loads(formatter(LogFormat.JSON).format(named))["message"] == "a=1"


LINE = "import logging; from deploy.logs import *; set_up(LogFormat.JSON); logging.info('here')"


def logging_process(file: Path) -> str:
    """What it says on standard error."""
    environment = {**os.environ, FILE_VARIABLE: str(file)}
    command = [sys.executable, "-c", LINE]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stderr


def test_processes_add_their_lines_to_one_file(tmp_path: Path) -> None:
    said = logging_process(tmp_path / "log") + logging_process(tmp_path / "log")

    assert (tmp_path / "log").read_text() == said
    assert [json.loads(line)["message"] for line in said.splitlines()] == ["here", "here"]


def test_a_log_that_cannot_be_written_is_said_and_does_no_harm(tmp_path: Path) -> None:
    said = logging_process(tmp_path / "nowhere" / "log").splitlines()

    assert json.loads(said[0])["message"].startswith("no line can be added to the file of the log")
    assert json.loads(said[1])["message"] == "here"
