"""Fleets: the agents that are started and stopped as they are needed, as an operator wants them.

Bodies of ``/api/v1/fleets`` and part of the stored state. No I/O here; how many agents a fleet has is
decided in ``fleet_plan``.
"""

from collections.abc import Mapping
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from balancer.desired_state import DesiredModel, EngineKeys, Strict, referred
from common.models import KvLayout, ModelReference, names

MOST_FLEETS = 64
MOST_AGENTS = 1024
"""Of one fleet."""


def _no_route(name: str) -> str:
    if name == "stream":
        raise ValueError("this name is that of a route")
    return name


FleetName: TypeAlias = Annotated[
    str, Field(pattern="^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"), AfterValidator(_no_route)
]
"""Part of the names of its agents: ``NAME-1``, ``NAME-2`` ..."""

# As Ray takes them: ``ray._private.label_utils``; its operators (``!``, ``in(...)``) are not offered.
LabelValue: TypeAlias = Annotated[
    str, Field(pattern="^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
LabelKey: TypeAlias = Annotated[
    str,
    Field(
        pattern="^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
    ),
]


def _in_steps(amount: float) -> float:
    if amount * 10_000 != round(amount * 10_000):
        raise ValueError("Ray counts in steps of 0.0001")
    return amount


def _whole_above_1(amount: float) -> float:
    if amount > 1 and amount != int(amount):
        raise ValueError("more than one can only be whole ones")
    return amount


class Resources(Strict):
    """What each agent takes of the node it runs on; Ray places by it, and adds nodes for it."""

    cpus: Annotated[float, Field(ge=0, le=4096), AfterValidator(_in_steps)] = 0.0
    gpus: Annotated[
        float, Field(ge=0, le=64), AfterValidator(_in_steps), AfterValidator(_whole_above_1)
    ] = 0.0
    labels: dict[LabelKey, LabelValue] = Field(max_length=16, default_factory=dict)
    """What the node must be labelled with."""

    @property
    def words(self) -> str:
        """Such as ``1 GPU, 8 CPUs, the label pool=gpu``."""
        parts = [
            f"{count:g} {name}" + ("" if count == 1 else "s")
            for count, name in ((self.gpus, "GPU"), (self.cpus, "CPU"))
            if count
        ]
        parts += [f"the label {name}={value}" for name, value in self.labels.items()]
        return ", ".join(parts) or "any room"


class Engine(EngineKeys):
    """How the model is run. What is not said is as the desired state says."""

    kv_layout: KvLayout = KvLayout.UNIFIED
    kv_cells: Annotated[int, Field(ge=16, lt=2**31)] | None = None
    cache_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    longest_gap: Annotated[float, Field(ge=0.01, le=60)] = 0.15


class Fleet(Strict):
    model: DesiredModel | None = None
    """None: that of the desired state, also when it changes."""
    slots: Annotated[int, Field(ge=1, le=256)] = 4
    """Of each agent."""
    resources: Resources = Resources()
    engine: Engine = Engine()
    min: Annotated[int, Field(ge=0, le=MOST_AGENTS)] = 0
    max: Annotated[int, Field(ge=0, le=MOST_AGENTS)] = 1
    idle_time: Annotated[float, Field(ge=1, le=86_400)] = 300.0
    """Seconds that an agent may have nothing to do before it goes, if ``min`` others are left."""
    grow_when_waiting: Annotated[int, Field(ge=1, le=100_000)] = 1
    """So many requests that wait mean one more agent."""
    grow_at_slot_use: Annotated[float, Field(gt=0, le=1)] = 1.0
    """So large a part of the slots in use means one more, also while nobody waits."""
    spare_nodes: Annotated[int, Field(ge=0, le=MOST_AGENTS)] = 0
    """Room for so many more agents is asked of Ray's autoscaler beforehand."""

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.model == "None":
            raise ValueError("a fleet has a model; without the key it is the desired state's")
        return self

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self

    def reference(self, desired: ModelReference) -> ModelReference:
        """``desired``: the model of the desired state."""
        return desired if self.model is None else referred(self.model)


Fleets: TypeAlias = Annotated[dict[FleetName, Fleet], Field(max_length=MOST_FLEETS)]


def model_names(fleets: Mapping[str, Fleet], desired: ModelReference) -> dict[str, frozenset[str]]:
    """For each fleet, what clients may call its model by."""
    return {name: names(fleet.reference(desired)) for name, fleet in fleets.items()}
