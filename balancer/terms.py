"""What a request asks of the buffer and the dispatcher. No I/O here."""

import enum
from dataclasses import dataclass


class Priority(enum.StrEnum):
    """Higher ones are dispatched first, each class in the order of arrival."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Route(enum.StrEnum):
    """By which of the clients' routes a request has come, as operators are told."""

    CONVERSATION = "conversation"
    RAW_PROMPT = "raw_prompt"
    EMBEDDING_BATCH = "embedding_batch"
    CHAT_COMPLETIONS = "chat_completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Terms:
    model: str | None = None
    """One of the names of the model that must serve it; None: any."""
    priority: Priority = Priority.NORMAL
    deadline: float | None = None
    """Seconds until it must be answered in full; None: it may wait as long as others do."""
    size: int = 0
    """Bytes that it takes while it waits."""
    route: Route = Route.OTHER
    client_id: str | None = None
    """What its client calls it, if that is fit to be shown; need not be unique."""


LONGEST_CLIENT_ID = 128


def shown_id(client_id: str) -> str | None:
    """What a client calls its request, if that is fit for logs and lists."""
    is_fit = client_id.isascii() and client_id.isprintable()
    return client_id if is_fit and 0 < len(client_id) <= LONGEST_CLIENT_ID else None


ANY = Terms()
