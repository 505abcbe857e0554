"""Our OpenAI routes against llama.cpp's server: the same requests, answer by answer.

Its answers were written down once, by ``record_llama_server.py``. What differs on purpose stands in
``DELIBERATE``, with the reason, and what is worse here in ``LACKING``; nothing else may differ.
"""

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai_requests import (
    QUESTIONS,
    TEMPLATE,
    Answer,
    Difference,
    Question,
    Setup,
    ask,
    differences,
)
from product import Up

STATE = "/api/v1/balancer_desired_state"


@dataclass(frozen=True, slots=True)
class Deliberate:
    """In all but ``why`` a ``*`` stands for anything, and ``;`` between alternatives."""

    requests: str
    path: str
    theirs: str
    ours: str
    why: str

    def covers(self, question: str, difference: Difference) -> bool:
        said = (self.requests, self.path, self.theirs, self.ours)
        return all(map(_fits, said, (question, *difference)))


def _fits(said: str, text: str) -> bool:
    return any(
        re.fullmatch(re.escape(each).replace(r"\*", ".*"), text, re.DOTALL)
        for each in said.split("; ")
    )


SILENT = "nothing is ignored in silence"
OPENAI = "as in OpenAI's reference"
OUR_FAULT = "what a client got wrong is no fault of the server's"
EACH = "each answer and each prompt is counted, not the first alone"
CUT = f"{OPENAI}: what 'max_output_tokens' has cut is incomplete"
OLDER = "OpenAI's older interface has one list for each fact"

DELIBERATE = [
    # Errors
    Deliberate("*", "error.code", "integer", "string; null", f"{OPENAI}: a word, not the status"),
    Deliberate("*", "error.param", "absent", "string; null", OPENAI),
    Deliberate("*", "HTTP status =", "500", "400", OUR_FAULT),
    Deliberate("*", "error.type =", "server_error", "invalid_request_error", OUR_FAULT),
    Deliberate(
        "*too long*",
        "error.type =",
        "exceed_context_size_error",
        "invalid_request_error",
        "OpenAI says it by the code: context_length_exceeded",
    ),
    Deliberate(
        "unknown route; chat by GET",
        "error.type =",
        "not_found_error",
        "invalid_request_error",
        OPENAI,
    ),
    Deliberate(
        "embeddings off",
        "error.type =",
        "not_supported_error",
        "server_error",
        "OpenAI has no such type",
    ),
    Deliberate(
        "chat by GET", "HTTP status =", "404", "405", "the route is there, the method is not"
    ),
    Deliberate("chat unknown model", "HTTP status", "200", "404", "several models may be served"),
    Deliberate(
        "chat unknown key; chat stop a number; tools not offered",
        "HTTP status",
        "200",
        "400",
        SILENT,
    ),
    Deliberate(
        "chat unknown role",
        "HTTP status",
        "200",
        "400",
        "the model was not trained with such a role",
    ),
    Deliberate("chat too many top_logprobs", "HTTP status", "200", "400", f"{OPENAI}: 20 at most"),
    Deliberate(
        "chat empty messages; text empty prompt; *tokenize nothing",
        "HTTP status",
        "200",
        "400",
        "there is nothing to answer to",
    ),
    Deliberate("text suffix", "HTTP status", "200", "400", f"{SILENT}, and it is not supported"),
    Deliberate(
        "tokenize special as text",
        "HTTP status",
        "200",
        "400",
        f"{SILENT}: names of special tokens are always understood",
    ),
    # What OpenAI has beside llama.cpp's
    Deliberate("chat *; tools *", "choices[].message.refusal", "absent", "null", OPENAI),
    Deliberate("chat *; tools *", "choices[].message.annotations", "absent", "array", OPENAI),
    Deliberate("chat *; tools *", "*choices[].logprobs", "absent", "null", OPENAI),
    Deliberate("chat *; tools *", "*choices[].logprobs.refusal", "absent", "null", OPENAI),
    Deliberate(
        "chat *; tools *; text *", "*usage.completion_tokens_details", "absent", "object", OPENAI
    ),
    Deliberate(
        "chat *; tools *; text *",
        "*usage.prompt_tokens_details.audio_tokens",
        "absent",
        "integer",
        OPENAI,
    ),
    Deliberate(
        "chat stream*; tools stream", "role:choices[].delta.content", "null", "string", OPENAI
    ),
    Deliberate(
        "* stream*",
        "*:usage",
        "absent; object",
        "null",
        f"{OPENAI}: with include_usage, all chunks but the last say null",
    ),
    # What is ours
    Deliberate(
        "chat *; tools *; text *",
        "*timings.queue_ms",
        "absent",
        "number",
        "here requests wait in a buffer",
    ),
    Deliberate("tokenize *", "count; max_model_len", "absent", "integer", "as in vLLM"),
    Deliberate("detokenize *", "prompt", "absent", "string", "as in vLLM"),
    # Counting
    Deliberate("chat n; chat stream n; text n", "*usage.*_tokens =", "*", "*", EACH),
    Deliberate("text batch; text token batch", "usage.*_tokens =", "*", "*", EACH),
    Deliberate(
        "chat grammar; text grammar",
        "usage.*_tokens =",
        "*",
        "*",
        "the token that ends an answer is no part of it",
    ),
    # Log probabilities
    Deliberate(
        "chat *logprobs",
        "*choices[].logprobs.content[].*id",
        "integer",
        "absent",
        "OpenAI tells tokens by their bytes, /v1/tokenize tells ids",
    ),
    Deliberate(
        "chat logprobs",
        "choices[].logprobs.content[].top_logprobs[]",
        "object",
        "absent",
        f"{OPENAI}: none unless asked for",
    ),
    Deliberate("text *logprobs", "*choices[].logprobs.content", "array", "absent", OLDER),
    Deliberate(
        "text *logprobs",
        "*choices[].logprobs.text_offset; *.token_logprobs; *.tokens; *.logprobs.top_logprobs",
        "absent",
        "array",
        OLDER,
    ),
    Deliberate(
        "text stream logprobs",
        "finish:choices[].logprobs",
        "null",
        "object",
        "what is told of no token is told alike",
    ),
    # Completions
    Deliberate("text echo", "choices[].text =", "*", "*", f"{OPENAI}: it is done, not ignored"),
    Deliberate(
        "text default length",
        "choices[].text =; choices[].finish_reason =; usage.*_tokens =",
        "*",
        "*",
        f"{OPENAI}: 16 tokens, not as many as fit",
    ),
    Deliberate(
        "text stream*", "finish:usage", "object", "absent", f"{OPENAI}: only with include_usage"
    ),
    Deliberate("text stream usage", "order =", "[DONE]", "usage [DONE]", OPENAI),
    Deliberate("text stream usage", "usage:", "absent", "object", OPENAI),
    Deliberate(
        "text stream usage",
        "finish:timings",
        "object",
        "absent",
        "it is in the last chunk, usage's",
    ),
    Deliberate(
        "text stream stop",
        "text:timings",
        "object",
        "absent",
        "once, in the last chunk; theirs has an empty one before it",
    ),
    # Tools
    Deliberate(
        "tools not to be used",
        "choices[].message.content =; usage.*_tokens =",
        "*",
        "*",
        "tools that must not be called are not shown to the model",
    ),
    Deliberate(
        "tools offered; tools required; tools one named",
        "choices[].message.content",
        "string",
        "null",
        OPENAI,
    ),
    Deliberate(
        "tools offered; tools required; tools one named; tools stream",
        "*usage.*_tokens =",
        "*",
        "*",
        "the token that ends an answer is no part of it",
    ),
    # Responses
    Deliberate("response *", "*", "absent", "*", f"{OPENAI}, of which llama.cpp leaves out much"),
    Deliberate("response *", "*status =", "completed", "incomplete", CUT),
    Deliberate("response *", "completed_at", "integer", "null", CUT),
    Deliberate("response stream", "order =", "*response.completed", "*response.incomplete", CUT),
    Deliberate("response stream", "response.completed:", "object", "absent", CUT),
    Deliberate(
        "response schema",
        "output[].content[].text =",
        "*",
        "*",
        f"{OPENAI}: text.format is kept to; llama.cpp ignores it",
    ),
    Deliberate(
        "chat tools of a model that knows none",
        "usage.*_tokens =",
        "*",
        "*",
        "its template passes over them; here it is told of them in words",
    ),
    # Others
    Deliberate(
        "chat json_schema; chat response_format; chat json_object",
        "choices[].message.content =; usage.*_tokens =",
        "*",
        "*",
        "the same JSON, but the white space that its grammar allows is another",
    ),
    Deliberate("models", "models", "array", "absent", "Ollama's list; OpenAI's is data"),
    Deliberate(
        "models",
        "data[].meta.*",
        "*",
        "absent",
        "of a file's facts only those that a client can use: the metadata route has the others",
    ),
    Deliberate("models", "data[].tags", "array", "absent", "nobody gives a model tags here"),
    Deliberate(
        "embed base64",
        "data[].encoding_format",
        "string",
        "absent",
        "the client has said it itself",
    ),
]

LACKING = [
    Deliberate(
        "chat prefilled",
        "choices[].message.content =; usage.*_tokens =",
        "*",
        "*",
        "llama.cpp goes on with an assistant's message that is the last one, and tells all of it",
    ),
]
"""What users of llama.cpp's server would miss."""

KNOWN = DELIBERATE + LACKING


def recorded() -> dict[str, Answer]:
    record = json.loads((Path(__file__).parent / "llama_server.json").read_text())
    return {name: Answer(**answer) for name, answer in record["answers"].items()}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Answer]:
    return recorded()


@pytest.fixture(scope="module")
def ours(up: Up) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for setup in Setup:
        with set_up(up, setup):
            for question in QUESTIONS:
                if question.setup is setup:
                    answers[question.name] = ask(up.client, question, question.path)
    return answers


@contextmanager
def set_up(up: Up, setup: Setup) -> Generator[None]:
    state = up.client.get(STATE).json()
    parameters = state["inference_parameters"]
    changes: dict[str, Any] = {}
    match setup:
        case Setup.PLAIN:
            pass
        case Setup.TOOLS:
            template = {"content": TEMPLATE}
            changes = {"chat_template_override": template, "use_chat_template_override": True}
        case Setup.EMBEDDINGS:
            vectors = {"enable_embeddings": True, "pooling_type": "Mean"}
            changes = {"inference_parameters": parameters | vectors}
    put(up, state | changes)
    try:
        yield
    finally:
        put(up, state)


def put(up: Up, state: dict[str, Any]) -> None:
    up.client.put(STATE, json=state).raise_for_status()
    overridden = state["use_chat_template_override"]
    up.until(lambda agents: agents[0]["uses_chat_template_override"] is overridden)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_an_answer_is_llama_servers_but_for_what_is_known_to_differ(
    question: Question, theirs: dict[str, Answer], ours: dict[str, Answer]
) -> None:
    found = differences(theirs[question.name], ours[question.name])

    assert [each for each in found if not any(d.covers(question.name, each) for d in KNOWN)] == []


@pytest.mark.parametrize("entry", KNOWN, ids=lambda entry: f"{entry.requests}-{entry.path}")
def test_what_is_known_to_differ_still_does(
    entry: Deliberate, theirs: dict[str, Answer], ours: dict[str, Answer]
) -> None:
    assert any(
        entry.covers(question.name, each)
        for question in QUESTIONS
        for each in differences(theirs[question.name], ours[question.name])
    )


def test_every_request_has_been_recorded_and_no_other(theirs: dict[str, Answer]) -> None:
    assert [*theirs] == [
        question.name for setup in Setup for question in QUESTIONS if question.setup is setup
    ]
