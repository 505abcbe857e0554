"""What a run does, from its seed alone: which clients come, what they ask, and which faults strike.

No I/O and no clock here. Every request has its own text, from which its answer is known byte by
byte: the echo engine says the prompt back. (A real model may be asked too; then only the number of
tokens is known.)
"""

import enum
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

WORDS = (
    "river", "mill", "wheel", "water", "weir", "sluice", "race", "stone", "grain", "flour", "dam",
    "œuvre", "Mühle", "río", "水車", "мельница", "🌊", "naïve", "—", "ﬁ",
)  # fmt: skip

BEGINNINGS = (
    "The miller counts what the water brings, and loses nothing of it: ",
    "Die Mühle am Bach, die ewig klappert, und das Wasser, das sie treibt: ",
)
"""Shared by many prompts, so that agents also share what they have read of them."""

SHORTEST, LONGEST = 100, 500
"""Bytes of a prompt: some seconds of a paced echo."""


class Protocol(enum.StrEnum):
    NATIVE = "native"
    CONVERSATION = "native, chat"
    SOCKET = "socket"
    CHAT_STREAM = "chat, streamed"
    CHAT_WHOLE = "chat, whole"
    COMPLETION_STREAM = "text, streamed"


class Manner(enum.StrEnum):
    READS = "reads"
    READS_SLOWLY = "reads slowly"
    LEAVES = "leaves"
    """Somewhere in the answer."""
    LEAVES_AT_ONCE = "leaves at once"
    HALF_CLOSES = "half-closes"
    SENDS_RUBBISH = "sends rubbish"
    STOPS = "says stop"
    """Over a websocket, which then serves on."""


PROTOCOLS: Mapping[Protocol, float] = {
    Protocol.NATIVE: 3,
    Protocol.CONVERSATION: 1,
    Protocol.SOCKET: 2,
    Protocol.CHAT_STREAM: 3,
    Protocol.CHAT_WHOLE: 1,
    Protocol.COMPLETION_STREAM: 1,
}

MANNERS: Mapping[Manner, float] = {
    Manner.READS: 12,
    Manner.READS_SLOWLY: 1,
    Manner.LEAVES: 2,
    Manner.LEAVES_AT_ONCE: 2,
    Manner.HALF_CLOSES: 1,
    Manner.SENDS_RUBBISH: 1,
    Manner.STOPS: 2,
}


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    max_tokens: int
    stop: str | None
    answer: str | None
    """All that may be said, and all that must be said if it ends well. None: that is the model's
    business.
    """
    tokens: int
    """Of the whole answer, as the usage has them."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One client: a request, or over a websocket several at once."""

    number: int
    protocol: Protocol
    manner: Manner
    questions: tuple[Question, ...]
    after: int
    """Pieces of the answer that a rude client waits for."""
    haste: float
    """0 to 1: how early one leaves at once, how long a slow one waits, which rubbish."""


def visit(seed: int, number: int, *, of_model: bool = False) -> Visit:
    """``of_model``: what a real model is asked, whose answers are not known."""
    ask = model_question if of_model else echo_question
    chance = random.Random(f"visit {number} of {seed}")
    protocol = _choose(PROTOCOLS, chance)
    manner = _choose(MANNERS, chance)
    if manner is Manner.STOPS:
        protocol = Protocol.SOCKET
    if manner is Manner.HALF_CLOSES:
        protocol = Protocol.NATIVE
    count = chance.randint(1, 3) if protocol is Protocol.SOCKET else 1
    return Visit(
        number,
        protocol,
        manner,
        tuple(ask(chance, f"{number}.{n}") for n in range(count)),
        after=chance.randint(1, 100),
        haste=chance.random(),
    )


def model_question(chance: random.Random, name: str) -> Question:
    """Greedy, and always as long as it may be."""
    prompt = f"{name} Tell me about the {' and the '.join(chance.choices(WORDS, k=4))}."
    tokens = chance.randint(20, 100)
    return Question(prompt, tokens, None, None, tokens)


def echo_question(chance: random.Random, name: str) -> Question:
    """``name``: stands in the prompt again and again, so that no part of an answer is another's."""
    size = chance.randint(SHORTEST, LONGEST)
    prompt = chance.choice(["", *BEGINNINGS])
    while len(prompt.encode()) < size:
        prompt += f"{name} {' '.join(chance.choices(WORDS, k=4))} "
    match chance.choice(["to the end", "to the end", "limit", "stop"]):
        case "limit":
            # At the end of a character: what is cut inside of one is another test's.
            answer = prompt[: chance.randint(len(prompt) // 2, len(prompt) - 1)]
            tokens = len(answer.encode())
            return Question(prompt, tokens, None, answer, tokens)
        case "stop":
            place = chance.randint(len(prompt) // 2, len(prompt) - 8)
            stop = prompt[place : place + 6]
            answer = prompt[: prompt.index(stop)]
            tokens = len((answer + stop).encode())
            return Question(prompt, size * 2, stop, answer, tokens)
        case _:
            return Question(prompt, size * 2, None, prompt, len(prompt.encode()))


class Kind(enum.StrEnum):
    KILL = "agent killed"
    KILL_KEEPER = "agent's keeper killed"
    DRAIN = "agent told to go, twice"
    STOP = "agent stopped for long"
    PAUSE = "agent stopped for a moment"
    CUT = "link cut"
    FREEZE_UP = "link frozen, from the agent"
    FREEZE_DOWN = "link frozen, to the agent"
    DELAY = "link delayed"
    KILL_REPLICA = "balancer replica killed"
    KILL_PROXY = "Serve proxy killed"
    KILL_CONTROLLER = "Serve controller killed"


OF_AGENTS: Mapping[Kind, float] = {
    Kind.KILL: 5,
    Kind.KILL_KEEPER: 1,
    Kind.DRAIN: 1,
    Kind.STOP: 2,
    Kind.PAUSE: 2,
    Kind.CUT: 3,
    Kind.FREEZE_UP: 1,
    Kind.FREEZE_DOWN: 1,
    Kind.DELAY: 2,
}

OF_BALANCER: Mapping[Kind, float] = {
    Kind.KILL_REPLICA: 0.5,
    Kind.KILL_PROXY: 0.3,
    Kind.KILL_CONTROLLER: 0.2,
}
"""Rarer: streams may end by them."""

LOSING = frozenset(OF_AGENTS) - {Kind.PAUSE, Kind.DELAY}
"""After which what an agent was doing has to go on elsewhere."""

LASTS: Mapping[Kind, tuple[float, float]] = {
    Kind.DRAIN: (0.5, 5.0),  # between the first and the second time
    Kind.STOP: (12.0, 20.0),  # longer than anybody is believed who says nothing
    Kind.PAUSE: (0.1, 1.0),
    Kind.CUT: (0.0, 2.0),
    Kind.FREEZE_UP: (1.0, 15.0),
    Kind.FREEZE_DOWN: (1.0, 15.0),
    Kind.DELAY: (3.0, 10.0),
}
"""Seconds, from and to. Of a link that is cut: until it can be had again."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    agent: int | None
    """Which one, counted from 0; None: it strikes the balancer's side."""
    wait: float
    """Seconds after the one before."""
    lasts: float


def faults(
    seed: int, *, agents: int, kinds: Mapping[Kind, float], interval: float
) -> Iterator[Fault]:
    """Without end. ``interval``: seconds between two of them, on average."""
    chance = random.Random(f"faults of {seed}")
    while True:
        kind = _choose(kinds, chance)
        yield Fault(
            kind,
            None if kind in OF_BALANCER else chance.randrange(agents),
            wait=interval * chance.uniform(0.2, 1.8),
            lasts=chance.uniform(*LASTS.get(kind, (0.0, 0.0))),
        )


ChoiceT = TypeVar("ChoiceT")


def _choose(weights: Mapping[ChoiceT, float], chance: random.Random) -> ChoiceT:
    return chance.choices(list(weights), list(weights.values()))[0]
