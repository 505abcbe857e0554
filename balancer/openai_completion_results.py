"""``/v1/completions``, outwards: chunks of a stream, or one object at the end. No I/O here."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from balancer.exchange import Told
from balancer.openai_results import (
    Head,
    Json,
    Tally,
    finish_reason,
    text_of,
)
from balancer.shown_logprobs import ShownLogprobs
from common.ids import RequestId
from common.messages import (
    Finished,
    FinishReason,
    Logprobs,
    TokenGenerated,
)

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
    _shown: ShownLogprobs = field(default_factory=ShownLogprobs)
    _decoder: IncrementalDecoder = field(default_factory=partial(_Decoder, errors="replace"))

    def take(self, event: TokenGenerated | Finished) -> None:
        if isinstance(event, TokenGenerated) and event.logprobs is not None:
            self._shown.take(event.logprobs)
        for each in self._shown.shown(text_of(event.segments)):
            self._tell(each)

    def _tell(self, logprobs: Logprobs) -> None:
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


class Completions:
    """The answers to a batch of prompts, for either way of telling them."""

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
        self.head = head
        self.request_ids = list(prompts)
        self._indices = {request_id: n for n, request_id in enumerate(prompts)}
        self._echoes = {request_id: echoes[prompt] for request_id, prompt in prompts.items()}
        self._logprobs = {
            request_id: _TextLogprobs() if tells_logprobs else None for request_id in prompts
        }
        self.tally = Tally(prompts)

    def text(self, event: TokenGenerated | Finished) -> str:
        logprobs = self._logprobs[event.request_id]
        if logprobs is not None:
            logprobs.take(event)
        return self._echoes.pop(event.request_id, "") + text_of(event.segments)

    def choice(self, request_id: RequestId, text: str, reason: str | None) -> Json:
        logprobs = self._logprobs[request_id]
        return {
            "text": text,
            "index": self._indices[request_id],
            "logprobs": None if logprobs is None else logprobs.drain(),
            "finish_reason": reason,
        }


class CompletionStream:
    def __init__(self, completions: Completions, *, tells_usage: bool) -> None:
        self._completions = completions
        self._tells_usage = tells_usage

    def chunks(self, told: Told) -> list[Json]:
        event, completions = told.event, self._completions
        if not isinstance(event, TokenGenerated | Finished):
            return []
        text = completions.text(event)
        if isinstance(event, TokenGenerated):
            return [self._chunk(event.request_id, text)] if text else []
        completions.tally.add(event, told.timing)
        reason = finish_reason(event.reason, called=False)
        chunks = [self._chunk(event.request_id, text, reason)]
        if completions.tally.is_whole:
            if self._tells_usage:
                chunks.append(completions.head.object([]) | {"usage": completions.tally.usage()})
            chunks[-1]["timings"] = completions.tally.timings()
        return chunks

    def _chunk(self, request_id: RequestId, text: str, reason: str | None = None) -> Json:
        completions = self._completions
        chunk = completions.head.object([completions.choice(request_id, text, reason)])
        if self._tells_usage:
            chunk["usage"] = None
        return chunk


class CompletionAnswer:
    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._texts: dict[RequestId, list[str]] = {each: [] for each in completions.request_ids}
        self._reasons: dict[RequestId, FinishReason] = {}

    def take(self, told: Told) -> None:
        event = told.event
        if not isinstance(event, TokenGenerated | Finished):
            return
        self._texts[event.request_id].append(self._completions.text(event))
        if isinstance(event, Finished):
            self._reasons[event.request_id] = event.reason
            self._completions.tally.add(event, told.timing)

    def object(self) -> Json:
        completions = self._completions
        choices = [
            completions.choice(
                request_id,
                "".join(texts),
                finish_reason(self._reasons[request_id], called=False),
            )
            for request_id, texts in self._texts.items()
        ]
        told = {"usage": completions.tally.usage(), "timings": completions.tally.timings()}
        return completions.head.object(choices) | told
