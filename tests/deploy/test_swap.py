"""When a change of the desired model is over, and what it says of each agent until then."""

from typing import Any

import pytest

from common.models import HuggingFaceModel, LocalModel, ModelReference, NoModel
from deploy.overview import StatusView
from deploy.swap import HALTED, UNHEARD, Outcome, Swap

NEW = LocalModel("/new.gguf")

OLD: dict[str, Any] = {
    "state": "ready", "application": "Applied", "model": "old", "model_path": "/old.gguf", "slots": 1
}  # fmt: skip
DONE: dict[str, Any] = {**OLD, "model": "new", "model_path": "/new.gguf"}
WAITS: dict[str, Any] = {**OLD, "state": "waits_for_turn", "application": "Fresh"}
STUCK: dict[str, Any] = {
    **OLD, "application": "Stuck",
    "issues": [{"kind": "ModelFileDoesNotExist", "model_path": "/new.gguf", "detail": "not here"}],
}  # fmt: skip


def view_of(fleets: dict[str, Any] | None = None, **agents: dict[str, Any]) -> StatusView:
    told = {name: {"id": name, **agent} for name, agent in agents.items()}
    return StatusView.of({"agents": told, "fleets": fleets or {}})


def started(view: StatusView, *, reference: ModelReference = NEW, is_new: bool = True) -> Swap:
    return Swap(reference, view.agents, is_new=is_new, now=0.0)


def test_it_is_over_when_all_agents_serve_the_model() -> None:
    swap = started(view_of(a=OLD, b=OLD))

    assert swap.outcome(view_of(a=OLD, b=OLD), now=0.1) is None
    assert swap.outcome(view_of(a=DONE, b=WAITS), now=1.0) is None
    assert swap.outcome(view_of(a=DONE, b=DONE), now=2.0) == Outcome(2)


def test_an_agent_that_cannot_ends_it_with_the_reason() -> None:
    swap = started(view_of(a=OLD, b=OLD))

    outcome = swap.outcome(view_of(a=DONE, b=STUCK), now=1.0)

    assert outcome == Outcome(1, "b cannot serve it: ModelFileDoesNotExist: /new.gguf: not here")


def test_one_that_tries_again_is_told_so() -> None:
    swap = started(view_of(a=OLD))

    outcome = swap.outcome(view_of(a={**STUCK, "application": "AttemptedAndRetrying"}), now=1.0)

    assert outcome is not None
    assert str(outcome.problem).startswith("a cannot serve it, and tries again by itself: Model")


def test_one_that_tries_again_now_is_on_its_way() -> None:
    swap = started(view_of(a=OLD))
    download = {"filename": "new.gguf", "current": 1, "total": 2}

    view = view_of(a={**STUCK, "application": "AttemptedAndRetrying", "download": download})

    assert swap.outcome(view, now=UNHEARD) is None


def test_what_an_agent_said_before_is_not_its_answer() -> None:
    swap = started(view_of(a=STUCK))

    assert swap.outcome(view_of(a=STUCK), now=1.0) is None
    assert swap.outcome(view_of(a=WAITS), now=1.5) is None
    assert swap.outcome(view_of(a=DONE), now=2.0) == Outcome(1)


def test_if_nothing_changes_the_same_complaint_is_its_answer_after_a_while() -> None:
    swap = started(view_of(a=STUCK))

    outcome = swap.outcome(view_of(a=STUCK), now=UNHEARD)

    assert outcome is not None
    assert outcome.problem is not None


def test_who_does_not_change_at_all_has_a_model_of_its_own() -> None:
    swap = started(view_of(a=OLD, own=OLD))

    assert swap.outcome(view_of(a=DONE, own=OLD), now=1.0) is None
    assert swap.outcome(view_of(a=DONE, own=OLD), now=UNHEARD) == Outcome(1)


def test_agents_of_a_fleet_with_its_own_model_and_those_that_go_are_not_waited_for() -> None:
    fleets: dict[str, Any] = {
        "own": {"fleet": {"model": {"LocalToAgent": "/x.gguf"}}},
        "any": {"fleet": {}},
    }
    swap = started(view_of())
    view = view_of(
        fleets,
        a={**WAITS, "fleet": "own"},
        b={**OLD, "state": "draining"},
        c={**DONE, "fleet": "any"},
    )

    assert swap.outcome(view, now=0.1) == Outcome(1)
    assert [row.title for row in swap.rows(view, now=0.1)] == ["c"]


def test_without_agents_nothing_is_waited_for() -> None:
    assert started(view_of()).outcome(view_of(), now=0.0) == Outcome(0)


def test_agents_that_were_lost_meanwhile_are_waited_for() -> None:
    swap = started(view_of(a=OLD))

    assert swap.outcome(view_of(a=WAITS), now=1.0) is None
    assert swap.outcome(view_of(), now=2.0) is None
    assert swap.outcome(view_of(again=DONE), now=3.0) == Outcome(1)


def test_a_halted_change_ends_it() -> None:
    swap = started(view_of(a=OLD))

    view = StatusView.of(
        {
            "agents": {"a": {"id": "a", **WAITS}},
            "balancer": {"model": {"wish_number": 2, "halted_by": "lost"}},
        }
    )

    assert swap.outcome(view, now=1.0) == Outcome(0, HALTED)


def test_the_model_that_is_served_already_needs_no_wait() -> None:
    view = view_of(a=DONE)

    assert started(view, is_new=False).outcome(view, now=0.0) == Outcome(1)


@pytest.mark.parametrize(
    ("reference", "agent"),
    [
        (NoModel(), {"state": "no_model", "application": "Applied"}),
        (HuggingFaceModel("org/repo", "m.gguf", "main"), {**DONE, "model": "m"}),
    ],
)
def test_every_kind_of_model_is_known_again(
    reference: ModelReference, agent: dict[str, Any]
) -> None:
    swap = started(view_of(a=OLD), reference=reference)

    assert swap.outcome(view_of(a=agent), now=0.1) == Outcome(1)


def test_each_agent_that_follows_has_a_row() -> None:
    swap = started(view_of(a=OLD, b=OLD, c=OLD, d=OLD))
    fetching = {
        **OLD, "application": "Fresh",
        "download": {"filename": "new.gguf", "current": 50, "total": 200},
    }  # fmt: skip

    rows = swap.rows(view_of(a=OLD, b=fetching, c=WAITS, d=DONE), now=0.1)

    assert [(row.title, row.words, row.part) for row in rows] == [
        ("a", "prepares the model", None),
        ("b", "fetching new.gguf, 25% of 200 B", 0.25),
        ("c", "waits for its turn to change the model", None),
        ("d", "done", 1.0),
    ]
