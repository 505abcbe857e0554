"""OpenAI's error bodies, and the HTTP statuses and headers that go with them. No I/O here."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from balancer.bodies import check_size
from balancer.limits import LimitError
from common.errors import STATUS, ErrorCode, RequestError
from common.messages import Failed

LONGEST_COMPLAINT = 300
"""Characters of what a client said itself."""

OPENAI_STATUS = STATUS | {
    ErrorCode.BUFFER_FULL: 429,
    # As 501 the official client would send it again, twice.
    ErrorCode.NOT_SUPPORTED: 400,
}

RETRY_AFTER = {429: 1, 503: 5}
"""Seconds, by status."""

FOR_GOOD = {
    ErrorCode.GENERATION_DISABLED,
    ErrorCode.EMBEDDINGS_DISABLED,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.GRAMMAR_REJECTED,
}
"""The same request would fail again; the official client would send it twice more if it were not told."""

TYPES = {429: "rate_limit_error"}
"""By status; the others are an ``invalid_request_error`` or, from 500 on, a ``server_error``."""

CODES = {
    ErrorCode.INVALID_REQUEST: "invalid_value",
    ErrorCode.NOT_SUPPORTED: "unsupported_parameter",
    ErrorCode.UNAUTHORIZED: "invalid_api_key",
    ErrorCode.BUFFER_FULL: "rate_limit_exceeded",
}
"""OpenAI's names, where they differ from ours."""

PARAMETERS = {
    ErrorCode.MODEL_NOT_FOUND: "model",
    ErrorCode.INVALID_GRAMMAR: "grammar",
    ErrorCode.INVALID_SCHEMA: "response_format",
    ErrorCode.INVALID_TOOL_SCHEMA: "tools",
}
"""What is to blame, where the code alone says it."""

PROMPT_ERRORS = {
    ErrorCode.INVALID_PROMPT,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.CHAT_TEMPLATE_ERROR,
    ErrorCode.MULTIMODAL_NOT_SUPPORTED,
    ErrorCode.IMAGE_DECODING_FAILED,
    ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE,
}
"""Where it is what each route calls its prompt."""


def parameters_of(prompt: str) -> Mapping[ErrorCode, str]:
    """What is to blame on a route, where the code alone says it. ``prompt``: what it calls its own."""
    return PARAMETERS | dict.fromkeys(PROMPT_ERRORS, prompt)


class ParameterError(RequestError):
    """The request's own fault, and which of its parameters it is."""

    def __init__(
        self,
        parameter: str | None,
        message: str,
        code: ErrorCode = ErrorCode.INVALID_REQUEST,
        *,
        told: str | None = None,
    ) -> None:
        """``told``: OpenAI's name for it, if it has one of its own."""
        super().__init__(code, message)
        self.parameter = parameter
        self.told = told


def failure(event: Failed, *, has_agents: bool) -> RequestError:
    """``has_agents``: else nobody could have served it, however long it had waited."""
    if event.code is ErrorCode.BUFFER_TIMEOUT and not has_agents:
        return RequestError(ErrorCode.NO_AGENTS, "no agent has come that could serve this")
    return RequestError(event.code, event.message, event.figures)


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])


def refusal(error: RequestError, parameters: Mapping[ErrorCode, str] = PARAMETERS) -> Refusal:
    """``parameters``: which one is to blame, where the error does not say it."""
    parameter, name = None, None
    if isinstance(error, ParameterError):
        parameter, name = error.parameter, error.told
    elif isinstance(error, LimitError):
        parameter = error.parameter
    status = OPENAI_STATUS[error.code]
    headers = {"retry-after": str(RETRY_AFTER[status])} if status in RETRY_AFTER else {}
    if error.code in FOR_GOOD:
        headers["x-should-retry"] = "false"
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {
        "message": error.message,
        "type": kind,
        "param": parameter or parameters.get(error.code),
        "code": name or CODES.get(error.code, str(error.code)),
        **error.figures,
    }
    return Refusal(status, {"error": body}, headers)


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(model: type[ModelT], body: bytes) -> ModelT:
    """From JSON. Raises ``ParameterError`` for the first key that is wrong."""
    check_size(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _describe(error, body) from error


def _describe(error: ValidationError, body: bytes) -> ParameterError:
    problems = error.errors(include_url=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        return ParameterError(None, _cut(f"the body is not JSON: {problems[0]['msg']}"))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # pydantic reads what Python's own reader does not
        value = None
    paths = [_path(problem, value) for problem in problems]
    # Of a union's alternatives that came farthest: it is what the client has meant.
    # Among equals one that is not about the type: the others have not even come so far.
    deepest = max(
        range(len(paths)),
        key=lambda n: (len(paths[n]), not problems[n]["type"].endswith("_type")),
    )
    return _complain(problems[deepest], _write(paths[deepest]))


def _path(problem: ErrorDetails, value: Any) -> list[str | int]:
    """The steps that the body itself has: pydantic names its own alternatives, too, and some of
    those are called like a key.
    """
    steps = problem["loc"]
    walks: list[list[str | int]]
    match problem["type"]:
        case "missing" | "extra_forbidden" as kind:
            *before, last = steps
            is_there = kind == "extra_forbidden"
            walks = [
                [*walk, last]
                for walk, end in _walks(before, value)
                if isinstance(end, dict) and _has(end, last) is is_there
            ]
        case "union_tag_invalid" | "union_tag_not_found":
            key = _key_of_tag(problem)
            walks = [walk if key is None else [*walk, key] for walk, _ in _walks(steps, value)]
        case _:
            walks = [walk for walk, _ in _walks(steps, value)]
    return max(walks, key=len) if walks else []


def _key_of_tag(problem: ErrorDetails) -> str | None:
    """By which a body says what alternative it means; None: that is for a function to find out."""
    told = str(problem.get("ctx", {})["discriminator"])
    return told.strip("'") if told.startswith("'") else None


def _walks(steps: Sequence[str | int], value: Any) -> Iterator[tuple[list[str | int], Any]]:
    """All ways into the body that leave out some of the steps, and where they end."""
    if not steps:
        yield [], value
        return
    step, *rest = steps
    if _has(value, step):
        for walk, end in _walks(rest, value[step]):
            yield [step, *walk], end
    yield from _walks(rest, value)


def _has(value: Any, step: str | int) -> bool:
    match value:
        case dict():
            return step in value
        case list():
            return isinstance(step, int) and step < len(cast("list[Any]", value))
        case _:
            return False


def _write(path: list[str | int]) -> str | None:
    """As OpenAI writes it: ``messages[0].content``."""
    written = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return _cut(written.removeprefix(".")) or None


def _complain(problem: ErrorDetails, parameter: str | None) -> ParameterError:
    message = _cut(problem["msg"]).removeprefix("Value error, ")
    match problem["type"]:
        case "missing" | "union_tag_not_found" as kind if kind == "missing" or _key_of_tag(problem):
            return ParameterError(
                parameter,
                f"Missing required parameter: '{parameter}'.",
                told="missing_required_parameter",
            )
        case "none_required":
            return ParameterError(
                parameter, f"'{parameter}' is not supported here.", ErrorCode.NOT_SUPPORTED
            )
        case "union_tag_invalid" | "union_tag_not_found" if _key_of_tag(problem) is None:
            context = problem.get("ctx", {})
            tag, known = context.get("tag"), context.get("expected_tags")
            why = "its type cannot be told" if tag is None else f"{tag!r} is none of {known}"
            return ParameterError(parameter, f"Invalid '{parameter}': {_cut(why)}")
        case "literal_error":
            return ParameterError(
                parameter, f"Invalid '{parameter}': {message}", told="unsupported_value"
            )
        case "extra_forbidden":
            return ParameterError(
                parameter,
                f"Unrecognized request argument: '{parameter}'.",
                ErrorCode.NOT_SUPPORTED,
                told="unknown_parameter",
            )
        case _ if parameter is None:
            return ParameterError(None, message)
        case _:
            return ParameterError(parameter, f"Invalid '{parameter}': {message}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_COMPLAINT else f"{text[:LONGEST_COMPLAINT]} ..."
