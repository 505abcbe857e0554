"""A scheduler with an echo engine, and what became of its requests."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from answers import plain_output, text_of

from agent.echo import ByteVocabulary, EchoEngine
from agent.engine import Chunk, ImageRun
from agent.loop import carry_out
from agent.output import OutputStream
from agent.prompt import PreparedRequest
from agent.scheduler import Effect, Scheduler, Share
from common.errors import DecodeError
from common.ids import RequestId, TokenId
from common.messages import (
    Event,
    Finished,
    Noted,
    Sampling,
    TokenGenerated,
    Usage,
)

R1, R2, R3, R4 = (RequestId(f"r{n}") for n in range(1, 5))


def mixed(text: str) -> tuple[list[TokenId], tuple[ImageRun, ...]]:
    """A prompt's tokens and the images among them. ``<cat*5>`` is an image of five tokens, and
    ``<cat/5>`` one that may be fed in parts.
    """
    tokens: list[TokenId] = []
    images: list[ImageRun] = []
    for n, part in enumerate(re.split(r"(<\w+[*/]\d+>)", text)):
        if n % 2 == 0:
            tokens += (TokenId(byte) for byte in part.encode())
            continue
        name, kind, length = re.split("([*/])", part.strip("<>"))
        images.append(ImageRun(len(tokens), int(length), name, divisible=kind == "/"))
        first = int.from_bytes(name.encode()) * 1000
        tokens += (TokenId(-1 - first - at) for at in range(int(length)))
    return tokens, tuple(images)


class Running:
    """A scheduler with an echo engine: carries out effects, remembers what clients were told."""

    def __init__(
        self,
        *,
        slots: int = 2,
        context: int = 64,
        batch_size: int = 512,
        longest_gap: float = 0.25,
        most_cached: int | None = None,
        engine: EchoEngine | None = None,
        vocabulary: ByteVocabulary | None = None,
        **engine_options: Any,
    ) -> None:
        self.engine = engine or EchoEngine(
            slots=slots, context=context, batch_size=batch_size, **engine_options
        )
        self.scheduler = Scheduler(
            vocabulary=vocabulary or ByteVocabulary(),
            capacity=self.engine.capacity,
            longest_gap=longest_gap,
            most_cached=self.engine.capacity.cells if most_cached is None else most_cached,
        )
        self.told: list[Event] = []
        self.noted: list[Noted] = []
        self.passes: list[list[Chunk]] = []
        self.shares: list[Share] = []
        self.seconds = 0.01
        """What the next pass takes."""
        self.poison: TokenId | None = None
        """A token that makes every decode fail that feeds it."""

    def do(self, effects: Sequence[Effect]) -> None:
        self.shares += [effect for effect in effects if isinstance(effect, Share)]
        events, notes = carry_out(effects, self.scheduler, self.engine)
        self.told += events
        self.noted += notes

    def submit(
        self,
        request_id: RequestId,
        text: str,
        *,
        max_tokens: int = 1000,
        stop: tuple[str, ...] = (),
        salt: str = "",
        ignore_eos: bool = False,
        cache_prompt: bool = True,
        output: OutputStream | None = None,
        marks: Mapping[TokenId, bytes] | None = None,
        resumed: str = "",
    ) -> None:
        prompt, images = mixed(text)
        told = tuple(TokenId(byte) for byte in resumed.encode())
        sampler = self.engine.sampler(prompt, Sampling(ignore_eos=ignore_eos), None, None, told)
        output = output or plain_output(stop)
        for token in told:
            output.feed(bytes([token]))
        self.do(
            self.scheduler.submit(
                PreparedRequest(
                    request_id,
                    prompt,
                    max_tokens,
                    sampler,
                    output,
                    marks or {},
                    cache_salt=salt,
                    cache_prompt=cache_prompt,
                    images=images,
                    resumed=told,
                )
            )
        )

    def plan(self) -> list[Chunk]:
        self.do(self.scheduler.make_room())
        return self.scheduler.plan()

    def step(self) -> list[Chunk]:
        chunks = self.plan()
        self.passes.append(chunks)
        if not chunks:
            return chunks
        try:
            if any(self.poison in chunk.tokens for chunk in chunks):
                raise DecodeError("poisoned")
            decoded = self.engine.decode(chunks)
        except DecodeError as error:
            self.do(self.scheduler.fail(chunks, str(error)))
        else:
            self.do(self.scheduler.commit(chunks, decoded, seconds=self.seconds))
        return chunks

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.step()
            assert self.passes[-1], "stalled"

    @property
    def fed(self) -> int:
        return sum(len(chunk.tokens) for chunks in self.passes for chunk in chunks)

    def text(self, request_id: RequestId) -> str:
        return "".join(
            text_of(event)
            for event in self.told
            if event.request_id == request_id and isinstance(event, TokenGenerated | Finished)
        )

    def last(self, request_id: RequestId) -> Event:
        return [event for event in self.told if event.request_id == request_id][-1]

    def usage(self, request_id: RequestId) -> Usage:
        end = self.last(request_id)
        assert isinstance(end, Finished)
        return end.usage

    def check(self) -> None:
        """The account of cells is that of the engine."""
        figures = self.scheduler.figures
        assert figures.cells_running + figures.cells_cached == self.engine.used
        assert figures.cells_running >= 0
        assert figures.cells_cached >= 0
        assert figures.cells_free >= 0
