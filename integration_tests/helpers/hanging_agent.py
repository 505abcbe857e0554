"""An agent's process whose model hangs as soon as it reads ``HANG``, in a pass that never ends."""

import threading
from collections.abc import Sequence

from engines import OneModel

from agent.echo import EchoEngine
from agent.engine import Chunk, Decoded
from agent.loop import LoopSettings
from agent.service import Agent
from agent.swap import ModelSwap
from common.models import LocalModel
from deploy.agent_process import main
from deploy.settings import AgentSettings

HANG = b"?"


class HangingEngine(EchoEngine):
    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        if any(HANG[0] in chunk.tokens for chunk in chunks):
            threading.Event().wait()
        return super().decode(chunks)


def make_hanging(settings: AgentSettings) -> Agent:
    return Agent(
        balancers=settings.balancers,
        name=settings.name,
        models=OneModel(HangingEngine(slots=2, context=256)),
        swap=ModelSwap(own=settings.choices, pinned=LocalModel("hanging")),
        loop_settings=LoopSettings(),
    )


if __name__ == "__main__":
    main(make_hanging)
