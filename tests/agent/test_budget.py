"""How many prompt tokens fit into a pass, for machines whose costs are made up here."""

import pytest

from agent.budget import TILE, PromptBudget


def settle(budget: PromptBudget, *, rows: int, row_pass: float, token_cost: float) -> int:
    """Measure passes until the budget stays where it is."""
    for _ in range(50):
        budget.measured(seconds=row_pass, rows=rows, prompt_tokens=0)
        tokens = budget.tokens(rows)
        budget.measured(seconds=row_pass + token_cost * tokens, rows=rows, prompt_tokens=tokens)
    return budget.tokens(rows)


def test_without_streams_the_whole_batch_may_be_fed() -> None:
    assert PromptBudget(longest_gap=0.1, batch_size=512).tokens(rows=0) == 512


def test_before_anything_is_measured_it_is_careful() -> None:
    assert PromptBudget(longest_gap=0.1, batch_size=512).tokens(rows=1) == TILE


@pytest.mark.parametrize(("token_cost", "fitting"), [(0.0001, 1984), (0.001, 192), (0.01, 32)])
def test_it_fills_the_gap_in_whole_tiles(token_cost: float, fitting: int) -> None:
    budget = PromptBudget(longest_gap=0.21, batch_size=2048)

    assert settle(budget, rows=4, row_pass=0.01, token_cost=token_cost) == fitting


def test_a_machine_that_is_too_slow_still_makes_progress() -> None:
    budget = PromptBudget(longest_gap=0.05, batch_size=512)

    assert settle(budget, rows=4, row_pass=0.2, token_cost=0.05) == TILE


def test_rows_have_their_place_in_the_batch() -> None:
    budget = PromptBudget(longest_gap=100.0, batch_size=256)

    assert settle(budget, rows=56, row_pass=0.01, token_cost=0.0001) == 200


def test_it_follows_costs_that_rise() -> None:
    budget = PromptBudget(longest_gap=0.4, batch_size=2048)
    cheap = settle(budget, rows=1, row_pass=0.01, token_cost=0.001)

    assert settle(budget, rows=1, row_pass=0.01, token_cost=0.003) < cheap / 2


def feed(budget: PromptBudget, costs: dict[int, float], passes: int) -> list[int]:
    """The budgets of so many passes beside one stream, where so many tokens cost so much."""
    fed: list[int] = []
    for _ in range(passes):
        fed.append(budget.tokens(rows=1))
        budget.measured(seconds=0.01 + costs[fed[-1]], rows=1, prompt_tokens=fed[-1])
    return fed


def test_two_tiles_are_fed_where_they_cost_hardly_more_than_one() -> None:
    budget = PromptBudget(longest_gap=0.1, batch_size=512)
    budget.measured(seconds=0.01, rows=1, prompt_tokens=0)

    fed = feed(budget, {TILE: 0.28, 2 * TILE: 0.35}, passes=30)

    assert fed[-20:] == [2 * TILE] * 20


def test_two_tiles_are_tried_only_now_and_then_where_they_cost_twice_as_much() -> None:
    budget = PromptBudget(longest_gap=0.1, batch_size=512)
    budget.measured(seconds=0.01, rows=1, prompt_tokens=0)

    fed = feed(budget, {TILE: 0.09, 2 * TILE: 0.18}, passes=90)

    assert set(fed) == {TILE, 2 * TILE}
    assert fed.count(2 * TILE) <= 10
