"""Continuous batching: which tokens to feed next, and what came of it.

One pass is ``plan`` -> ``Engine.decode`` -> ``commit`` (or ``fail``). Planning changes nothing that
a failed decode would have to undo. ``submit`` and ``cancel`` come between passes only, else a
sequence ID in the plan could already be somebody else's. No I/O here, no clock and no model.

Effects come in one list, in the order in which they must be carried out: ``Start`` and ``Forget``
are for the engine, the events are for the client.

| a request is | and it is found in |
|---|---|
| ingesting its prompt | ``_active``, with ``fed`` < the length of its prompt |
| generating | ``_active``, with ``fed`` at least that |
| over | nowhere: its last event and ``Forget`` left together |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agent.engine import Chunk, Vocabulary
from agent.prompt import PreparedRequest
from agent.request import ActiveRequest, Phase
from agent.sequences import SequencePool
from agent.text import TextStream
from common.errors import ErrorCode
from common.ids import RequestId, SequenceId, TokenId
from common.messages import Event, Failed, Finished, FinishReason, Sampling, TokenGenerated

PROMPT_BUDGET = 256
"""Prompt tokens in one pass at most: a long prompt must not hold up the streams that run."""


@dataclass(frozen=True, slots=True)
class Start:
    sequence_id: SequenceId
    prompt: Sequence[TokenId]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Forget:
    sequence_id: SequenceId


Effect: TypeAlias = Start | Forget | Event


class Scheduler:
    def __init__(
        self, *, vocabulary: Vocabulary, sequences: int, context: int, batch_size: int
    ) -> None:
        """``batch_size``: tokens in one pass at most; it must hold one for each sequence."""
        assert batch_size >= sequences
        self._vocabulary = vocabulary
        self._context = context
        self._batch_size = batch_size
        self._sequences = SequencePool(sequences)
        self._active: dict[SequenceId, ActiveRequest] = {}

    @property
    def is_idle(self) -> bool:
        return not self._active

    def submit(self, request: PreparedRequest) -> list[Effect]:
        """Begin a request. The caller owns the slots and submits no more than there are."""
        assert 0 < len(request.prompt) < self._context
        sequence_id = self._sequences.acquire()
        self._active[sequence_id] = ActiveRequest(
            request.request_id,
            sequence_id,
            request.prompt,
            request.max_tokens,
            TextStream(request.stop),
        )
        return [Start(sequence_id, request.prompt, request.sampling)]

    def cancel(self, request_id: RequestId) -> list[Effect]:
        """End the request, with what it has used. Nothing to do if it is over already."""
        for request in self._active.values():
            if request.request_id == request_id:
                return self._finish(request, FinishReason.CANCELLED)
        return []

    def plan(self) -> list[Chunk]:
        """Chunks for one decode; none if there is nothing to do.

        1. Requests that generate go first, one token each, so that no prompt stalls a stream.
        2. Prompts share what is left of the batch, within the prompt budget, oldest first.
        """
        chunks: list[Chunk] = []
        ingesting: list[ActiveRequest] = []
        for request in self._active.values():
            if request.phase is Phase.INGESTING:
                ingesting.append(request)
            else:
                assert request.last_token is not None
                chunks.append(
                    Chunk(request.sequence_id, request.fed, (request.last_token,), wants_token=True)
                )
        budget = min(PROMPT_BUDGET, self._batch_size - len(chunks))
        for request in ingesting:
            if budget <= 0:
                break
            tokens = request.prompt[request.fed : request.fed + budget]
            budget -= len(tokens)
            wants_token = request.fed + len(tokens) == len(request.prompt)
            chunks.append(Chunk(request.sequence_id, request.fed, tokens, wants_token=wants_token))
        return chunks

    def commit(
        self, chunks: Sequence[Chunk], sampled: Mapping[SequenceId, TokenId]
    ) -> list[Effect]:
        """Take note that the chunks were decoded and what was sampled after them."""
        effects: list[Effect] = []
        for chunk in chunks:
            request = self._active[chunk.sequence_id]
            request.fed += len(chunk.tokens)
            if chunk.wants_token:
                effects += self._take(request, sampled[chunk.sequence_id])
        return effects

    def fail(self, sequence_ids: Iterable[SequenceId], message: str) -> list[Effect]:
        """The decode that fed these sequences failed: their requests end with the message."""
        effects: list[Effect] = []
        for sequence_id in sequence_ids:
            request = self._active[sequence_id]
            effects.append(Failed(request.request_id, ErrorCode.DECODE_FAILED, message))
            effects.append(self._release(request))
        return effects

    def _take(self, request: ActiveRequest, token: TokenId) -> list[Effect]:
        if self._vocabulary.is_end(token):
            return self._finish(request, FinishReason.STOP)
        request.generated += 1
        request.last_token = token
        text = request.text.feed(self._vocabulary.piece(token))
        effects: list[Effect] = [TokenGenerated(request.request_id, token, text)]
        if request.text.stopped:
            effects += self._finish(request, FinishReason.STOP)
        elif request.generated >= request.max_tokens or request.length >= self._context:
            effects += self._finish(request, FinishReason.LENGTH)
        return effects

    def _finish(self, request: ActiveRequest, reason: FinishReason) -> list[Effect]:
        tail = request.text.flush()
        return [
            Finished(request.request_id, reason, request.usage, tail),
            self._release(request),
        ]

    def _release(self, request: ActiveRequest) -> Forget:
        del self._active[request.sequence_id]
        self._sequences.release(request.sequence_id)
        return Forget(request.sequence_id)
