from agent.phases import Phases
from common.models import Phase


def test_a_start_is_told_phase_by_phase() -> None:
    phases = Phases(started=10.0)
    assert (phases.phase, phases.seconds) == (Phase.PROCESS, {})

    phases.enter(Phase.DOWNLOAD, now=11.0)
    phases.enter(Phase.DOWNLOAD, now=12.0)
    phases.enter(Phase.LOAD, now=13.5)
    assert phases.seconds == {Phase.PROCESS: 1.0, Phase.DOWNLOAD: 2.5}
    phases.enter(Phase.WARM_UP, now=14.0)
    phases.enter(Phase.READY, now=14.25)

    assert phases.phase is Phase.READY
    assert phases.seconds == {
        Phase.PROCESS: 1.0,
        Phase.DOWNLOAD: 2.5,
        Phase.LOAD: 0.5,
        Phase.WARM_UP: 0.25,
    }


def test_what_is_tried_again_is_added_up() -> None:
    phases = Phases(started=0.0)
    for phase, now in ((Phase.DOWNLOAD, 1.0), (Phase.LOAD, 2.0), (Phase.DOWNLOAD, 4.0)):
        phases.enter(phase, now=now)

    phases.enter(Phase.LOAD, now=8.0)

    assert phases.seconds == {Phase.PROCESS: 1.0, Phase.DOWNLOAD: 5.0, Phase.LOAD: 2.0}


def test_what_comes_after_the_start_is_not_counted() -> None:
    phases = Phases(started=0.0)
    phases.enter(Phase.READY, now=1.0)

    phases.enter(Phase.LOAD, now=5.0)
    phases.enter(Phase.READY, now=6.0)
    phases.enter(Phase.DRAINING, now=7.0)

    assert phases.phase is Phase.DRAINING
    assert phases.seconds == {Phase.PROCESS: 1.0}


def test_a_start_that_is_broken_off_is_told_as_far_as_it_came() -> None:
    phases = Phases(started=0.0)
    phases.enter(Phase.LOAD, now=1.0)

    phases.enter(Phase.DRAINING, now=3.0)

    assert phases.seconds == {Phase.PROCESS: 1.0, Phase.LOAD: 2.0}


def test_a_clock_that_is_coarser_than_the_start_makes_no_negative_times() -> None:
    phases = Phases(started=1.0)

    phases.enter(Phase.DOWNLOAD, now=0.99)

    assert phases.seconds == {Phase.PROCESS: 0.0}
