"""How far agents have come with a request, so that another one can go on from there. No I/O here.

What is noted has been handed to the client, all of it: what one pass of an agent brings forth comes
in one frame.
"""

from array import array
from dataclasses import dataclass, field

from msgspec.structs import replace

from common.ids import TokenId
from common.messages import (
    DocumentFailed,
    DocumentTooLong,
    Embed,
    Embedded,
    Event,
    Finished,
    Generate,
    TokenGenerated,
    decode_to_agent,
    encode,
)


@dataclass(slots=True)
class Progress:
    _tokens: "array[int]" = field(default_factory=lambda: array("i"))
    """Of the answer."""
    _documents: int = 0
    """How many of a batch are over: they come in their order."""
    _embedded_tokens: int = 0
    """In those that have their vectors."""
    _embedded_before: int = 0
    """The same, by the agents before the present one."""

    @property
    def is_nothing(self) -> bool:
        return not self._tokens and not self._documents

    def note(self, event: Event) -> None:
        match event:
            case TokenGenerated(token=token):
                self._tokens.append(token)
            case Embedded(tokens=tokens):
                self._documents += 1
                self._embedded_tokens += tokens
            case DocumentTooLong() | DocumentFailed():
                self._documents += 1
            case _:
                pass

    def rest(self, frame: bytes) -> bytes:
        """``frame``: an encoded ``Generate`` or ``Embed``, as it was first sent. What to send to the
        agent that goes on.
        """
        if self.is_nothing:
            return frame
        match decode_to_agent(frame):
            case Generate() as request:
                return encode(replace(request, resumed=tuple(map(TokenId, self._tokens))))
            case Embed() as request:
                self._embedded_before = self._embedded_tokens
                return encode(replace(request, documents=request.documents[self._documents :]))
            case other:
                raise AssertionError(f"nobody goes on with {type(other).__name__}")

    def finished(self, event: Finished) -> Finished:
        """The last agent's last word, with what those before it have used. (Of an answer it knows.)"""
        if not self._embedded_before:
            return event
        tokens = event.usage.prompt_tokens + self._embedded_before
        return replace(event, usage=replace(event.usage, prompt_tokens=tokens))
