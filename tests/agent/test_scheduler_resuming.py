"""Answers that another agent has begun."""

from typing import Any

import pytest
from scheduled import R1, R2, Running

from common.messages import (
    Finished,
    FinishReason,
    Usage,
)


def test_an_answer_goes_on_behind_what_was_told_elsewhere() -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc")
    running.submit(R2, "xyz")

    running.run()

    assert (running.text(R1), running.text(R2)) == ("def", "xyz")
    assert running.usage(R1) == Usage(6, 0, content_tokens=6)
    running.check()


def test_what_was_generated_elsewhere_counts_for_the_limit() -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc", max_tokens=4)

    running.run()

    assert running.text(R1) == "d"
    assert running.last(R1) == Finished(R1, FinishReason.LENGTH, Usage(6, 0, content_tokens=4))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 3}, FinishReason.LENGTH),
        ({"stop": ("c",)}, FinishReason.STOP),
    ],
)
def test_an_answer_that_was_complete_elsewhere_ends_at_once(
    options: dict[str, Any], reason: FinishReason
) -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc", **options)

    assert running.scheduler.is_idle
    assert running.last(R1) == Finished(R1, reason, Usage(6, 0, content_tokens=3))
    running.check()


def test_an_answer_too_long_for_this_agents_context_ends_with_its_length() -> None:
    running = Running(context=8)
    running.submit(R1, "abcdef", resumed="abcdef")

    end = running.last(R1)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH


def test_a_stop_text_that_began_elsewhere_is_found() -> None:
    running = Running()
    running.submit(R1, "abcdef", resumed="abc", stop=("cd",))

    running.run()

    assert running.text(R1) == ""
    assert running.last(R1) == Finished(R1, FinishReason.STOP, Usage(6, 0, content_tokens=4))


def test_only_the_cached_part_of_the_prompt_is_told_when_an_answer_goes_on() -> None:
    running = Running()
    running.submit(R1, "abcdefghijkl", ignore_eos=True, max_tokens=20)
    running.run()

    running.submit(R2, "abcdefghijkl", ignore_eos=True, max_tokens=18, resumed="abcdefghijklabcd")
    running.run()

    assert running.text(R2) == "ef"
    assert running.usage(R2).cached_prompt_tokens == 12


def test_an_answer_that_goes_on_survives_a_pause() -> None:
    running = Running(slots=2, context=64, cells=64)
    running.submit(R1, "aaaa", ignore_eos=True, max_tokens=50)
    running.submit(R2, "bcde", ignore_eos=True, max_tokens=50, resumed="bcdebc")

    running.run()

    assert running.scheduler.figures.pauses
    assert running.text(R2) == ("bcde" * 13)[6:50]
    assert running.usage(R2).content_tokens == 50
    running.check()
