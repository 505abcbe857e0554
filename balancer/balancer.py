"""The balancer: sole owner of the dispatcher. Feeds it events and carries out its effects.

It decides nothing. All its methods are called on one asyncio loop and none of them waits, so that
an event and its effects are never interleaved with another's.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import assert_never

from balancer.buffer import Buffer
from balancer.consultations import Consultations
from balancer.desired_state import BalancerDesiredState, InferenceParameters, agent_state
from balancer.dispatcher import Abandon, Dispatch, Dispatcher, Effect, Reject, Rejection
from balancer.exchange import Changes, Exchange, Told
from balancer.fleet_beats import FleetView, SeenAgent
from balancer.fleet_demand import FleetDemand
from balancer.fleets import Fleet
from balancer.history import INTERVAL
from balancer.journal import Record, State
from balancer.limits import Limit, Limits, Tally
from balancer.linked_agents import AgentView, LinkedAgent, is_open, plainness
from balancer.metrics import Metrics
from balancer.observed import gauges, load
from balancer.progress import Progress
from balancer.records import Records
from balancer.rollout import GiveTurn, Rollout
from balancer.stored_state import StoredState
from balancer.terms import ANY, Terms
from balancer.watch import LOOK_INTERVAL
from common.errors import ErrorCode, RequestError
from common.ids import AgentId, RequestId
from common.messages import (
    Busy,
    Cancel,
    Described,
    Detokenized,
    DocumentFailed,
    DocumentTooLong,
    Drain,
    Embedded,
    Event,
    Failed,
    Finished,
    Join,
    Noted,
    SetState,
    Status,
    Swap,
    TokenGenerated,
    Tokenized,
    ToolCallsEnded,
    Undrain,
    encode,
)
from common.models import names

log = logging.getLogger(__name__)


LOST_MODEL_PATIENCE = 60.0
"""Seconds that a model stays known when the agent is lost that served it: it may come back."""

MOST_ORDERS = 2048
"""To agents, of which those may not come back."""

SHUTTING_DOWN = "the balancer is shutting down"


@dataclass(slots=True)
class _Request:
    frame: bytes
    """Its ``Generate`` or ``Embed``, as it travels."""
    exchange: Exchange
    record: Record
    limit: asyncio.TimerHandle | None = None
    """Ends it at its own deadline."""
    progress: Progress = field(default_factory=Progress)
    is_under_way: bool = False
    """The agent that has it has told something of it."""


def _told(stored: StoredState) -> tuple[object, ...]:
    """What agents are told of it."""
    return stored.wish_number, stored.balancer_desired_state, stored.agent_overrides


def new_id() -> RequestId:
    return RequestId(uuid.uuid4().hex)


class Balancer:
    def __init__(
        self,
        *,
        buffer_capacity: int,
        patience: float,
        limits: Limits | None = None,
        settling: float = 0.0,
    ) -> None:
        """``buffer_capacity``: requests that may wait; ``patience``: seconds that each may wait;
        ``limits``: all other bounds; ``settling``: seconds from now in which agents of any model may
        still come back, after a balancer before this one.

        Must be made inside a running asyncio loop.
        """
        self.limits = limits or Limits()
        self.tally = Tally(self.limits)
        self._buffer_capacity = buffer_capacity
        buffer = Buffer(
            capacity=buffer_capacity, patience=patience, most_bytes=self.limits.buffered_bytes
        )
        self._dispatcher = Dispatcher(buffer)
        self._loop = asyncio.get_running_loop()
        self._settled = self._loop.time() + settling
        self._timer: asyncio.TimerHandle | None = None
        self._agents: dict[AgentId, LinkedAgent] = {}
        self._requests: dict[RequestId, _Request] = {}
        self.accepts = True
        """False: new requests are told that this balancer ends."""
        self.closed = asyncio.Event()
        self.changes = Changes()
        self.metrics = Metrics(partial(gauges, self))
        self.records = Records(self.metrics)
        self._rollout = Rollout()
        self._demand = FleetDemand()
        self.demand_changes = Changes()
        """Of what fleets are to be, or of whether anybody waits for one that has no agents."""
        self._lost_models: dict[str, float] = {}
        """Names of what agents served that were lost, and until when requests for it may wait."""
        self._consultations = Consultations()
        self._abandoned: dict[RequestId, tuple[AgentId, float]] = {}
        """Nobody waits for them, but their slots are bound yet: where, and since when."""
        self._orders: dict[AgentId, bool] = {}
        """Agents that are to be drained, or undrained, and have not said yet that they are."""
        self._stored = StoredState(balancer_desired_state=BalancerDesiredState.defaults())
        self.mode_changes = Changes()
        """Of whether tokens are generated at all."""
        self._loop.call_later(LOOK_INTERVAL, self._look)
        self._loop.call_later(INTERVAL, self._sample)

    # What clients do

    def submit(
        self,
        request_id: RequestId,
        frame: bytes,
        terms: Terms = ANY,
        *,
        exchange: Exchange | None = None,
    ) -> Exchange:
        """Take the request on; ``frame`` is its encoded ``Generate`` or ``Embed``. Read the exchange
        to its end, or ``cancel``. ``exchange``: where its events go, perhaps with others'.
        """
        exchange = exchange or Exchange()
        now = self._loop.time()
        record = self.records.arrived(request_id, terms, self._best_name(terms.model))
        request = _Request(frame, exchange, record)
        self._requests[request_id] = request
        if not self.accepts:
            self._refuse_because_closed(request_id)
            return exchange
        if terms.deadline is not None:
            request.limit = self._loop.call_at(now + terms.deadline, self._give_up, request_id)
        terms = replace(terms, size=len(frame))
        self._carry_out(self._dispatcher.submit(request_id, terms, now=now))
        self._note_waits([record])
        if self._dispatcher.buffered == 1 and self.fleets:
            self.demand_changes.notify()
        return exchange

    def submit_all(self, frames: Mapping[RequestId, bytes], terms: Terms = ANY) -> Exchange:
        """Take on several requests whose events go to one client. ``cancel`` each of them."""
        exchange = Exchange(len(frames))
        for request_id, frame in frames.items():
            self.submit(request_id, frame, terms, exchange=exchange)
        return exchange

    @property
    def model_names(self) -> set[str]:
        """What clients may ask for: what agents serve, and what they are to serve."""
        return {name for each in self.models for name in each}

    @property
    def models(self) -> list[list[str]]:
        """All the names of each model that is served, or is to be; the best one first."""
        served = [agent.status.model_names for agent in self._agents.values()]
        wanted = [names(self.desired_state.model_reference), *self._demand.models.values()]
        known = {frozenset(told) for told in (*wanted, *served)}
        return sorted(sorted(each, key=plainness) for each in known if each)

    def _best_name(self, model: str | None) -> str | None:
        """As metrics call what a client has asked for; None: nobody knows which it will be."""
        known = self.models
        if model is None:
            return known[0][0] if len(known) == 1 else None
        return next((each[0] for each in known if model in each), None)

    def parameters_for_tokens(self, model: str | None) -> InferenceParameters:
        """How requests for tokens are to be served. ``model``: one of its names; None: any.

        Raises ``RequestError`` if tokens are not generated at all, or not by this model.
        """
        parameters = self.desired_state.inference_parameters
        if parameters.enable_embeddings:
            raise RequestError(
                ErrorCode.GENERATION_DISABLED,
                "token generation is disabled while embeddings are enabled",
            )
        self.check_model(model)
        return parameters

    def check_model(self, model: str | None) -> None:
        """Raises ``RequestError`` if nobody serves it, or is to, or was lost with it just now."""
        now = self._loop.time()
        if model is None or now < self._settled or self._lost_models.get(model, 0.0) > now:
            return
        if model not in (known := self.model_names):
            raise RequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"no agent serves the model {model!r}; there is: {', '.join(sorted(known))}",
            )

    def cancel(self, request_id: RequestId) -> None:
        """The client has gone; nothing if the request is over already."""
        self._consultations.cancel(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            if request.limit is not None:
                request.limit.cancel()
            self.records.cancelled(request.record)
            self._carry_out(self._dispatcher.cancel(request_id))

    def consult(self, request_id: RequestId, frame: bytes, model: str | None) -> Exchange:
        """Ask an agent for what only takes its model's vocabulary, and no slot. ``frame``: an encoded
        ``Tokenize`` or ``Detokenize``. Read the exchange to its end, or ``cancel``. Raises
        ``LimitError``.
        """
        agent = next((a for a in self._agents.values() if a.serves(model)), None)
        if not self.accepts:
            failed = Failed(request_id, ErrorCode.SHUTTING_DOWN, SHUTTING_DOWN)
        elif agent is None:
            failed = Failed(request_id, ErrorCode.NO_AGENTS, "no agent serves a model now")
        else:
            return self._consultations.begin(request_id, frame, agent)
        exchange = Exchange()
        exchange.put(Told(None, failed))
        return exchange

    # What agents do

    def join(self, frame: Join, send: Callable[[bytes], None], drop: Callable[[str], None]) -> None:
        """A link has been made. ``send`` hands an encoded frame to it and never waits; ``drop`` ends
        it, for the reason that is given, when the agent has been made to leave already.

        An agent that is here already has a new link before we noticed the loss of the old one.
        """
        if frame.agent_id in self._agents:
            self.leave(frame.agent_id, "it has a newer link")
        log.info("agent_id=%s name=%s joined", frame.agent_id, frame.name)
        agent = LinkedAgent(
            frame.agent_id, frame.name, frame.labels, frame.status, send, drop, frame.fleet
        )
        self._agents[frame.agent_id] = agent
        self._tell_state(agent)
        if (is_held := self._orders.get(frame.agent_id)) is not None:
            self._order(agent, is_held=is_held)
        self._dispatcher.join(frame.agent_id)
        self._report(frame.agent_id, frame.status)
        self._expect()

    def report(self, agent_id: AgentId, status: Status) -> None:
        agent = self._agents[agent_id]
        agent.watch.heard()
        if status.version > agent.status.version:
            before, agent.status = agent.status, status
            agent.told_at = monotonic()
            if self._orders.get(agent_id) is status.held:
                del self._orders[agent_id]
            self._report(agent_id, status)
            if is_open(before) != is_open(status):
                self._expect()

    def described(self, agent_id: AgentId, description: Described) -> None:
        self._agents[agent_id].description = description

    def happened(self, agent_id: AgentId, events: Iterable[Event]) -> None:
        """What one pass of an agent brought forth."""
        self._agents[agent_id].watch.heard()
        for event in events:
            if event.request_id in self._consultations:
                self._consultations.happened(agent_id, event)
            # An event of a request that has moved on since is out of date.
            elif self._dispatcher.serves(agent_id, event.request_id):
                self._happened(self._agents[agent_id], event)

    def noted(self, agent_id: AgentId, note: Noted) -> None:
        request = self._requests.get(note.request_id)
        if request is not None and self._dispatcher.serves(agent_id, note.request_id):
            self.records.noted(request.record, note)

    def leave(self, agent_id: AgentId, reason: str) -> None:
        """The agent's link is lost. ``reason``: for the log."""
        log.info("agent_id=%s left: %s", agent_id, reason)
        agent = self._agents.pop(agent_id)
        if not agent.status.leaving:
            self.records.incident(ErrorCode.AGENT_LOST, reason, agent=agent.name)
            back_by = self._loop.time() + LOST_MODEL_PATIENCE
            self._lost_models = dict.fromkeys(agent.status.model_names, back_by) | {
                name: until
                for name, until in self._lost_models.items()
                if until > self._loop.time()
            }
        self._consultations.leave(agent_id)
        self._abandoned = {r: asked for r, asked in self._abandoned.items() if asked[0] != agent_id}
        lost = [r.record for r in self._requests.values() if r.record.agent_id == agent_id]
        for record in lost:
            self.records.agent_lost(record, reason)
        # Nobody waited if another slot was free, so what is dispatched now is what was put back.
        before = self._dispatcher.buffered
        effects = self._dispatcher.leave(
            agent_id, in_order=agent.status.leaving, now=self._loop.time()
        )
        self.metrics.requeued.labels("agent_lost").inc(
            max(0, self._dispatcher.buffered - before)
            + sum(isinstance(effect, Dispatch) for effect in effects)
        )
        self._expect()
        self._give_turns(self._rollout.leave(agent_id))
        if self._rollout.halted_by == agent_id:
            log.warning(
                "agent_id=%s was lost while it changed its model: the others keep theirs until an "
                "agent has shown that the model works, or the desired state is put again",
                agent_id,
            )
        self._carry_out(effects)
        self._note_waits(lost)

    def _look(self) -> None:
        """Is there an agent that has come to a stop?"""
        for agent_id, agent in tuple(self._agents.items()):
            reason = agent.watch.look(agent.status, bound=self._dispatcher.bound(agent_id))
            if reason is not None:
                log.warning("agent_id=%s name=%s is given up: %s", agent_id, agent.name, reason)
                self.metrics.given_up.inc()
                self.leave(agent_id, "it is given up")
                agent.drop(reason)
        if not self.closed.is_set():
            self._loop.call_later(LOOK_INTERVAL, self._look)

    def _sample(self) -> None:
        """For the charts of the last minutes."""
        self.records.sample(load(self))
        if not self.closed.is_set():
            self._loop.call_later(INTERVAL, self._sample)

    # What the operator wants

    def want(self, stored: StoredState) -> None:
        """From now on, of every agent. It must be in the store already."""
        before, self._stored = self._stored, stored
        self._demand.want(stored.fleets, self.desired_state.model_reference)
        self._expect()
        self.demand_changes.notify()
        if _told(before) != _told(stored):
            for agent in self._agents.values():
                self._tell_state(agent)
            self._give_turns(self._rollout.restart(stored.wish_number))
        if (
            before.balancer_desired_state.inference_parameters.enable_embeddings
            != self.desired_state.inference_parameters.enable_embeddings
        ):
            self.mode_changes.notify()

    @property
    def stored(self) -> StoredState:
        return self._stored

    @property
    def desired_state(self) -> BalancerDesiredState:
        return self._stored.balancer_desired_state

    @property
    def fleets(self) -> Mapping[str, Fleet]:
        return self._stored.fleets

    @property
    def fleet_views(self) -> Mapping[str, FleetView]:
        """As the supervisor sees them; those that it does not know yet are not among them."""
        return self._demand.views

    @property
    def waiting(self) -> dict[str, int]:
        """Requests without a slot, by fleet."""
        return self._demand.waiting(self._dispatcher.waiting)

    @property
    def fleet_agents(self) -> list[SeenAgent]:
        return [agent.seen() for agent in self._agents.values() if agent.fleet is not None]

    def supervised(self, views: Mapping[str, FleetView], *, leads: bool) -> None:
        """What the supervisor says. ``leads``: this balancer decides when agents change their models."""
        self._give_turns(self._rollout.lead(leads))
        if self._demand.supervised(views):
            self._expect()
            self.changes.notify()

    def unsupervised(self, *, since: float, leads: bool) -> None:
        """The supervisor does not answer. ``since``: of the loop's clock. ``leads``: as above; it may
        have made another balancer lead.
        """
        self._give_turns(self._rollout.lead(leads))
        if self._demand.unsupervised(since=since):
            self.changes.notify()

    @property
    def unsupervised_for(self) -> float | None:
        """Seconds that the supervisor has not answered; None: it does, or was never asked."""
        return self._demand.silence(now=self._loop.time())

    def _expect(self) -> None:
        served = {agent.fleet for agent in self._agents.values() if agent.is_open}
        self._dispatcher.expect(self._demand.expected(served), now=self._loop.time())
        self._arm()

    @property
    def halted_by(self) -> AgentId | None:
        """The agent whose loss has halted the change of models; None: it is not halted."""
        return self._rollout.halted_by

    # What the operator does

    def drain_agent(self, agent_id: AgentId) -> None:
        """It finishes what runs, takes nothing new, and stays. Raises ``RequestError``."""
        self._order(self._known(agent_id), is_held=True)

    def undrain_agent(self, agent_id: AgentId) -> None:
        """Raises ``RequestError``."""
        self._order(self._known(agent_id), is_held=False)

    def _order(self, agent: LinkedAgent, *, is_held: bool) -> None:
        """Said again on its next link, until its status shows that it has heard."""
        self._orders[agent.agent_id] = is_held
        if len(self._orders) > MOST_ORDERS:
            del self._orders[next(iter(self._orders))]
        agent.send(encode(Drain() if is_held else Undrain()))

    def end_request(self, request_id: RequestId) -> None:
        """Its client is told that an operator wants that. Raises ``RequestError``."""
        message = "an operator has cancelled the request"
        if not self._fail(request_id, ErrorCode.CANCELLED_BY_OPERATOR, message):
            raise RequestError(
                ErrorCode.REQUEST_NOT_FOUND, "there is no such request, or it is over"
            )

    def _known(self, agent_id: AgentId) -> LinkedAgent:
        agent = self._agents.get(agent_id)
        if agent is None:
            raise RequestError(ErrorCode.AGENT_NOT_FOUND, "there is no such agent")
        return agent

    # What observers see

    @property
    def agents(self) -> list[AgentView]:
        return [
            agent.view(bound=self._dispatcher.bound(agent.agent_id))
            for agent in self._agents.values()
        ]

    @property
    def buffered(self) -> int:
        return self._dispatcher.buffered

    @property
    def buffer_capacity(self) -> int:
        return self._buffer_capacity

    @property
    def buffered_bytes(self) -> int:
        return self._dispatcher.buffered_bytes

    @property
    def running(self) -> int:
        """Requests that agents have, and whose clients wait for them."""
        return len(self._requests) - self._dispatcher.buffered

    @property
    def abandoned(self) -> int:
        """Requests that agents have yet, and for which nobody waits any longer."""
        return len(self._abandoned)

    @property
    def consulted(self) -> int:
        """Texts that agents are asked about just now."""
        return len(self._consultations)

    async def drain(self) -> None:
        """Take nothing new, tell those that wait for a slot that this balancer ends, and return when all
        that runs is over.
        """
        self.accepts = False
        for request_id, request in tuple(self._requests.items()):
            if request.record.state is State.WAITING and request.record.started is None:
                self._carry_out(self._dispatcher.cancel(request_id))
                self._refuse_because_closed(request_id)
        while self._requests:
            await self.changes.after(self.changes.count)

    def close(self) -> None:
        """Tell every client that this balancer ends; new requests are told the same at once."""
        self.accepts = False
        self.closed.set()
        self.changes.notify()
        self._consultations.end(ErrorCode.SHUTTING_DOWN, SHUTTING_DOWN)
        for request_id in tuple(self._requests):
            self._carry_out(self._dispatcher.cancel(request_id))
            self._refuse_because_closed(request_id)
        if self._timer is not None:
            self._timer.cancel()

    def _report(self, agent_id: AgentId, status: Status) -> None:
        self._give_turns(
            self._rollout.report(
                agent_id,
                awaits_turn=status.awaits_turn,
                is_swapping=status.swapping,
                is_leaving=status.leaving,
                turn_taken=status.turn_taken,
                applied=status.applied,
            )
        )
        self._carry_out(
            self._dispatcher.report(
                agent_id,
                slots=status.slots_total,
                elsewhere=status.slots_elsewhere,
                draining=status.draining,
                swapping=status.swapping,
                models=frozenset(status.model_names),
                fingerprint=status.fingerprint,
                now=self._loop.time(),
            )
        )

    def _tell_state(self, agent: LinkedAgent) -> None:
        state = agent_state(
            self.desired_state, self._stored.agent_overrides, agent.name, agent.labels
        )
        agent.send(encode(SetState(self._stored.wish_number, state)))

    def _give_turns(self, turns: Iterable[GiveTurn]) -> None:
        for given in turns:
            log.info("agent_id=%s changes its model", given.agent_id)
            self._agents[given.agent_id].send(encode(Swap(given.turn)))

    def _happened(self, agent: LinkedAgent, event: Event) -> None:
        request_id = event.request_id
        match event:
            case (
                TokenGenerated()
                | ToolCallsEnded()
                | Embedded()
                | DocumentTooLong()
                | DocumentFailed()
            ):
                request = self._requests.get(request_id)
                if request is not None:
                    self._pass_on(request, agent, event)
            case Busy():
                request = self._requests.get(request_id)
                if request is not None:
                    self.records.refused_by_agent(request.record)
                self._freed(request_id)
                self._carry_out(self._dispatcher.refuse(request_id, now=self._loop.time()))
                self._note_waits([] if request is None else [request.record])
            case Tokenized() | Detokenized():
                pass  # nobody waits for it any longer
            case Finished() | Failed():
                request = self._requests.pop(request_id, None)
                if request is not None:
                    self._end(request, agent.name, event)
                self._freed(request_id)
                self._carry_out(self._dispatcher.finish(request_id))
            case _:
                assert_never(event)

    def _freed(self, request_id: RequestId) -> None:
        """Its agent has said so."""
        if request_id in self._abandoned:
            _, since = self._abandoned.pop(request_id)
            self.metrics.cancel.observe(monotonic() - since)

    def _pass_on(
        self,
        request: _Request,
        agent: LinkedAgent,
        event: TokenGenerated | ToolCallsEnded | Embedded | DocumentTooLong | DocumentFailed,
    ) -> None:
        if not request.is_under_way:
            request.is_under_way = True
            self._dispatcher.start(event.request_id)
            if request.record.started is not None:
                self.records.went_on(request.record)
        is_token = isinstance(event, TokenGenerated)
        if request.record.started is None:
            self.records.started(request.record, with_token=is_token)
        if is_token:
            self.records.got_token(request.record)
        limit = request.exchange.limit_reached
        if limit is None:
            request.progress.note(event)
            request.exchange.put(Told(agent.name, event))
            return
        self.metrics.reach(limit)
        del self._requests[event.request_id]
        slow = Failed(
            event.request_id, ErrorCode.SLOW_CLIENT, "the answer was not read; it has been given up"
        )
        self._end(request, agent.name, slow)
        self._carry_out(self._dispatcher.cancel(event.request_id))

    def _end(self, request: _Request, name: str | None, event: Finished | Failed) -> None:
        """The client's last event. The request must have left ``_requests``."""
        if isinstance(event, Finished):
            event = request.progress.finished(event)
        if request.limit is not None:
            request.limit.cancel()
        timing = self.records.over(request.record, name, event)
        request.exchange.put(Told(name, event, timing))

    def _give_up(self, request_id: RequestId) -> None:
        """Its own deadline has come."""
        self._fail(request_id, ErrorCode.DEADLINE_EXCEEDED, "the request's deadline has passed")

    def _fail(self, request_id: RequestId, code: ErrorCode, message: str) -> bool:
        """Tell its client, and free its slot; False: it is over already."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._end(request, request.record.agent, Failed(request_id, code, message))
        self._carry_out(self._dispatcher.cancel(request_id))
        return True

    def _refuse_because_closed(self, request_id: RequestId) -> None:
        self._end(
            self._requests.pop(request_id),
            None,
            Failed(request_id, ErrorCode.SHUTTING_DOWN, SHUTTING_DOWN),
        )

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Dispatch(request_id, agent_id, choice):
                    request = self._requests[request_id]
                    agent = self._agents[agent_id]
                    self.records.dispatched(
                        request.record, agent_id, agent.name, str(choice), model=agent.model
                    )
                    request.is_under_way = False
                    if not request.progress.is_nothing:
                        self.metrics.resumed.inc()
                    self._agents[agent_id].send(request.progress.rest(request.frame))
                case Abandon(request_id, agent_id):
                    self._abandoned[request_id] = (agent_id, monotonic())
                    self._agents[agent_id].send(encode(Cancel(request_id)))
                case Reject(request_id, reason):
                    request = self._requests.pop(request_id)
                    rejected = self._rejected(effect, reason, request.record.terms.model)
                    self._end(request, None, rejected)
                case _:
                    assert_never(effect)
        self._arm()
        self.changes.notify()

    def _note_waits(self, records: Iterable[Record]) -> None:
        """Those of them that have no slot now."""
        for record in records:
            if record.state is State.WAITING:
                why = str(self._dispatcher.obstacle(record.terms.model))
                if reason := self._demand.reason(record.terms.model):
                    why += f"; {reason}"
                self.records.waits(record, why)

    def _rejected(self, effect: Reject, reason: Rejection, model: str | None) -> Failed:
        match reason:
            case Rejection.BUFFER_FULL:
                code = ErrorCode.BUFFER_FULL
                message = "too many requests are waiting for a slot already"
                self.metrics.reach(Limit.BUFFERED_REQUESTS)
            case Rejection.BUFFER_BYTES_FULL:
                code = ErrorCode.BUFFER_FULL
                message = "the requests that wait for a slot have too many bytes already"
                self.metrics.reach(Limit.BUFFERED_BYTES)
            case Rejection.BUFFER_TIMEOUT:
                code = ErrorCode.BUFFER_TIMEOUT
                message = "no slot became free in time"
                if why := self._demand.reason(model):
                    message += f"; {why}"
            case Rejection.AGENT_LOST:
                code = ErrorCode.AGENT_LOST
                message = (
                    "the agent that served this request was lost, and no other went on with it"
                )
        return Failed(effect.request_id, code, message)

    def _arm(self) -> None:
        """Have ``expire`` called at the next deadline, if there is one."""
        deadline = None if self.closed.is_set() else self._dispatcher.next_deadline
        if self._timer is not None:
            if self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._carry_out(self._dispatcher.expire(now=self._loop.time()))
