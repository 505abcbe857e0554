"""What each process is told when it starts: built once from the command line, then passed down."""

import enum
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from agent.engine import KvLayout

CLIENT_PORT = 8061
AGENT_PORT = 8062

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class EngineKind(enum.StrEnum):
    LLAMA = "llama"
    ECHO = "echo"
    """No model: says the prompt back. For tests and demonstrations."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    balancer: str
    """The websocket address of the balancer's agent listener."""
    name: str | None
    slots: int
    engine: EngineKind
    model_path: str
    context: int | None
    """Tokens of one request at most; None: the engine's choice."""
    threads: int
    kv_layout: KvLayout = KvLayout.UNIFIED
    kv_cells: int | None = None
    """Tokens of all requests together; None: enough for each slot's context."""
    cache_tokens: int | None = None
    """Tokens that finished requests may keep; None: as many as one request can have."""
    longest_gap: float = 0.15
    """Seconds between two tokens of a stream while prompts are fed, if that can be had."""


class BalancerSettings(BaseModel):
    """The arguments of ``deploy.app:build``, also as ``serve run deploy.app:build key=value``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent_host: str = "127.0.0.1"
    agent_port: int = Field(default=AGENT_PORT, ge=0, le=65535)
    buffer_size: int = Field(default=128, ge=0)
    """Requests that may wait for a slot."""
    buffer_timeout: float = Field(default=10.0, gt=0)
    """Seconds that each may wait."""
