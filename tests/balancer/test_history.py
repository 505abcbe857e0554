"""The samples that charts are drawn from."""

from balancer.history import MOST_SAMPLES, History, Load, Sample, Totals

LOAD = Load(buffered=1, running=2, slots=4, slots_busy=2, agents=1)


def test_a_sample_keeps_the_totals_of_its_moment() -> None:
    history = History()
    history.totals.tokens = 5
    history.sample(LOAD, at=10.0)
    history.totals.tokens = 9

    assert [*history.samples] == [Sample(1, 10.0, Totals(tokens=5), LOAD, None)]


def test_first_tokens_count_in_their_interval_only() -> None:
    history = History()
    history.got_first_token(1.0)
    history.got_first_token(2.0)
    history.sample(LOAD, at=10.0)
    history.got_first_token(4.0)
    history.sample(LOAD, at=12.0)
    history.sample(LOAD, at=14.0)

    assert [sample.first_token for sample in history.samples] == [1.5, 4.0, None]


def test_the_oldest_samples_are_forgotten() -> None:
    history = History()
    for n in range(MOST_SAMPLES + 5):
        history.sample(LOAD, at=n)

    assert [sample.number for sample in history.samples][:: MOST_SAMPLES - 1] == [
        6,
        MOST_SAMPLES + 5,
    ]
