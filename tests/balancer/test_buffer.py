"""What waits is bounded in bytes, too; order and deadlines are tested through the dispatcher."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from balancer.buffer import Buffer
from balancer.dispatcher import Dispatch, Dispatcher, Reject, Rejection
from balancer.terms import Priority, Terms
from common.ids import AgentId, RequestId

A = AgentId("a")
R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))
MOST = 100


def test_one_that_does_not_fit_in_bytes_is_turned_away_and_a_smaller_one_is_not() -> None:
    dispatcher = Dispatcher(Buffer(capacity=9, patience=10.0, most_bytes=MOST))
    dispatcher.submit(R1, Terms(size=60), now=0.0)

    assert dispatcher.submit(R2, Terms(size=41), now=0.0) == [
        Reject(R2, Rejection.BUFFER_BYTES_FULL)
    ]
    assert dispatcher.submit(R3, Terms(size=40), now=0.0) == []
    assert dispatcher.buffered_bytes == 100


def test_one_that_is_put_back_is_let_in_whatever_it_weighs() -> None:
    dispatcher = Dispatcher(Buffer(capacity=9, patience=10.0, most_bytes=MOST))
    dispatcher.join(A)
    dispatcher.report(A, slots=1, now=0.0)
    assert dispatcher.submit(R1, Terms(size=90), now=0.0) == [Dispatch(R1, A)]
    dispatcher.submit(R2, Terms(size=90), now=0.0)

    dispatcher.leave(A, now=1.0)

    assert dispatcher.buffered_bytes == 180
    dispatcher.cancel(R1)
    dispatcher.expire(now=20.0)
    assert dispatcher.buffered_bytes == 0


class Weights(RuleBasedStateMachine):
    """Random pushes and removals, against a plain sum."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer(capacity=5, patience=1.0, most_bytes=MOST)
        self.dispatcher = Dispatcher(self.buffer)
        self.count = 0
        self.now = 0.0

    @rule(
        size=st.integers(0, 60),
        priority=st.sampled_from(Priority),
        deadline=st.sampled_from([None, 2.0]),
    )
    def submit(self, size: int, priority: Priority, deadline: float | None) -> None:
        self.count += 1
        terms = Terms(None, priority, deadline, size)
        self.dispatcher.submit(RequestId(str(self.count)), terms, now=self.now)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.count:
            number = data.draw(st.integers(1, self.count))
            self.dispatcher.cancel(RequestId(str(number)))

    @rule()
    def wait(self) -> None:
        self.now += 0.5
        self.dispatcher.expire(now=self.now)

    @rule(slots=st.integers(0, 2))
    def agent_comes_and_goes(self, slots: int) -> None:
        """What it was given is put back."""
        self.dispatcher.join(A)
        self.dispatcher.report(A, slots=slots, now=self.now)
        self.dispatcher.leave(A, now=self.now)

    @invariant()
    def the_bytes_are_those_of_what_waits(self) -> None:
        assert self.buffer.bytes == sum(waiting.terms.size for waiting in self.buffer)
        assert self.buffer.bytes <= MOST


TestWeights = Weights.TestCase
