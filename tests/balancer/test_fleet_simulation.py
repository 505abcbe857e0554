"""Fleet plans in days of simulated traffic.

``HEADRACE_EXAMPLES`` sets how many days are played where they are many.
"""

import os
from functools import cache

import pytest
from fleet_simulation import (
    DAY,
    HOUR,
    WORKING_DAY,
    Day,
    NaivePlanner,
    Record,
    cheapest,
    longest_wait_allowed,
)

from balancer.fleet_plan import FleetPlan

DAYS = max(int(os.environ.get("HEADRACE_EXAMPLES", "2")), 1)


@cache
def day(seed: int) -> dict[str, Record]:
    return Day(WORKING_DAY, FleetPlan(), seed=seed).run()


@pytest.mark.parametrize("seed", range(DAYS))
def test_every_request_of_a_day_is_served_soon(seed: int) -> None:
    for record in day(seed).values():
        assert record.served == record.requests
        assert record.longest_wait <= longest_wait_allowed(record)


@pytest.mark.parametrize("seed", range(DAYS))
def test_those_who_wait_at_all_are_few(seed: int) -> None:
    """But where all come at once, to no agent."""
    for name in ("chat", "code"):
        record = day(seed)[name]
        waited = sum(wait > 0 for wait in record.waits)
        assert waited <= 0.02 * record.requests


@pytest.mark.parametrize("seed", range(DAYS))
def test_nobody_is_left_at_night(seed: int) -> None:
    records = day(seed)

    assert [records[name].wanted_at(4 * HOUR) for name in records] == [0, 0, 0]
    assert [records[name].wanted[-1][1] for name in records] == [0, 0, 0]
    assert records["code"].wanted_at(7.5 * HOUR) == 0


@pytest.mark.parametrize("seed", range(DAYS))
def test_a_day_costs_little_more_than_for_who_knows_it_beforehand(seed: int) -> None:
    """And much less than as many agents as are ever needed, all day."""
    records = day(seed)

    assert records["chat"].ratio < 1.9
    assert records["code"].ratio < 2.5  # a third agent is half as much again
    for record in records.values():
        assert record.agent_seconds < 0.5 * record.most_agents * DAY


def test_the_number_of_agents_does_not_go_up_and_down() -> None:
    """There are no two turns within ten minutes. Nobody knows whether a burst comes when an agent has
    just gone, but that is about one day in sixty.
    """
    restless = [
        (seed, name)
        for seed in range(DAYS)
        for name, record in day(seed).items()
        if record.most_turns() > 1
    ]

    assert len(restless) <= DAYS // 30, restless


def test_without_hysteresis_it_would_go_up_and_down_all_day() -> None:
    code = {"code": WORKING_DAY["code"]}

    naive = Day(code, NaivePlanner(), seed=0).run()["code"]

    assert naive.served == naive.requests
    assert naive.hurried_turns > 100
    assert naive.most_turns() > 10


def test_the_cheapest_way_is_known() -> None:
    one = [(1000.0, 50.0)]
    start = round(cheapest(one, slots=1) - 50, 6)
    assert 10 < start < 30

    def costs(*requests: tuple[float, float], slots: int = 1) -> float:
        return round(cheapest(requests, slots), 6)

    assert costs((1000, 50), (1010, 20), slots=2) == 50 + start
    assert costs((1000, 50), (1010, 20)) == 70 + 2 * start
    assert costs((1000, 50), (1055, 20)) == 75 + start  # it stays
    assert costs((1000, 50), (2000, 20)) == 70 + 2 * start
