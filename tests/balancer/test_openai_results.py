"""What OpenAI's answers have in common: what was used, and how long it took."""

from collections.abc import Mapping

import pytest
from told import A, B, C, end

from balancer.exchange import Timing, Told
from balancer.openai_results import Json, Tally
from common.ids import RequestId
from common.messages import (
    Finished,
    Usage,
)


def tally(prompts: Mapping[RequestId, int], *ends: Told) -> Tally:
    made = Tally(prompts)
    for told in ends:
        assert isinstance(told.event, Finished)
        made.add(told.event, told.timing)
    return made


def test_each_generated_token_is_counted_whatever_it_is_for() -> None:
    usage = Usage(
        prompt_tokens=7,
        cached_prompt_tokens=3,
        content_tokens=1,
        reasoning_tokens=2,
        tool_call_tokens=4,
        undeterminable_tokens=8,
        input_image_tokens=5,
    )

    told = tally({A: 0}, end(usage=usage)).usage()

    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (7, 15, 22)
    assert told["prompt_tokens_details"]["cached_tokens"] == 3
    assert told["completion_tokens_details"]["reasoning_tokens"] == 2


def test_a_prompt_is_counted_once_as_its_first_answer_has_read_it() -> None:
    ends = [
        end(C, usage=Usage(prompt_tokens=7, cached_prompt_tokens=2, content_tokens=4)),
        end(B, usage=Usage(prompt_tokens=5, cached_prompt_tokens=5, content_tokens=2)),
        end(A, usage=Usage(prompt_tokens=5, cached_prompt_tokens=1, content_tokens=1)),
    ]

    made = tally({A: 0, B: 0, C: 1}, *ends)

    usage, timings = made.usage(), made.timings()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 7)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (3, 9, 7)


def test_a_tally_is_whole_when_every_answer_has_ended() -> None:
    made = Tally({A: 0, B: 0})

    for told, is_whole in [(end(A), False), (end(B), True)]:
        assert isinstance(told.event, Finished)
        made.add(told.event, told.timing)
        assert made.is_whole is is_whole


def timings(*each: Timing, usage: Usage | None = None) -> Json:
    ids = [RequestId(str(n)) for n in range(len(each))]
    ends = [end(ids[n], timing=timing, usage=usage) for n, timing in enumerate(each)]
    return tally(dict.fromkeys(ids, 0), *ends).timings()


def test_times_are_told_in_milliseconds_by_llama_cpps_names() -> None:
    usage = Usage(prompt_tokens=10, cached_prompt_tokens=6, content_tokens=4)

    assert timings(Timing(10.0, 10.5, 11.5, 13.5), usage=usage) == {
        "queue_ms": 500.0,
        "cache_n": 6,
        "prompt_n": 4,
        "prompt_ms": 1000.0,
        "prompt_per_token_ms": 250.0,
        "prompt_per_second": 4.0,
        "predicted_n": 4,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
    }


def test_of_several_answers_the_time_is_from_the_first_beginning_to_the_last_end() -> None:
    told = timings(Timing(10.0, 12.0, 13.0, 14.0), Timing(10.0, 11.0, 12.0, 20.0))

    assert (told["queue_ms"], told["prompt_ms"], told["predicted_ms"]) == (1000, 1000, 8000)


def test_a_clock_may_begin_at_zero() -> None:
    told = timings(Timing(0.0, 0.0, 0.0, 2.0), usage=Usage(prompt_tokens=1, content_tokens=1))

    assert (told["queue_ms"], told["prompt_ms"], told["predicted_ms"]) == (0, 0, 2000)


@pytest.mark.parametrize(
    ("timing", "queue", "prompt", "predicted"),
    [
        (Timing(1.0, None, None, 3.0), 2000, 0, 0),
        (Timing(1.0, 2.0, None, 4.0), 1000, 2000, 0),
        (Timing(1.0, 1.0, 1.0, 1.0), 0, 0, 0),
    ],
)
def test_what_never_began_took_no_time(
    timing: Timing, queue: int, prompt: int, predicted: int
) -> None:
    told = timings(timing)

    assert (told["queue_ms"], told["prompt_ms"], told["predicted_ms"]) == (queue, prompt, predicted)


def test_nothing_is_divided_by_nothing() -> None:
    told = timings(Timing(1.0, 1.0, 1.0, 1.0), usage=Usage(prompt_tokens=3, cached_prompt_tokens=3))

    assert {name: value for name, value in told.items() if value is None} == {
        "prompt_per_token_ms": None,
        "prompt_per_second": None,
        "predicted_per_token_ms": None,
        "predicted_per_second": None,
    }
