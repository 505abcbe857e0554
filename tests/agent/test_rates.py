"""Passes are told apart by what they do."""

import pytest

from agent.rates import Rates


def test_nothing_measured_is_not_zero() -> None:
    rates = Rates()

    assert (rates.prefill, rates.decode, rates.concurrency) == (None, None, None)
    assert (rates.step_seconds, rates.step_tokens) == (None, None)


def test_a_pass_takes_its_time_and_its_tokens_whatever_they_are_for() -> None:
    rates = Rates()
    rates.measured(seconds=0.5, rows=0, prompt_tokens=200)
    rates.measured(seconds=0.1, rows=2, prompt_tokens=98)

    assert rates.step_seconds == pytest.approx(0.3, rel=0.02)
    assert rates.step_tokens == pytest.approx(150, rel=0.02)


def test_a_pass_that_only_feeds_prompts_counts_as_prefill() -> None:
    rates = Rates()
    rates.measured(seconds=0.5, rows=0, prompt_tokens=200)

    assert (rates.prefill, rates.decode) == (400, None)


def test_a_pass_in_which_a_stream_generates_counts_as_decode_whatever_it_feeds() -> None:
    rates = Rates()
    rates.measured(seconds=0.5, rows=4, prompt_tokens=200)

    assert (rates.prefill, rates.decode, rates.concurrency) == (None, 8, 4)


def test_several_streams_generate_several_tokens() -> None:
    rates = Rates()
    rates.measured(seconds=0.1, rows=2, prompt_tokens=0)
    rates.measured(seconds=0.3, rows=6, prompt_tokens=0)

    assert rates.decode == pytest.approx(20, rel=0.02)
    assert rates.concurrency == pytest.approx(4, rel=0.05)


def test_old_passes_fade() -> None:
    rates = Rates()
    for _ in range(100):
        rates.measured(seconds=1.0, rows=1, prompt_tokens=0)
    for _ in range(200):
        rates.measured(seconds=0.1, rows=1, prompt_tokens=0)

    assert rates.decode == pytest.approx(10, rel=0.05)
