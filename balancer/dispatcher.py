"""Decides which agent serves which request.

Events come in as method calls; decisions go out as effects, for the caller to carry out in order.
There is no I/O here, no clock (``now`` is an argument) and no lock: one task owns it.

| a request is | and it is found in | it leaves by |
|---|---|---|
| buffered | ``_buffer`` | ``Dispatch``; ``cancel``; ``expire`` -> ``Reject`` |
| dispatched | ``_bound``, and its slot in ``_pool`` | ``finish``; ``refuse`` or ``leave`` -> buffered, or ``Reject`` |
| abandoned (its client has gone) | as dispatched, with ``abandoned`` set | ``finish``, ``refuse``, ``leave``: silently |
| over | nowhere | |

Always true: nobody waits while a slot is free; no agent has more requests than slots; no effect
speaks of a request that is over.
"""

import enum
from dataclasses import dataclass
from typing import TypeAlias

from balancer.buffer import Buffer
from balancer.policy import Policy, least_busy
from balancer.pool import AgentPool
from common.ids import AgentId, RequestId

MOST_LOSSES = 2
"""How many agents a request may lose before it is rejected: it could be what kills them."""


class Rejection(enum.StrEnum):
    BUFFER_FULL = "buffer_full"
    BUFFER_TIMEOUT = "buffer_timeout"
    AGENT_LOST = "agent_lost"


@dataclass(frozen=True, slots=True)
class Dispatch:
    request_id: RequestId
    agent_id: AgentId


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
    deadline: float
    """For the buffer, should the agent refuse."""
    losses: int = 0
    started: bool = False
    abandoned: bool = False


class Dispatcher:
    def __init__(self, buffer: Buffer, policy: Policy = least_busy) -> None:
        self._buffer = buffer
        self._policy = policy
        self._pool = AgentPool()
        self._bound: dict[RequestId, _Binding] = {}
        self._losses: dict[RequestId, int] = {}  # of buffered requests that lost agents before

    @property
    def buffered(self) -> int:
        return len(self._buffer)

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

    def submit(self, request_id: RequestId, *, now: float) -> list[Effect]:
        """A new request: dispatched at once, buffered (no effect), or rejected."""
        if self._pool.available():  # then nobody waits: see _drain
            return [self._dispatch(request_id, deadline=now + self._buffer.patience)]
        if self._buffer.is_full:
            return [Reject(request_id, Rejection.BUFFER_FULL)]
        self._buffer.push(request_id, now=now)
        return []

    def start(self, request_id: RequestId) -> None:
        """Its first text has gone to the client: from now on it cannot begin anew elsewhere."""
        if binding := self._bound.get(request_id):
            binding.started = True

    def finish(self, request_id: RequestId) -> list[Effect]:
        """The agent is done with the request, so its slot is free."""
        binding = self._bound.pop(request_id, None)
        if binding is None:
            return []
        self._pool.release(binding.agent_id, request_id)
        return self._drain()

    def refuse(self, request_id: RequestId) -> list[Effect]:
        """The agent was busy: back to the head of the buffer, with the deadline it had.

        An agent that refuses what it had begun contradicts itself: that request is rejected.
        """
        binding = self._bound.pop(request_id, None)
        if binding is None:
            return []
        self._pool.refuse(binding.agent_id, request_id)
        if binding.abandoned:
            return self._drain()
        if binding.started:
            return [Reject(request_id, Rejection.AGENT_LOST), *self._drain()]
        self._put_back(request_id, binding, deadline=binding.deadline)
        return self._drain()

    def cancel(self, request_id: RequestId) -> list[Effect]:
        """The client has gone, wherever the request is. Nothing more will be said of it."""
        if self._buffer.discard(request_id):
            self._losses.pop(request_id, None)
            return []
        binding = self._bound.get(request_id)
        if binding is None or binding.abandoned:
            return []
        binding.abandoned = True
        return [Abandon(request_id, binding.agent_id)]

    def join(self, agent_id: AgentId) -> None:
        """A new agent, with no slots until it reports some."""
        self._pool.join(agent_id)

    def report(self, agent_id: AgentId, *, slots: int, draining: bool) -> list[Effect]:
        self._pool.report(agent_id, slots=slots, draining=draining)
        return self._drain()

    def leave(self, agent_id: AgentId, *, now: float) -> list[Effect]:
        """The agent is lost, and so is all that it was doing.

        1. Abandoned: nobody waits for it.
        2. Not started, and not too often lost: to the head of the buffer, in its old order, with
           new patience. Its client notices only time.
        3. Else: rejected.
        """
        lost = self._pool.leave(agent_id).bound
        effects: list[Effect] = []
        for request_id in reversed([r for r in self._bound if r in lost]):
            binding = self._bound.pop(request_id)
            binding.losses += 1
            if binding.abandoned:
                continue
            if not binding.started and binding.losses <= MOST_LOSSES:
                self._put_back(request_id, binding, deadline=now + self._buffer.patience)
            else:
                effects.append(Reject(request_id, Rejection.AGENT_LOST))
        return [*reversed(effects), *self._drain()]

    def expire(self, *, now: float) -> list[Effect]:
        expired = self._buffer.expire(now=now)
        for request_id in expired:
            self._losses.pop(request_id, None)
        return [Reject(request_id, Rejection.BUFFER_TIMEOUT) for request_id in expired]

    def _put_back(self, request_id: RequestId, binding: _Binding, *, deadline: float) -> None:
        self._buffer.push_back(request_id, deadline=deadline)
        if binding.losses:
            self._losses[request_id] = binding.losses

    def _drain(self) -> list[Effect]:
        effects: list[Effect] = []
        while len(self._buffer) and self._pool.available():
            request_id, deadline = self._buffer.pop()
            effects.append(self._dispatch(request_id, deadline=deadline))
        return effects

    def _dispatch(self, request_id: RequestId, *, deadline: float) -> Dispatch:
        agent = self._policy(self._pool.available())
        self._pool.bind(agent.agent_id, request_id)
        losses = self._losses.pop(request_id, 0)
        self._bound[request_id] = _Binding(agent.agent_id, deadline, losses)
        return Dispatch(request_id, agent.agent_id)
