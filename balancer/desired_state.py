"""What the operator wants the agents to run: the bodies of ``/api/v1/balancer_desired_state`` and
``/api/v1/agent_overrides``, and what follows from them for one agent.

Names and required keys of the former are those of the published wire format. No I/O here.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from balancer.bodies import Row
from common import messages, models
from common.messages import Pooling, Sampling
from common.models import (
    AgentDesiredState,
    CacheType,
    EngineChoices,
    FlashAttention,
    ModelReference,
    NoModel,
)


class Strict(BaseModel):
    """Base of all public data: immutable, and nothing in it is ignored in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


UInt: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Int: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class InferenceParameters(Strict):
    """Every key must be given; ``defaults`` are for a balancer that was never told."""

    # Operators are shown what stands under each.
    model_config = ConfigDict(use_attribute_docstrings=True)

    n_batch: UInt
    """Tokens in one embedding batch, in one document and in one piece of an image, at most."""
    context_size: UInt
    """Tokens that one request can have, prompt and answer; 0: as many as the model knows."""
    embedding_batch_size: Annotated[int, Field(gt=0, lt=2**32)]
    """Documents that are given to an agent at once."""
    enable_embeddings: bool
    """Embeddings in place of generated tokens."""
    image_resize_to_fit: Annotated[int, Field(gt=0, lt=2**32)]
    """Pixels of an image's longest side; larger ones are scaled down."""
    k_cache_dtype: CacheType
    """How keys are kept in the KV cache."""
    v_cache_dtype: CacheType
    """How values are kept in the KV cache; other than F16 or F32 needs flash attention."""
    # Sampling is bounded as for single requests: else each of them would be refused for it.
    min_p: Annotated[float, Field(ge=0, le=1)]
    """Tokens less likely than this part of the likeliest one are left out; 0: none."""
    n_gpu_layers: Int
    """Layers of the model on GPUs; 0: none, -1: all."""
    penalty_frequency: Annotated[float, Field(ge=-100, le=100)]
    """Taken from a token's logit for each time that it occurred; 0: off."""
    penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31)]
    """How many of the latest tokens are penalised; -1: as many as the context holds, 0: none."""
    penalty_presence: Annotated[float, Field(ge=-100, le=100)]
    """Taken from a token's logit if it occurred; 0: off."""
    penalty_repeat: Annotated[float, Field(gt=0, le=100)]
    """Divides the logit of a token that occurred; 1: off."""
    pooling_type: Pooling
    """What becomes of a document's tokens' vectors."""
    temperature: Annotated[float, Field(ge=-100, le=100)]
    """0 or less: always the likeliest token."""
    top_k: Int
    """So many of the likeliest tokens are candidates; 0 or less: all."""
    top_p: Annotated[float, Field(ge=0, le=1)]
    """The likeliest tokens that have this probability together are candidates; 1: all."""

    @classmethod
    def defaults(cls) -> "InferenceParameters":
        """Those of the published format, but for the KV cache: as ``Q8_0``, which they name, prompts
        are read 1.4 times as long on a CPU (measured).
        """
        sampling = Sampling()
        return cls(
            n_batch=2048,
            context_size=8192,
            embedding_batch_size=256,
            enable_embeddings=False,
            image_resize_to_fit=1024,
            k_cache_dtype=CacheType.F16,
            v_cache_dtype=CacheType.F16,
            min_p=sampling.min_p,
            n_gpu_layers=0,
            penalty_frequency=sampling.penalty_frequency,
            penalty_last_n=sampling.penalty_last_n,
            penalty_presence=sampling.penalty_presence,
            penalty_repeat=sampling.penalty_repeat,
            pooling_type=Pooling.LAST,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )

    @property
    def sampling(self) -> Sampling:
        """How requests are sampled that do not say it themselves."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            penalty_repeat=self.penalty_repeat,
            penalty_frequency=self.penalty_frequency,
            penalty_presence=self.penalty_presence,
            penalty_last_n=self.penalty_last_n,
        )

    @property
    def choices(self) -> EngineChoices:
        """How models are run on agents that nobody told otherwise."""
        return EngineChoices(
            context_size=self.context_size,
            n_batch=self.n_batch,
            n_gpu_layers=self.n_gpu_layers,
            k_cache_dtype=self.k_cache_dtype,
            v_cache_dtype=self.v_cache_dtype,
        )


class HuggingFaceReference(Strict):
    filename: str
    repo_id: str
    revision: str


class HuggingFaceModel(Strict):
    reference: HuggingFaceReference = Field(alias="HuggingFace")

    def referred(self) -> ModelReference:
        told = self.reference
        return models.HuggingFaceModel(told.repo_id, told.filename, told.revision)


class LocalModel(Strict):
    path: str = Field(alias="LocalToAgent")

    def referred(self) -> ModelReference:
        return models.LocalModel(self.path)


def _is_absent(value: object) -> bool:
    return value is None


class UrlReference(Strict):
    url: str
    # Ours, and not told to clients that never said it: some refuse keys that they do not know.
    sha256: Annotated[
        Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None, Field(exclude_if=_is_absent)
    ] = None


class UrlModel(Strict):
    reference: UrlReference = Field(alias="Url")

    def referred(self) -> ModelReference:
        return models.UrlModel(self.reference.url, self.reference.sha256)


DesiredModel: TypeAlias = Literal["None"] | HuggingFaceModel | LocalModel | UrlModel


def referred(model: DesiredModel) -> ModelReference:
    """As agents are told."""
    return NoModel() if model == "None" else model.referred()


class ChatTemplateOverride(Strict):
    content: str


class BalancerDesiredState(Strict):
    chat_template_override: ChatTemplateOverride | None = None
    inference_parameters: InferenceParameters
    model: DesiredModel
    multimodal_projection: DesiredModel
    use_chat_template_override: bool

    @property
    def template(self) -> ChatTemplateOverride | None:
        """In place of the model's own; None also if one is to be used that is not there."""
        return self.chat_template_override if self.use_chat_template_override else None

    @property
    def model_reference(self) -> ModelReference:
        return referred(self.model)

    @property
    def applicable(self) -> "ApplicableState":
        return ApplicableState(
            chat_template_override=self.template,
            inference_parameters=self.inference_parameters,
            model=self.model,
            multimodal_projection=self.multimodal_projection,
        )

    @classmethod
    def defaults(cls) -> "BalancerDesiredState":
        return cls(
            inference_parameters=InferenceParameters.defaults(),
            model="None",
            multimodal_projection="None",
            use_chat_template_override=False,
        )


class ApplicableState(Strict):
    """The part that agents apply."""

    chat_template_override: ChatTemplateOverride | None
    inference_parameters: InferenceParameters
    model: DesiredModel
    multimodal_projection: DesiredModel


Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=messages.LONGEST_NAME)]


class EngineKeys(Strict):
    """How a model is run, where machines differ. What is not said holds as for all."""

    context_size: UInt | None = None
    n_batch: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    n_gpu_layers: Int | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    tensor_split: (
        Annotated[Row[Annotated[float, Field(ge=0, le=1e6)]], Field(max_length=64)] | None
    ) = None
    main_gpu: Annotated[int, Field(ge=0, le=255)] | None = None
    flash_attention: FlashAttention | None = None
    k_cache_dtype: CacheType | None = None
    v_cache_dtype: CacheType | None = None

    def engine_choices(self, slots: int | None) -> EngineChoices:
        return EngineChoices(slots=slots, **self.model_dump(include=set(EngineKeys.model_fields)))


class AgentOverride(EngineKeys):
    """What holds for some agents only."""

    name: Name | None = None
    label: Name | None = None
    slots: Annotated[int, Field(ge=1, le=256)] | None = None

    @model_validator(mode="after")
    def _for_somebody(self) -> "AgentOverride":
        if (self.name is None) == (self.label is None):
            raise ValueError("exactly one of name and label is expected")
        return self

    @property
    def choices(self) -> EngineChoices:
        return self.engine_choices(self.slots)

    def is_for(self, name: str | None, labels: Iterable[str]) -> bool:
        return self.name == name if self.label is None else self.label in labels


class AgentOverrides(Strict):
    """By name goes before by label; among those of one kind the later before the earlier."""

    overrides: Annotated[Row[AgentOverride], Field(max_length=1000)] = ()

    def choices(self, name: str | None, labels: Iterable[str]) -> EngineChoices:
        """All that is said of one agent."""
        ours = [each for each in self.overrides if each.is_for(name, labels)]
        ours.sort(key=lambda each: each.name is not None)
        return EngineChoices.merged(*(each.choices for each in reversed(ours)))


def agent_state(
    state: BalancerDesiredState, overrides: AgentOverrides, name: str | None, labels: Iterable[str]
) -> AgentDesiredState:
    """What one agent is to run."""
    template = state.template
    return AgentDesiredState(
        model=state.model_reference,
        multimodal_projection=referred(state.multimodal_projection),
        chat_template=None if template is None else template.content,
        embeddings_only=state.inference_parameters.enable_embeddings,
        choices=state.inference_parameters.choices,
        overrides=overrides.choices(name, labels),
    )
