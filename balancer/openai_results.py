"""Answers as OpenAI tells them: chunks of a stream, or one object at the end. No I/O here.

``Tally`` adds up what all answers to a request have used, for both.
"""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from balancer.exchange import Timing, Told
from common.ids import RequestId
from common.messages import (
    Finished,
    FinishReason,
    Logprobs,
    Segment,
    TokenClass,
    TokenGenerated,
    TokenLogprob,
    ToolCallDelta,
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


def content_of(segments: Sequence[Segment]) -> str:
    """Undeterminable text is content: OpenAI has no word for it."""
    shown = (TokenClass.CONTENT, TokenClass.UNDETERMINABLE)
    return "".join(segment.text for segment in segments if segment.token_class in shown)


def reasoning_of(segments: Sequence[Segment]) -> str:
    return "".join(s.text for s in segments if s.token_class is TokenClass.REASONING)


def text_of(segments: Sequence[Segment]) -> str:
    """All of it, of an answer in which nothing is set apart."""
    return "".join(segment.text for segment in segments)


def chat_logprobs(event: TokenGenerated) -> list[Json]:
    """Of the content's tokens only; a token that shows nothing yet is one of them."""
    hidden = (TokenClass.REASONING, TokenClass.TOOL_CALL)
    if event.logprobs is None or event.calls:
        return []
    if event.segments and all(segment.token_class in hidden for segment in event.segments):
        return []
    told = _logprob(event.logprobs.chosen)
    return [{**told, "top_logprobs": [_logprob(each) for each in event.logprobs.top]}]


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


def _call_delta(delta: ToolCallDelta) -> Json:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


class ChatStream:
    """The chunks of a chat. Every answer begins with its role and ends with its reason."""

    def __init__(self, head: Head, indices: Mapping[RequestId, int], *, tells_usage: bool) -> None:
        """``indices``: of the answers."""
        self._head = head
        self._indices = indices
        self._tells_usage = tells_usage
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._tally = Tally(dict.fromkeys(indices, 0))

    def chunks(self, told: Told) -> list[Json]:
        event = told.event
        if not isinstance(event, TokenGenerated | Finished):
            return []
        index = self._indices[event.request_id]
        deltas: list[Json] = []
        if index not in self._begun:
            self._begun.add(index)
            deltas.append({"role": "assistant", "content": ""})
        if reasoning := reasoning_of(event.segments):
            deltas.append({"reasoning_content": reasoning})
        logprobs = chat_logprobs(event) if isinstance(event, TokenGenerated) else []
        content = content_of(event.segments)
        if content or logprobs:
            deltas.append({"content": content})
        if event.calls:
            self._called.add(index)
            deltas.append({"tool_calls": [_call_delta(delta) for delta in event.calls]})
        chunks = [self._chunk(index, delta) for delta in deltas]
        if logprobs:
            chunks[-1]["choices"][0]["logprobs"] = {"content": logprobs, "refusal": None}
        if isinstance(event, Finished):
            chunks += self._end(index, event, told.timing)
        return chunks

    def _end(self, index: int, event: Finished, timing: Timing | None) -> list[Json]:
        self._tally.add(event, timing)
        reason = finish_reason(event.reason, called=index in self._called)
        chunks = [self._chunk(index, {}, reason)]
        if self._tally.is_whole:
            if self._tells_usage:
                usage = self._tally.usage()
                chunks.append(self._head.object([]) | {"usage": usage})
            chunks[-1]["timings"] = self._tally.timings()
        return chunks

    def _chunk(self, index: int, delta: Json, reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = self._head.object([choice])
        if self._tells_usage:
            chunk["usage"] = None
        return chunk


@dataclass(slots=True)
class _Answer:
    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, Json] = field(default_factory=dict[int, Json])
    logprobs: list[Json] = field(default_factory=list[Json])
    reason: FinishReason = FinishReason.STOP

    def take_call(self, delta: ToolCallDelta) -> None:
        if delta.name is not None:
            self.calls[delta.index] = {
                "id": delta.call_id,
                "type": "function",
                "function": {"name": delta.name, "arguments": delta.arguments},
            }
        else:
            self.calls[delta.index]["function"]["arguments"] += delta.arguments


class ChatAnswer:
    """A chat in one object."""

    def __init__(
        self, head: Head, indices: Mapping[RequestId, int], *, tells_logprobs: bool
    ) -> None:
        self._head = head
        self._tells_logprobs = tells_logprobs
        self._answers = {request_id: _Answer() for request_id in indices}
        self._tally = Tally(dict.fromkeys(indices, 0))

    def take(self, told: Told) -> None:
        event = told.event
        if not isinstance(event, TokenGenerated | Finished):
            return
        answer = self._answers[event.request_id]
        answer.content.append(content_of(event.segments))
        answer.reasoning.append(reasoning_of(event.segments))
        for delta in event.calls:
            answer.take_call(delta)
        if isinstance(event, TokenGenerated):
            answer.logprobs += chat_logprobs(event)
        else:
            answer.reason = event.reason
            self._tally.add(event, told.timing)

    def object(self) -> Json:
        choices = [self._choice(n, answer) for n, answer in enumerate(self._answers.values())]
        told = {"usage": self._tally.usage(), "timings": self._tally.timings()}
        return self._head.object(choices) | told

    def _choice(self, index: int, answer: _Answer) -> Json:
        message: Json = {
            "role": "assistant",
            "content": "".join(answer.content),
            "refusal": None,
            "annotations": [],
        }
        if reasoning := "".join(answer.reasoning):
            message["reasoning_content"] = reasoning
        if answer.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = list(answer.calls.values())
        logprobs = {"content": answer.logprobs, "refusal": None} if self._tells_logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(answer.reason, called=bool(answer.calls)),
        }


# Completions


_Decoder = getincrementaldecoder("utf-8")


@dataclass(slots=True)
class _TextLogprobs:
    """As the older interface has them: one list for each fact."""

    offset: int = 0
    """Of the next token in the text, in whole characters: several tokens may make one."""
    tokens: list[str] = field(default_factory=list[str])
    logprobs: list[float] = field(default_factory=list[float])
    tops: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    offsets: list[int] = field(default_factory=list[int])
    _decoder: IncrementalDecoder = field(default_factory=partial(_Decoder, errors="replace"))

    def take(self, logprobs: Logprobs) -> None:
        self.tokens.append(logprobs.chosen.piece.decode(errors="replace"))
        self.logprobs.append(logprobs.chosen.logprob)
        told = (*logprobs.top, logprobs.chosen)
        self.tops.append({each.piece.decode(errors="replace"): each.logprob for each in told})
        self.offsets.append(self.offset)
        self.offset += len(self._decoder.decode(logprobs.chosen.piece))

    def drain(self) -> Json:
        """What has been taken since the last time."""
        told = {
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.tops,
            "text_offset": self.offsets,
        }
        self.tokens, self.logprobs, self.tops, self.offsets = [], [], [], []
        return told


class _Completions:
    """What both ways to tell completions share."""

    def __init__(
        self,
        head: Head,
        prompts: Mapping[RequestId, int],
        echoes: Sequence[str],
        *,
        tells_logprobs: bool,
    ) -> None:
        """``prompts``: which one each answer belongs to, in the order of their indices. ``echoes``:
        what to put before the answers to each.
        """
        self._head = head
        self._indices = {request_id: n for n, request_id in enumerate(prompts)}
        self._echoes = {request_id: echoes[prompt] for request_id, prompt in prompts.items()}
        self._logprobs = {
            request_id: _TextLogprobs() if tells_logprobs else None for request_id in prompts
        }
        self._tally = Tally(prompts)

    def _text(self, event: TokenGenerated | Finished) -> str:
        logprobs = self._logprobs[event.request_id]
        if isinstance(event, TokenGenerated) and logprobs is not None and event.logprobs:
            logprobs.take(event.logprobs)
        return self._echoes.pop(event.request_id, "") + text_of(event.segments)

    def _choice(self, request_id: RequestId, text: str, reason: str | None) -> Json:
        logprobs = self._logprobs[request_id]
        return {
            "text": text,
            "index": self._indices[request_id],
            "logprobs": None if logprobs is None else logprobs.drain(),
            "finish_reason": reason,
        }


class CompletionStream(_Completions):
    def __init__(
        self,
        head: Head,
        prompts: Mapping[RequestId, int],
        echoes: Sequence[str],
        *,
        tells_logprobs: bool,
        tells_usage: bool,
    ) -> None:
        super().__init__(head, prompts, echoes, tells_logprobs=tells_logprobs)
        self._tells_usage = tells_usage

    def chunks(self, told: Told) -> list[Json]:
        event = told.event
        if not isinstance(event, TokenGenerated | Finished):
            return []
        text = self._text(event)
        if isinstance(event, TokenGenerated):
            has_logprobs = event.logprobs is not None
            return [self._chunk(event.request_id, text)] if text or has_logprobs else []
        self._tally.add(event, told.timing)
        reason = finish_reason(event.reason, called=False)
        chunks = [self._chunk(event.request_id, text, reason)]
        if self._tally.is_whole:
            if self._tells_usage:
                chunks.append(self._head.object([]) | {"usage": self._tally.usage()})
            chunks[-1]["timings"] = self._tally.timings()
        return chunks

    def _chunk(self, request_id: RequestId, text: str, reason: str | None = None) -> Json:
        chunk = self._head.object([self._choice(request_id, text, reason)])
        if self._tells_usage:
            chunk["usage"] = None
        return chunk


class CompletionAnswer(_Completions):
    def __init__(
        self,
        head: Head,
        prompts: Mapping[RequestId, int],
        echoes: Sequence[str],
        *,
        tells_logprobs: bool,
    ) -> None:
        super().__init__(head, prompts, echoes, tells_logprobs=tells_logprobs)
        self._texts: dict[RequestId, list[str]] = {request_id: [] for request_id in prompts}
        self._reasons: dict[RequestId, FinishReason] = {}

    def take(self, told: Told) -> None:
        event = told.event
        if not isinstance(event, TokenGenerated | Finished):
            return
        self._texts[event.request_id].append(self._text(event))
        if isinstance(event, Finished):
            self._reasons[event.request_id] = event.reason
            self._tally.add(event, told.timing)

    def object(self) -> Json:
        choices = [
            self._choice(
                request_id,
                "".join(texts),
                finish_reason(self._reasons[request_id], called=False),
            )
            for request_id, texts in self._texts.items()
        ]
        told = {"usage": self._tally.usage(), "timings": self._tally.timings()}
        return self._head.object(choices) | told
