"""What the operator wants the agents to run: the body of ``/api/v1/balancer_desired_state``.

Names, defaults and required keys are those of the published wire format. No I/O here.
"""

import enum
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from common.messages import Pooling, Sampling


class Strict(BaseModel):
    """Base of all public data: immutable, and nothing in it is ignored in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CacheType(enum.StrEnum):
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    IQ4_NL = "IQ4_NL"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"


UInt: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Int: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class InferenceParameters(Strict):
    """Every key must be given; ``defaults`` are for a balancer that was never told."""

    n_batch: UInt
    context_size: UInt
    embedding_batch_size: Annotated[int, Field(gt=0, lt=2**32)]
    enable_embeddings: bool
    image_resize_to_fit: Annotated[int, Field(gt=0, lt=2**32)]
    k_cache_dtype: CacheType
    v_cache_dtype: CacheType
    min_p: float
    n_gpu_layers: Int
    penalty_frequency: float
    penalty_last_n: Int
    penalty_presence: float
    penalty_repeat: float
    pooling_type: Pooling
    temperature: float
    top_k: Int
    top_p: float

    @classmethod
    def defaults(cls) -> "InferenceParameters":
        sampling = Sampling()
        return cls(
            n_batch=2048,
            context_size=8192,
            embedding_batch_size=256,
            enable_embeddings=False,
            image_resize_to_fit=1024,
            k_cache_dtype=CacheType.Q8_0,
            v_cache_dtype=CacheType.Q8_0,
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


class HuggingFaceReference(Strict):
    filename: str
    repo_id: str
    revision: str


class HuggingFaceModel(Strict):
    reference: HuggingFaceReference = Field(alias="HuggingFace")


class LocalModel(Strict):
    path: str = Field(alias="LocalToAgent")


class UrlReference(Strict):
    url: str


class UrlModel(Strict):
    reference: UrlReference = Field(alias="Url")


DesiredModel: TypeAlias = Literal["None"] | HuggingFaceModel | LocalModel | UrlModel


class ChatTemplateOverride(Strict):
    content: str


class BalancerDesiredState(Strict):
    chat_template_override: ChatTemplateOverride | None = None
    inference_parameters: InferenceParameters
    model: DesiredModel
    multimodal_projection: DesiredModel
    use_chat_template_override: bool

    @classmethod
    def defaults(cls) -> "BalancerDesiredState":
        return cls(
            inference_parameters=InferenceParameters.defaults(),
            model="None",
            multimodal_projection="None",
            use_chat_template_override=False,
        )
