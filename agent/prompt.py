"""From a ``Generate`` frame to tokens, or to the reason why it cannot run here.

No I/O here, and nothing that belongs to the decode thread: long prompts are prepared beside it,
so that they do not hold up the streams that run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.answer_grammar import answer_grammar
from agent.embedding import EmbeddingRequest, tokenize
from agent.engine import Engine, Guidance, ImageRun, MixedPrompt, Sampler
from agent.formats import PLAIN, recognize
from agent.images import open_image
from agent.output import OutputStream
from agent.output_parser import OutputParser
from agent.template import ChatTemplate
from agent.tools import Tools
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    CallsTold,
    Conversation,
    Detokenize,
    Detokenized,
    Embed,
    Generate,
    Prompt,
    RawPrompt,
    Tokenize,
    Tokenized,
    TokenPrompt,
)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    request_id: RequestId
    prompt: list[TokenId]
    """At least one token, and fewer than the context holds; negative where images are."""
    max_tokens: int
    sampler: Sampler
    output: OutputStream
    marks: Mapping[TokenId, bytes] = field(default_factory=dict[TokenId, bytes])
    """The texts of control tokens that the output's format needs."""
    cache_salt: str = ""
    cache_prompt: bool = True
    images: tuple[ImageRun, ...] = ()
    """In the prompt, in their order."""


def _always() -> bool:
    return True


class Preparer:
    def __init__(self, engine: Engine, chat_template: str | None = None) -> None:
        """``chat_template``: in place of the model's own."""
        self.engine = engine
        self.template = engine.chat_template if chat_template is None else chat_template
        """Its source; None: there is none."""
        self.template_error: RequestError | None = None
        """Why conversations cannot be rendered; None: they can."""
        self._vocabulary = engine.vocabulary
        self._context = engine.capacity.context
        self._compiled: ChatTemplate | None = None
        self.format = recognize(self.template)
        self._marks = self._tokens_of(self.format.marks)
        if self.template is None:
            self.template_error = RequestError(
                ErrorCode.CHAT_TEMPLATE_ERROR, "the model has no chat template"
            )
            return
        try:
            self._compiled = ChatTemplate(self.template, self._vocabulary.special_texts)
        except RequestError as error:
            self.template_error = error

    @property
    def slots(self) -> int:
        return self.engine.capacity.slots

    def prepare(
        self, request: Generate | Embed, is_wanted: Callable[[], bool] = _always
    ) -> PreparedRequest | EmbeddingRequest:
        """Render and tokenize. Raises ``RequestError``, whose text is for the client.

        ``is_wanted``: asked now and then when it takes long; if not, an error is raised soon.
        """
        if isinstance(request, Embed):
            return tokenize(
                request,
                self.engine.embedder,
                longest_piece=self._vocabulary.longest_piece,
                vocabulary_size=self._vocabulary.size,
            )
        return self.prepare_prompt(request, is_wanted)

    def consult(self, request: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """For any thread. Raises ``RequestError``."""
        if isinstance(request, Detokenize):
            tokens = self._take(request.tokens).tokens
            text = b"".join(map(self._vocabulary.written, tokens)).decode(errors="replace")
            return Detokenized(request.request_id, text)
        match request.prompt:
            case Conversation(images=images) if images:
                raise RequestError(ErrorCode.NOT_SUPPORTED, "images are not made of text tokens")
            case RawPrompt(text) if not request.adds_beginning:
                self._check_text(len(text))
                tokens = self._vocabulary.tokenize(text)
            case prompt:
                tokens = self._read(self._render(prompt)).tokens
        pieces = tuple(map(self._vocabulary.written, tokens))
        return Tokenized(request.request_id, tuple(tokens), pieces, self._context)

    def prepare_prompt(
        self, request: Generate, is_wanted: Callable[[], bool] = _always
    ) -> PreparedRequest:
        text = self._render(request.prompt)
        match request.prompt:
            case TokenPrompt(given):
                prompt = self._take(given)
            case Conversation(images=images) if images:
                prompt = self._see(request.prompt, text, is_wanted)
            case _:
                prompt = self._read(text)
        tokens = prompt.tokens
        if not tokens:
            raise RequestError(ErrorCode.INVALID_REQUEST, "the prompt is empty")
        self._check_length(len(tokens))
        sampler = self.engine.sampler(
            tokens, request.sampling, self._guidance(request, text), request.logprobs
        )
        return PreparedRequest(
            request.request_id,
            tokens,
            request.max_tokens,
            sampler,
            OutputStream(self._parser(request, text), stop=request.stop),
            self._marks,
            request.cache_salt,
            request.cache_prompt,
            prompt.images,
        )

    def _take(self, tokens: Sequence[TokenId]) -> MixedPrompt:
        wrong = next((token for token in tokens if not 0 <= token < self._vocabulary.size), None)
        if wrong is not None:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"the model has no token {wrong}: its tokens are 0 to {self._vocabulary.size - 1}",
            )
        return MixedPrompt(list(tokens))

    def _read(self, text: str) -> MixedPrompt:
        self._check_text(len(text))
        tokens = self._vocabulary.tokenize(text)
        beginning = self._missing_beginning(tokens)
        if beginning is not None:
            tokens.insert(0, beginning)
        return MixedPrompt(tokens)

    def _see(
        self, conversation: Conversation, text: str, is_wanted: Callable[[], bool]
    ) -> MixedPrompt:
        vision = self.engine.vision
        if vision is None:
            raise RequestError(
                ErrorCode.MULTIMODAL_NOT_SUPPORTED,
                "the model cannot see images: it has no multimodal projector",
            )
        texts = text.split(conversation.image_marker)
        if len(texts) != len(conversation.images) + 1:
            raise RequestError(
                ErrorCode.CHAT_TEMPLATE_ERROR,
                f"the chat template names {len(texts) - 1} images, "
                f"but the conversation has {len(conversation.images)}",
            )
        self._check_text(sum(map(len, texts)))
        if self._missing_beginning(self._vocabulary.tokenize(texts[0])) is not None:
            texts[0] = self._vocabulary.special_texts["bos_token"] + texts[0]
        side = conversation.longest_image_side
        pictures = [open_image(data, longest_side=side) for data in conversation.images]

        def proceed(count: int) -> None:
            self._check_length(count)
            if not is_wanted():
                raise RequestError(ErrorCode.INVALID_REQUEST, "nobody waits for it any longer")

        return vision.read(texts, pictures, proceed=proceed)

    def _missing_beginning(self, tokens: Sequence[TokenId]) -> TokenId | None:
        """Many templates write the beginning token themselves; twice would harm the answer."""
        beginning = self._vocabulary.beginning
        return None if tokens[:1] == [beginning] else beginning

    def _check_text(self, length: int) -> None:
        """Millions of tokens take seconds to count, only to be refused: others wait meanwhile."""
        least = length // self._vocabulary.longest_piece
        if least >= self._context:
            raise self._too_long(f"at least {least}")

    def _check_length(self, count: int) -> None:
        if count >= self._context:
            raise self._too_long(str(count))

    def _parser(self, request: Generate, text: str) -> OutputParser:
        match request.prompt:
            case TokenPrompt() | RawPrompt(is_plain=True):
                return PLAIN.parser(prompt="", tools=None, has_tools=False)
            case Conversation(tools=offered) if offered:
                tools = Tools(offered)
                are_read = request.prompt.calls_told is not CallsTold.RAW
                return self.format.parser(
                    prompt=text, tools=tools if are_read else None, has_tools=True
                )
            case _:
                return self.format.parser(prompt=text, tools=None, has_tools=False)

    def _guidance(self, request: Generate, text: str) -> Guidance | None:
        """What the answer has to follow."""
        if not isinstance(request.prompt, Conversation):
            return request.constraint
        tokens = {mark.decode(): token for token, mark in self._marks.items()}
        return answer_grammar(
            self.format,
            request.prompt,
            prompt=text,
            constraint=request.constraint,
            tokens=tokens,
            ends=[mark for mark, token in tokens.items() if self._vocabulary.is_end(token)],
        )

    def _tokens_of(self, marks: Sequence[str]) -> dict[TokenId, bytes]:
        """Those that are one token, whose own text is not shown."""
        found: dict[TokenId, bytes] = {}
        for mark in marks:
            tokens = self._vocabulary.tokenize(mark)
            if len(tokens) == 1 and not self._vocabulary.piece(tokens[0]):
                found[tokens[0]] = mark.encode()
        return found

    def _too_long(self, count: str) -> RequestError:
        return RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"context_length_exceeded: the prompt has {count} tokens; with at least one "
            f"for the answer, the limit of this agent is {self._context}",
        )

    def _render(self, prompt: Prompt) -> str:
        match prompt:
            case RawPrompt(text):
                return text
            case TokenPrompt():
                return ""
            case Conversation() as conversation:
                if self._compiled is None:
                    raise RequestError(
                        ErrorCode.CHAT_TEMPLATE_ERROR,
                        f"{self.template_error}; send a raw prompt instead",
                    )
                return self._compiled.render(conversation)
