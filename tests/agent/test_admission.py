from agent.admission import Admission
from common.ids import RequestId

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))


def test_admits_as_many_as_there_are_slots() -> None:
    admission = Admission()
    admission.slots = 2

    assert [admission.admit(r) for r in (R1, R2, R3)] == [True, True, False]
    assert admission.processing == 2


def test_a_released_slot_can_be_taken_again() -> None:
    admission = Admission()
    admission.slots = 1
    admission.admit(R1)

    admission.release(R1)

    assert admission.is_idle
    assert admission.admit(R2)


def test_admits_nobody_without_a_model_or_while_draining() -> None:
    admission = Admission()
    assert not admission.admit(R1)

    admission.slots = 1
    admission.draining = True

    assert not admission.admit(R1)


def test_one_request_never_holds_two_slots() -> None:
    """It was cancelled with its link and has come again before it had ended."""
    admission = Admission()
    admission.slots = 2
    admission.admit(R1)

    assert not admission.admit(R1)
    assert admission.processing == 1
