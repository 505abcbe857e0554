"""What the supervisor knows from beats."""

import msgspec
from msgspec import structs

from balancer.desired_state import BalancerDesiredState
from balancer.fleet_beats import Beat, SeenAgent
from balancer.fleet_registry import LONG_SILENCE, SILENCE, Registry
from balancer.stored_state import AGENT_OVERRIDES, DESIRED_STATE, StoredState
from common.models import Phase

STATE = StoredState(balancer_desired_state=BalancerDesiredState.defaults(), declared=1)


def beat(
    balancer_id: str, state: StoredState = STATE, *, tells: bool = False, **more: object
) -> Beat:
    told = {
        "balancer_id": balancer_id,
        "address": f"ws://{balancer_id}:1",
        "digest": state.digest,
        "state": state.model_dump_json(by_alias=True) if tells else None,
    }
    return msgspec.json.decode(msgspec.json.encode({**told, **more}), type=Beat)


def test_what_different_balancers_were_told_goes_to_all() -> None:
    registry = Registry(now=0)
    here, there = (STATE.put(part, at=7) for part in (DESIRED_STATE, AGENT_OVERRIDES))
    for name, state in (("a", here), ("b", there)):
        assert registry.hear(beat(name, state, tells=True), now=1) is None

    both = here.merged(there)
    assert registry.state == both
    for name, state in (("a", here), ("b", there)):
        told = registry.answer(beat(name, state), {})
        assert told.digest == both.digest
        assert told.state is not None
        assert StoredState.model_validate_json(told.state) == both
    assert registry.answer(beat("a", both), {}).state is None


def test_a_state_that_cannot_be_read_is_reported_once_and_not_followed() -> None:
    registry = Registry(now=0)
    registry.hear(beat("a", tells=True), now=1)
    unknown = structs.replace(beat("b"), digest="abc", state='{"version": "2"}')

    problem = registry.hear(unknown, now=1)

    assert problem is not None
    assert "balancer b" in problem
    assert registry.hear(unknown, now=2) is None
    assert registry.state == STATE


def test_one_balancer_leads_and_another_when_it_is_lost() -> None:
    registry = Registry(now=0)
    for name in ("b", "a"):
        registry.hear(beat(name), now=0)
    assert [registry.answer(beat(name), {}).leads for name in ("a", "b")] == [True, False]

    registry.hear(beat("b"), now=SILENCE)
    assert registry.expire(now=SILENCE + 0.1) == ["a"]

    assert registry.answer(beat("b"), {}).leads


def test_a_balancer_whose_beats_are_late_keeps_its_links_but_not_what_it_said() -> None:
    registry = Registry(now=0)
    agent = msgspec.to_builtins(SeenAgent(name="one-1", phase=Phase.READY))
    registry.hear(beat("a", waiting={"one": 2}, agents=[agent]), now=0)
    assert not registry.is_blind

    registry.expire(now=LONG_SILENCE)

    assert registry.is_blind
    assert (registry.waiting, registry.agents) == ({}, {})
    assert registry.addresses == ("ws://a:1",)
    registry.expire(now=LONG_SILENCE + 0.1)
    assert registry.addresses == ()


def test_a_balancer_that_is_heard_again_counts_again() -> None:
    registry = Registry(now=0)
    registry.hear(beat("a"), now=0)
    registry.expire(now=LONG_SILENCE - 1)

    registry.hear(beat("a", waiting={"one": 1}), now=LONG_SILENCE - 1)
    registry.expire(now=LONG_SILENCE + 1)

    assert registry.addresses == ("ws://a:1",)
    assert registry.waiting == {"one": 1}


def test_a_balancer_that_ends_after_it_was_lost_is_hung_up_on_at_once() -> None:
    registry = Registry(now=0)
    registry.hear(beat("a"), now=0)
    registry.expire(now=SILENCE + 1)

    registry.hear(beat("a", ends=True), now=SILENCE + 1)

    assert registry.addresses == ()


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
