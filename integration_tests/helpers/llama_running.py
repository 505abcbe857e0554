"""The scheduler and the llama.cpp engine together, driven by a test pass by pass."""

from collections.abc import Sequence
from typing import Any

from answers import text_of

from agent.llama import LlamaEngine
from agent.loop import carry_out
from agent.prompt import Preparer
from agent.scheduler import Effect, Scheduler
from common.ids import RequestId, SequenceId, TokenId
from common.messages import (
    Event,
    Finished,
    Generate,
    Prompt,
    Sampling,
    TokenGenerated,
)

GREEDY = Sampling(temperature=0, penalty_repeat=1, penalty_presence=0)


class Running:
    """A scheduler that drives the engine; requests are submitted whenever a test likes."""

    def __init__(
        self, engine: LlamaEngine, *, longest_gap: float = 0.25, template: str | None = None
    ) -> None:
        self.engine = engine
        self.preparer = Preparer(engine, template)
        self.scheduler = Scheduler(
            vocabulary=engine.vocabulary,
            capacity=engine.capacity,
            longest_gap=longest_gap,
            most_cached=engine.capacity.context,
        )
        self.events: list[Event] = []
        self.chunks: list[int] = []

    def submit(self, name: str, prompt: Prompt, **options: Any) -> None:
        options = {"max_tokens": 12, "sampling": GREEDY} | options
        request = Generate(request_id=RequestId(name), prompt=prompt, **options)
        self.do(self.scheduler.submit(self.preparer.prepare_prompt(request)))

    def step(self) -> None:
        self.do(self.scheduler.make_room())
        chunks = self.scheduler.plan()
        self.chunks.append(len(chunks))
        self.do(self.scheduler.commit(chunks, self.engine.decode(chunks), seconds=0.05))

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.step()

    def do(self, effects: Sequence[Effect]) -> None:
        events, _ = carry_out(effects, self.scheduler, self.engine)
        self.events += events

    def outcome(self, name: str) -> tuple[str, Finished]:
        """Its text and end."""
        mine = [event for event in self.events if event.request_id == name]
        end = mine[-1]
        assert isinstance(end, Finished)
        texts = (text_of(event) for event in mine if isinstance(event, TokenGenerated | Finished))
        return "".join(texts), end

    def forget(self) -> None:
        """Empty the engine for the next test."""
        for sequence_id in range(self.engine.capacity.sequences):
            self.engine.forget(SequenceId(sequence_id))


def generate(
    engine: LlamaEngine, *prompts: Prompt, max_tokens: int = 12, sampling: Sampling = GREEDY
) -> list[tuple[str, Finished]]:
    """Run the prompts together on an empty engine; return each one's text and end."""
    running = Running(engine)
    for n, prompt in enumerate(prompts):
        running.submit(str(n), prompt, max_tokens=max_tokens, sampling=sampling)
    running.run()
    running.forget()
    return [running.outcome(str(n)) for n in range(len(prompts))]


def first_logprobs(running: Running, name: str) -> dict[TokenId, float]:
    """What the model thought of the likeliest first tokens of the answer."""
    for event in running.events:
        if isinstance(event, TokenGenerated) and event.request_id == name:
            assert event.logprobs is not None
            return {each.token: each.logprob for each in event.logprobs.top}
    raise AssertionError(f"{name} has no answer")
