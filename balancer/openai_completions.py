"""``/v1/completions``, inwards: prompts as text or tokens, one or many. No I/O here."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from balancer.bodies import Items
from balancer.openai_errors import ParameterError
from balancer.openai_generation import GenerationBody
from balancer.terms import Route
from common.ids import TokenId
from common.messages import Prompt, RawPrompt, TokenPrompt

DEFAULT_TOKENS = 16
"""OpenAI's own default for these, unlike for chats."""

MOST_PROMPTS = 128
"""In one batch."""

Token: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Tokens: TypeAlias = Annotated[Items[Token], Field(min_length=1)]


def shape(value: Any) -> str:
    """What a prompt is meant to be, so that an error is about that and nothing else it might be."""
    if not isinstance(value, list):
        return "text"
    return "tokens" if value and isinstance(value[0], int) else "batch"


def _part_shape(value: Any) -> str:
    return "tokens" if isinstance(value, list) else "text"


OneText: TypeAlias = Annotated[str, Tag("text")]
OneTokens: TypeAlias = Annotated[Tokens, Tag("tokens")]
Part: TypeAlias = Annotated[OneText | OneTokens, Discriminator(_part_shape)]
"""Of a batch."""


def batch_of(value: str | Sequence[int] | Sequence[str | list[int]]) -> list[str | list[int]]:
    """Texts and lists of tokens; a single one is a batch, too."""
    if isinstance(value, str):
        return [value]
    tokens = [each for each in value if isinstance(each, int)]
    return [tokens] if tokens else [each for each in value if not isinstance(each, int)]


class CompletionRequest(GenerationBody):
    route: ClassVar[Route] = Route.COMPLETIONS

    prompt: Annotated[
        OneText
        | OneTokens
        | Annotated[Items[Part], Field(min_length=1, max_length=MOST_PROMPTS), Tag("batch")],
        Discriminator(shape),
    ]
    echo: bool | None = None
    """Put the prompt before each answer."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None

    @property
    def longest_answer(self) -> int:
        return DEFAULT_TOKENS if self.max_tokens is None else super().longest_answer

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[Prompt]:
        """One for each part of the batch. Raises ``ParameterError``."""
        if self.echo and self.logprobs is not None:
            raise ParameterError("echo", "'echo' together with 'logprobs' is not supported here.")
        return [
            RawPrompt(each, is_plain=True)
            if isinstance(each, str)
            else TokenPrompt(tuple(map(TokenId, each)))
            for each in batch_of(self.prompt)
        ]

    def echoes(self) -> list[str]:
        """What to put before the answers to each prompt. Raises ``ParameterError``."""
        batch = batch_of(self.prompt)
        if not self.echo:
            return [""] * len(batch)
        texts = [each for each in batch if isinstance(each, str)]
        if len(texts) < len(batch):
            raise ParameterError("echo", "'echo' of tokens is not supported here.")
        return texts
