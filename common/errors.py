"""What can go wrong with a request, and whose fault it is.

Every failure that a client may see has a stable ``code`` and, from ``STATUS``, the HTTP status
that describes it. Foreign exceptions are turned into these at the border where they appear.
"""

import enum
from collections.abc import Mapping


class ErrorCode(enum.StrEnum):
    # The client's
    INVALID_REQUEST = "invalid_request"
    INVALID_PROMPT = "invalid_prompt"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    HEADERS_TOO_LARGE = "headers_too_large"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    NOT_SUPPORTED = "not_supported"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    AGENT_NOT_FOUND = "agent_not_found"
    FLEET_NOT_FOUND = "fleet_not_found"
    REQUEST_NOT_FOUND = "request_not_found"
    OVERTAKEN = "overtaken"
    CHAT_TEMPLATE_ERROR = "chat_template_error"
    MULTIMODAL_NOT_SUPPORTED = "multimodal_not_supported"
    IMAGE_DECODING_FAILED = "image_decoding_failed"
    IMAGE_EXCEEDS_BATCH_SIZE = "image_exceeds_batch_size"
    INVALID_GRAMMAR = "invalid_grammar"
    INVALID_SCHEMA = "invalid_schema"
    INVALID_TOOL_SCHEMA = "invalid_tool_schema"
    GRAMMAR_WITH_THINKING = "grammar_with_thinking"
    GRAMMAR_REJECTED = "grammar_rejected"
    SLOW_CLIENT = "slow_client"
    GENERATION_DISABLED = "generation_disabled"
    EMBEDDINGS_DISABLED = "embeddings_disabled"
    # Ours
    AGENT_LOST = "agent_lost"
    OVERLOADED = "overloaded"
    BALANCER_LOST = "balancer_lost"
    BUFFER_FULL = "buffer_full"
    BUFFER_TIMEOUT = "buffer_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED_BY_OPERATOR = "cancelled_by_operator"
    NO_AGENTS = "no_agents"
    DECODE_FAILED = "decode_failed"
    INTERNAL_ERROR = "internal_error"
    SHUTTING_DOWN = "shutting_down"


STATUS = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INVALID_PROMPT: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.ORIGIN_NOT_ALLOWED: 403,
    ErrorCode.HEADERS_TOO_LARGE: 431,
    ErrorCode.BODY_TOO_LARGE: 413,
    ErrorCode.BODY_TOO_SLOW: 408,
    ErrorCode.NOT_SUPPORTED: 501,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.AGENT_NOT_FOUND: 404,
    ErrorCode.FLEET_NOT_FOUND: 404,
    ErrorCode.REQUEST_NOT_FOUND: 404,
    ErrorCode.OVERTAKEN: 409,
    ErrorCode.CHAT_TEMPLATE_ERROR: 400,
    ErrorCode.MULTIMODAL_NOT_SUPPORTED: 400,
    ErrorCode.IMAGE_DECODING_FAILED: 400,
    ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE: 400,
    ErrorCode.INVALID_GRAMMAR: 400,
    ErrorCode.INVALID_SCHEMA: 400,
    ErrorCode.INVALID_TOOL_SCHEMA: 400,
    ErrorCode.GRAMMAR_WITH_THINKING: 400,
    ErrorCode.GRAMMAR_REJECTED: 500,
    ErrorCode.SLOW_CLIENT: 503,
    ErrorCode.GENERATION_DISABLED: 501,
    ErrorCode.EMBEDDINGS_DISABLED: 501,
    ErrorCode.AGENT_LOST: 502,
    ErrorCode.OVERLOADED: 503,
    ErrorCode.BALANCER_LOST: 503,
    ErrorCode.BUFFER_FULL: 503,
    ErrorCode.BUFFER_TIMEOUT: 504,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.CANCELLED_BY_OPERATOR: 410,
    ErrorCode.NO_AGENTS: 503,
    ErrorCode.DECODE_FAILED: 500,
    ErrorCode.INTERNAL_ERROR: 500,
    ErrorCode.SHUTTING_DOWN: 503,
}


class HeadraceError(Exception):
    """Base of all our exceptions; its text is fit to be shown to whoever caused it."""


class RequestError(HeadraceError):
    """One request cannot be served; the others are not affected."""

    limit: str | None = None
    """What the bound is called in the metrics that it is beyond, if it is beyond one."""

    def __init__(
        self, code: ErrorCode, message: str, figures: Mapping[str, int] | None = None
    ) -> None:
        """``figures``: those of the message, by the names that the published wire format has."""
        super().__init__(message)
        self.code = code
        self.figures = dict(figures or {})

    @property
    def message(self) -> str:
        return str(self)


class ModelError(HeadraceError):
    """The model file is missing, unreadable or not what this agent can run."""


class ProjectorError(ModelError):
    """So is the file of the multimodal projector, or it is that of another model."""


class DecodeError(HeadraceError):
    """One pass of the model failed; what it fed is not to be relied on."""
