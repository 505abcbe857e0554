"""When a change of the desired model is over, and what it says of each agent until then."""

from typing import Any

from common.models import HuggingFaceModel, LocalModel, ModelReference, NoModel
from deploy.overview import StatusView
from deploy.swap import HALTED, REPLACED, UNHEARD, Outcome, Swap

NEW = LocalModel("/new.gguf")

WISH = 7

OLD: dict[str, Any] = {
    "state": "ready", "application": "Applied", "applied": WISH - 1, "model": "m", "slots": 1
}  # fmt: skip
DONE: dict[str, Any] = {**OLD, "applied": WISH}
OWN: dict[str, Any] = {**OLD, "applied": 0}
WAITS: dict[str, Any] = {**OLD, "applied": 0, "state": "waits_for_turn", "application": "Fresh"}
STUCK: dict[str, Any] = {
    **OLD, "applied": 0, "application": "Stuck",
    "issues": [{"kind": "ModelFileDoesNotExist", "model_path": "/new.gguf", "detail": "not here"}],
}  # fmt: skip


def view_of(
    fleets: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **agents: dict[str, Any],
) -> StatusView:
    """``model``: other keys of what is wanted."""
    told = {name: {"id": name, **agent} for name, agent in agents.items()}
    wanted = {"wish_number": WISH, "desired": "/new.gguf", **(model or {})}
    return StatusView.of({"agents": told, "fleets": fleets or {}, "balancer": {"model": wanted}})


def started(view: StatusView, *, reference: ModelReference = NEW) -> Swap:
    return Swap(reference, WISH, view.agents, now=0.0)


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


def test_who_has_applied_something_but_no_wish_has_a_model_of_its_own() -> None:
    swap = started(view_of(a=OLD, own=OWN))

    assert swap.outcome(view_of(a=OLD, own=OWN), now=UNHEARD) is None
    assert swap.outcome(view_of(a=DONE, own=OWN), now=UNHEARD) == Outcome(1)
    assert [row.title for row in swap.rows(view_of(a=DONE, own=OWN), now=0.1)] == ["a"]


def test_another_file_of_the_same_repository_is_another_model() -> None:
    reference = HuggingFaceModel("org/repo", "small.gguf", "main")
    wanted = {"desired": "https://huggingface.co/org/repo/blob/main/small.gguf"}
    old, new = {**OLD, "model": "org/repo"}, {**DONE, "model": "org/repo"}
    swap = started(view_of(a=old), reference=reference)

    assert swap.outcome(view_of(model=wanted, a=old), now=UNHEARD) is None
    assert swap.outcome(view_of(model=wanted, a=new), now=UNHEARD) == Outcome(1)


def test_a_later_wish_for_the_same_model_is_followed() -> None:
    swap = started(view_of(a=OLD))

    view = view_of(model={"wish_number": WISH + 1}, a={**DONE, "applied": WISH + 1})

    assert swap.outcome(view, now=1.0) == Outcome(1)


def test_a_later_wish_for_another_model_ends_it() -> None:
    swap = started(view_of(a=OLD))

    view = view_of(model={"wish_number": WISH + 1, "desired": "/other.gguf"}, a=OLD)

    assert swap.outcome(view, now=1.0) == Outcome(0, REPLACED)


def test_what_was_wanted_before_is_no_later_wish() -> None:
    swap = started(view_of(a=OLD))

    view = view_of(model={"wish_number": WISH - 1, "desired": "/old.gguf"}, a=OLD)

    assert swap.outcome(view, now=1.0) is None


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

    assert swap.outcome(view_of(model={"halted_by": "lost"}, a=WAITS), now=1.0) == Outcome(
        0, HALTED
    )


def test_no_model_is_a_wish_too() -> None:
    swap = started(view_of(a=OLD), reference=NoModel())
    nothing = {"state": "no_model", "application": "Applied", "applied": WISH}

    assert swap.outcome(view_of(model={"desired": None}, a=OLD), now=0.1) is None
    assert swap.outcome(view_of(model={"desired": None}, a=nothing), now=0.2) == Outcome(1)


def test_each_agent_that_follows_has_a_row() -> None:
    swap = started(view_of(a=OLD, b=OLD, c=OLD, d=OLD))
    fetching = {
        **WAITS, "state": "downloading",
        "download": {"filename": "new.gguf", "current": 50, "total": 200},
    }  # fmt: skip

    rows = swap.rows(view_of(a=OLD, b=fetching, c=WAITS, d=DONE), now=0.1)

    assert [(row.title, row.words, row.part) for row in rows] == [
        ("a", "prepares the model", None),
        ("b", "fetching new.gguf, 25% of 200 B", 0.25),
        ("c", "waits for its turn to change the model", None),
        ("d", "done", 1.0),
    ]
