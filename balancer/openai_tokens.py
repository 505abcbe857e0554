"""``/v1/tokenize`` and ``/v1/detokenize``. OpenAI has no such routes: they understand the requests of
llama.cpp's server (``content``) and of vLLM (``prompt``, or a chat's ``messages``). No I/O here.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from balancer.bodies import Items
from balancer.openai_chat import ChatRequest
from balancer.openai_completions import Token
from balancer.openai_errors import ParameterError, parse
from balancer.openai_generation import Said
from balancer.openai_results import Json
from common.ids import RequestId, TokenId
from common.messages import Detokenize, Detokenized, RawPrompt, Tokenize, Tokenized


class _Tokens(Said):
    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    with_pieces: bool | None = None
    """Tell each token's text, too."""

    @property
    def tells_pieces(self) -> bool:
        return bool(self.with_pieces)


class ContentToTokenize(_Tokens):
    content: str
    add_special: bool | None = None
    """The token that a prompt must start with."""
    parse_special: Literal[True] | None = None
    """Names of special tokens are always understood."""

    def frame(self, request_id: RequestId) -> Tokenize:
        return Tokenize(
            request_id=request_id,
            prompt=RawPrompt(self.content),
            adds_beginning=bool(self.add_special),
        )


class PromptToTokenize(_Tokens):
    prompt: str
    add_special_tokens: bool | None = None

    def frame(self, request_id: RequestId) -> Tokenize:
        return Tokenize(
            request_id=request_id,
            prompt=RawPrompt(self.prompt),
            adds_beginning=self.add_special_tokens is not False,
        )


class ChatToTokenize(ChatRequest):
    with_pieces: bool | None = None

    @property
    def tells_pieces(self) -> bool:
        return bool(self.with_pieces)

    def frame(self, request_id: RequestId) -> Tokenize:
        conversation = self.conversation(longest_image_side=1)
        if conversation.images:
            raise ParameterError("messages", "images are not made of text tokens")
        return Tokenize(request_id=request_id, prompt=conversation, adds_beginning=True)


class _Keys(BaseModel):
    content: Any = None
    messages: Any = None


def parse_text(body: bytes) -> ContentToTokenize | PromptToTokenize | ChatToTokenize:
    """Raises ``RequestError``."""
    keys = parse(_Keys, body).model_fields_set
    if "messages" in keys:
        return parse(ChatToTokenize, body)
    return parse(ContentToTokenize if "content" in keys else PromptToTokenize, body)


class TokensToText(Said):
    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    tokens: Items[Token]

    def frame(self, request_id: RequestId) -> Detokenize:
        return Detokenize(request_id, tuple(map(TokenId, self.tokens)))


def tokenized(event: Tokenized, *, tells_pieces: bool) -> Json:
    tokens: list[Any] = list(event.tokens)
    if tells_pieces:
        tokens = [
            {"id": token, "piece": _piece(piece)}
            for token, piece in zip(event.tokens, event.pieces, strict=True)
        ]
    return {"tokens": tokens, "count": len(event.tokens), "max_model_len": event.context}


def detokenized(event: Detokenized) -> Json:
    """By both names that clients look for."""
    return {"content": event.text, "prompt": event.text}


def _piece(piece: bytes) -> str | list[int]:
    """A part of a character is told by its bytes, as llama.cpp does it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
