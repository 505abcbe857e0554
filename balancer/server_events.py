"""Server-sent events as OpenAI has them. No I/O here."""

from collections.abc import Sequence
from typing import Any

import msgspec


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named(events: Sequence[dict[str, Any]]) -> bytes:
    """Each by its ``type``."""
    return b"".join(b"event: " + event["type"].encode() + b"\n" + data(event) for event in events)
