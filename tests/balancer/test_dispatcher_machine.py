"""The dispatcher, whatever clients, agents and time do: what it promises is said here a second time,
as a list of all requests, and each of its effects is compared with that.

``HEADRACE_EXAMPLES`` sets how many histories are played.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bodies import PATIENT
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from balancer.buffer import Buffer
from balancer.dispatcher import (
    LONGEST_START,
    LONGEST_SWAP,
    MOST_LOSSES,
    MOST_MOVES,
    Abandon,
    Dispatch,
    Dispatcher,
    Effect,
    Reject,
    Rejection,
)
from balancer.terms import Priority, Terms
from common.ids import AgentId, RequestId

CAPACITY, PATIENCE = 4, 5.0
MODELS = ("one", "two")
RANKS = {priority: rank for rank, priority in enumerate(Priority)}


@dataclass(eq=False)
class Asked:
    """A request that is not over."""

    request_id: RequestId
    arrival: int
    terms: Terms
    since: float
    deadline: float
    agent_id: AgentId | None = None
    """None: it waits."""
    kin: str | None = None
    losses: int = 0
    moves: int = 0
    abandoned: bool = False

    @property
    def turn(self) -> tuple[int, int]:
        return RANKS[self.terms.priority], self.arrival


@dataclass
class Known:
    """An agent as it has last reported."""

    slots: int = 0
    elsewhere: int = 0
    """Slots that other balancers' requests have."""
    draining: bool = False
    swapping: bool = False
    model: str = ""
    fingerprint: str = ""
    refused: bool = False


agents = st.tuples(
    st.integers(0, 3), st.sampled_from(MODELS), st.sampled_from(["f1", "f1", "f2", ""])
)
"""As they join: slots, model and fingerprint."""

terms = st.builds(
    Terms,
    st.sampled_from([None, None, *MODELS]),
    st.sampled_from([Priority.HIGH, Priority.NORMAL, Priority.NORMAL, Priority.LOW]),
    st.sampled_from([None, None, None, 3.0, 700.0]),
)


class Histories(RuleBasedStateMachine):
    @initialize(joined=st.lists(agents, max_size=3))
    def start(self, joined: list[tuple[int, str, str]]) -> None:
        self.now = 100.0
        self.count = 0
        self.dispatcher = Dispatcher(Buffer(capacity=CAPACITY, patience=PATIENCE))
        self.agents: dict[AgentId, Known] = {}
        self.live: dict[RequestId, Asked] = {}
        self.swapping_since: float | None = None
        self.expected: frozenset[str | None] = frozenset()
        for each in joined:
            self.join(each)

    # What is known of it from outside

    @property
    def waiting(self) -> list[Asked]:
        """In the order in which they should have their turn."""
        waiting = [each for each in self.live.values() if each.agent_id is None]
        return sorted(waiting, key=lambda each: each.turn)

    @property
    def running(self) -> list[Asked]:
        return [each for each in self.live.values() if each.agent_id is not None]

    def bound(self, agent_id: AgentId) -> int:
        return sum(each.agent_id == agent_id for each in self.live.values())

    def available(self, request: Asked) -> list[AgentId]:
        """The agents that could take it now."""
        return [
            agent_id
            for agent_id, agent in self.agents.items()
            if not (agent.draining or agent.refused)
            and self.bound(agent_id) + agent.elsewhere < agent.slots
            and request.terms.model in (None, agent.model)
            and request.kin in (None, agent.fingerprint)
        ]

    def check(self, effects: Iterable[Effect], rejected: Iterable[Reject] = ()) -> None:
        """Those that are expected are rejected first; then all who can be are dispatched, in order."""
        expected = list(rejected)
        for effect in effects:
            request = self.live[effect.request_id]
            assert not request.abandoned, "nobody waits for it"
            match effect:
                case Reject():
                    assert effect == expected.pop(0)
                    del self.live[effect.request_id]
                case Dispatch(_, agent_id):
                    first = next(each for each in self.waiting if self.available(each))
                    assert request is first, "overtaken"
                    assert agent_id in self.available(request), "it does not fit"
                    request.agent_id = agent_id
                case Abandon():
                    raise AssertionError("nobody has cancelled it")
        assert expected == []
        assert not any(self.available(each) for each in self.waiting), "it waits though it fits"

    # Clients

    @rule(several=st.lists(terms, min_size=1, max_size=4))
    def submit(self, several: list[Terms]) -> None:
        for each in several:
            self.submit_one(each)

    def submit_one(self, terms: Terms) -> None:
        self.count += 1
        own = None if terms.deadline is None else self.now + terms.deadline
        deadline = self.patient_until(terms) if own is None else own
        request = Asked(RequestId(f"r{self.count:04}"), self.count, terms, self.now, deadline)
        is_full = len(self.waiting) >= CAPACITY
        self.live[request.request_id] = request
        refused = is_full and not self.available(request)
        self.check(
            self.dispatcher.submit(request.request_id, terms, now=self.now),
            [Reject(request.request_id, Rejection.BUFFER_FULL)] if refused else [],
        )

    def is_expected(self, terms: Terms) -> bool:
        return terms.model in self.expected

    def patient_until(self, terms: Terms) -> float:
        if self.swapping_since is not None:
            return self.swapping_since + LONGEST_SWAP
        return self.now + (LONGEST_START if self.is_expected(terms) else PATIENCE)

    @rule(models=st.frozensets(st.none() | st.sampled_from(MODELS)))
    def expect(self, models: frozenset[str | None]) -> None:
        before = {each.request_id: self.is_expected(each.terms) for each in self.waiting}
        self.expected = models
        for each in self.waiting:
            changed = before[each.request_id] != self.is_expected(each.terms)
            if self.swapping_since is None and changed:
                self.set_deadline(each)
        self.dispatcher.expect(models, now=self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        effects = self.dispatcher.cancel(request.request_id)
        if request.agent_id is None:
            assert effects == []
            del self.live[request.request_id]
        elif request.abandoned:
            assert effects == []
        else:
            assert effects == [Abandon(request.request_id, request.agent_id)]
            request.abandoned = True

    # Agents

    @precondition(lambda self: len(self.agents) < 4)
    @rule(joined=agents)
    def join(self, joined: tuple[int, str, str]) -> None:
        slots, model, fingerprint = joined
        self.count += 1
        agent_id = AgentId(f"a{self.count:04}")
        self.agents[agent_id] = Known()
        self.dispatcher.join(agent_id)
        assert self.dispatcher.bound(agent_id) == 0
        self.report(agent_id, Known(slots, model=model, fingerprint=fingerprint))

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), elsewhere=st.integers(0, 4))
    def take_slots_elsewhere(self, data: st.DataObject, elsewhere: int) -> None:
        """Or give them back; out of date it may be, and then more than there are."""
        agent_id = self.agent(data)
        self.report(agent_id, replace(self.agents[agent_id], elsewhere=elsewhere, refused=False))

    def report(self, agent_id: AgentId, told: Known) -> None:
        self.agents[agent_id] = told
        self.watch_swaps()
        self.check(
            self.dispatcher.report(
                agent_id,
                slots=told.slots,
                elsewhere=told.elsewhere,
                draining=told.draining,
                swapping=told.swapping,
                models=frozenset({told.model}),
                fingerprint=told.fingerprint,
                now=self.now,
            )
        )

    def watch_swaps(self) -> None:
        """Nobody loses patience meanwhile."""
        before = self.swapping_since
        swaps = any(agent.swapping for agent in self.agents.values())
        self.swapping_since = None if not swaps else self.now if before is None else before
        for request in self.waiting:
            if request.terms.deadline is None and (self.swapping_since is None) != (before is None):
                request.deadline = self.patient_until(request.terms)

    def agent(self, data: st.DataObject) -> AgentId:
        return data.draw(st.sampled_from(sorted(self.agents)))

    @precondition(lambda self: self.agents)
    @rule(
        data=st.data(),
        slots=st.integers(0, 3),
        draining=st.sampled_from([False, False, True]),
        swapping=st.sampled_from([False, False, True]),
        model=st.sampled_from([None, None, *MODELS]),
        fingerprint=st.sampled_from([None, None, "", "f1", "f2"]),
    )
    def change(
        self,
        data: st.DataObject,
        slots: int,
        draining: bool,
        swapping: bool,
        model: str | None,
        fingerprint: str | None,
    ) -> None:
        agent_id = self.agent(data)
        before = self.agents[agent_id]
        model = before.model if model is None else model
        fingerprint = before.fingerprint if fingerprint is None else fingerprint
        told = Known(slots, before.elsewhere, draining or swapping, swapping, model, fingerprint)
        self.report(agent_id, told)

    @precondition(lambda self: self.agents)
    @rule(data=st.data())
    def repeat_the_report(self, data: st.DataObject) -> None:
        self.hear_the_same_again(self.agent(data))

    def hear_the_same_again(self, agent_id: AgentId) -> None:
        told = self.agents[agent_id]
        told.refused = False
        self.report(agent_id, told)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), in_order=st.booleans())
    def leave(self, data: st.DataObject, in_order: bool) -> None:
        self.lose(self.agent(data), in_order=in_order)

    @precondition(lambda self: self.running)
    @rule(
        in_order=st.booleans(),
        slots=st.integers(1, 3),
        times=st.sampled_from([1, 2, MOST_LOSSES + 1, MOST_MOVES + 1]),
        begins=st.booleans(),
    )
    def come_and_go(self, in_order: bool, slots: int, times: int, begins: bool) -> None:
        """One that has work is lost, and one like it comes: again and again, it may be. ``begins``: it
        gets somewhere with its work before.
        """
        for _ in range(times):
            if not self.running:
                return
            agent_id = self.running[0].agent_id
            assert agent_id is not None
            before = self.agents[agent_id]
            for request in self.running:
                if request.agent_id == agent_id and begins:
                    self.begin(request, agent_id)
            self.lose(agent_id, in_order=in_order)
            self.join((slots, before.model, before.fingerprint))

    @precondition(lambda self: self.running)
    @rule(times=st.sampled_from([2, MOST_MOVES + 1]))
    def give_back_again_and_again(self, times: int) -> None:
        """To where it comes from, since nobody else reports."""
        for _ in range(times):
            if self.running:
                request, agent_id = self.running[0], self.running[0].agent_id
                assert agent_id is not None
                self.begin(request, agent_id)
                self.let_go(request, agent_id)
                self.hear_the_same_again(agent_id)

    @precondition(lambda self: self.waiting and self.running)
    @rule(data=st.data())
    def one_refuses_and_the_other_is_lost(self, data: st.DataObject) -> None:
        self.refuse(data)
        if self.running:
            agent_id = self.running[-1].agent_id
            assert agent_id is not None
            self.lose(agent_id, in_order=False)

    def lose(self, agent_id: AgentId, *, in_order: bool) -> None:
        rejected: list[Asked] = []
        for request in tuple(self.running):
            if request.agent_id == agent_id:
                request.moves += 1
                request.losses += not in_order
                rejected += self.move(request)
        del self.agents[agent_id]
        self.watch_swaps()
        effects = self.dispatcher.leave(agent_id, in_order=in_order, now=self.now)
        # In which order they are told is nobody's concern.
        told = [effect for effect in effects if isinstance(effect, Reject)]
        wanted = {Reject(each.request_id, Rejection.AGENT_LOST) for each in rejected}
        assert set(told) == wanted
        self.check(effects, told)

    def move(self, request: Asked) -> list[Asked]:
        """It is taken from its agent; returned if it must be rejected."""
        if request.abandoned:
            del self.live[request.request_id]
            return []
        if request.losses > MOST_LOSSES or request.moves > MOST_MOVES or request.kin == "":
            return [request]
        request.agent_id = None
        request.since = self.now
        self.set_deadline(request)
        return []

    def set_deadline(self, request: Asked) -> None:
        if request.terms.deadline is None:
            longest = request.since + LONGEST_START + PATIENCE
            request.deadline = min(self.patient_until(request.terms), longest)

    def hold_deadline(self, request: Asked) -> None:
        if self.swapping_since is not None or self.is_expected(request.terms):
            self.set_deadline(request)

    def one_that_runs(self, data: st.DataObject) -> tuple[Asked, AgentId]:
        running = sorted(each.request_id for each in self.running)
        request = self.live[data.draw(st.sampled_from(running))]
        assert request.agent_id is not None
        return request, request.agent_id

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        """Its first words, or more of them."""
        self.begin(*self.one_that_runs(data))

    def begin(self, request: Asked, agent_id: AgentId) -> None:
        self.dispatcher.start(request.request_id)
        request.kin = self.agents[agent_id].fingerprint
        request.losses = 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(self.one_that_runs(data)[0])

    def end(self, request: Asked) -> None:
        assert request.agent_id is not None
        self.agents[request.agent_id].refused = False
        del self.live[request.request_id]
        self.check(self.dispatcher.finish(request.request_id))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Or give back, if it has begun."""
        self.let_go(*self.one_that_runs(data))

    def let_go(self, request: Asked, agent_id: AgentId) -> None:
        self.agents[agent_id].refused = True
        rejected: list[Asked] = []
        if request.abandoned or request.kin is not None:
            request.moves += 1
            rejected = self.move(request)
        else:
            request.agent_id = None
            self.hold_deadline(request)
        self.check(
            self.dispatcher.refuse(request.request_id, now=self.now),
            [Reject(each.request_id, Rejection.AGENT_LOST) for each in rejected],
        )

    @rule()
    def speak_of_the_dead(self) -> None:
        for number in range(self.count + 2):
            gone = RequestId(f"r{number:04}")
            if gone not in self.live:
                self.dispatcher.start(gone)
                assert self.dispatcher.finish(gone) == []
                assert self.dispatcher.refuse(gone, now=self.now) == []
                assert self.dispatcher.cancel(gone) == []

    @precondition(lambda self: self.waiting)
    @rule()
    def speak_of_what_waits(self) -> None:
        """Late, by agents that have it no longer."""
        for request in self.waiting:
            self.dispatcher.start(request.request_id)
            assert self.dispatcher.finish(request.request_id) == []
            assert self.dispatcher.refuse(request.request_id, now=self.now) == []

    # Time

    @rule(seconds=st.floats(0.1, 6.0) | st.sampled_from([PATIENCE, LONGEST_SWAP]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = [each for each in self.waiting if each.deadline <= self.now]
        rejected = [
            Reject(
                each.request_id,
                Rejection.BUFFER_TIMEOUT if each.kin is None else Rejection.AGENT_LOST,
            )
            for each in late
        ]
        self.check(self.dispatcher.expire(now=self.now), rejected)

    # What always holds

    @invariant()
    def slots_are_bound_to_those_who_run_and_to_nobody_else(self) -> None:
        for agent_id in self.agents:
            assert self.dispatcher.bound(agent_id) == self.bound(agent_id)
            for request in self.live.values():
                holds = request.agent_id == agent_id
                assert self.dispatcher.serves(agent_id, request.request_id) == holds

    @invariant()
    def the_buffer_holds_who_waits_until_their_deadlines(self) -> None:
        assert self.dispatcher.buffered == len(self.waiting)
        deadlines = [each.deadline for each in self.waiting]
        assert self.dispatcher.next_deadline == min(deadlines, default=None)

    def teardown(self) -> None:
        """With agents enough, all have their turn, and in the end all slots are free."""
        if not hasattr(self, "live"):
            return
        for model in MODELS:
            for fingerprint in ("f1", "f2"):
                self.join((100, model, fingerprint))
        assert self.waiting == []
        for request in self.running:
            self.end(request)
        assert self.live == {}
        for agent_id in tuple(self.agents):
            assert self.dispatcher.bound(agent_id) == 0
            self.lose(agent_id, in_order=False)
        assert self.dispatcher.buffered == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    PATIENT, max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "100")), stateful_step_count=50
)
