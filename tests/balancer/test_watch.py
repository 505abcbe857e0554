"""Who is given up, and who is only slow."""

from dataclasses import dataclass, field

from balancer.watch import MOST_SILENT, Watch
from common.messages import Status


@dataclass
class Watched:
    watch: Watch = field(default_factory=Watch)

    def looks(
        self, count: int, *, bound: int = 1, age: float | None = None, limit: float | None = None
    ) -> list[bool]:
        status = Status(
            version=1,
            slots_desired=1,
            slots_total=1,
            slots_processing=bound,
            step_age=age,
            step_limit=limit,
        )
        return [self.watch.look(status, bound=bound) is not None for _ in range(count)]


def test_an_agent_that_has_requests_must_speak() -> None:
    assert Watched().looks(MOST_SILENT + 1) == [*[False] * MOST_SILENT, True]


def test_an_agent_that_speaks_now_and_then_is_not_silent() -> None:
    watched = Watched()

    for _ in range(3):
        assert not any(watched.looks(MOST_SILENT))
        watched.watch.heard()


def test_an_agent_without_requests_may_be_silent() -> None:
    watched = Watched()

    assert not any(watched.looks(10 * MOST_SILENT, bound=0))
    assert not any(watched.looks(MOST_SILENT))


def test_a_step_may_take_what_its_agent_says_and_no_longer() -> None:
    assert Watched().looks(1, age=59.0, limit=60.0) == [False]
    assert Watched().looks(1, age=61.0, limit=60.0) == [True]


def test_an_agent_that_knows_no_limit_is_not_held_to_one() -> None:
    assert Watched().looks(1, age=1000.0) == [False]
    assert Watched().looks(1, limit=1.0) == [False]
