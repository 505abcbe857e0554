"""What all of OpenAI's answers have: their heads, what they used, and what an event adds to them.

No I/O here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from balancer.exchange import Timing
from balancer.shown_logprobs import ShownLogprobs
from common.ids import RequestId
from common.messages import (
    Finished,
    FinishReason,
    Logprobs,
    Segment,
    TokenClass,
    TokenGenerated,
    TokenLogprob,
    Usage,
)

Json: TypeAlias = dict[str, Any]

FINGERPRINT = "headrace"


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer, or its one object, begin with."""

    id: str
    kind: str
    created: int
    """Seconds since 1970."""
    model: str

    def object(self, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


@dataclass(slots=True)
class Tally:
    """Of the answers to a request that have ended."""

    prompts: Mapping[RequestId, int]
    """Which prompt each of the request's answers belongs to: it is counted once."""
    _usages: dict[RequestId, Usage] = field(default_factory=dict[RequestId, Usage])
    _timings: list[Timing] = field(default_factory=list[Timing])

    def add(self, event: Finished, timing: Timing | None) -> None:
        self._usages[event.request_id] = event.usage
        if timing is not None:
            self._timings.append(timing)

    @property
    def is_whole(self) -> bool:
        return len(self._usages) == len(self.prompts)

    def usage(self) -> Json:
        prompt = sum(usage.prompt_tokens for usage in self._firsts())
        completion = sum(map(_generated, self._usages.values()))
        reasoning = sum(usage.reasoning_tokens for usage in self._usages.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached(), "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def timings(self) -> Json:
        """In milliseconds, by llama.cpp's names; ``queue_ms`` is ours. Of several answers: from the
        first one's beginning to the last one's end.
        """
        arrived = min(timing.arrived for timing in self._timings)
        ended = max(timing.ended for timing in self._timings)
        dispatches = [t.dispatched for t in self._timings if t.dispatched is not None]
        dispatched = min(dispatches, default=ended)
        starts = [t.started for t in self._timings if t.started is not None]
        started = min(starts, default=ended)
        cached = self._cached()
        fed = sum(usage.prompt_tokens for usage in self._firsts()) - cached
        generated = sum(map(_generated, self._usages.values()))
        return {
            "queue_ms": _ms(dispatched - arrived),
            "cache_n": cached,
            **_rates("prompt", fed, started - dispatched),
            **_rates("predicted", generated, ended - started),
        }

    def _firsts(self) -> Iterator[Usage]:
        """The usage of the first answer to each prompt."""
        seen: set[int] = set()
        for request_id, prompt in self.prompts.items():
            if prompt not in seen and request_id in self._usages:
                seen.add(prompt)
                yield self._usages[request_id]

    def _cached(self) -> int:
        return sum(usage.cached_prompt_tokens for usage in self._firsts())


def _generated(usage: Usage) -> int:
    return (
        usage.content_tokens
        + usage.reasoning_tokens
        + usage.tool_call_tokens
        + usage.undeterminable_tokens
    )


def _rates(name: str, tokens: int, seconds: float) -> Json:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": _ms(seconds),
        f"{name}_per_token_ms": _ms(seconds / tokens) if tokens else None,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else None,
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


# What one event adds to an answer


CONTENT = (TokenClass.CONTENT, TokenClass.UNDETERMINABLE)
"""OpenAI has no word for undeterminable text."""


def content_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments if segment.token_class in CONTENT)


def reasoning_of(segments: Sequence[Segment]) -> str:
    return "".join(s.text for s in segments if s.token_class is TokenClass.REASONING)


def text_of(segments: Sequence[Segment]) -> str:
    """All of it, of an answer in which nothing is set apart."""
    return "".join(segment.text for segment in segments)


class ChatLogprobs:
    """Of one answer: those of the tokens of its content, told with their text."""

    def __init__(self) -> None:
        self._shown = ShownLogprobs()

    def of(self, event: TokenGenerated | Finished) -> list[Json]:
        if isinstance(event, TokenGenerated):
            if event.logprobs is None:
                return []
            self._shown.take(event.logprobs)
        told: list[Logprobs] = []
        for segment in event.segments:
            shown = self._shown.shown(segment.text)
            if segment.token_class in CONTENT:
                told += shown
        return [
            {**_logprob(each.chosen), "top_logprobs": [_logprob(other) for other in each.top]}
            for each in told
        ]


def _logprob(each: TokenLogprob) -> Json:
    return {
        "token": each.piece.decode(errors="replace"),
        "bytes": list(each.piece),
        "logprob": each.logprob,
    }


def finish_reason(reason: FinishReason, *, called: bool) -> str:
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if called else "stop"
