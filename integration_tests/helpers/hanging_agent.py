"""An agent's process whose model hangs as soon as it reads ``HANG``, in a pass that never ends."""

import threading
from collections.abc import Callable, Sequence

from agent.echo import EchoEngine
from agent.engine import Chunk, Decoded, Engine
from agent.loop import LoopSettings
from agent.service import Agent
from agent.swap import ModelSwap, Setup
from common.models import Download, HuggingFaceModel, LocalModel, UrlModel
from deploy.agent_process import main
from deploy.settings import AgentSettings

HANG = b"?"


class HangingEngine(EchoEngine):
    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        if any(HANG[0] in chunk.tokens for chunk in chunks):
            threading.Event().wait()
        return super().decode(chunks)


class HangingModels:
    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        /,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> str:
        return "hanging"

    def check(self, setup: Setup, /) -> None:
        pass

    def load(self, setup: Setup, /) -> Engine:
        return HangingEngine(slots=2, context=256)


def make_hanging(settings: AgentSettings) -> Agent:
    return Agent(
        balancer=settings.balancer,
        name=settings.name,
        models=HangingModels(),
        swap=ModelSwap(own=settings.choices, pinned=LocalModel("hanging")),
        loop_settings=LoopSettings(),
    )


if __name__ == "__main__":
    main(make_hanging)
