"""The text at ``/metrics`` after a load, as a monitoring system would judge it."""

import asyncio
import shutil
import subprocess

import pytest
from exposition import by_label, total
from loaded import metrics_after_load
from metrics_lint import faults


@pytest.fixture(scope="module")
def text() -> str:
    return asyncio.run(metrics_after_load())


def test_it_is_as_the_guides_want_it(text: str) -> None:
    assert faults(text) == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_promtool_has_no_complaint(text: str) -> None:
    told = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )

    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


def test_what_was_served_is_counted(text: str) -> None:
    assert by_label(text, "headrace_requests_total", "route") == {
        "chat_completions": 6,
        "raw_prompt": 2,
    }
    assert by_label(text, "headrace_requests_total", "model") == {"echo": 8}
    assert total(text, "headrace_tokens_generated_total") == 6 * 5 + 2 * 4
    first = total(text, "headrace_time_to_first_token_seconds_count")
    gaps = total(text, "headrace_inter_token_seconds_count")
    assert (first, gaps) == (8, 6 * 4 + 2 * 3)
    assert total(text, 'headrace_refused_requests_total{reason="model_not_found"}') == 2


def test_an_agent_that_has_gone_leaves_no_series(text: str) -> None:
    assert by_label(text, "headrace_agents", "state")["ready"] == 2
    assert by_label(text, "headrace_slots", "agent") == {"one": 2, "other": 2}
    assert "gone" not in text


GOOD = "# HELP headrace_a_total b\n# TYPE headrace_a_total counter\nheadrace_a_total 1\n"
HISTOGRAM = """# HELP headrace_a_seconds b
# TYPE headrace_a_seconds histogram
headrace_a_seconds_bucket{le="1"} 1
headrace_a_seconds_bucket{le="+Inf"} 2
headrace_a_seconds_count 2
headrace_a_seconds_sum 3
"""


@pytest.mark.parametrize("good", [GOOD, HISTOGRAM])
def test_what_is_good_is_not_faulted(good: str) -> None:
    assert faults(good) == []


@pytest.mark.parametrize(
    ("good", "old", "new"),
    [
        (GOOD, "# HELP headrace_a_total b\n", ""),
        (GOOD, "# TYPE headrace_a_total counter\n", ""),
        (GOOD, "_a_total", "_a"),
        (GOOD, "headrace_", "other_"),
        (GOOD, "_a_", "_a_ms_"),
        (GOOD, "_a_", "_counter_a_"),
        (GOOD, "total 1", "total 1\nheadrace_a_total 1"),
        (GOOD, "total 1", 'total{job="a"} 1'),
        (GOOD, "total 1", 'total{Camel="a"} 1'),
        (GOOD, "total 1", 'total{le="a"} 1'),
        (GOOD, "total 1", 'total{a="a"} 1\nheadrace_a_total{b="a"} 1'),
        (GOOD, "total 1", "total -1"),
        (GOOD, "counter", "gauge"),
        (GOOD, GOOD, GOOD * 2),
        (HISTOGRAM, "_seconds", "_minutes"),
        (HISTOGRAM, "_seconds", ""),
        (HISTOGRAM, '"+Inf"} 2', '"+Inf"} 0'),
        (HISTOGRAM, '"+Inf"', '"2"'),
        (HISTOGRAM, "count 2", "count 3"),
        (HISTOGRAM, "headrace_a_seconds_count 2\n", ""),
    ],
)
def test_what_is_wrong_is_found(good: str, old: str, new: str) -> None:
    assert faults(good.replace(old, new))
