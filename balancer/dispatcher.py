"""Decides which agent serves which request.

Events come in as method calls; decisions go out as effects, for the caller to carry out in order.
There is no I/O here, no clock (``now`` is an argument) and no lock: one task owns it.

| a request is | and it is found in | it leaves by |
|---|---|---|
| buffered | ``_buffer`` | ``Dispatch``; ``cancel``; ``expire`` -> ``Reject`` |
| dispatched | ``_bound``, and its slot in ``_pool`` | ``finish``; ``refuse`` or ``leave`` -> buffered, or ``Reject`` |
| begun: its client has been told of it | as dispatched, with ``kin``: no other agent can go on with it | the same |
| abandoned (its client has gone) | as dispatched, with ``abandoned`` set | ``finish``, ``refuse``, ``leave``: silently |
| over | nowhere | |

Always true: nobody waits while a slot that fits is free; who could have had a slot gets it before
those of lower priority and those that came later; no agent has more requests than slots; no effect
speaks of a request that is over.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from balancer.buffer import Buffer, Waiting
from balancer.policy import Policy, least_busy
from balancer.pool import Agent, AgentPool, Obstacle
from balancer.terms import ANY, Terms
from common.ids import AgentId, RequestId

LONGEST_SWAP = 600.0
"""Seconds that requests wait while an agent changes its model, whatever their patience."""

LONGEST_START = 600.0
"""Seconds that each waits at most while an agent for it is started, or longer if it has more patience."""

MOST_LOSSES = 2
"""How many agents a request may lose in a row, without getting any further, before it is rejected: it
could be what kills them.
"""

MOST_MOVES = 8
"""How often it may go on elsewhere, also because agents drained: each time its prompt is fed anew."""


class Rejection(enum.StrEnum):
    BUFFER_FULL = "buffer_full"
    BUFFER_BYTES_FULL = "buffer_bytes_full"
    BUFFER_TIMEOUT = "buffer_timeout"
    AGENT_LOST = "agent_lost"


@dataclass(frozen=True, slots=True)
class Choice:
    """Why it was this agent; its text is for operators."""

    available: int
    """Agents that had a free slot for it."""
    taken: int
    """Slots of this one, before."""
    slots: int

    def __str__(self) -> str:
        told = f"{self.taken} of its {self.slots} slots were taken"
        if self.available == 1:
            return f"the only agent with a free slot for it: {told}"
        return f"the least busy of {self.available} agents with a free slot for it: {told}"


@dataclass(frozen=True, slots=True)
class Dispatch:
    request_id: RequestId
    agent_id: AgentId
    choice: Choice | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Abandon:
    """Tell the agent to stop. The slot stays bound until it answers."""

    request_id: RequestId
    agent_id: AgentId


@dataclass(frozen=True, slots=True)
class Reject:
    request_id: RequestId
    reason: Rejection


Effect: TypeAlias = Dispatch | Abandon | Reject


@dataclass(slots=True)
class _Binding:
    agent_id: AgentId
    request: Waiting
    """As it waited, and will again should the agent refuse."""
    abandoned: bool = False


class Dispatcher:
    def __init__(self, buffer: Buffer, policy: Policy = least_busy) -> None:
        self._buffer = buffer
        self._policy = policy
        self._pool = AgentPool()
        self._bound: dict[RequestId, _Binding] = {}
        self._arrivals = 0
        self._swapping_since: float | None = None
        """Since when agents change their models; None: nobody does."""
        self._expected: frozenset[str | None] = frozenset()
        """See ``expect``."""

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def waiting(self) -> Counter[str | None]:
        """How many wait for each model, by the name they ask for; None: any will do."""
        return Counter(waiting.terms.model for waiting in self._buffer)

    def obstacle(self, model: str | None) -> Obstacle:
        """Why requests for this model wait."""
        return self._pool.obstacle(model)

    @property
    def buffered_bytes(self) -> int:
        return self._buffer.bytes

    @property
    def next_deadline(self) -> float | None:
        """When ``expire`` should be called next."""
        return self._buffer.next_deadline

    def bound(self, agent_id: AgentId) -> int:
        """How many of the agent's slots are bound."""
        return self._pool.bound(agent_id)

    def serves(self, agent_id: AgentId, request_id: RequestId) -> bool:
        """Is the request bound to this agent? If not, what the agent says of it is out of date."""
        binding = self._bound.get(request_id)
        return binding is not None and binding.agent_id == agent_id

    def submit(self, request_id: RequestId, terms: Terms = ANY, *, now: float) -> list[Effect]:
        """A new request: dispatched at once, buffered (no effect), or rejected."""
        self._arrivals += 1
        request = Waiting(request_id, self._arrivals, terms, now, self._deadline(terms, now))
        # Nobody waits for what is available: see _drain.
        if available := self._pool.available(terms.model):
            return [self._dispatch(request, available)]
        if self._buffer.is_full:
            return [Reject(request_id, Rejection.BUFFER_FULL)]
        if not self._buffer.has_room_for(terms):
            return [Reject(request_id, Rejection.BUFFER_BYTES_FULL)]
        self._buffer.push(request)
        return []

    def start(self, request_id: RequestId) -> None:
        """Its client has been told of it: from now on it cannot begin anew, only go on elsewhere. To be
        called for each agent that it is bound to, since it gets further there.
        """
        if binding := self._bound.get(request_id):
            binding.request.kin = self._pool.fingerprint(binding.agent_id)
            binding.request.losses = 0

    def finish(self, request_id: RequestId) -> list[Effect]:
        """The agent is done with the request, so its slot is free."""
        binding = self._bound.pop(request_id, None)
        if binding is None:
            return []
        self._pool.release(binding.agent_id, request_id)
        return self._drain()

    def refuse(self, request_id: RequestId, *, now: float) -> list[Effect]:
        """The agent was busy: back to the head of the buffer, with the deadline it had.

        If it had begun, the agent gives it back since it must let go of it: then with new patience,
        and rejected if it has moved too often.
        """
        binding = self._bound.pop(request_id, None)
        if binding is None:
            return []
        self._pool.refuse(binding.agent_id, request_id)
        if binding.abandoned:
            return self._drain()
        request = binding.request
        if request.kin is not None:
            request.moves += 1
            return [*self._move(request, now), *self._drain()]
        if self._is_held(request.terms):
            self._set_deadline(request, now)
        self._buffer.push_back(request)
        return self._drain()

    def cancel(self, request_id: RequestId) -> list[Effect]:
        """The client has gone, wherever the request is. Nothing more will be said of it."""
        if self._buffer.discard(request_id):
            return []
        binding = self._bound.get(request_id)
        if binding is None or binding.abandoned:
            return []
        binding.abandoned = True
        return [Abandon(request_id, binding.agent_id)]

    def join(self, agent_id: AgentId) -> None:
        """A new agent, with no slots until it reports some."""
        self._pool.join(agent_id)

    def report(
        self,
        agent_id: AgentId,
        *,
        slots: int,
        elsewhere: int = 0,
        draining: bool = False,
        swapping: bool = False,
        models: frozenset[str] = frozenset(),
        fingerprint: str = "",
        now: float,
    ) -> list[Effect]:
        """``elsewhere``: slots that requests have which did not come from here."""
        self._pool.report(
            agent_id,
            slots=slots,
            elsewhere=elsewhere,
            draining=draining,
            swapping=swapping,
            models=models,
            fingerprint=fingerprint,
        )
        self._watch_swaps(now)
        return self._drain()

    def expect(self, models: frozenset[str | None], *, now: float) -> None:
        """Agents are about to come for those who ask for these models, by any of their names; None: for
        those who ask for none. Their patience begins when no agent is expected for them any more.
        """
        before, self._expected = self._expected, models
        for waiting in self._buffer:
            model = waiting.terms.model
            if self._swapping_since is None and (model in before) != (model in models):
                self._set_deadline(waiting, now)

    def leave(self, agent_id: AgentId, *, in_order: bool = False, now: float) -> list[Effect]:
        """The agent is lost, and so is all that it was doing. ``in_order``: it was asked to go, so
        that no request can be to blame for it.

        1. Abandoned: nobody waits for it.
        2. Not too often lost or moved: to the head of the buffer, in its old order, with new
           patience. Its client notices only time.
        3. Else: rejected.
        """
        lost = self._pool.leave(agent_id).bound
        effects: list[Effect] = []
        for request_id in reversed([r for r in self._bound if r in lost]):
            binding = self._bound.pop(request_id)
            if not binding.abandoned:
                binding.request.moves += 1
                binding.request.losses += not in_order
                effects += self._move(binding.request, now)
        self._watch_swaps(now)
        return [*reversed(effects), *self._drain()]

    def expire(self, *, now: float) -> list[Effect]:
        return [
            Reject(
                request.request_id,
                Rejection.BUFFER_TIMEOUT if request.kin is None else Rejection.AGENT_LOST,
            )
            for request in self._buffer.expire(now=now)
        ]

    def _deadline(self, terms: Terms, now: float) -> float:
        """Of one that begins to wait now."""
        if terms.deadline is not None:
            return now + terms.deadline
        if self._swapping_since is not None:
            return self._swapping_since + LONGEST_SWAP
        return now + (self._longest_start if terms.model in self._expected else self._patience)

    @property
    def _patience(self) -> float:
        return self._buffer.patience

    @property
    def _longest_start(self) -> float:
        return max(LONGEST_START, self._patience)

    def _is_held(self, terms: Terms) -> bool:
        """Its patience does not count now."""
        return self._swapping_since is not None or terms.model in self._expected

    def _set_deadline(self, request: Waiting, now: float) -> None:
        """Of one that begins to wait now, or as if it did; its own stays. However often agents are
        expected for it, and are not any more, it waits no longer than for one of them.
        """
        if request.terms.deadline is None:
            longest = request.since + self._longest_start + self._patience
            request.deadline = min(self._deadline(request.terms, now), longest)

    def _watch_swaps(self, now: float) -> None:
        """Nobody's patience ends while an agent changes its model, unless that takes for ever."""
        if self._pool.is_swapping == (self._swapping_since is not None):
            return
        self._swapping_since = now if self._pool.is_swapping else None
        for waiting in self._buffer:
            if waiting.terms.deadline is None:  # a swap has a bound of its own
                waiting.deadline = self._deadline(waiting.terms, now)

    def _move(self, request: Waiting, now: float) -> list[Effect]:
        """It was taken from its agent: to go on, or begin, elsewhere."""
        if request.losses > MOST_LOSSES or request.moves > MOST_MOVES or request.kin == "":
            return [Reject(request.request_id, Rejection.AGENT_LOST)]
        request.since = now
        self._set_deadline(request, now)
        self._buffer.push_back(request)
        return []

    def _drain(self) -> list[Effect]:
        effects: list[Effect] = []
        if not self._pool.available(None):
            return effects
        for waiting in tuple(self._buffer):
            if available := self._pool.available(waiting.terms.model, waiting.kin):
                self._buffer.discard(waiting.request_id)
                effects.append(self._dispatch(waiting, available))
            elif waiting.terms.model is None and waiting.kin is None:
                break  # nobody has a free slot
        return effects

    def _dispatch(self, request: Waiting, available: Sequence[Agent]) -> Dispatch:
        agent = self._policy(available)
        choice = Choice(len(available), agent.taken_slots, agent.slots)
        self._pool.bind(agent.agent_id, request.request_id)
        self._bound[request.request_id] = _Binding(agent.agent_id, request)
        return Dispatch(request.request_id, agent.agent_id, choice)
