"""What went wrong lately."""

import pytest

from balancer.incidents import MOST_INCIDENTS, Incident, Incidents, told
from common.errors import ErrorCode
from common.ids import RequestId

FULL = ErrorCode.BUFFER_FULL
LOST = ErrorCode.AGENT_LOST


def test_what_happens_again_is_one_with_its_number() -> None:
    incidents = Incidents()
    incidents.add(FULL, "full", at=1.0)
    incidents.add(LOST, "its link was closed", at=2.0, agent="one")
    incidents.add(FULL, "still full", at=3.0, request_id=RequestId("r1"))

    assert [*incidents.numbered.values()] == [
        Incident(2.0, LOST, "its link was closed", 1, None, "one"),
        Incident(3.0, FULL, "still full", 2, RequestId("r1"), None),
    ]
    assert [*incidents.numbered] == [2, 3]


def test_those_of_two_agents_are_two() -> None:
    incidents = Incidents()
    incidents.add(LOST, at=1.0, agent="one")
    incidents.add(LOST, at=2.0, agent="two")

    assert [incident.count for incident in incidents.numbered.values()] == [1, 1]


def test_the_oldest_are_forgotten() -> None:
    incidents = Incidents()
    for n in range(3 * MOST_INCIDENTS):
        incidents.add(LOST, at=n, agent=str(n))
    incidents.add(LOST, at=1000.0, agent="0")

    assert len(incidents.numbered) == MOST_INCIDENTS
    assert [*incidents.numbered.values()][-1].count == 1


@pytest.mark.parametrize(
    ("code", "is_told"),
    [
        (ErrorCode.INVALID_REQUEST, False),
        (ErrorCode.CHAT_TEMPLATE_ERROR, False),
        (ErrorCode.NOT_SUPPORTED, False),
        (ErrorCode.GRAMMAR_REJECTED, False),
        (ErrorCode.DECODE_FAILED, True),
        (ErrorCode.BUFFER_TIMEOUT, True),
    ],
)
def test_operators_are_not_told_what_may_quote_a_prompt(code: ErrorCode, is_told: bool) -> None:
    assert told(code, "my secret") == ("my secret" if is_told else None)
