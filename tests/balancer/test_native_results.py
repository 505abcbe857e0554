"""What clients are sent. The messages as they travel stand in ``golden/``: those of the published
format, and those that differ for clients which do not know all of it.
"""

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answers import content

from balancer.native_requests import GenerateEmbeddingBatchParams, InputDocument
from balancer.native_results import MOST_NAMED, Dialect, Teller, dialect, mode_notification
from common.errors import ErrorCode
from common.ids import RequestId, TokenId
from common.messages import (
    DocumentFailed,
    DocumentTooLong,
    Embedded,
    Event,
    Failed,
    Finished,
    FinishReason,
    Logprobs,
    Pooling,
    Segment,
    TokenClass,
    TokenGenerated,
    TokenLogprob,
    ToolCall,
    ToolCallFormatUnknown,
    ToolCallsEnded,
    ToolCallsInvalid,
    ToolCallsParsed,
    ToolCallsUnreadable,
    Usage,
)

FOLDER = Path(__file__).parent / "golden"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "results.json").read_text())
FOR_PYTHON: dict[str, Any] = json.loads((FOLDER / "results_python_client.json").read_text())

R = RequestId("ours")
USAGE = Usage(12, 3, 4, 5, 6, 7)
PARAMS = GenerateEmbeddingBatchParams(
    input_batch=(InputDocument(content="x", id="d1"),), normalization_method="L2"
)


def token(*segments: tuple[TokenClass, str]) -> TokenGenerated:
    return TokenGenerated(R, TokenId(1), tuple(Segment(*segment) for segment in segments))


EVENTS: dict[str, Event] = {
    "content": token((TokenClass.CONTENT, "Hi")),
    "reasoning": token((TokenClass.REASONING, "Hm")),
    "tool call": token((TokenClass.TOOL_CALL, '{"a"')),
    "undeterminable": token((TokenClass.UNDETERMINABLE, "[")),
    "two classes in one token": token((TokenClass.REASONING, "so."), (TokenClass.CONTENT, "Yes")),
    "nothing to show yet": token(),
    "done": Finished(R, FinishReason.STOP, USAGE),
    "done with a tail": Finished(R, FinishReason.LENGTH, USAGE, content("<thi")),
    "cancelled": Finished(R, FinishReason.CANCELLED, USAGE, content("<thi")),
    "parsed tool calls": ToolCallsEnded(
        R,
        ToolCallsParsed(
            (
                ToolCall(
                    "call_1", "get_weather", '{"city": "Paris",\n"digits": 12345678901234567890}'
                ),
                ToolCall("call_2", "now", "{now", is_json=False),
            )
        ),
    ),
    "tool calls that cannot be read": ToolCallsEnded(R, ToolCallsUnreadable("no name")),
    "tool calls that are not valid": ToolCallsEnded(
        R, ToolCallsInvalid(("unknown tool", "city is missing"))
    ),
    "tool calls of an unknown format": ToolCallsEnded(
        R, ToolCallFormatUnknown("[f()]", "not known")
    ),
    "chat template error": Failed(R, ErrorCode.CHAT_TEMPLATE_ERROR, "why"),
    "grammar with thinking": Failed(R, ErrorCode.GRAMMAR_WITH_THINKING, "why"),
    "schema that cannot be converted": Failed(R, ErrorCode.INVALID_SCHEMA, "why"),
    "grammar that cannot be compiled": Failed(R, ErrorCode.INVALID_GRAMMAR, "why"),
    "output that the grammar rejected": Failed(R, ErrorCode.GRAMMAR_REJECTED, "why"),
    "no multimodal model": Failed(R, ErrorCode.MULTIMODAL_NOT_SUPPORTED, "why"),
    "image that cannot be read": Failed(R, ErrorCode.IMAGE_DECODING_FAILED, "why"),
    "image larger than the batch": Failed(
        R,
        ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE,
        "an image has 300 tokens",
        {"image_tokens": 300, "n_batch": 256},
    ),
    "done with images": Finished(R, FinishReason.STOP, Usage(300, 0, 4, input_image_tokens=256)),
    "tool schema that is none": Failed(R, ErrorCode.INVALID_TOOL_SCHEMA, "why"),
    "generation disabled": Failed(R, ErrorCode.GENERATION_DISABLED, "why"),
    "buffer full": Failed(R, ErrorCode.BUFFER_FULL, "why"),
    "buffer timeout": Failed(R, ErrorCode.BUFFER_TIMEOUT, "why"),
    "agent lost": Failed(R, ErrorCode.AGENT_LOST, "why"),
    "context exceeded": Failed(R, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "why"),
}
EMBEDDING_EVENTS: dict[str, Event] = {
    "embedding": Embedded(R, "d1", 2, struct.pack("<2f", 0.5, -1)),
    "embeddings of each token": Embedded(R, "d1", 2, struct.pack("<4f", 1, 2, 3, 4)),
    "document too long": DocumentTooLong(R, "d1", 9, 8),
}
ENDS: dict[str, list[DocumentFailed | DocumentTooLong]] = {
    "embeddings done": [],
    "embeddings done, but for some": [DocumentFailed(R, "d1", "it is empty")],
}


def told(name: str, dialect: Dialect) -> list[Any]:
    """The messages, as they travel."""
    teller = Teller("theirs", dialect)
    if name in EVENTS:
        messages = teller.messages("agent-1", EVENTS[name])
    elif name in EMBEDDING_EVENTS:
        event = EMBEDDING_EVENTS[name]
        messages = list(teller.embedding_messages("agent-1", event, PARAMS, Pooling.LAST))
    else:
        messages = [teller.embedding_done(ENDS[name])]
    lines = [msgspec.json.encode(message) for message in messages]
    assert not any(b"\n" in line for line in lines), "one message a line"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", GOLDEN)
def test_events_become_the_golden_messages(name: str) -> None:
    assert told(name, Dialect.PUBLISHED) == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_client_that_knows_less_is_told_the_same_in_words_that_it_knows(name: str) -> None:
    assert told(name, Dialect.PYTHON_CLIENT) == FOR_PYTHON.get(name, GOLDEN[name])


def test_every_event_is_golden() -> None:
    assert set(GOLDEN) == {*EVENTS, *EMBEDDING_EVENTS, *ENDS}


@pytest.mark.parametrize(
    ("user_agent", "expected"),
    [
        ("python-httpx/0.28.1", Dialect.PYTHON_CLIENT),
        ("Python/3.12 websockets/15.0", Dialect.PYTHON_CLIENT),
        ("Mozilla/5.0", Dialect.PUBLISHED),
        ("", Dialect.PUBLISHED),
    ],
)
def test_clients_are_told_apart_by_their_library(user_agent: str, expected: Dialect) -> None:
    assert dialect(user_agent) is expected


def test_documents_that_are_too_long_are_named_at_the_end_to_a_client_that_does_not_know_the_word() -> (
    None
):
    too_long = DocumentTooLong(R, "d1", 9, 8)

    python = Teller("theirs", Dialect.PYTHON_CLIENT).embedding_done([too_long])
    published = Teller("theirs", Dialect.PUBLISHED).embedding_done([too_long])

    error = "documents that could not be embedded: 'd1' (9 tokens, the limit is 8)"
    assert python["Response"]["response"] == {"Embedding": {"Error": error}}
    assert published["Response"]["response"] == {"Embedding": "Done"}


def test_the_names_of_documents_that_failed_are_bounded() -> None:
    failed = [DocumentFailed(R, f"d{n}", "why") for n in range(MOST_NAMED + 5)]

    done = Teller("theirs", Dialect.PUBLISHED).embedding_done(failed)

    error = done["Response"]["response"]["Embedding"]["Error"]
    assert error.count("(why)") == MOST_NAMED
    assert error.endswith("5 more")


def test_one_of_several_answers_is_told_by_its_index() -> None:
    (message,) = Teller("theirs", Dialect.PUBLISHED).messages(
        "agent-1", token((TokenClass.CONTENT, "Hi")), index=2
    )

    assert message["Response"]["index"] == 2


def test_logprobs_are_told_even_if_there_is_nothing_to_show() -> None:
    chosen = TokenLogprob(TokenId(7), -0.5, b"\xc3")
    event = TokenGenerated(R, TokenId(7), (), Logprobs(chosen, (chosen,)))

    (message,) = Teller("theirs", Dialect.PUBLISHED).messages("agent-1", event)

    alternative = {"token_id": 7, "token": "\ufffd", "logprob": -0.5}
    assert message["Response"]["logprobs"] == {**alternative, "top_logprobs": [alternative]}
    assert message["Response"]["response"] == {"GeneratedToken": {"ContentToken": ""}}


def test_vectors_are_no_answer_to_a_prompt() -> None:
    teller = Teller("theirs", Dialect.PUBLISHED)

    assert [teller.messages("a", event) for event in EMBEDDING_EVENTS.values()] == [[], [], []]


def test_the_mode_is_told_as_a_notification() -> None:
    assert mode_notification(enable_embeddings=True) == {"Notification": "TokenGenerationDisabled"}
    assert mode_notification(enable_embeddings=False) == {"Notification": "TokenGenerationEnabled"}
