import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.admission import Admission, Offer
from common.ids import RequestId

R1, R2, R3, R4 = (RequestId(f"r{n}") for n in (1, 2, 3, 4))
A, B, C = "a", "b", "c"


@pytest.fixture
def admission() -> Admission:
    """With two slots."""
    admission = Admission()
    admission.slots = 2
    return admission


def test_admits_as_many_as_there_are_slots(admission: Admission) -> None:
    assert [admission.admit(r, A) for r in (R1, R2, R3)] == [True, True, False]
    assert admission.processing == 2


def test_a_released_slot_can_be_taken_again(admission: Admission) -> None:
    admission.slots = 1
    admission.admit(R1, A)

    assert admission.release(R1) is None

    assert admission.is_idle
    assert admission.admit(R2, A)


def test_admits_nobody_without_a_model_or_while_draining() -> None:
    admission = Admission()
    assert not admission.admit(R1, A)

    admission.slots = 1
    admission.draining = True

    assert not admission.admit(R1, A)


def test_one_request_never_holds_two_slots(admission: Admission) -> None:
    """It was cancelled with its link and has come again before it had ended."""
    admission.admit(R1, A)

    assert not admission.admit(R1, A)
    assert admission.processing == 1


def test_each_link_is_told_what_others_have(admission: Admission) -> None:
    admission.admit(R1, A)
    admission.admit(R2, A)

    assert (admission.elsewhere(A), admission.elsewhere(B)) == (0, 2)
    admission.forget(A)
    assert admission.elsewhere(A) == 2  # when it is back, they are not its own any more


def share(admission: Admission) -> Offer:
    """One link has all slots, another one wants some, and the first slot is free."""
    admission.admit(R1, A)
    admission.admit(R2, A)
    assert not admission.admit(R3, B)
    offer = admission.release(R1)
    assert offer is not None
    return offer


def test_a_free_slot_is_offered_to_who_has_fewer(admission: Admission) -> None:
    offer = share(admission)

    assert (admission.elsewhere(A), admission.elsewhere(B)) == (1, 1)
    assert not admission.admit(R4, A)
    assert admission.admit(R3, B)
    assert not admission.withdraw(offer)
    assert admission.release(R2) is None  # each had one
    assert admission.admit(R4, A)


def test_an_offer_that_nobody_takes_is_everybodys_and_the_last_one(admission: Admission) -> None:
    assert admission.withdraw(share(admission))

    assert admission.elsewhere(A) == 0
    assert admission.admit(R4, A)
    assert admission.release(R4) is None


def test_nothing_is_kept_from_anybody_while_there_is_room(admission: Admission) -> None:
    admission.slots = 3
    admission.admit(R3, B)
    admission.release(R3)
    admission.admit(R1, A)
    admission.admit(R2, A)

    assert admission.release(R1) is None


def test_nothing_is_offered_to_a_lost_link_or_kept_from_one(admission: Admission) -> None:
    offer = share(admission)
    admission.forget(A)
    assert not admission.withdraw(offer)
    assert admission.elsewhere(A) == 1
    assert admission.admit(R1, A)

    admission.forget(B)
    assert admission.release(R1) is None


def test_who_had_no_offer_may_take_the_slot_too(admission: Admission) -> None:
    """It is kept from one only."""
    offer = share(admission)

    assert admission.admit(R4, C)
    assert not admission.withdraw(offer)
    assert admission.elsewhere(A) == 1


class Histories(RuleBasedStateMachine):
    """Whatever links do, no more run than there are slots, and all can be had when nobody runs."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission()
        self.admission.slots = 3
        self.running: dict[RequestId, str | None] = {}
        self.offers: list[Offer] = []
        self.count = 0

    @rule(link=st.sampled_from([A, B, C]))
    def ask(self, link: str) -> None:
        self.count += 1
        request_id = RequestId(str(self.count))
        told = self.admission.elsewhere(link)
        own = sum(each == link for each in self.running.values())
        admitted = self.admission.admit(request_id, link)
        assert admitted == (own + told < self.admission.slots), "it was told something else"
        if admitted:
            self.running[request_id] = link

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request_id]
        if (offer := self.admission.release(request_id)) is not None:
            self.offers.append(offer)
        assert self.admission.release(request_id) is None

    @precondition(lambda self: self.offers)
    @rule()
    def withdraw(self) -> None:
        self.admission.withdraw(self.offers.pop(0))

    @rule(link=st.sampled_from([A, B, C]))
    def lose(self, link: str) -> None:
        self.admission.forget(link)
        self.running = {r: None if each == link else each for r, each in self.running.items()}

    @precondition(lambda self: not self.offers)
    @rule(slots=st.integers(0, 4))
    def change(self, slots: int) -> None:
        self.admission.slots = slots

    @invariant()
    def each_request_has_its_slot(self) -> None:
        assert self.admission.processing == len(self.running)

    @invariant()
    def what_is_offered_is_free(self) -> None:
        for link in (A, B, C):
            own = sum(each == link for each in self.running.values())
            most = max(self.admission.slots, len(self.running))
            assert own + self.admission.elsewhere(link) <= most

    def teardown(self) -> None:
        for offer in self.offers:
            self.admission.withdraw(offer)
        for link in (A, B, C):
            own = sum(each == link for each in self.running.values())
            assert own + self.admission.elsewhere(link) == len(self.running)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
