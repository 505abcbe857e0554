"""What an agent is about, in one word."""

from typing import Any

import pytest
from msgspec.structs import replace

from balancer.agent_states import AgentState, state_of
from common.messages import Status
from common.models import AgentIssue, Application, Download, IssueKind

ISSUES = (AgentIssue(IssueKind.MODEL_CANNOT_BE_LOADED, "m.gguf"),)
DOWNLOAD = Download("m.gguf", 1, 2)


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"slots_total": 4}, AgentState.READY),
        ({"slots_total": 4, "download": DOWNLOAD}, AgentState.READY),
        ({"slots_total": 4, "awaits_turn": True}, AgentState.WAITS_FOR_TURN),
        ({"slots_total": 4, "held": True, "draining": True}, AgentState.HELD),
        ({"slots_total": 4, "leaving": True, "held": True}, AgentState.DRAINING),
        ({"slots_total": 4, "swapping": True, "draining": True}, AgentState.SWAPPING),
        ({"swapping": True, "leaving": True}, AgentState.DRAINING),
        ({"download": DOWNLOAD}, AgentState.DOWNLOADING),
        ({"application": Application.STUCK, "issues": ISSUES}, AgentState.STUCK),
        ({"application": Application.RETRYING, "issues": ISSUES}, AgentState.RETRYING),
        ({"application": Application.RETRYING}, AgentState.LOADING),
        ({"application": Application.APPLIED}, AgentState.NO_MODEL),
        ({}, AgentState.LOADING),
    ],
)
def test_an_agent_is(told: dict[str, Any], state: AgentState) -> None:
    none = Status(version=1, slots_desired=4, slots_total=0, slots_processing=0)

    assert state_of(replace(none, **told)) is state
