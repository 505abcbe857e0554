"""``/v1/chat/completions``, outwards: chunks of a stream, or one object at the end. No I/O here."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from balancer.exchange import Timing, Told
from balancer.openai_results import (
    ChatLogprobs,
    Head,
    Json,
    Tally,
    content_of,
    finish_reason,
    reasoning_of,
)
from common.ids import RequestId
from common.messages import (
    Finished,
    FinishReason,
    TokenGenerated,
    ToolCallDelta,
)


def _call_delta(delta: ToolCallDelta) -> Json:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index, **_call(delta)}


def _call(delta: ToolCallDelta) -> Json:
    """One that begins."""
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": delta.call_id, "type": "function", "function": function}


class ChatStream:
    """The chunks of a chat. Every answer begins with its role and ends with its reason."""

    def __init__(self, head: Head, indices: Mapping[RequestId, int], *, tells_usage: bool) -> None:
        """``indices``: of the answers."""
        self._head = head
        self._indices = indices
        self._tells_usage = tells_usage
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._logprobs = {index: ChatLogprobs() for index in indices.values()}
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
        chunks = [self._chunk(index, delta) for delta in deltas]
        logprobs = self._logprobs[index].of(event)
        if content := content_of(event.segments):
            chunks.append(self._chunk(index, {"content": content}))
            if logprobs:
                chunks[-1]["choices"][0]["logprobs"] = {"content": logprobs, "refusal": None}
        if event.calls:
            self._called.add(index)
            calls = [_call_delta(delta) for delta in event.calls]
            chunks.append(self._chunk(index, {"tool_calls": calls}))
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
    """By index, without their arguments."""
    arguments: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    logprobs: list[Json] = field(default_factory=list[Json])
    shown: ChatLogprobs = field(default_factory=ChatLogprobs)
    reason: FinishReason = FinishReason.STOP

    def take_call(self, delta: ToolCallDelta) -> None:
        if delta.name is not None:
            self.calls[delta.index] = _call(delta)
        self.arguments.setdefault(delta.index, []).append(delta.arguments)

    def whole_calls(self) -> list[Json]:
        for index, call in self.calls.items():
            call["function"]["arguments"] = "".join(self.arguments[index])
        return list(self.calls.values())


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
        answer.logprobs += answer.shown.of(event)
        if isinstance(event, Finished):
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
            message["tool_calls"] = answer.whole_calls()
        logprobs = {"content": answer.logprobs, "refusal": None} if self._tells_logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(answer.reason, called=bool(answer.calls)),
        }
