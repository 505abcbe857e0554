"""``/v1/responses``, outwards: what the agent tells becomes OpenAI's events, or one object at the end.

No I/O here. An answer is a list of items: reasoning, messages and function calls. One is open at a
time, and an event that goes on with another one closes it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from balancer.exchange import Timing, Told
from balancer.openai_errors import OPENAI_STATUS
from balancer.openai_results import ChatLogprobs, Json, Tally
from common.errors import ErrorCode, RequestError
from common.messages import (
    Finished,
    FinishReason,
    Segment,
    TokenClass,
    TokenGenerated,
    ToolCallDelta,
)

Event: TypeAlias = dict[str, Any]
"""With its ``type`` and its ``sequence_number``, from 0."""

FAILURES = {
    ErrorCode.BUFFER_FULL: "rate_limit_exceeded",
    ErrorCode.IMAGE_DECODING_FAILED: "image_parse_error",
    ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE: "image_too_large",
    # Missing in the official client's list, but sent by OpenAI, and what Codex looks for.
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
}
"""OpenAI's codes for an answer that failed; by the HTTP status if the error is not here."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    id: str
    """Beginning with ``resp_``."""
    created: int
    """Seconds since 1970."""
    model: str
    settings: Json
    """What is repeated of the request."""

    def object(self, status: str, output: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
            **self.settings,
        }


@dataclass(slots=True)
class _Item(ABC):
    id: str
    index: int
    """In the output."""
    status: str = "in_progress"
    _texts: list[str] = field(default_factory=list[str])

    prefix: ClassVar[str]

    @property
    def is_open(self) -> bool:
        return self.status == "in_progress"

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def object(self) -> Json: ...

    @abstractmethod
    def begin(self) -> list[Event]: ...

    @abstractmethod
    def end(self) -> list[Event]: ...

    def _event(self, kind: str, **told: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **told}

    def _whole(self, kind: str) -> Event:
        return {"type": kind, "output_index": self.index, "item": self.object()}


@dataclass(slots=True)
class _TextItem(_Item):
    """Of one part, which is text."""

    logprobs: list[Json] = field(default_factory=list[Json])

    kind: ClassVar[str]
    """Of the part, and of the events about it."""

    @abstractmethod
    def _part(self) -> Json: ...

    @abstractmethod
    def _told_logprobs(self, logprobs: list[Json]) -> Json:
        """As an event has them."""

    def begin(self) -> list[Event]:
        whole = self._whole("response.output_item.added")
        whole["item"]["content"] = []
        return [whole, self._of_part("response.content_part.added", part=self._part())]

    def add(self, text: str, logprobs: list[Json]) -> Event:
        self._texts.append(text)
        self.logprobs += logprobs
        told = self._told_logprobs(logprobs)
        return self._of_part(f"response.{self.kind}.delta", delta=text, **told)

    def end(self) -> list[Event]:
        told = self._told_logprobs(self.logprobs)
        return [
            self._of_part(f"response.{self.kind}.done", text=self.text, **told),
            self._of_part("response.content_part.done", part=self._part()),
            self._whole("response.output_item.done"),
        ]

    def _of_part(self, kind: str, **told: Any) -> Event:
        return self._event(kind, content_index=0, **told)


@dataclass(slots=True)
class _Reasoning(_TextItem):
    prefix = "rs"
    kind = "reasoning_text"

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def _told_logprobs(self, logprobs: list[Json]) -> Json:
        return {}

    def object(self) -> Json:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": [self._part()],
            "status": self.status,
        }


@dataclass(slots=True)
class _Message(_TextItem):
    prefix = "msg"
    kind = "output_text"

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def _told_logprobs(self, logprobs: list[Json]) -> Json:
        return {"logprobs": list(logprobs)}

    def object(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [self._part()],
            "status": self.status,
        }


@dataclass(slots=True)
class _Call(_Item):
    call_id: str | None = None
    name: str | None = None

    prefix = "fc"

    def begin(self) -> list[Event]:
        return [self._whole("response.output_item.added")]

    def add(self, arguments: str) -> Event:
        self._texts.append(arguments)
        return self._event("response.function_call_arguments.delta", delta=arguments)

    def end(self) -> list[Event]:
        told = {"name": self.name, "arguments": self.text}
        return [
            self._event("response.function_call_arguments.done", **told),
            self._whole("response.output_item.done"),
        ]

    def object(self) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
            "status": self.status,
        }


class ResponseStream:
    """An answer's events: those of ``begin``, then those that follow from each of the agent's. The
    answer ends with the agent's last one, or with ``fail``.
    """

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._sent = 0
        self._items: list[_Item] = []
        self._held: list[str] = []
        """White space with which an item may begin, or that only stands between two."""
        self._held_kind: type[_TextItem] = _Message
        self._shown_logprobs = ChatLogprobs()
        self._logprobs: list[Json] = []
        """Of text that has not been told yet."""
        self._status = "in_progress"
        self._ending: Json = {}

    def begin(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": self.object()} for kind in kinds])

    def events(self, told: Told) -> list[Event]:
        event = told.event
        if not isinstance(event, TokenGenerated | Finished):
            return []
        self._logprobs += self._shown_logprobs.of(event)
        events: list[Event] = []
        for piece in _pieces(event):
            match piece:
                case ToolCallDelta():
                    events += self._call(piece)
                case Segment(token_class=TokenClass.REASONING, text=text):
                    events += self._text(_Reasoning, text)
                case Segment(token_class=TokenClass.TOOL_CALL):
                    pass  # the deltas tell it
                case Segment(text=text):
                    events += self._text(_Message, text)
        if isinstance(event, Finished):
            events += self._finish(event, told.timing)
        return self._numbered(events)

    def fail(self, error: RequestError) -> list[Event]:
        """What has come of the answer stays as it is."""
        if (item := self._open) is not None:
            item.status = "incomplete"
        by_status = "server_error" if OPENAI_STATUS[error.code] >= 500 else "invalid_prompt"
        self._status = "failed"
        self._ending = {
            "error": {"code": FAILURES.get(error.code, by_status), "message": error.message}
        }
        return self._numbered([{"type": "response.failed", "response": self.object()}])

    def object(self) -> Json:
        """The response as far as it has come."""
        output = [item.object() for item in self._items]
        return self._head.object(self._status, output) | self._ending

    def _numbered(self, events: list[Event]) -> list[Event]:
        first = self._sent
        self._sent += len(events)
        return [
            {"type": event["type"], "sequence_number": number, **event}
            for number, event in enumerate(events, first)
        ]

    @property
    def _open(self) -> _Item | None:
        return self._items[-1] if self._items and self._items[-1].is_open else None

    def _close(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item.status = status
        return item.end()

    def _begin(self, item: _Item) -> list[Event]:
        closing = self._close("completed")
        self._items.append(item)
        return [*closing, *item.begin()]

    def _name(self, kind: type[_Item]) -> tuple[str, int]:
        """The id and the place of the next item. Clients tell items of all responses apart by id."""
        place = len(self._items)
        return f"{kind.prefix}_{self._head.id.removeprefix('resp_')}_{place}", place

    def _text(self, kind: type[_TextItem], text: str) -> list[Event]:
        if kind is not self._held_kind:
            self._held.clear()
            self._held_kind = kind
        events: list[Event] = []
        if not isinstance(self._open, kind):
            if not text or text.isspace():
                self._held.append(text)
                return []
            events = self._begin(kind(*self._name(kind)))
        return [*events, *self._add(text)]

    def _add(self, text: str) -> list[Event]:
        """To the open item, with what has been held back."""
        item = self._open
        assert isinstance(item, _TextItem)
        text = "".join(self._held) + text
        logprobs = self._logprobs
        self._held, self._logprobs = [], []
        return [item.add(text, logprobs)] if text or logprobs else []

    def _call(self, delta: ToolCallDelta) -> list[Event]:
        self._held.clear()
        self._logprobs.clear()
        events: list[Event] = []
        if delta.name is not None:
            call_id = delta.call_id or f"call_{delta.index}"
            item = _Call(*self._name(_Call), call_id=call_id, name=delta.name)
            events = self._begin(item)
        call = self._open
        # An agent tells calls one after the other.
        assert isinstance(call, _Call)
        return [*events, call.add(delta.arguments)] if delta.arguments else events

    def _finish(self, event: Finished, timing: Timing | None) -> list[Event]:
        is_cut = event.reason is FinishReason.LENGTH
        events: list[Event] = []
        if self._held_kind is not _Message:
            self._held.clear()
        if all(isinstance(item, _Reasoning) for item in self._items) and (self._held or not is_cut):
            # An answer without a word is a message all the same: clients look for one.
            events += self._begin(_Message(*self._name(_Message)))
        if isinstance(self._open, _Message):
            events += self._add("")
        events += self._close("incomplete" if is_cut else "completed")

        tally = Tally({event.request_id: 0})
        tally.add(event, timing)
        self._status = "incomplete" if is_cut else "completed"
        self._ending = {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(tally),
            "timings": tally.timings(),
        }
        if timing is not None and not is_cut:
            took = round(timing.ended - timing.arrived)
            self._ending["completed_at"] = self._head.created + took
        return [*events, {"type": f"response.{self._status}", "response": self.object()}]


class ResponseAnswer:
    """The same, told in one object."""

    def __init__(self, head: ResponseHead) -> None:
        self._stream = ResponseStream(head)

    def take(self, told: Told) -> None:
        self._stream.events(told)

    def object(self) -> Json:
        return self._stream.object()


def _pieces(event: TokenGenerated | Finished) -> list[Segment | ToolCallDelta]:
    """In the model's order, as far as it is known: an event tells texts and calls apart."""
    segments, calls = event.segments, event.calls
    goes_on = bool(calls) and calls[0].name is None
    classes = [segment.token_class for segment in segments]
    if goes_on:
        place = 0
    elif TokenClass.TOOL_CALL in classes:
        place = classes.index(TokenClass.TOOL_CALL)
    else:
        place = len(segments)
    return [*segments[:place], *calls, *segments[place:]]


def _usage(tally: Tally) -> Json:
    told = tally.usage()
    cached = told["prompt_tokens_details"]["cached_tokens"]
    reasoning = told["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": told["prompt_tokens"],
        # Nobody asks for cache writes here, as those who pay for them do.
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": told["total_tokens"],
    }
