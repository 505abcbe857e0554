"""What every OpenAI request for tokens may say, however it gives its prompt. No I/O here.

Beside OpenAI's own keys there are those that clients of llama.cpp's server know, by its names, and
ours: ``priority``, ``deadline_ms`` and ``cache_salt``.
"""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec.structs import replace
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from balancer.bodies import Row
from balancer.limits import UNLIMITED
from balancer.native_requests import MOST_ANSWERS, SamplingOptions, StopText
from balancer.openai_errors import ParameterError
from balancer.terms import Priority, Route, Terms
from common.ids import RequestId
from common.messages import Constraint, Gbnf, Generate, JsonSchema, Prompt, Sampling


class Said(BaseModel):
    """Base of what OpenAI clients send: nothing is ignored in silence, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


def _not_zero(value: int) -> int:
    if not value:
        raise ValueError("must be at least 1, or -1 for as many as fit")
    return value


TokenLimit: TypeAlias = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(_not_zero)]
"""-1, as in llama.cpp: as many as the context holds."""

Text: TypeAlias = Annotated[str, Field(max_length=1024)]

LLAMA_CPP_NAMES = {
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
    "penalty_frequency": "frequency_penalty",
    "penalty_presence": "presence_penalty",
}


class StreamOptions(Said):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(SamplingOptions):
    model_config = ConfigDict(
        strict=True,
        alias_generator=lambda name: LLAMA_CPP_NAMES.get(name, name),
        serialize_by_alias=False,
    )

    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """None: any that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: TokenLimit | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[Row[StopText], Field(max_length=16)] | None = None

    grammar: str | None = None
    """In GBNF; its first rule is ``root``."""
    json_schema: dict[str, Any] | bool | None = None
    cache_prompt: bool | None = None

    priority: Priority | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=24 * 3600 * 1000)] | None = None
    cache_salt: Annotated[str, Field(max_length=128)] | None = None

    # They change nothing about an answer here, and OpenAI promises no more either.
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @field_validator("stream_options")
    @classmethod
    def _only_of_streams(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only allowed when 'stream' is true")
        return value

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def answers(self) -> int:
        """To each prompt."""
        return self.n or 1

    @property
    def tells_usage(self) -> bool:
        """At the end of a stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    route: ClassVar[Route] = Route.OTHER

    @property
    def terms(self) -> Terms:
        seconds = None if self.deadline_ms is None else self.deadline_ms / 1000
        return Terms(self.model, self.priority or Priority.NORMAL, seconds, route=self.route)

    @property
    def longest_answer(self) -> int:
        """In tokens."""
        return self._limited(self.max_tokens)

    @staticmethod
    def _limited(limit: int | None) -> int:
        return UNLIMITED if limit is None or limit < 0 else limit

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """How many to tell with each token's log probability; None: do not tell it."""

    def constraint(self) -> Constraint | None:
        """Raises ``ParameterError`` if there is more than one."""
        if self.grammar is not None and self.json_schema is not None:
            raise ParameterError("grammar", "'grammar' and 'json_schema' exclude each other.")
        if self.grammar is not None:
            return Gbnf(self.grammar)
        return None if self.json_schema is None else written_schema(self.json_schema)

    def generate(self, request_id: RequestId, prompt: Prompt, sampling: Sampling) -> Generate:
        """The frame for an agent. ``sampling``: what holds where the client says nothing."""
        # -1 as in llama.cpp: any.
        seed = None if self.seed is None or self.seed == -1 else self.seed % 2**32
        return Generate(
            request_id=request_id,
            prompt=prompt,
            max_tokens=self.longest_answer,
            sampling=replace(sampling, **self.replacements(), seed=seed),
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
            constraint=self.constraint(),
            logprobs=self.alternatives,
            cache_salt=self.cache_salt or "",
            # As in the native protocol: the same text again, unless answers share the prompt anyway.
            cache_prompt=(seed is None or self.answers > 1)
            if self.cache_prompt is None
            else self.cache_prompt,
        )


def written_schema(schema: dict[str, Any] | bool) -> JsonSchema:
    return JsonSchema(msgspec.json.encode(schema).decode())
