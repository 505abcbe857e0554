"""How the states of several balancers become one."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from balancer import stored_state
from balancer.desired_state import AgentOverride, AgentOverrides, BalancerDesiredState
from balancer.fleets import Fleet
from balancer.stored_state import AGENT_OVERRIDES, DESIRED_STATE, StoredState, fleet_part

DEFAULTS = BalancerDesiredState.defaults()
OVERRIDES = AgentOverrides(overrides=(AgentOverride(name="a", slots=2),))


def declared(at: int, **fleets: int) -> StoredState:
    """``fleets``: the ``max`` of each."""
    told = {name: Fleet(max=most) for name, most in fleets.items()}
    return StoredState(balancer_desired_state=DEFAULTS, fleets=told, declared=at)


def put(state: StoredState, at: int, **fleets: int | None) -> StoredState:
    """None: deleted."""
    kept = {name: fleet for name, fleet in state.fleets.items() if name not in fleets}
    new = {name: Fleet(max=most) for name, most in fleets.items() if most is not None}
    return state.model_copy(update={"fleets": kept | new}).put(*map(fleet_part, fleets), at=at)


def sizes(state: StoredState) -> dict[str, int]:
    return {name: fleet.max for name, fleet in state.fleets.items()}


def test_what_two_balancers_were_told_of_different_parts_holds_both() -> None:
    first = declared(10, a=1, b=1)
    here, there = put(first, 20, a=2), put(first, 30, b=3, c=4)

    assert sizes(here.merged(there)) == {"a": 2, "b": 3, "c": 4}


def test_of_one_part_what_was_put_later_holds() -> None:
    first = declared(10, a=1)

    assert sizes(put(first, 20, a=2).merged(put(first, 30, a=3))) == {"a": 3}
    assert sizes(put(first, 40, a=2).merged(put(first, 30, a=3))) == {"a": 2}


def test_what_was_deleted_later_is_gone_and_what_was_put_after_that_is_there() -> None:
    first = put(declared(10), 20, a=1)

    assert sizes(first.merged(put(first, 30, a=None))) == {}
    assert sizes(put(first, 30, a=None).merged(put(first, 40, a=2))) == {"a": 2}


def test_a_new_declaration_holds_as_a_whole_but_for_what_was_put_or_deleted() -> None:
    told = put(declared(10, old=1, same=1, changed=1, deleted=1), 20, changed=5, deleted=None)
    new = declared(30, new=1, same=2, changed=2, deleted=2)

    assert sizes(told.merged(new)) == {"new": 1, "same": 2, "changed": 5}


def test_desired_state_and_overrides_are_parts_of_their_own() -> None:
    first = declared(10)
    model = DEFAULTS.model_copy(update={"model": "None", "use_chat_template_override": True})
    here = first.model_copy(update={"balancer_desired_state": model}).put(DESIRED_STATE, at=20)
    there = first.model_copy(update={"agent_overrides": OVERRIDES}).put(AGENT_OVERRIDES, at=30)

    merged = here.merged(there)

    assert (merged.balancer_desired_state, merged.agent_overrides) == (model, OVERRIDES)


def test_the_wish_of_agents_has_a_new_number_only_if_it_was_said_again() -> None:
    state = declared(10)
    fleet = put(state, 20, a=1)
    again = fleet.put(DESIRED_STATE, at=30)

    numbers = [each.wish_number for each in (state, fleet, again)]

    assert numbers == [10, 10, 30]


def test_deleted_fleets_are_remembered_up_to_a_bound() -> None:
    state = declared(1, kept=1)
    for number in range(stored_state.MOST_DELETED + 10):
        state = put(state, 10 + number, **{f"f{number}": None})
    state = put(state, 5, there=1)

    merged = state.merged(state)

    assert len(merged.revisions) == stored_state.MOST_DELETED + 1
    assert fleet_part("f9") not in merged.revisions
    assert fleet_part("f10") in merged.revisions
    assert sizes(merged) == {"kept": 1, "there": 1}


@st.composite
def states(draw: st.DrawFn) -> StoredState:
    some = st.dictionaries(st.sampled_from("ab"), st.integers(0, 2))
    state = declared(draw(st.integers(0, 2)), **draw(some))
    for at in draw(st.lists(st.integers(1, 4), max_size=2)):
        name, most = draw(st.sampled_from("ab")), draw(st.none() | st.integers(0, 2))
        state = put(state, at, **{name: most})
    return state


@given(st.lists(states(), min_size=2, max_size=3))
def test_all_balancers_come_to_the_same_in_whatever_order_they_hear_of_each_other(
    told: list[StoredState],
) -> None:
    results: set[str] = set()
    for order in itertools.permutations(told):
        merged = order[0]
        for state in order[1:]:
            merged = merged.merged(state)
        results.add(merged.digest)
        assert all(merged.merged(state) == merged for state in told)

    assert len(results) == 1
