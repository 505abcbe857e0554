"""How many prompt tokens fit into a pass, for machines whose costs are made up here."""

import pytest

from agent.budget import TILE, PromptBudget


def settle(budget: PromptBudget, *, rows: int, row_pass: float, token_cost: float) -> int:
    """Measure passes until the budget stays where it is; return the rows of a whole pass."""
    for _ in range(50):
        budget.measured(seconds=row_pass, rows=rows, prompt_tokens=0)
        tokens = budget.tokens(rows)
        budget.measured(seconds=row_pass + token_cost * tokens, rows=rows, prompt_tokens=tokens)
    return rows + budget.tokens(rows)


def test_without_streams_the_whole_batch_may_be_fed() -> None:
    assert PromptBudget(longest_gap=0.1, batch_size=512).tokens(rows=0) == 512


def test_before_anything_is_measured_it_is_careful() -> None:
    assert PromptBudget(longest_gap=0.1, batch_size=512).tokens(rows=1) == TILE // 2 - 1


@pytest.mark.parametrize(("token_cost", "fitting"), [(0.0001, 1984), (0.001, 192), (0.005, 32)])
def test_it_fills_the_gap_in_whole_tiles(token_cost: float, fitting: int) -> None:
    budget = PromptBudget(longest_gap=0.21, batch_size=2048)

    assert settle(budget, rows=4, row_pass=0.01, token_cost=token_cost) == fitting


def test_a_machine_that_is_too_slow_still_makes_progress() -> None:
    budget = PromptBudget(longest_gap=0.05, batch_size=512)

    assert settle(budget, rows=4, row_pass=0.2, token_cost=0.05) == TILE // 2


def test_beside_many_streams_something_is_still_fed() -> None:
    budget = PromptBudget(longest_gap=0.05, batch_size=512)

    assert settle(budget, rows=60, row_pass=0.2, token_cost=0.05) == 96


def test_rows_have_their_place_in_the_batch() -> None:
    budget = PromptBudget(longest_gap=100.0, batch_size=256)

    assert settle(budget, rows=56, row_pass=0.01, token_cost=0.0001) == 256


def test_it_follows_costs_that_rise() -> None:
    budget = PromptBudget(longest_gap=0.4, batch_size=2048)
    cheap = settle(budget, rows=1, row_pass=0.01, token_cost=0.001)

    assert settle(budget, rows=1, row_pass=0.01, token_cost=0.003) < cheap / 2


def feed(budget: PromptBudget, costs: dict[int, float], passes: int) -> list[int]:
    """The rows of so many passes beside one stream, where so many rows cost so much."""
    sizes: list[int] = []
    for _ in range(passes):
        tokens = budget.tokens(rows=1)
        sizes.append(1 + tokens)
        budget.measured(seconds=0.01 + costs[sizes[-1]], rows=1, prompt_tokens=tokens)
    return sizes


def test_a_whole_tile_is_fed_where_it_costs_hardly_more_than_half_of_one() -> None:
    budget = PromptBudget(longest_gap=0.1, batch_size=512)
    budget.measured(seconds=0.01, rows=1, prompt_tokens=0)

    sizes = feed(budget, {TILE // 2: 0.28, TILE: 0.35}, passes=70)

    assert sizes[-50:].count(TILE) >= 45


def test_a_whole_tile_is_tried_only_now_and_then_where_it_costs_twice_as_much() -> None:
    budget = PromptBudget(longest_gap=0.08, batch_size=512)
    budget.measured(seconds=0.01, rows=1, prompt_tokens=0)

    sizes = feed(budget, {TILE // 2: 0.09, TILE: 0.18}, passes=90)

    assert set(sizes) == {TILE // 2, TILE}
    assert sizes.count(TILE) <= 7


def test_costs_that_rise_from_pass_to_pass_do_not_spoil_the_comparison() -> None:
    """As they do while a long prompt is fed."""
    budget = PromptBudget(longest_gap=0.1, batch_size=512)
    budget.measured(seconds=0.01, rows=1, prompt_tokens=0)

    sizes: list[int] = []
    for n in range(70):
        rising = 1 + 0.04 * n
        sizes += feed(budget, {TILE // 2: 0.2 * rising, TILE: 0.33 * rising}, passes=1)

    assert sizes[-50:].count(TILE) >= 45


def test_what_a_pass_will_take_is_told_by_what_others_took() -> None:
    budget = PromptBudget(longest_gap=0.1, batch_size=512)

    budget.measured(seconds=0.03, rows=1, prompt_tokens=0)
    budget.measured(seconds=1.0, rows=0, prompt_tokens=100)

    assert budget.expected(rows=1, prompt_tokens=0) == pytest.approx(0.03)
    assert budget.expected(rows=0, prompt_tokens=200) == pytest.approx(2.0)
    assert budget.expected(rows=1, prompt_tokens=100) == pytest.approx(1.03)
    assert budget.expected(rows=64, prompt_tokens=0) == pytest.approx(0.64), "many are computed"


def test_of_what_was_never_measured_nothing_is_expected() -> None:
    budget = PromptBudget(longest_gap=0.1, batch_size=512)
    assert budget.expected(rows=1, prompt_tokens=0) is None
    assert budget.expected(rows=0, prompt_tokens=1) is None

    budget.measured(seconds=0.03, rows=1, prompt_tokens=0)

    assert budget.expected(rows=1, prompt_tokens=0) is not None
    assert budget.expected(rows=1, prompt_tokens=1) is None
