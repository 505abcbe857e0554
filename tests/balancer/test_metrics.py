from balancer.metrics import AgentGauges, Gauges, Metrics


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


def test_two_balancers_do_not_share_counts() -> None:
    one, other = (Metrics(lambda: Gauges(0, [])) for _ in range(2))

    one.tokens.inc()

    assert b"headrace_tokens_generated_total 1.0" in one.text()
    assert b"headrace_tokens_generated_total 0.0" in other.text()
