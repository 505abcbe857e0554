"""When an agent's process is killed, and when it is started again."""

from deploy.keeping import (
    FIRST_PATIENCE,
    LOADING_PATIENCE,
    LONGEST_DELAY,
    MOST_RESTARTS,
    PATIENCE,
    WELL,
    Beat,
    Restarts,
    Silence,
)

SERVES, LOADS = Beat(serves=True), Beat(serves=False)


def ticks_until_killed(silence: Silence) -> int:
    return next(n for n in range(1, 1000) if silence.tick())


def test_a_process_that_falls_silent_is_killed_after_some_ticks() -> None:
    silence = Silence()
    silence.beat(SERVES)

    assert ticks_until_killed(silence) == PATIENCE


def test_each_beat_begins_the_count_anew() -> None:
    silence = Silence()

    for _ in range(100):
        silence.beat(SERVES)
        assert not any(silence.tick() for _ in range(PATIENCE - 1))


def test_starting_and_loading_may_take_longer() -> None:
    silence = Silence()
    assert ticks_until_killed(silence) == FIRST_PATIENCE

    silence.beat(LOADS)

    assert ticks_until_killed(silence) == LOADING_PATIENCE


def test_it_is_known_whether_a_process_can_hear_yet() -> None:
    silence = Silence()
    silence.tick()
    assert not silence.has_spoken

    silence.beat(LOADS)

    assert silence.has_spoken


def test_a_process_that_ends_again_and_again_is_started_ever_later_and_then_given_up() -> None:
    restarts = Restarts()

    delays = [restarts.ended() for _ in range(MOST_RESTARTS + 1)]

    assert delays[:4] == [0.2, 0.4, 0.8, 1.6]
    assert delays[6:-1] == [LONGEST_DELAY] * (MOST_RESTARTS - 6)
    assert delays[-1] is None


def test_a_process_that_has_served_well_is_started_again_at_once() -> None:
    restarts = Restarts()
    for _ in range(MOST_RESTARTS):
        restarts.ended()

    for _ in range(WELL):
        restarts.beat(SERVES)

    assert restarts.ended() == 0.2


def test_what_several_processes_have_served_is_not_added_up() -> None:
    restarts = Restarts()

    for n in range(4):
        for _ in range(WELL - 1):
            restarts.beat(SERVES)
        assert restarts.ended() == 0.2 * 2**n


def test_to_load_for_long_is_not_to_serve_well() -> None:
    restarts = Restarts()
    restarts.ended()

    for _ in range(10 * WELL):
        restarts.beat(LOADS)

    assert restarts.ended() == 0.4
