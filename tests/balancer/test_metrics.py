from balancer.metrics import AgentGauges, Gauges, Metrics
from common.messages import Figures


def test_every_metric_is_there_from_the_start() -> None:
    metrics = Metrics(lambda: Gauges(buffered=2, agents=[AgentGauges("a", 4, 1)]))

    lines = metrics.text().decode().splitlines()

    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} >= {
        "headrace_requests_total",
        "headrace_tokens_generated_total",
        "headrace_prompt_tokens_total",
        "headrace_buffer_wait_seconds",
        "headrace_time_to_first_token_seconds",
        "headrace_requeued_total",
        "headrace_requests_buffered",
        "headrace_agents",
        "headrace_slots",
        "headrace_slots_processing",
    }
    assert "headrace_requests_buffered 2.0" in lines
    assert 'headrace_slots_processing{agent="a"} 1.0' in lines


def test_agents_of_one_name_are_one_series() -> None:
    agents = [AgentGauges("a", 4, 1), AgentGauges("a", 2, 2), AgentGauges(None, 1, 0)]

    lines = Metrics(lambda: Gauges(0, agents)).text().decode().splitlines()

    assert [line for line in lines if line.startswith("headrace_slots{")] == [
        'headrace_slots{agent="a"} 6.0',
        'headrace_slots{agent="unnamed"} 1.0',
    ]
    assert "headrace_agents 3.0" in lines


def test_what_an_agents_scheduler_says_is_shown() -> None:
    figures = Figures(
        cells_total=100,
        cells_running=30,
        cells_cached=20,
        prompt_tokens_fed=7,
        prompt_tokens_cached=5,
        pauses=2,
        waiting=1,
        prefill_rate=None,
        decode_rate=80.0,
        concurrency=2.5,
    )
    agents = [AgentGauges("a", 4, 1, figures, step_age=0.25), AgentGauges("a", 4, 0)]

    lines = Metrics(lambda: Gauges(0, agents)).text().decode().splitlines()

    assert set(lines) >= {
        'headrace_kv_cells{agent="a",state="free"} 50.0',
        'headrace_kv_cells{agent="a",state="cached"} 20.0',
        'headrace_kv_cells{agent="a",state="running"} 30.0',
        'headrace_scheduler_prompt_tokens_total{agent="a",source="fed"} 7.0',
        'headrace_scheduler_prompt_tokens_total{agent="a",source="cached"} 5.0',
        'headrace_scheduler_pauses_total{agent="a"} 2.0',
        'headrace_scheduler_waiting{agent="a"} 1.0',
        'headrace_decode_tokens_per_second{agent="a"} 80.0',
        'headrace_concurrent_sequences{agent="a"} 2.5',
        'headrace_step_age_seconds{agent="a"} 0.25',
    }
    assert not [line for line in lines if line.startswith("headrace_prefill_tokens_per_second{")]


def test_two_balancers_do_not_share_counts() -> None:
    one, other = (Metrics(lambda: Gauges(0, [])) for _ in range(2))

    one.tokens.inc()

    assert b"headrace_tokens_generated_total 1.0" in one.text()
    assert b"headrace_tokens_generated_total 0.0" in other.text()
