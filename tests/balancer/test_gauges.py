from balancer.agent_states import AgentState
from balancer.gauges import AgentGauges, Gauges, LimitGauge
from balancer.limits import Limit
from balancer.metrics import Metrics
from common.messages import Figures


def test_agents_of_one_name_are_one_series() -> None:
    agents = [AgentGauges("a", 4, 1), AgentGauges("a", 2, 2), AgentGauges(None, 1, 0)]

    lines = Metrics(lambda: Gauges(0, agents)).text().decode().splitlines()

    assert [line for line in lines if line.startswith("headrace_slots{")] == [
        'headrace_slots{agent="a"} 6.0',
        'headrace_slots{agent="unnamed"} 1.0',
    ]
    assert 'headrace_agents{state="ready"} 3.0' in lines
    assert 'headrace_agents{state="stuck"} 0.0' in lines


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
        step_seconds=0.02,
        step_tokens=40.5,
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
        'headrace_step_seconds{agent="a"} 0.02',
        'headrace_step_tokens{agent="a"} 40.5',
    }
    assert not [line for line in lines if line.startswith("headrace_prefill_tokens_per_second{")]


def test_a_limit_is_shown_with_what_is_used_of_it() -> None:
    limits = [LimitGauge(Limit.AGENTS, 5, 2), LimitGauge(Limit.MAX_TOKENS, None, None)]

    lines = Metrics(lambda: Gauges(0, [], limits=limits)).text().decode().splitlines()

    assert [line for line in lines if line.startswith("headrace_limit{")] == [
        'headrace_limit{limit="agents"} 5.0',
        'headrace_limit{limit="max_tokens"} +Inf',
    ]
    assert [line for line in lines if line.startswith("headrace_limit_used{")] == [
        'headrace_limit_used{limit="agents"} 2.0'
    ]


def test_agents_are_counted_by_what_they_do() -> None:
    agents = [AgentGauges(None, 0, 0, state=AgentState.LOADING), AgentGauges(None, 1, 0)]

    lines = Metrics(lambda: Gauges(0, agents)).text().decode().splitlines()

    counted = [line for line in lines if line.startswith("headrace_agents{")]
    assert len(counted) == len(AgentState)
    assert [line for line in counted if not line.endswith(" 0.0")] == [
        'headrace_agents{state="ready"} 1.0',
        'headrace_agents{state="loading"} 1.0',
    ]
