import re
from pathlib import Path

import pytest
from played import Play, ask, metric

from balancer.balancer import Balancer
from balancer.exchange import Exchange
from balancer.gauges import AgentGauges, Gauges
from balancer.limits import MOST_CONSULTATIONS, MOST_UNREAD_EVENTS, Limit, LimitError
from balancer.metrics import REFUSALS, Metrics
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import Busy, Detokenize, Failed, encode


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
        "headrace_refused_requests_total",
        "headrace_limit_refusals_total",
        "headrace_limit",
        "headrace_limit_used",
        "headrace_cancel_seconds",
        "headrace_abandoned_requests",
        "headrace_requests_buffered",
        "headrace_agents",
        "headrace_slots",
        "headrace_slots_processing",
    }
    assert "headrace_requests_buffered 2.0" in lines
    assert 'headrace_slots_processing{agent="a"} 1.0' in lines


def test_two_balancers_do_not_share_counts() -> None:
    one, other = (Metrics(lambda: Gauges(0, [])) for _ in range(2))

    one.of(None).tokens += 1

    assert b'headrace_tokens_generated_total{model="other"} 1.0' in one.text()
    assert b'headrace_tokens_generated_total{model="other"} 0.0' in other.text()


# Limits


def test_a_refusal_is_counted_by_its_code_and_by_the_bound_that_it_is_beyond() -> None:
    metrics = Metrics(lambda: Gauges(0, []))

    metrics.refuse(LimitError(Limit.BODY_BYTES, ErrorCode.BODY_TOO_LARGE, "too large"))
    metrics.refuse(RequestError(ErrorCode.INVALID_REQUEST, "no"))
    metrics.refuse(RequestError(ErrorCode.INTERNAL_ERROR, "a fault is no refusal"))

    lines = metrics.text().decode().splitlines()
    counted = {
        line for line in lines if re.match("headrace_.*refus.*_total{", line) and line[-3:] != "0.0"
    }
    assert counted == {
        'headrace_refused_requests_total{reason="body_too_large"} 1.0',
        'headrace_refused_requests_total{reason="invalid_request"} 1.0',
        'headrace_limit_refusals_total{limit="body_bytes"} 1.0',
    }


async def test_every_limit_has_its_series_from_the_start(balancer: Balancer) -> None:
    text = balancer.metrics.text().decode()

    for limit in Limit:
        assert f'headrace_limit{{limit="{limit}"}} ' in text
        assert f'headrace_limit_refusals_total{{limit="{limit}"}} 0.0' in text
    for code in REFUSALS:
        assert f'headrace_refused_requests_total{{reason="{code}"}} 0.0' in text
    for limit, most in (("buffered_requests", 2), ("body_bytes", 8388608), ("prompt_tokens", 8192)):
        assert metric(balancer, f'headrace_limit{{limit="{limit}"}}') == most


def test_the_readme_names_every_limit_and_no_other() -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    table = readme.partition("## Limits")[2].partition("\n## ")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(Limit)


async def test_what_an_agent_refuses_is_counted_too(balancer: Balancer, play: Play) -> None:
    agent = play(slots=2)
    ask(balancer, R)
    await agent.asked()
    ask(balancer, RequestId("begun"))
    await agent.asked()

    agent.say(Failed(R, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long"))
    agent.say_token(RequestId("begun"), "a")
    agent.say(Failed(RequestId("begun"), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "it was taken on"))

    counted = metric(balancer, 'headrace_refused_requests_total{reason="context_length_exceeded"}')
    assert counted == 1
    assert metric(balancer, 'headrace_limit_refusals_total{limit="prompt_tokens"}') == 1


async def test_a_client_that_does_not_read_comes_up_against_its_bound(
    balancer: Balancer, play: Play
) -> None:
    agent = play()
    ask(balancer, R)
    await agent.asked()

    for _ in range(MOST_UNREAD_EVENTS + 1):
        agent.say_token(R, "a")

    assert metric(balancer, 'headrace_limit_refusals_total{limit="unread_events"}') == 1


async def test_texts_that_are_being_tokenized_are_bounded(balancer: Balancer, play: Play) -> None:
    play()

    def consult(n: int) -> Exchange:
        request_id = RequestId(str(n))
        return balancer.consult(request_id, encode(Detokenize(request_id, ())), None)

    for n in range(MOST_CONSULTATIONS):
        consult(n)
    with pytest.raises(LimitError) as caught:
        consult(MOST_CONSULTATIONS)

    assert (caught.value.code, caught.value.limit) == (ErrorCode.BUFFER_FULL, "consultations")
    used = metric(balancer, 'headrace_limit_used{limit="consultations"}')
    assert used == MOST_CONSULTATIONS


# Cancels

R = RequestId("r")


def cancels(balancer: Balancer) -> tuple[float, float]:
    """Slots that are not free yet, and how many have become free."""
    return (
        metric(balancer, "headrace_abandoned_requests"),
        metric(balancer, "headrace_cancel_seconds_count"),
    )


async def test_it_is_measured_how_long_a_slot_is_held_for_nobody(
    balancer: Balancer, play: Play
) -> None:
    """B01, B02."""
    agent = play()
    ask(balancer, R)
    await agent.asked()
    assert cancels(balancer) == (0, 0)

    balancer.cancel(R)
    assert await agent.cancelled() == R
    assert cancels(balancer) == (1, 0)

    agent.finish(R)
    assert cancels(balancer) == (0, 1)
    agent.finish(R)
    assert cancels(balancer) == (0, 1)


async def test_an_agent_may_also_never_have_begun_it(balancer: Balancer, play: Play) -> None:
    agent = play()
    ask(balancer, R)
    await agent.asked()
    balancer.cancel(R)

    agent.say(Busy(R))

    assert cancels(balancer) == (0, 1)


async def test_who_finishes_was_not_cancelled(balancer: Balancer, play: Play) -> None:
    agent = play()
    ask(balancer, R)
    await agent.asked()

    agent.finish(R)

    assert cancels(balancer) == (0, 0)


async def test_one_that_waits_holds_no_slot(balancer: Balancer) -> None:
    ask(balancer, R)

    balancer.cancel(R)

    assert cancels(balancer) == (0, 0)


async def test_the_slots_of_a_lost_agent_are_gone_not_free(balancer: Balancer, play: Play) -> None:
    one, other = play("one"), play("other")
    for request_id in ("a", "b"):
        ask(balancer, RequestId(request_id))
        balancer.cancel(RequestId(request_id))
    assert cancels(balancer) == (2, 0)

    one.leave()

    assert cancels(balancer) == (1, 0)
    other.leave()
    assert cancels(balancer) == (0, 0)
