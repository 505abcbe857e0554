"""A view of a balancer is what the events of its status stream say together."""

from typing import Any

import pytest

from deploy.overview import OverviewError, StatusEvent, StatusView


def snapshot(**sections: Any) -> StatusEvent:
    return StatusEvent("e-1", "snapshot", sections)


def change(**sections: Any) -> StatusEvent:
    return StatusEvent("e-2", "change", sections)


def test_a_change_replaces_adds_and_removes_single_values() -> None:
    view = StatusView()
    view.apply(snapshot(agents={"a": {"id": "a", "slots": 1}, "b": {"id": "b"}}))

    view.apply(change(agents={"a": {"id": "a", "state": "ready"}, "b": None, "c": {"id": "c"}}))

    assert set(view.agents) == {"a", "c"}
    assert (view.agents["a"].state, view.agents["a"].slots) == ("ready", 0)


def test_a_snapshot_replaces_all() -> None:
    view = StatusView.of({"agents": {"a": {"id": "a"}}, "balancer": {"buffer": {"waiting": 3}}})

    view.apply(snapshot(requests={"r": {"id": "r"}}))

    assert (dict(view.agents), set(view.requests), view.buffer.waiting) == ({}, {"r"}, 0)


def test_what_is_not_known_here_is_left_aside() -> None:
    view = StatusView.of(
        {
            "agents": {"a": {"id": "a", "mood": "good"}},
            "weather": {"x": {"rain": 1}},
            "balancer": {"mood": {}},
        }
    )

    assert view.agents["a"].title == "a"


@pytest.mark.parametrize(
    "data", [{"agents": {"a": {"id": 5}}}, {"agents": [1]}, {"balancer": {"buffer": 1}}]
)
def test_what_cannot_be_understood_is_one_error(data: Any) -> None:
    with pytest.raises(OverviewError, match="another version of headrace"):
        StatusView.of(data)


def test_errors_come_with_the_newest_first_and_moments_with_the_newest_last() -> None:
    view = StatusView.of(
        {
            "errors": {"9": {"at": 1.0, "code": "old"}, "10": {"at": 2.0, "code": "new"}},
            "history": {"10": {"at": 4.0}, "9": {"at": 2.0}},
        }
    )

    assert [each.code for each in view.errors] == ["new", "old"]
    assert [each.at for each in view.history] == [2.0, 4.0]


def test_the_rate_of_now_looks_back_some_seconds() -> None:
    moments = {str(n): {"at": 100.0 + 2 * n, "tokens": tokens} for n, tokens in enumerate(
        [0, 1000, 1000, 1000, 1000, 1000, 1010, 1020]
    )}  # fmt: skip
    view = StatusView.of({"history": moments})

    assert view.token_rate == 2.0  # 20 tokens in the last 10 s
    assert StatusView.of({"history": {"1": {"at": 1.0}}}).token_rate is None


def test_slots_are_those_of_all_agents() -> None:
    view = StatusView.of(
        {
            "agents": {
                "a": {"id": "a", "slots": 4, "slots_busy": 1},
                "b": {"id": "b", "slots": 2, "slots_busy": 2},
            }
        }
    )

    assert view.slots == (3, 6)


def test_figures_become_parts_of_a_whole() -> None:
    figures = {
        "cells_total": 100, "cells_running": 20, "cells_cached": 30,
        "prompt_tokens_fed": 25, "prompt_tokens_cached": 75,
    }  # fmt: skip
    view = StatusView.of({"agents": {"a": {"id": "a", "figures": figures}, "b": {"id": "b"}}})

    told, silent = view.agents["a"].figures, view.agents["b"].figures
    assert (told.cell_use, told.hit_rate) == (0.5, 0.75)
    assert (silent.cell_use, silent.hit_rate) == (None, None)
