"""From a ``Generate`` frame to tokens, or to the reason why it cannot run here.

No I/O here, and nothing that belongs to the decode thread: long prompts are prepared beside it,
so that they do not hold up the streams that run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

from agent.answer_grammar import answer_grammar
from agent.embedding import EmbeddingRequest, tokenize
from agent.engine import Engine, Guidance, ImageRun, MixedPrompt, Sampler
from agent.formats import PLAIN, OutputFormat, recognize, recognize_told
from agent.images import open_image
from agent.output import OutputStream
from agent.output_parser import OutputParser
from agent.template import ChatTemplate
from agent.tool_calls import MOST_CALLS
from agent.tool_prompt import has_tools, with_tools_in_words
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
    resumed: tuple[TokenId, ...] = ()
    """How the answer begins; the sampler and the output know of it already."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model is to see it, and how it will answer."""

    text: str
    """Empty if tokens were given."""
    format: OutputFormat
    conversation: Conversation | None = None
    """As it was sent; None: the prompt was text or tokens."""


LONGEST_TO_TOKENIZE = 2**20
"""In characters, for who only wants the tokens; it may be more than a prompt."""


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
        """Of answers, unless tools are told in words."""
        self._told_format = recognize_told(self.template)
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

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same model with the same template: its prompts and answers are the same."""
        told = (self.engine.fingerprint, self.template or "")
        return sha256("\0".join(told).encode()).hexdigest()

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
            case Conversation() as conversation if request.template is not None:
                template = ChatTemplate(request.template, self._vocabulary.special_texts)
                text = template.render(conversation)
            case prompt:
                text = self.render(prompt).text
        if len(text) > LONGEST_TO_TOKENIZE:
            raise RequestError(
                ErrorCode.INVALID_PROMPT,
                f"the text has {len(text)} characters; {LONGEST_TO_TOKENIZE} are allowed",
            )
        tokens = self._tokenize(text) if request.adds_beginning else self._vocabulary.tokenize(text)
        pieces = tuple(map(self._vocabulary.written, tokens))
        return Tokenized(request.request_id, tuple(tokens), pieces, self._context)

    def prepare_prompt(
        self, request: Generate, is_wanted: Callable[[], bool] = _always
    ) -> PreparedRequest:
        rendered = self.render(request.prompt)
        text = rendered.text
        match request.prompt:
            case TokenPrompt(given):
                prompt = self._take(given)
            case Conversation(images=images) if images:
                prompt = self._see(request.prompt, text, is_wanted)
            case _:
                prompt = self._read(text)
        tokens = prompt.tokens
        if not tokens:
            raise RequestError(ErrorCode.INVALID_PROMPT, "the prompt is empty")
        self._check_length(len(tokens))
        resumed = self._take(request.resumed).tokens
        sampler = self.engine.sampler(
            tokens,
            request.sampling,
            self._guidance(request, rendered),
            request.logprobs,
            resumed,
        )
        output = OutputStream(
            _parser(rendered),
            stop=request.stop,
            is_calls=bool(rendered.conversation and rendered.conversation.must_call),
        )
        marks = self._marks_of(rendered.format)
        for token in resumed:
            output.feed(self._vocabulary.piece(token) or marks.get(token, b""))  # told already
        return PreparedRequest(
            request.request_id,
            tokens,
            request.max_tokens,
            sampler,
            output,
            marks,
            request.cache_salt,
            request.cache_prompt,
            prompt.images,
            request.resumed,
        )

    def _take(self, tokens: Sequence[TokenId]) -> MixedPrompt:
        wrong = next((token for token in tokens if not 0 <= token < self._vocabulary.size), None)
        if wrong is not None:
            raise RequestError(
                ErrorCode.INVALID_PROMPT,
                f"the model has no token {wrong}: its tokens are 0 to {self._vocabulary.size - 1}",
            )
        return MixedPrompt(list(tokens))

    def _read(self, text: str) -> MixedPrompt:
        self._check_text(len(text))
        return MixedPrompt(self._tokenize(text))

    def _tokenize(self, text: str) -> list[TokenId]:
        tokens = self._vocabulary.tokenize(text)
        beginning = self._missing_beginning(tokens)
        if beginning is not None:
            tokens.insert(0, beginning)
        return tokens

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
            raise self._too_long(least, "at least ")

    def _check_length(self, count: int) -> None:
        if count >= self._context:
            raise self._too_long(count)

    def _guidance(self, request: Generate, rendered: RenderedPrompt) -> Guidance | None:
        """What the answer has to follow."""
        if not isinstance(request.prompt, Conversation):
            return request.constraint
        tokens = {mark.decode(): token for token, mark in self._marks_of(rendered.format).items()}
        return answer_grammar(
            rendered.format,
            request.prompt,
            prompt=rendered.text,
            constraint=request.constraint,
            tokens=tokens,
            ends=[mark for mark, token in tokens.items() if self._vocabulary.is_end(token)],
        )

    def _marks_of(self, form: OutputFormat) -> dict[TokenId, bytes]:
        if form is self.format:
            return self._marks
        return self._told_marks if form is self._told_format else {}

    @cached_property
    def _told_marks(self) -> dict[TokenId, bytes]:
        return {} if self._told_format is None else self._tokens_of(self._told_format.marks)

    def _tokens_of(self, marks: Sequence[str]) -> dict[TokenId, bytes]:
        """Those that are one token, whose own text is not shown."""
        found: dict[TokenId, bytes] = {}
        for mark in marks:
            tokens = self._vocabulary.tokenize(mark)
            if len(tokens) == 1 and not self._vocabulary.piece(tokens[0]):
                found[tokens[0]] = mark.encode()
        return found

    def _too_long(self, count: int, about: str = "") -> RequestError:
        return RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"context_length_exceeded: the prompt has {about}{count} tokens; with at least one "
            f"for the answer, the limit of this agent is {self._context}",
            {"n_prompt_tokens": count, "n_ctx": self._context},
        )

    def format_for(self, conversation: Conversation) -> OutputFormat:
        """How the model will write its answer to it."""
        if self._told_format is not None and has_tools(conversation):
            return self._told_format
        return self.format

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """Raises ``RequestError`` if the template cannot do it."""
        match prompt:
            case RawPrompt(text, is_plain=True):
                return RenderedPrompt(text, PLAIN)
            case RawPrompt(text):
                return RenderedPrompt(text, self.format)
            case TokenPrompt():
                return RenderedPrompt("", PLAIN)
            case Conversation() as conversation:
                if self._compiled is None:
                    raise RequestError(
                        ErrorCode.CHAT_TEMPLATE_ERROR,
                        f"{self.template_error}; send a raw prompt instead",
                    )
                form = self.format_for(conversation)
                seen = conversation
                if form is self._told_format:
                    takes_system = self._compiled.takes_system
                    seen = with_tools_in_words(conversation, takes_system=takes_system)
                text = self._compiled.render(seen)
                if not conversation.enable_thinking:
                    text = form.without_reasoning(text)
                return RenderedPrompt(text, form, conversation)


def _parser(rendered: RenderedPrompt) -> OutputParser:
    form, prompt, conversation = rendered.format, rendered.text, rendered.conversation
    if conversation is None or not conversation.tools:
        return form.parser(prompt=prompt, tools=None, has_tools=False)
    tools = Tools(conversation.tools)
    match conversation.calls_told:
        case CallsTold.RAW:
            return form.parser(prompt=prompt, tools=None, has_tools=True)
        case CallsTold.CHECKED:
            return form.parser(prompt=prompt, tools=tools, has_tools=True)
        case CallsTold.STREAMED:
            most_calls = MOST_CALLS if conversation.parallel_calls else 1
            return form.streaming_parser(prompt=prompt, tools=tools, most_calls=most_calls)
