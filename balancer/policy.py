"""How to choose among the agents that have a free slot. Pure functions of what is given."""

from collections.abc import Sequence
from typing import Protocol

from balancer.pool import Agent


class Policy(Protocol):
    def __call__(self, available: Sequence[Agent], /) -> Agent: ...


def least_busy(available: Sequence[Agent], /) -> Agent:
    """The agent with the smallest part of its slots taken; ties go to the one that joined first."""
    return min(available, key=lambda agent: agent.taken_slots / agent.slots)
