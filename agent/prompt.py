"""From a ``Generate`` frame to tokens, or to the reason why it cannot run here.

No I/O here, and nothing that belongs to the decode thread: long prompts are prepared beside it,
so that they do not hold up the streams that run.
"""

from dataclasses import dataclass

from agent.embedding import EmbeddingRequest, tokenize
from agent.engine import Engine, Sampler
from agent.template import ChatTemplate
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import Conversation, Embed, Generate, RawPrompt


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    request_id: RequestId
    prompt: list[TokenId]
    """At least one token, and fewer than the context holds."""
    max_tokens: int
    sampler: Sampler
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    cache_prompt: bool = True


class Preparer:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vocabulary = engine.vocabulary
        self._context = engine.capacity.context
        self._template: ChatTemplate | None = None
        self._why_no_template = "the model has no chat template"
        if engine.chat_template is not None:
            try:
                self._template = ChatTemplate(engine.chat_template, self._vocabulary.special_texts)
            except RequestError as error:
                self._why_no_template = error.message

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def prepare(self, request: Generate | Embed) -> PreparedRequest | EmbeddingRequest:
        """Render and tokenize. Raises ``RequestError``, whose text is for the client."""
        if isinstance(request, Embed):
            longest = self._vocabulary.longest_piece
            return tokenize(request, self._engine.embedder, longest_piece=longest)
        return self.prepare_prompt(request)

    def prepare_prompt(self, request: Generate) -> PreparedRequest:
        text = self._render(request)
        # Millions of tokens take seconds to count, only to be refused: others wait meanwhile.
        least = len(text) // self._vocabulary.longest_piece
        if least >= self._context:
            raise self._too_long(f"at least {least}")
        tokens = self._vocabulary.tokenize(text)
        beginning = self._vocabulary.beginning
        # Many templates write the beginning token themselves; twice would harm the answer.
        if beginning is not None and tokens[:1] != [beginning]:
            tokens.insert(0, beginning)
        if not tokens:
            raise RequestError(ErrorCode.INVALID_REQUEST, "the prompt is empty")
        if len(tokens) >= self._context:
            raise self._too_long(str(len(tokens)))
        sampler = self._engine.sampler(
            tokens, request.sampling, request.constraint, request.logprobs
        )
        return PreparedRequest(
            request.request_id,
            tokens,
            request.max_tokens,
            sampler,
            request.stop,
            request.cache_salt,
            request.cache_prompt,
        )

    def _too_long(self, count: str) -> RequestError:
        return RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"context_length_exceeded: the prompt has {count} tokens; with at least one "
            f"for the answer, the limit of this agent is {self._context}",
        )

    def _render(self, request: Generate) -> str:
        match request.prompt:
            case RawPrompt(text):
                return text
            case Conversation() as conversation:
                if self._template is None:
                    raise RequestError(
                        ErrorCode.CHAT_TEMPLATE_ERROR,
                        f"{self._why_no_template}; send a raw prompt instead",
                    )
                return self._template.render(conversation)
