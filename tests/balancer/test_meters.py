"""What is measured of requests, by model."""

from collections.abc import Callable

import pytest
from exposition import by_label, samples
from played import Play, ask, metric

from balancer import records
from balancer.balancer import Balancer
from balancer.gauges import Gauges
from balancer.meters import MOST_MODELS, OTHER
from balancer.metrics import Metrics
from balancer.terms import Route, Terms
from common.ids import RequestId
from common.messages import Busy, FinishReason

R = RequestId("r")


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let it be so late."""

    def is_so_late(now: float) -> None:
        monkeypatch.setattr(records, "monotonic", lambda: now)

    return is_so_late


def bucket(balancer: Balancer, name: str, model: str) -> dict[str, float]:
    """How many there were of at most so many seconds; those that say the same are left out."""
    counts: dict[str, float] = {}
    for sample in samples(balancer.metrics.text().decode()):
        is_asked = sample.name == f"{name}_bucket" and sample.labels["model"] == model
        if is_asked and sample.value not in counts.values():
            counts[sample.labels["le"]] = sample.value
    return counts


async def test_a_request_is_counted_by_route_model_and_outcome(
    balancer: Balancer, play: Play, at: Callable[[float], None]
) -> None:
    at(10.0)
    ask(balancer, R, Terms(route=Route.CHAT_COMPLETIONS))
    at(10.2)
    agent = play()
    await agent.asked()
    at(13.0)
    agent.finish(R)

    labels = '{route="chat_completions",model="played",outcome="stop"}'
    assert metric(balancer, f"headrace_requests_total{labels}") == 1
    assert metric(balancer, "headrace_requests_total") == 1
    assert bucket(balancer, "headrace_buffer_wait_seconds", "played") == {"0.005": 0, "0.25": 1}
    assert bucket(balancer, "headrace_request_seconds", "played") == {"0.1": 0, "5.0": 1}
    assert metric(balancer, 'headrace_request_seconds_sum{model="played"}') == 3


async def test_the_first_token_is_measured_from_the_arrival_and_the_others_from_the_one_before(
    balancer: Balancer, play: Play, at: Callable[[float], None]
) -> None:
    at(10.0)
    agent = play()
    ask(balancer, R)
    await agent.asked()
    for now in (10.5, 10.5625, 10.75):
        at(now)
        agent.say_token(R, "a")

    first = bucket(balancer, "headrace_time_to_first_token_seconds", "played")
    assert first == {"0.005": 0, "0.5": 1}
    gaps = bucket(balancer, "headrace_inter_token_seconds", "played")
    assert gaps == {"0.005": 0, "0.075": 1, "0.2": 2}
    assert metric(balancer, "headrace_inter_token_seconds_sum") == 0.25
    assert metric(balancer, 'headrace_tokens_generated_total{model="played"}') == 3


async def test_one_that_goes_on_elsewhere_has_waited_once_and_its_gap_shows(
    balancer: Balancer, play: Play, at: Callable[[float], None]
) -> None:
    at(0.0)
    first, second = (play(name, fingerprint="one") for name in ("first", "second"))
    ask(balancer, R)
    await first.asked()
    at(2.0)
    first.say_token(R, "a")
    at(9.0)
    first.leave()
    await second.asked()
    at(12.0)
    second.say_token(R, "b")

    assert metric(balancer, "headrace_buffer_wait_seconds_count") == 1
    assert metric(balancer, "headrace_inter_token_seconds_sum") == 10
    assert metric(balancer, "headrace_time_to_first_token_seconds_count") == 1


def test_of_too_many_models_those_lose_their_series_that_nobody_has_asked_for_longest() -> None:
    metrics = Metrics(lambda: Gauges(0, []))
    metrics.of(None).over(Route.CONVERSATION, "stop", 1.0)
    for n in range(MOST_MODELS - 1):
        metrics.of(f"m{n}").over(Route.CONVERSATION, "stop", 1.0)
    metrics.use("m0")
    metrics.of("new").over(Route.CONVERSATION, "stop", 1.0)

    counts = by_label(metrics.text().decode(), "headrace_requests_total", "model")
    assert len(counts) == MOST_MODELS
    assert counts[OTHER] == counts["m0"] == counts["new"] == 1
    assert "m1" not in counts


async def test_a_model_is_called_by_its_best_name_whatever_the_client_calls_it(
    balancer: Balancer, play: Play
) -> None:
    names = ("who/small-model", "small.gguf", "small")
    agent = play(slots=2, model_names=names)
    for n, model in enumerate([None, *names]):
        request_id = RequestId(str(n))
        ask(balancer, request_id, Terms(model, route=Route.COMPLETIONS))
        await agent.asked()
        agent.say_token(request_id, "a")
        agent.finish(request_id, FinishReason.LENGTH)

    labels = '{model="small",route="completions",outcome="length"}'
    assert metric(balancer, f"headrace_requests_total{labels}") == 4
    assert metric(balancer, 'headrace_tokens_generated_total{model="small"}') == 4
    assert metric(balancer, 'headrace_prompt_tokens_total{model="small"}') == 20


async def test_what_never_had_an_agent_is_called_as_the_client_called_it(
    balancer: Balancer, play: Play
) -> None:
    play(slots=0, model_names=("small", "small.gguf"))

    def cancelled(*models: str | None) -> dict[str, float]:
        for model in models:
            ask(balancer, RequestId("r"), Terms(model))
            balancer.cancel(RequestId("r"))
        return by_label(balancer.metrics.text().decode(), "headrace_requests_total", "model")

    # Where there is one model only, it is meant.
    assert cancelled("small.gguf", "unknown", None) == {"small": 2, OTHER: 1}
    play("other", slots=0, model_names=("large",))
    assert cancelled(None) == {"small": 2, OTHER: 2}


async def test_who_waits_in_vain_has_waited_too(balancer: Balancer, play: Play) -> None:
    agent = play(slots=1)
    first, second = RequestId("r1"), RequestId("r2")
    ask(balancer, first)
    agent.say(Busy(first))
    ask(balancer, second)
    count = "headrace_buffer_wait_seconds_count"
    assert metric(balancer, count) == 0, "nobody has taken it yet"

    balancer.cancel(second)
    assert metric(balancer, count) == 1
    agent.report(slots=1)
    agent.say_token(first, "a")
    assert metric(balancer, count) == 2
    agent.finish(first)
    assert metric(balancer, count) == 2
