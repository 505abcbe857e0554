"""An agent from its settings."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agent.echo import EchoEngine
from agent.engine import Chunk, Decoded, Engine
from agent.link import Credentials
from agent.loop import LoopSettings
from agent.model_files import ModelFiles, default_cache
from agent.service import Agent
from agent.swap import ModelSwap, Setup
from balancer.keys import Role
from common.models import (
    CacheType,
    Download,
    FlashAttention,
    HuggingFaceModel,
    KvLayout,
    LocalModel,
    UrlModel,
)
from common.references import describe
from deploy.access import own_key
from deploy.attempts import Attempts
from deploy.machine import default_threads, process_age, usable_cores
from deploy.settings import AgentSettings, EngineKind
from deploy.tls import client_context, pinned_context, pinned_text_context

ECHO_CONTEXT = 4096

ECHO_PACE = "HEADRACE_ECHO_PACE"
"""An environment variable: seconds that each pass of the echo engine takes, so that what it says can
be watched, and interrupted, as a model's answer can.
"""

DEFAULT_SLOTS = 4


def make_agent(settings: AgentSettings) -> Agent:
    """Must be called inside a running asyncio loop. Raises ``HeadraceError`` if a file that it is told
    of cannot be used.
    """
    is_echo = settings.engine is EngineKind.ECHO
    return Agent(
        balancers=settings.balancers,
        name=settings.name,
        labels=settings.labels,
        fleet=settings.fleet,
        models=EchoModels(settings) if is_echo else LlamaModels(settings),
        swap=ModelSwap(
            own=settings.choices, pinned=LocalModel("echo") if is_echo else settings.pinned
        ),
        loop_settings=LoopSettings(
            longest_gap=settings.longest_gap, cache_tokens=settings.cache_tokens
        ),
        credentials=credentials(settings, os.environ),
        started=time.monotonic() - process_age(),
    )


def credentials(settings: AgentSettings, environment: Mapping[str, str]) -> Credentials:
    """Raises ``HeadraceError``."""
    file = None if settings.key_file is None else Path(settings.key_file)
    tls = None
    if settings.tls_pin is not None:
        tls = pinned_context(Path(settings.tls_pin))
    elif settings.tls_pin_text is not None:
        tls = pinned_text_context(settings.tls_pin_text, "the balancer's certificate")
    elif settings.tls_ca is not None:
        tls = client_context(Path(settings.tls_ca))
    return Credentials(own_key(Role.AGENT, file, environment), tls)


class EchoModels:
    """No files: the echo engine, under any name."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings

    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        /,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> str:
        return describe(reference)

    def check(self, setup: Setup, /) -> None:
        pass

    def load(self, setup: Setup, warms_up: Callable[[], None], /) -> Engine:
        choices = setup.target.choices
        context = choices.context_size or ECHO_CONTEXT
        return PacedEcho(
            float(os.environ.get(ECHO_PACE, "0")),
            slots=choices.slots or DEFAULT_SLOTS,
            context=context,
            cells=max(self._settings.kv_cells or 0, context),
            shares_cells=self._settings.kv_layout is KvLayout.UNIFIED,
        )


class PacedEcho(EchoEngine):
    def __init__(
        self, pace: float, *, slots: int, context: int, cells: int, shares_cells: bool
    ) -> None:
        super().__init__(slots=slots, context=context, cells=cells, shares_cells=shares_cells)
        self._pace = pace

    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        time.sleep(self._pace)
        return super().decode(chunks)


class LlamaModels:
    """Files of GGUF, run by llama.cpp."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        cache = default_cache(os.environ)
        self._files = ModelFiles(cache=cache)
        self._attempts = Attempts(cache / "loading", _identity(settings))

    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        /,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> str:
        return str(self._files.find(reference, progress=progress, stop=stop))

    def check(self, setup: Setup, /) -> None:
        from agent.llama import check_loadable  # needs the built library; echo does not
        from agent.llama_vision import check_projector

        check_loadable(setup.model_path)
        if setup.projection_path is not None:
            check_projector(setup.projection_path)
        self._attempts.check(repr(setup))

    def load(self, setup: Setup, warms_up: Callable[[], None], /) -> Engine:
        with self._attempts.noted(repr(setup)):
            return self._load(setup, warms_up)

    def _load(self, setup: Setup, warms_up: Callable[[], None]) -> Engine:
        from agent.llama import (
            DEFAULT_CONTEXT,
            EMBEDDING_BATCH_SIZE,
            IMAGE_BATCH_SIZE,
            Attention,
            Device,
            LlamaEngine,
        )

        choices = setup.target.choices
        cells = self._settings.kv_cells
        context = DEFAULT_CONTEXT if choices.context_size is None else choices.context_size
        if cells is not None and self._settings.choices.context_size is None:
            context = min(context or cells, cells)  # what holds for all is too much here
        return LlamaEngine(
            setup.model_path,
            slots=choices.slots or DEFAULT_SLOTS,
            threads=choices.threads or default_threads(usable_cores()),
            context=context,
            cells=cells,
            layout=self._settings.kv_layout,
            embedding_batch_size=choices.n_batch or EMBEDDING_BATCH_SIZE,
            projector_path=setup.projection_path,
            image_batch_size=choices.n_batch or IMAGE_BATCH_SIZE,
            device=Device(
                gpu_layers=choices.n_gpu_layers or 0,
                tensor_split=choices.tensor_split or (),
                main_gpu=choices.main_gpu or 0,
            ),
            attention=Attention(
                flash=choices.flash_attention or FlashAttention.AUTO,
                k_cache=choices.k_cache_dtype or CacheType.F16,
                v_cache=choices.v_cache_dtype or CacheType.F16,
            ),
            warms_up=warms_up,
        )


def _identity(settings: AgentSettings) -> str:
    """The same at each start of this agent, and no other's on this machine. The balancers' addresses
    change in a cluster, where the names of a fleet's agents are unique; those of others need not be.
    """
    if settings.fleet is not None:
        return f"fleet {settings.fleet} {settings.name}"
    return f"{' '.join(sorted(settings.balancers))} {settings.name}"
