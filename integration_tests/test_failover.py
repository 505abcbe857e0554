"""An agent is killed with eight greedy streams on it: they go on elsewhere as if nothing had been."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from product import Up, start_up

QUESTIONS = (
    "Why is the sky blue?",
    "Tell me about whales.",
    "What is a compiler?",
    "How do bees make honey?",
    "Name three rivers and say where they are.",
    "Explain gravity to a child.",
    "Write about winter in the mountains.",
    "What is music for?",
)
TOKENS = 96
TOKENS_BEFORE = 12
"""That each stream must have had when the agent is killed."""


@dataclass
class Answer:
    text: str = ""
    times: list[float] = field(default_factory=list[float])
    last: Any = None
    has_begun: threading.Event = field(default_factory=threading.Event)

    def ask(self, up: Up, question: str) -> None:
        body = {
            "conversation_history": [{"role": "user", "content": question}],
            "add_generation_prompt": True,
            "enable_thinking": False,
            "max_tokens": TOKENS,
            "sampling": {"temperature": 0, "ignore_eos": True},
        }
        route = "/api/v1/continue_from_conversation_history"
        with up.client.stream("POST", route, json=body) as response:
            for line in response.iter_lines():
                self.take(json.loads(line))

    def take(self, message: Any) -> None:
        self.last = message
        self.times.append(time.monotonic())
        self.text += message["Response"]["response"]["GeneratedToken"].get("ContentToken", "")
        if len(self.times) == TOKENS_BEFORE:
            self.has_begun.set()

    @property
    def longest_gap(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))

    @property
    def usage(self) -> Any:
        return self.last["Response"]["response"]["GeneratedToken"]["Done"]["usage"]


def agents_of(up: Up) -> list[int]:
    """Their processes."""
    return [pid for pid, line in up.command.running() if "deploy.agent_process" in line]


def run(up: Up, *, victim: int | None = None) -> list[Answer]:
    """Ask all at once; when each has begun, kill the process."""
    answers = [Answer() for _ in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        asked = [
            threads.submit(answer.ask, up, question)
            for answer, question in zip(answers, QUESTIONS, strict=True)
        ]
        for answer in answers:
            assert answer.has_begun.wait(120)
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
        for each in asked:
            each.result()
    return answers


@pytest.mark.parametrize("agents", [1, 2])
def test_eight_greedy_streams_survive_the_death_of_an_agent(
    agents: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two agents the other one goes on with the victim's streams; a single one is started again and
    goes on with its own.
    """
    with start_up("--agents", str(agents), "--slots", "8", "--buffer-timeout", "60") as up:
        undisturbed = run(up)

        answers = run(up, victim=agents_of(up)[0])

        up.until(lambda linked: sum(a["slots_total"] for a in linked) == 8 * agents)
        metrics = up.client.get("/metrics").text
    gaps = ", ".join(f"{answer.longest_gap:.1f}" for answer in answers)
    with capsys.disabled():
        print(f"\nlongest gaps with {agents} agents: {gaps} s")  # noqa: T201
    assert f"\nheadrace_resumed_total {8 / agents}\n" in metrics
    for answer, alone in zip(answers, undisturbed, strict=True):
        assert answer.text == alone.text
        assert answer.usage["content_tokens"] == TOKENS
        assert answer.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
