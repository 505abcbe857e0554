"""What each process is told when it starts: built once from the command line, then passed down."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from balancer.fleets import Fleets
from balancer.limits import Limits
from common.models import EngineChoices, KvLayout, ModelReference
from deploy.logs import LogFormat

CLIENT_PORT = 8061
AGENT_PORT = 8062

NODE = "node"
"""As ``agent_host``: the address of the node that the balancer runs on."""


class EngineKind(enum.StrEnum):
    LLAMA = "llama"
    ECHO = "echo"
    """No model: says the prompt back. For tests and demonstrations."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    balancers: tuple[str, ...]
    """The websocket addresses of the balancers' agent listeners."""
    name: str | None
    engine: EngineKind
    choices: EngineChoices
    """What this agent was told; the rest is as the balancer says."""
    labels: tuple[str, ...] = ()
    """What overrides may call it by."""
    fleet: str | None = None
    """Whose it is; None: it was started by hand."""
    pinned: ModelReference | None = None
    """The model that it runs whatever the others run; None: that of the desired state."""
    kv_layout: KvLayout = KvLayout.UNIFIED
    kv_cells: int | None = None
    """Tokens of all requests together; None: as many as one request can have."""
    cache_tokens: int | None = None
    """Tokens that finished requests may keep; None: as many as one request can have."""
    longest_gap: float = 0.15
    """Seconds between two tokens of a stream while prompts are fed, if that can be had."""
    key_file: str | None = None
    """With the key that the balancer wants of agents; None: it is in the environment, if anywhere."""
    tls_ca: str | None = None
    """Of ``wss://``: a file of the authorities to trust; None: those of the system."""
    tls_pin: str | None = None
    """A file with the balancer's own certificate, which is trusted alone and whatever its name."""
    tls_pin_text: str | None = None
    """The same as the text of such a file, for machines that do not have it."""
    log_format: LogFormat = LogFormat.PLAIN


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """The same for all agents of fleets."""

    code: str
    """The version of the project: see ``code_version``."""
    engine: EngineKind = EngineKind.LLAMA
    key_file: str | None = None
    """It must be on each node where there are agents."""
    tls_pin_text: str | None = None
    log_format: LogFormat = LogFormat.PLAIN


def to_line(settings: AgentSettings) -> bytes:
    """JSON, for another process."""
    return msgspec.json.encode(settings)


def from_line(line: bytes) -> AgentSettings:
    return msgspec.json.decode(line, type=AgentSettings)


class BalancerSettings(BaseModel):
    """The arguments of ``deploy.app:build``, also as ``serve run deploy.app:build key=value``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent_host: str = "127.0.0.1"
    """An address, or ``node``: that of the node it runs on."""
    agent_port: int = Field(default=AGENT_PORT, ge=0, le=65535)
    buffer_size: int = Field(default=128, ge=0)
    """Requests that may wait for a slot."""
    buffer_timeout: float = Field(default=10.0, gt=0)
    """Seconds that each may wait."""
    limits: Limits = Limits()
    state: str = "memory://"
    """Where the desired state is kept: ``memory://`` or ``file:///PATH``."""
    model: str | None = None
    """What agents run unless it was ever put: a path, an address, see ``parse_model``."""
    fleets: Fleets = Field(default_factory=dict)
    """Each as it is here unless it was ever put or deleted."""
    engine: EngineKind = EngineKind.LLAMA
    """Of the agents of fleets."""
    origins: tuple[str, ...] = ()
    """Of other web pages that may use the routes."""
    keys: Path | None = None
    """A file of keys; None: those in the environment variable ``HEADRACE_KEYS``, if there is one."""
    insecure: bool = False
    """Allow addresses that others can reach and for which there are no keys."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """For the agents' listener; the clients' is Serve's, which has options of its own for it."""
    log_format: LogFormat = LogFormat.PLAIN
    """Of the balancer, the supervisor and the agents of fleets."""
    traces: str | None = None
    """Where spans are sent over OTLP/HTTP; None: nowhere."""

    @model_validator(mode="after")
    def _has_both_or_none(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self
