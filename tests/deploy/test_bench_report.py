import io
import itertools
import json
import statistics
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.bench_report import (
    WORDS,
    BenchError,
    CountedBy,
    Figures,
    Outcome,
    PictureFormat,
    Spread,
    Target,
    Usage,
    make_prompts,
    make_warm_up,
    picture_format,
    poisson,
    reason,
    spread,
    summarize,
    texts_per_second,
    to_json,
    to_picture,
    to_tables,
)

GOOD = Outcome(sent=1.0, texts=(1.5, 1.6, 2.0), ended=2.1, usage=Usage(10, 4, 3))
SLOW = Outcome(sent=1.0, texts=(3.0, 3.5), ended=4.0, usage=Usage(20, 0, 2))
BAD = Outcome(sent=1.0, texts=(1.1,), ended=1.2, usage=Usage(99, 99, 99), error="HTTP 503: full")


def told(figures: Figures) -> str:
    output = io.StringIO()
    Console(file=output, width=120).print(to_tables(figures))
    return output.getvalue()


# The plan


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    def plan(seed: int) -> list[object]:
        return [
            make_prompts(seed, requests=3, tokens=20),
            make_prompts(seed, requests=1, tokens=0, shared_tokens=20),
            make_warm_up(seed, requests=2, tokens=20),
            poisson(seed, requests=5, rate=2.0),
        ]

    assert plan(1) == plan(1)
    assert all(one != other for one, other in zip(plan(1), plan(2), strict=True))


def test_prompts_have_the_length_asked_for_and_share_nothing() -> None:
    prompts = [
        *make_prompts(7, requests=30, tokens=20),
        *make_warm_up(7, requests=30, tokens=20),
    ]

    assert {len(prompt.split()) for prompt in prompts} == {20}
    assert len({tuple(prompt.split()[:4]) for prompt in prompts}) == 60


def test_a_shared_prefix_is_the_same_in_all_prompts_and_what_follows_is_not() -> None:
    prompts = make_prompts(7, requests=30, tokens=20, shared_tokens=50)
    more = make_prompts(7, requests=31, tokens=20, shared_tokens=50)

    words = [prompt.split() for prompt in prompts]
    assert {len(all_of_them) for all_of_them in words} == {70}
    assert len({tuple(all_of_them[:50]) for all_of_them in words}) == 1
    assert len({tuple(all_of_them[50:54]) for all_of_them in words}) == 30
    assert more[:30] == prompts


def test_a_warm_up_does_not_begin_with_the_shared_prefix() -> None:
    (prompt,) = make_prompts(7, requests=1, tokens=5, shared_tokens=5)
    (warm_up,) = make_warm_up(7, requests=1, tokens=10)

    assert prompt.split()[:4] != warm_up.split()[:4]


def test_words_differ_and_are_words() -> None:
    assert len(set(WORDS)) == len(WORDS) > 250
    assert all(word.isalpha() and word.islower() for word in WORDS)


def test_open_arrivals_begin_at_once_and_come_at_their_rate() -> None:
    times = poisson(3, requests=10_000, rate=5.0).times

    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert all(pause >= 0 for pause in pauses)
    assert statistics.mean(pauses) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(pauses) == pytest.approx(0.2, rel=0.05)  # as is exponential's


# The figures


def test_a_percentile_is_the_nearest_rank() -> None:
    assert spread([]) is None
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)
    assert spread([4.0, 1.0, 2.0, 3.0]) == Spread(2.0, 4.0, 4.0, 4.0)
    assert spread(range(1, 1001)) == Spread(500, 950, 990, 1000)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_spread_rises_and_was_measured(values: list[float]) -> None:
    found = spread(values)

    assert found is not None
    assert found.p50 <= found.p95 <= found.p99 <= found.max == max(values)
    assert {found.p50, found.p95, found.p99} <= set(values)


def test_figures_of_a_run() -> None:
    figures = summarize([GOOD, SLOW], seconds=4.0)

    assert figures == Figures(
        ok=2,
        failed=0,
        unfinished=0,
        errors={},
        seconds=4.0,
        requests_per_second=0.5,
        output_tokens=5,
        output_tokens_counted_by=CountedBy.USAGE,
        output_tokens_per_second=1.25,
        prompt_tokens=30,
        prompt_tokens_per_second=7.5,
        cached_prompt_tokens=4,
        time_to_first_token=Spread(0.5, 2.0, 2.0, 2.0),
        gaps=spread([1.6 - 1.5, 2.0 - 1.6, 0.5]),
        total_time=Spread(2.1 - 1.0, 3.0, 3.0, 3.0),
        target=Target(),
        goodput=None,
    )


def test_a_failed_request_adds_to_nothing_but_the_errors() -> None:
    with_errors = summarize([GOOD, BAD, BAD], seconds=2.0)
    without = summarize([GOOD], seconds=2.0)

    assert (with_errors.ok, with_errors.failed) == (1, 2)
    assert with_errors.errors == {"HTTP 503: full": 2}
    assert with_errors.output_tokens == without.output_tokens == 3
    assert with_errors.prompt_tokens == without.prompt_tokens
    assert with_errors.time_to_first_token == without.time_to_first_token
    assert with_errors.gaps == without.gaps
    assert with_errors.requests_per_second == without.requests_per_second


def test_the_most_frequent_reason_comes_first() -> None:
    once = Outcome(sent=0.0, texts=(), ended=1.0, error="once")

    assert list(summarize([once, BAD, BAD], seconds=1.0).errors.items()) == [
        ("HTTP 503: full", 2),
        ("once", 1),
    ]


def test_nothing_measured_is_no_figure_and_no_division_by_zero() -> None:
    figures = summarize([], seconds=0.0, target=Target(first=1.0))

    assert figures.time_to_first_token is None
    assert (figures.output_tokens_per_second, figures.goodput) == (0.0, 0.0)
    assert figures.prompt_tokens is None
    assert "requests ok" in told(figures)
    assert "p50" not in told(figures)


@pytest.mark.parametrize(
    ("usages", "tokens", "counted_by"),
    [
        ((Usage(5, 0, 7), Usage(5, 0, 7)), 14, CountedBy.USAGE),
        ((None, Usage(5)), 4, CountedBy.EVENTS),
        ((None, Usage(5, 0, 7)), 9, CountedBy.BOTH),
    ],
)
def test_output_tokens_are_counted_by_usage_if_there_is_one(
    usages: tuple[Usage | None, ...], tokens: int, counted_by: CountedBy
) -> None:
    outcomes = [Outcome(sent=0.0, texts=(1.0, 2.0), ended=3.0, usage=usage) for usage in usages]

    figures = summarize(outcomes, seconds=1.0)

    assert (figures.output_tokens, figures.output_tokens_counted_by) == (tokens, counted_by)
    assert f"counted by {counted_by}" in told(figures)


def test_prompt_tokens_are_told_only_if_all_are_known() -> None:
    unknown = Outcome(sent=0.0, texts=(1.0,), ended=2.0)

    figures = summarize([GOOD, unknown], seconds=1.0)

    assert (figures.prompt_tokens, figures.cached_prompt_tokens) == (None, None)
    assert "prompt tokens/s" not in told(figures)


@pytest.mark.parametrize(
    ("target", "goodput"),
    [
        (Target(first=0.5), 0.5),
        (Target(first=0.4), 0.0),
        (Target(first=2.0), 1.0),
        (Target(gap=0.45), 0.5),
        (Target(gap=0.5), 1.0),
        (Target(first=2.0, gap=0.45), 0.5),
        (Target(), None),
    ],
)
def test_goodput_counts_what_met_both_targets(target: Target, goodput: float | None) -> None:
    assert summarize([GOOD, SLOW, BAD], seconds=2.0, target=target).goodput == goodput


def test_an_answer_without_text_meets_no_target_for_its_first_token() -> None:
    silent = Outcome(sent=0.0, texts=(), ended=0.1, usage=Usage(5, 0, 0))

    assert silent.ok
    assert not silent.meets(Target(first=1.0))
    assert silent.meets(Target(gap=1.0))


def test_a_reason_is_one_short_printable_line() -> None:
    assert reason("no\n  room\x1b[1m left ") == "no room[1m left"
    assert reason(" ") == "no reason was given"
    assert len(reason("x" * 1000)) == 300


# How it is told


def test_the_table_says_what_was_measured() -> None:
    figures = summarize(
        [GOOD, SLOW, BAD], seconds=4.0, unfinished=2, target=Target(first=0.5, gap=0.45)
    )

    lines = [" ".join(line.replace("│", " ").split()) for line in told(figures).splitlines()]

    assert lines[:8] == [
        "requests ok 2 in 4.00 s",
        "requests failed 1",
        "1 HTTP 503: full",
        "requests unfinished 2 interrupted, not counted",
        "requests/s 0.50",
        "output tokens/s 1.2 5 tokens, counted by usage",
        "prompt tokens/s 7.5 30 tokens, 4 of them from a cache",
        "goodput, requests/s 0.25 first token within 500 ms, no gap above 450 ms",
    ]
    assert "time to first token 500 ms 2.00 s 2.00 s 2.00 s" in lines
    assert "gap between tokens 400 ms 500 ms 500 ms 500 ms" in lines


def test_a_servers_words_are_no_markup_and_many_reasons_are_summed_up() -> None:
    outcomes = [
        Outcome(sent=0.0, texts=(), ended=1.0, error=f"[bold]reason {n}") for n in range(12)
    ]

    text = told(summarize(outcomes, seconds=1.0))

    assert "[bold]reason 9" in text
    assert "reason 10" not in text
    assert "2  for other reasons" in text


def test_the_json_holds_settings_figures_and_each_request() -> None:
    figures = summarize([GOOD, BAD], seconds=2.0)

    document = json.loads(to_json({"seed": 7}, figures, [GOOD, BAD]))

    assert document["settings"] == {"seed": 7}
    assert document["figures"]["output_tokens_counted_by"] == "usage"
    assert document["figures"]["gaps"]["max"] == pytest.approx(0.4)
    assert document["figures"]["errors"] == {"HTTP 503: full": 1}
    assert document["requests"][0] == {
        "sent": 0.0,
        "time_to_first_token": 0.5,
        "longest_gap": pytest.approx(0.4),
        "total_time": pytest.approx(1.1),
        "output_tokens": 3,
        "prompt_tokens": 10,
        "cached_prompt_tokens": 4,
        "error": None,
    }
    assert document["requests"][1]["error"] == "HTTP 503: full"


@pytest.mark.parametrize(("name", "beginning"), [("a.png", b"\x89PNG\r\n"), ("a.b.SVG", b"<?xml")])
def test_a_picture_is_drawn_in_the_format_that_its_name_says(name: str, beginning: bytes) -> None:
    data = to_picture([GOOD, SLOW, BAD], title="a run", format=picture_format(name))

    assert data.startswith(beginning)


def test_nothing_can_be_drawn_too() -> None:
    assert to_picture([BAD], title="nothing", format=PictureFormat.PNG)


@pytest.mark.parametrize("name", ["a.jpg", "png", "svg.", ""])
def test_other_formats_are_refused(name: str) -> None:
    with pytest.raises(BenchError, match=r"neither in \.png nor in \.svg"):
        picture_format(name)


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(BenchError, match=r"pip install 'matplotlib>="):
        picture_format("a.png")


def test_events_over_time_add_up_to_all_events() -> None:
    seconds, rates = texts_per_second([GOOD, SLOW], bins=10)

    widths = [after - before for before, after in itertools.pairwise(seconds)]
    assert (seconds[0], seconds[-1]) == (0.0, 2.5)
    assert sum(w * rate for w, rate in zip(widths, rates, strict=False)) == pytest.approx(5)
