"""One supervisor, with the newest settings, however balancers come and go."""

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from deploy.succession import LONG_PATIENCE, PATIENCE, Claim, Succession


def test_a_claim_is_read_as_it_was_told() -> None:
    claim = Claim(1700000000123, "Settings(code='c1')")

    assert Claim.parse(str(claim)) == claim


def test_what_an_older_version_told_counts_as_the_oldest() -> None:
    assert Claim.parse("Settings(code='c1', engine='x y')") == Claim(
        0, "Settings(code='c1', engine='x y')"
    )


def test_where_there_is_none_one_is_made_at_once() -> None:
    assert Succession(Claim(5, "new")).may_make(now=0)


def test_one_with_the_same_settings_is_followed_whoever_made_it() -> None:
    assert Succession(Claim(5, "new")).follows(Claim(1, "new"))
    assert Succession(Claim(5, "new")).follows(Claim(9, "new"))


def test_an_older_one_is_ended_and_another_made_at_once() -> None:
    new = Succession(Claim(5, "new"))

    assert not new.follows(Claim(1, "old"))
    assert new.may_make(now=0)


def test_an_old_balancer_follows_what_a_newer_one_has_made() -> None:
    old = Succession(Claim(1, "old"))
    assert old.follows(Claim(1, "old"))

    assert old.follows(Claim(5, "new"))


def test_who_has_lost_its_supervisor_gives_a_newer_balancer_time_to_make_one() -> None:
    old = Succession(Claim(1, "old"))
    old.follows(Claim(1, "old"))

    assert not old.may_make(now=100)
    assert not old.may_make(now=100 + PATIENCE - 0.1)
    assert old.may_make(now=100 + PATIENCE)


def test_time_without_one_is_counted_anew_each_time() -> None:
    balancer = Succession(Claim(1, "new"))
    balancer.follows(Claim(1, "new"))
    balancer.may_make(now=100)
    balancer.follows(Claim(1, "new"))

    assert not balancer.may_make(now=100 + PATIENCE)


def test_who_knows_of_a_newer_balancer_makes_one_only_when_nobody_else_does() -> None:
    old = Succession(Claim(1, "old"))
    assert old.may_make(now=0)
    old.follows(Claim(5, "new"))

    assert not old.may_make(now=100)
    assert not old.may_make(now=100 + LONG_PATIENCE - 0.1)
    assert old.may_make(now=100 + LONG_PATIENCE)


def test_settings_that_are_declared_again_are_new() -> None:
    assert not Succession(Claim(9, "old")).follows(Claim(5, "new"))


@dataclass
class Cluster:
    """Balancers that look for the supervisor in any order; who ends or makes one does it at once."""

    now: float = 0.0
    supervisor: Claim | None = None

    def look(self, balancer: Succession) -> None:
        self.now += 0.5
        if self.supervisor is None:
            if balancer.may_make(now=self.now):
                self.supervisor = balancer.own
        elif not balancer.follows(self.supervisor):
            self.supervisor = None


@given(
    settings=st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
    clocks=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    events=st.lists(st.sampled_from(["start", "die", 0, 1, 2, 3]), max_size=60),
)
def test_in_the_end_all_follow_one_with_the_settings_of_the_newest(
    settings: list[str], clocks: list[int], events: Iterable[str | int]
) -> None:
    cluster = Cluster()
    cluster.supervisor = Claim(0, "before")
    waiting = [
        Succession(Claim(at, each)) for each, at in zip(settings, sorted(clocks), strict=False)
    ]
    balancers = [waiting.pop(0)]
    cluster.look(balancers[0])
    for event in events:
        if event == "start" and waiting:
            balancers.append(waiting.pop(0))
        elif event == "die":
            cluster.supervisor = None
        elif isinstance(event, int) and event < len(balancers):
            cluster.look(balancers[event])

    for _ in range(100):
        for balancer in balancers:
            cluster.look(balancer)

    newest = max(each.own for each in balancers)
    assert cluster.supervisor is not None
    assert cluster.supervisor.settings == newest.settings
    made = cluster.supervisor
    for balancer in balancers:
        cluster.look(balancer)
    assert cluster.supervisor == made
