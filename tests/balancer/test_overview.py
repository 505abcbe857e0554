"""What operators see of requests, agents and errors: the whole of what is written down."""

from typing import Any

import httpx
import pytest
from played import Play, ask

from balancer.balancer import Balancer
from balancer.overview import MOST_OPEN
from balancer.terms import Priority, Route, Terms
from common.errors import ErrorCode
from common.ids import RequestId
from common.messages import Busy, Failed, Figures, Note, Noted
from common.models import AgentIssue, IssueKind

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))


async def decisions(client: httpx.AsyncClient, name: str) -> list[tuple[str, str | None]]:
    told = (await client.get(f"/api/v1/requests/{name}")).json()
    return [(each["what"], each["agent"]) for each in told["decisions"]]


async def request(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    answer = await client.get(f"/api/v1/requests/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_request_is_told_whole(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    agent = play("one", slots=1)
    terms = Terms("played", Priority.HIGH, route=Route.CONVERSATION, client_id="mine")
    ask(balancer, R1, terms=terms)
    balancer.noted(agent.agent_id, Noted(R1, Note.ADMITTED, "all is new", 5, 3))
    agent.say_token(R1, "a")
    agent.say_token(R1, "b")

    running = await request(client, "r1")
    agent.finish(R1)
    over = await request(client, "r1")

    assert await decisions(client, "r1") == [
        ("arrived", None),
        ("dispatched", "one"),
        ("admitted", "one"),
        ("first_token", "one"),
        ("over", None),
    ]

    for told in (running, over):
        assert told.pop("arrived") > 1.7e9
        assert 0 <= told.pop("waited") <= told.pop("first_token")
        told.pop("decisions")
    assert running == {
        "id": "r1",
        "client_id": "mine",
        "route": "conversation",
        "model": "played",
        "priority": "high",
        "state": "running",
        "why": None,
        "agent": "one",
        "agent_id": "id-of-one",
        "prompt_tokens": 5,
        "cached_tokens": 3,
        "tokens": 2,
        "ended": None,
        "outcome": None,
        "message": None,
        "moves": 0,
    }
    assert over.pop("ended") > 0
    assert over == {
        **{key: value for key, value in running.items() if key != "ended"},
        "state": "over",
        "cached_tokens": 0,  # as the agent counts at the end
        "outcome": "stop",
    }


async def test_why_a_request_waited_and_where_it_went_is_told(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    one = play("one", slots=1)
    ask(balancer, R1)
    ask(balancer, R2)
    assert (await request(client, "r2"))["why"] == "1 slot of 1 agent, all taken"

    one.finish(R1)
    one.say(Busy(R2))
    two = play("two", slots=1)
    two.leave()
    one.report(slots=1)
    one.finish(R2)

    assert await decisions(client, "r2") == [
        ("arrived", None),
        ("buffered", None),
        ("dispatched", "one"),
        ("refused", "one"),
        ("buffered", None),
        ("dispatched", "two"),
        ("agent_lost", "two"),
        ("buffered", None),
        ("dispatched", "one"),
        ("over", None),
    ]
    told = await request(client, "r2")
    assert (told["moves"], told["why"]) == (1, "1 slot of 1 agent, all taken")


async def test_what_the_scheduler_notes_is_told_with_its_reason(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    agent = play("one", slots=1)
    ask(balancer, R1)
    balancer.noted(agent.agent_id, Noted(R1, Note.WAITS_FOR_CELLS, "none are left"))
    balancer.noted(agent.agent_id, Noted(R2, Note.WAITS_FOR_CELLS, "of whom?"))

    told = (await request(client, "r1"))["decisions"][-1]

    assert told.pop("at") >= 0
    assert told == {
        "by": "scheduler",
        "agent": "one",
        "what": "waits_for_cells",
        "why": "none are left",
    }


async def test_what_an_agent_says_of_another_ones_request_is_not_believed(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play("one", slots=1)
    other = play("other", slots=0)
    ask(balancer, R1)
    balancer.noted(other.agent_id, Noted(R1, Note.PAUSED, "so it says"))

    assert await decisions(client, "r1") == [("arrived", None), ("dispatched", "one")]


@pytest.mark.parametrize(
    ("slots", "more", "why"),
    [
        (None, {}, "there is no agent"),
        (0, {}, "none of 1 agent serves its model now"),
        (1, {"draining": True}, "1 agent for it, but drained, or changing the model"),
    ],
)
async def test_why_it_waits(
    client: httpx.AsyncClient,
    balancer: Balancer,
    play: Play,
    slots: int | None,
    more: dict[str, Any],
    why: str,
) -> None:
    if slots is not None:
        play("one", slots=slots, **more)
    ask(balancer, R1)

    assert (await request(client, "r1"))["why"] == why


async def test_one_whose_client_left_is_told_as_cancelled(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play("one", slots=1)
    ask(balancer, R1)
    balancer.cancel(R1)

    told = await request(client, "r1")

    assert (told["state"], told["outcome"]) == ("over", "cancelled")
    state = (await client.get("/api/v1/overview")).json()
    assert state["balancer"]["requests"] == {
        "waiting": 0,
        "running": 0,
        "cancelling": 1,
        "over": {"cancelled": 1},
    }


async def test_failures_are_among_the_errors_without_what_quotes_prompts(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    agent = play("one", slots=2)
    ask(balancer, R1)
    ask(balancer, R2)
    agent.say(Failed(R1, ErrorCode.CHAT_TEMPLATE_ERROR, "it says: my secret"))
    agent.say(Failed(R2, ErrorCode.DECODE_FAILED, "llama_decode returned -3"))
    agent.leave()

    errors = (await client.get("/api/v1/overview")).json()["errors"]

    assert [(e["code"], e["message"], e["request_id"], e["agent"]) for e in errors.values()] == [
        ("chat_template_error", "", "r1", "one"),
        ("decode_failed", "llama_decode returned -3", "r2", "one"),
        ("agent_lost", "it was lost", None, "one"),
    ]
    assert "secret" not in (await client.get("/api/v1/overview")).text


async def test_what_is_refused_at_the_border_is_among_the_errors(
    client: httpx.AsyncClient,
) -> None:
    for _ in range(3):
        await client.post("/v1/completions", json={"prompt": 7})

    (error,) = (await client.get("/api/v1/overview")).json()["errors"].values()

    assert (error["code"], error["count"]) == ("invalid_request", 3)


async def test_an_agent_is_told_whole(client: httpx.AsyncClient, play: Play) -> None:
    issue = AgentIssue(IssueKind.MODEL_CANNOT_BE_LOADED, "/m.gguf", "broken", template="T")
    agent = play("one", slots=2, labels=("gpu",), fleet="small")
    agent.report(
        slots=2,
        held=True,
        draining=True,
        issues=(issue,),
        applied=7,
        figures=Figures(cells_total=10, decode_rate=2.5),
        model_names=("org/played", "played.gguf", "played"),
    )

    told = (await client.get("/api/v1/overview")).json()["agents"]["id-of-one"]

    figures = told.pop("figures")
    assert (figures["cells_total"], figures["decode_rate"]) == (10, 2.5)
    assert told == {
        "id": "id-of-one",
        "name": "one",
        "labels": ["gpu"],
        "fleet": "small",
        "state": "held",
        "held": True,
        "slots": 2,
        "slots_busy": 0,
        "slots_desired": 2,
        "model": "played",
        "model_path": "/models/played.gguf",
        "uses_chat_template_override": False,
        "output_format": "",
        "application": "Applied",
        "applied": 7,
        "download": None,
        "issues": [{"kind": "ModelCannotBeLoaded", "model_path": "/m.gguf", "detail": "broken"}],
        "phase": "ready",
        "phases": {},
        "step_age": None,
    }


async def test_the_newest_requests_come_first(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    agent = play("one", slots=3)
    for request_id in (R1, R2, R3):
        ask(balancer, request_id)
    agent.finish(R2)
    agent.finish(R1)

    listed = (await client.get("/api/v1/requests")).json()["requests"]

    assert [each["id"] for each in listed] == ["r3", "r1", "r2"]


async def test_what_runs_is_shown_however_many_wait(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    balancer._buffer_capacity = 10_000  # pyright: ignore[reportPrivateUsage]
    balancer._dispatcher._buffer.capacity = 10_000  # pyright: ignore[reportPrivateUsage]
    play("one", slots=2)
    for n in range(2 * MOST_OPEN):
        ask(balancer, RequestId(f"r{n}"))

    shown = (await client.get("/api/v1/overview")).json()["requests"]

    states = [each["state"] for each in shown.values()]
    assert (states.count("running"), len(states)) == (2, MOST_OPEN)
    assert f"r{MOST_OPEN - 1}" in shown, "who is next in the queue"
    assert f"r{MOST_OPEN}" not in shown


async def test_a_request_that_waits_again_has_no_agent_and_says_why(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    agent = play("one", slots=1)
    ask(balancer, R1)
    agent.say(Busy(R1))

    told = await request(client, "r1")

    assert (told["state"], told["agent"], told["waited"], told["moves"]) == (
        "waiting",
        None,
        None,
        0,
    )
    assert told["why"] == "1 slot of 1 agent, all taken"


async def test_a_request_is_found_by_what_its_client_calls_it(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    for request_id in (R1, R2):
        ask(balancer, request_id, terms=Terms(client_id="mine"))

    assert (await request(client, "mine"))["id"] == "r2"


async def test_of_an_agent_that_says_nothing_the_step_grows_older(
    client: httpx.AsyncClient, balancer: Balancer, play: Play
) -> None:
    play("one", slots=1).report(slots=1, step_age=5.0)
    (agent,) = balancer._agents.values()  # pyright: ignore[reportPrivateUsage]
    agent.told_at -= 100

    assert (await client.get("/api/v1/overview")).json()["agents"]["id-of-one"]["step_age"] >= 105


async def test_what_operators_mistype_and_cancel_is_no_error_of_the_fleet(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    ask(balancer, R1)
    await client.delete("/api/v1/requests/r1")
    await client.get("/api/v1/requests/nothing")
    await client.post("/api/v1/agent/nobody/drain")

    assert (await client.get("/api/v1/overview")).json()["errors"] == {}
