"""What the supervisor knows from beats."""

import msgspec

from balancer.desired_state import BalancerDesiredState
from balancer.fleet_beats import Beat, SeenAgent
from balancer.fleet_registry import SILENCE, Registry
from balancer.state_store import StoredState
from common.models import Phase


def beat(balancer_id: str, *, revision: int = 1, tells: bool = False, **more: object) -> Beat:
    state = StoredState(balancer_desired_state=BalancerDesiredState.defaults(), revision=revision)
    text = state.model_dump_json(by_alias=True)
    told = {
        "balancer_id": balancer_id,
        "address": f"ws://{balancer_id}:1",
        "revision": revision,
        "state": text if tells else None,
    }
    return msgspec.json.decode(msgspec.json.encode({**told, **more}), type=Beat)


def test_a_state_goes_from_who_was_told_it_to_all_others() -> None:
    registry = Registry(now=0)
    new, old = beat("b", revision=7, tells=True), beat("a", revision=3, tells=True)
    assert registry.hear(new, now=1) is None
    assert registry.hear(old, now=1) is None

    assert registry.state is not None
    assert registry.state.revision == 7
    assert registry.answer(new, {}).state is None
    told = registry.answer(old, {})
    assert (told.revision, told.state) == (7, new.state)


def test_a_state_that_cannot_be_read_is_reported_and_not_followed() -> None:
    registry = Registry(now=0)
    registry.hear(beat("a", revision=3, tells=True), now=1)

    problem = registry.hear(beat("b", revision=9, state='{"version": "2"}'), now=1)

    assert problem is not None
    assert "balancer b" in problem
    assert registry.state is not None
    assert registry.state.revision == 3


def test_one_balancer_leads_and_another_when_it_is_lost() -> None:
    registry = Registry(now=0)
    for name in ("b", "a"):
        registry.hear(beat(name), now=0)
    assert [registry.answer(beat(name), {}).leads for name in ("a", "b")] == [True, False]

    registry.hear(beat("b"), now=SILENCE)
    assert registry.expire(now=SILENCE + 0.1) == ["a"]

    assert registry.answer(beat("b"), {}).leads
    assert registry.addresses == ("ws://b:1",)


def test_a_balancer_that_ends_says_so_and_is_forgotten_at_once() -> None:
    registry = Registry(now=0)
    registry.hear(beat("a"), now=0)
    registry.hear(beat("b"), now=0)

    registry.hear(beat("a", ends=True), now=1)

    assert registry.addresses == ("ws://b:1",)
    assert registry.expire(now=1) == []


def test_who_waits_is_counted_at_all_balancers_together() -> None:
    registry = Registry(now=0)
    registry.hear(beat("a", waiting={"one": 2, "two": 1}), now=0)
    registry.hear(beat("b", waiting={"one": 3}), now=0)

    assert registry.waiting == {"one": 5, "two": 1}


def test_an_agent_is_as_the_balancer_sees_it_that_was_heard_last() -> None:
    registry = Registry(now=0)
    loads, serves = (SeenAgent(name="one-1", phase=phase) for phase in (Phase.LOAD, Phase.READY))
    registry.hear(beat("a", agents=[msgspec.to_builtins(serves)]), now=2)
    registry.hear(beat("b", agents=[msgspec.to_builtins(loads)]), now=1)

    assert registry.agents == {"one-1": serves}


def test_what_a_newer_version_says_besides_is_ignored() -> None:
    told = {**msgspec.to_builtins(beat("a")), "mood": "good"}

    assert msgspec.json.decode(msgspec.json.encode(told), type=Beat).balancer_id == "a"
