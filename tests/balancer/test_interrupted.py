import json
from typing import Any

import pytest

from balancer.interrupted import LastWords, WholeAnswer, last_words, whole_answer
from balancer.native_results import PYTHON_CLIENTS
from common.errors import ErrorCode, RequestError

LOST = RequestError(ErrorCode.BALANCER_LOST, "it is gone")
OPENAI_ERROR = {
    "message": "it is gone",
    "type": "server_error",
    "param": None,
    "code": "balancer_lost",
}
NATIVE = "/api/v1/continue_from_raw_prompt"
LINES = {"content-type": "application/json", "x-request-id": "r1"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


def words(path: str, answer: dict[str, str], user_agent: str = "") -> LastWords:
    found = last_words(path, answer=answer, user_agent=user_agent)
    assert found is not None
    return found


def read_events(text: bytes) -> list[tuple[str | None, Any]]:
    """Names and data of all whole events."""
    events: list[tuple[str | None, Any]] = []
    for block in text.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("event"), json.loads(fields["data"])))
    return events


def test_an_answer_that_has_not_begun_is_an_error_of_its_protocol_to_be_tried_again() -> None:
    assert whole_answer(NATIVE, LOST) == WholeAnswer(
        503,
        {
            "content-type": "text/plain; charset=utf-8",
            "retry-after": "5",
            "x-headrace-error": "balancer_lost",
        },
        b"it is gone\n",
    )
    told = whole_answer("/v1/chat/completions", LOST)
    assert told.status == 503
    assert told.headers == {"content-type": "application/json", "retry-after": "5"}
    assert json.loads(told.body) == {"error": OPENAI_ERROR}


@pytest.mark.parametrize("user_agent", ["curl/8", PYTHON_CLIENTS[0]])
def test_a_native_stream_ends_with_an_error_line_under_the_requests_name(user_agent: str) -> None:
    end = words(NATIVE, LINES, user_agent).end(LOST)

    error = {"code": 503, "description": "it is gone"}
    assert json.loads(end) == {"Error": {"request_id": "r1", "error": error}}
    assert end.endswith(b"\n")


def test_a_line_that_was_cut_is_closed_before_the_error() -> None:
    stream = words("/api/v1/generate_embedding_batch", LINES)
    stream.see(b'{"whole": 1}\n')
    assert not stream.end(LOST).startswith(b"\n")

    stream.see(b'{"cut": ')

    assert stream.end(LOST).startswith(b"\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_end_with_openais_error_and_not_as_if_complete(path: str) -> None:
    stream = words(path, EVENTS)
    stream.see(b'data: {"choices": []}\n\n')

    assert read_events(stream.end(LOST)) == [(None, {"error": OPENAI_ERROR})]


def test_an_event_that_was_cut_is_closed_before_the_error() -> None:
    for path in ("/v1/completions", "/v1/responses"):
        stream = words(path, EVENTS)
        stream.see(b'data: {"cho')

        assert stream.end(LOST).startswith(b"\n\n")


def test_a_responses_error_goes_on_with_the_numbers() -> None:
    stream = words("/v1/responses", EVENTS)
    stream.see(
        b'event: a\ndata: {"sequence_number":0}\n\nevent: b\ndata: {"sequence_number":1}\n\n'
    )
    stream.see(b": keep-alive\n\n")

    event = {
        "type": "error",
        "sequence_number": 2,
        "code": "balancer_lost",
        "message": "it is gone",
        "param": None,
    }
    assert read_events(stream.end(LOST)) == [("error", event)]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/chat/completions", {"content-type": "application/json", "content-length": "9"}),
        (NATIVE, LINES | {"content-length": "9"}),
        ("/api/v1/agents/stream", EVENTS),
        ("/metrics", {"content-type": "text/plain"}),
    ],
)
def test_what_has_no_word_for_an_error_can_only_be_cut(path: str, answer: dict[str, str]) -> None:
    assert last_words(path, answer=answer, user_agent="") is None
