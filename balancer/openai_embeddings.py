"""``/v1/embeddings``: documents as text or tokens, vectors as numbers or in base64. No I/O here."""

import math
import struct
from base64 import b64encode
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from balancer.bodies import Items
from balancer.exchange import Told
from balancer.openai_completions import OneText, OneTokens, Part, batch_of, shape
from balancer.openai_errors import ParameterError
from balancer.openai_generation import Said, Text
from balancer.openai_results import Json
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Document, DocumentFailed, DocumentTooLong, Embedded, Finished, Pooling

MOST_DOCUMENTS = 2048
"""OpenAI's own limit."""


class EmbeddingRequest(Said):
    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    input: Annotated[
        OneText
        | OneTokens
        | Annotated[Items[Part], Field(min_length=1, max_length=MOST_DOCUMENTS), Tag("batch")],
        Discriminator(shape),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**20)] | None = None
    """The first so many of each vector, which is brought to length 1 again."""
    user: Text | None = None

    @property
    def documents(self) -> tuple[Document, ...]:
        """Named by their indices."""
        return tuple(
            Document(str(n), each)
            if isinstance(each, str)
            else Document(str(n), "", tuple(map(TokenId, each)))
            for n, each in enumerate(batch_of(self.input))
        )


def single_vector(pooling: Pooling) -> Pooling:
    """The same, if it makes one vector of a text. Raises ``RequestError``."""
    if pooling in (Pooling.NONE, Pooling.RANK):
        raise RequestError(
            ErrorCode.NOT_SUPPORTED, f"with the pooling {pooling} a text has no single vector"
        )
    return pooling


class EmbeddingAnswer:
    """Collects the vectors, which come in any order."""

    def __init__(self, params: EmbeddingRequest, model: str) -> None:
        self._params = params
        self._model = model
        self._vectors: dict[int, Embedded] = {}
        self._tokens = 0

    def take(self, told: Told) -> None:
        """Raises ``ParameterError`` for a document that cannot be embedded."""
        match told.event:
            case Embedded(document_id=document_id) as event:
                wanted = self._params.dimensions
                if wanted is not None and wanted > event.dimensions:
                    raise ParameterError(
                        "dimensions",
                        f"'dimensions' is {wanted}, but the model's vectors have {event.dimensions}.",
                    )
                self._vectors[int(document_id)] = event
            case DocumentTooLong(document_id=document_id, tokens=tokens, limit=limit):
                raise ParameterError(
                    self._named(document_id),
                    f"this input has {tokens} tokens, the limit is {limit}",
                    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                )
            case DocumentFailed(document_id=document_id, message=message):
                raise ParameterError(
                    self._named(document_id), f"this input cannot be embedded: {message}"
                )
            case Finished(usage=usage):
                self._tokens += usage.prompt_tokens
            case _:
                pass

    def object(self) -> Json:
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        data = [
            {"object": "embedding", "index": n, "embedding": self._encode(self._vectors[n])}
            for n in sorted(self._vectors)
        ]
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _named(self, document_id: str) -> str:
        many = isinstance(self._params.input, list) and not isinstance(self._params.input[0], int)
        return f"input[{document_id}]" if many else "input"

    def _encode(self, event: Embedded) -> Any:
        values, dimensions = event.values, self._params.dimensions
        if dimensions is not None and dimensions < event.dimensions:
            vector = struct.unpack(f"<{dimensions}f", values[: 4 * dimensions])
            length = math.hypot(*vector) or 1.0
            values = struct.pack(f"<{dimensions}f", *(value / length for value in vector))
        if self._params.encoding_format == "base64":
            return b64encode(values).decode()
        return list(struct.unpack(f"<{len(values) // 4}f", values))
