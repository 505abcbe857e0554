"""What an agent is about, in one word, for operators. No I/O here."""

import enum

from common.messages import Status
from common.models import Application


class AgentState(enum.StrEnum):
    READY = "ready"
    WAITS_FOR_TURN = "waits_for_turn"
    """Serves, and changes its model when those before it have."""
    HELD = "held"
    """An operator drained it: it stays, and takes nothing new."""
    DRAINING = "draining"
    """Finishes what runs, and goes."""
    SWAPPING = "swapping"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    NO_MODEL = "no_model"
    """It has none, as is wanted."""
    RETRYING = "retrying"
    STUCK = "stuck"
    """It cannot do what is wanted, and tries no more."""


def state_of(status: Status) -> AgentState:
    """The first that holds:

    1. It goes, or changes its model.
    2. It serves: held, waiting for its turn, or ready.
    3. It does not yet: a file comes, it has given up, it tries again, it has what is wanted (nothing),
       or it loads.
    """
    if status.leaving:
        return AgentState.DRAINING
    if status.swapping:
        return AgentState.SWAPPING
    if status.slots_total:
        if status.held:
            return AgentState.HELD
        return AgentState.WAITS_FOR_TURN if status.awaits_turn else AgentState.READY
    if status.download is not None:
        return AgentState.DOWNLOADING
    if status.application is Application.STUCK:
        return AgentState.STUCK
    if status.application is Application.RETRYING and status.issues:
        return AgentState.RETRYING
    if status.application is Application.APPLIED:
        return AgentState.NO_MODEL
    return AgentState.LOADING
