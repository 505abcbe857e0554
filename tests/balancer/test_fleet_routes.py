"""The routes of fleets over real HTTP; the supervisor's part is played by the test."""

import asyncio
from dataclasses import fields

import httpx
import pytest
from played import Play, PlayedAgent, ask

from balancer.balancer import Balancer
from balancer.exchange import Exchange
from balancer.fleet_beats import FleetView, MemberView, SeenAgent
from balancer.fleet_plan import FleetReport
from balancer.fleets import MOST_FLEETS, Fleet
from balancer.stored_state import StoredState
from balancer.terms import Terms
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import Event, Failed, Finished
from common.models import Phase

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))
QWEN = {"model": {"LocalToAgent": "/models/qwen.gguf"}, "max": 3}


def with_fleet(balancer: Balancer, **keys: object) -> StoredState:
    fleet = Fleet.model_validate({**QWEN, **keys})
    return balancer.stored.model_copy(update={"fleets": {"qwen": fleet}})


async def put(client: httpx.AsyncClient, name: str, fleet: object) -> int:
    return (await client.put(f"/api/v1/fleets/{name}", json=fleet)).status_code


async def test_a_fleet_that_was_put_is_shown_with_what_the_supervisor_says(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    assert await put(client, "qwen", QWEN) == 204
    report = FleetReport(wanted=2, seen=1, ready=0, starting=1, draining=0, reason="it loads")
    member = MemberView(name="qwen-1", phase=Phase.LOAD, seconds={Phase.NODE: 1.5})
    balancer.supervised({"qwen": FleetView(report=report, agents=(member,))}, leads=True)

    told = (await client.get("/api/v1/fleets/qwen")).json()

    assert told["fleet"]["max"] == 3
    del told["fleet"]
    assert told == {
        "wanted": 2,
        "seen": 1,
        "ready": 0,
        "starting": 1,
        "draining": 0,
        "reason": "it loads",
        "is_stuck": False,
        "lacks_node": False,
        "waiting": 0,
        "agents": [{"name": "qwen-1", "phase": "load", "seconds": {"node": 1.5}, "problem": None}],
    }
    assert list((await client.get("/api/v1/fleets")).json()["fleets"]) == ["qwen"]


async def test_what_nobody_supervises_yet_says_so(client: httpx.AsyncClient) -> None:
    await put(client, "qwen", QWEN)

    told = (await client.get("/api/v1/fleets/qwen")).json()

    assert (told["wanted"], told["seen"], told["is_stuck"]) == (None, 0, False)
    assert "supervisor" in told["reason"]
    assert told.keys() == {each.name for each in fields(FleetReport)} | {
        "fleet",
        "waiting",
        "agents",
    }


async def test_what_a_supervisor_said_that_is_silent_now_is_marked(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    await put(client, "qwen", QWEN)
    report = FleetReport(wanted=2, seen=1, ready=0, starting=1, draining=0, reason="it loads")
    balancer.supervised({"qwen": FleetView(report=report)}, leads=True)
    count = balancer.changes.count

    balancer.unsupervised(since=asyncio.get_running_loop().time() - 12, leads=True)
    balancer.unsupervised(since=asyncio.get_running_loop().time() - 13, leads=True)

    assert balancer.changes.count == count + 1
    told = (await client.get("/api/v1/fleets/qwen")).json()
    assert told["reason"] == "the supervisor has not answered for 12 s; before: it loads"
    assert told["wanted"] == 2
    balancer.supervised({"qwen": FleetView(report=report)}, leads=True)
    assert balancer.changes.count == count + 2
    assert (await client.get("/api/v1/fleets/qwen")).json()["reason"] == "it loads"


async def test_a_deleted_fleet_is_gone_and_unknown_ones_are_404(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    await put(client, "qwen", QWEN)

    assert (await client.delete("/api/v1/fleets/qwen")).status_code == 204

    assert balancer.fleets == {}
    assert (await client.get("/api/v1/fleets/qwen")).status_code == 404
    assert (await client.delete("/api/v1/fleets/qwen")).status_code == 404


@pytest.mark.parametrize("name", ["Qwen", "-a", "a_b", "a" * 41, "a.b", "stream"])
async def test_bad_names_are_refused(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.put(f"/api/v1/fleets/{name}", json=QWEN)

    assert answer.status_code == 400
    assert answer.text.startswith("the fleet's name: ")
    assert "request" not in answer.text
    assert "body" not in answer.text


async def test_bad_fleets_are_refused_with_the_reason(client: httpx.AsyncClient) -> None:
    answer = await client.put("/api/v1/fleets/qwen", json={"min": 3, "max": 1})

    assert (answer.status_code, "min (3) is more than max (1)" in answer.text) == (400, True)


async def test_there_is_a_bound_to_how_many_there_are(client: httpx.AsyncClient) -> None:
    for n in range(MOST_FLEETS):
        await put(client, f"f{n}", {})

    assert await put(client, "f0", QWEN) == 204
    assert await put(client, "one-more", {}) == 400


async def test_the_model_of_a_fleet_is_known_before_it_has_an_agent(
    client: httpx.AsyncClient, balancer: Balancer
) -> None:
    with pytest.raises(RequestError, match="qwen"):
        balancer.check_model("qwen")

    await put(client, "qwen", QWEN)

    balancer.check_model("qwen")
    ids = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    assert "qwen" in ids


IMPATIENT = Terms(model="nobody's")


async def last_of(exchange: Exchange) -> Event:
    async with asyncio.timeout(10):
        return [told.event async for told in exchange][-1]


async def test_a_request_for_a_fleet_at_zero_waits_beyond_its_patience() -> None:
    balancer = Balancer(buffer_capacity=2, patience=0.05)
    balancer.want(with_fleet(balancer, max=1))
    waiting = ask(balancer, R1, Terms(model="qwen"))
    assert balancer.waiting == {"qwen": 1}
    assert isinstance(await last_of(ask(balancer, R2, IMPATIENT)), Failed)

    agent = PlayedAgent(balancer, "qwen-1", fleet="qwen", model_names=("qwen",))

    assert (await agent.asked()).request_id == R1
    agent.finish(R1)
    assert isinstance(await last_of(waiting), Finished)


async def test_a_fleet_that_may_have_no_agents_is_not_waited_for() -> None:
    balancer = Balancer(buffer_capacity=2, patience=0.05)
    balancer.want(with_fleet(balancer, max=0))

    outcome = await last_of(ask(balancer, R1, Terms(model="qwen")))

    assert isinstance(outcome, Failed)
    assert outcome.code is ErrorCode.BUFFER_TIMEOUT


async def test_a_fleet_that_grows_is_waited_for_and_one_that_does_not_is_not() -> None:
    balancer = Balancer(buffer_capacity=2, patience=0.05)
    balancer.want(with_fleet(balancer, max=2))
    agent = PlayedAgent(balancer, "qwen-1", fleet="qwen", model_names=("qwen",))
    running = ask(balancer, R3, Terms(model="qwen"))
    report = FleetReport(wanted=2, seen=2, ready=1, starting=1, draining=0, reason=None)
    balancer.supervised({"qwen": FleetView(report=report)}, leads=True)
    waiting = ask(balancer, R1, Terms(model="qwen"))
    await last_of(ask(balancer, R2, IMPATIENT))

    balancer.supervised({}, leads=True)  # it does not come after all

    outcome = await last_of(waiting)
    assert isinstance(outcome, Failed)
    assert outcome.code is ErrorCode.BUFFER_TIMEOUT
    agent.finish(R3)
    assert isinstance(await last_of(running), Finished)


async def test_who_does_not_lead_gives_no_turns(balancer: Balancer, play: Play) -> None:
    balancer.supervised({}, leads=False)
    agent = play("one")
    agent.report(slots=1, awaits_turn=True)
    assert agent.turns == []

    balancer.supervised({}, leads=True)

    assert agent.turns == [1]


async def test_who_hears_nothing_of_the_supervisor_does_not_lead_if_another_may(
    balancer: Balancer, play: Play
) -> None:
    balancer.supervised({}, leads=True)
    balancer.unsupervised(since=0.0, leads=False)
    agent = play("one")
    agent.report(slots=1, awaits_turn=True)

    assert agent.turns == []


async def test_agents_of_fleets_are_seen_with_all_that_runs_there(
    balancer: Balancer, play: Play
) -> None:
    play("by-hand")
    agent = play("qwen-1", slots=4, fleet="qwen")
    agent.report(slots=4, slots_processing=3, phase=Phase.READY, phases={Phase.LOAD: 2.0})

    assert balancer.fleet_agents == [
        SeenAgent(name="qwen-1", phase=Phase.READY, phases={Phase.LOAD: 2.0}, slots=4, processing=3)
    ]


async def test_who_asks_for_no_model_does_not_wait_for_a_fleet_that_may_have_no_agents(
    balancer: Balancer,
) -> None:
    paused, able = Fleet(max=0), Fleet(max=1)
    balancer.want(balancer.stored.model_copy(update={"fleets": {"a": paused, "b": able}}))

    ask(balancer, R1)

    assert balancer.waiting == {"a": 0, "b": 1}


STUCK = FleetReport(
    wanted=1, seen=1, ready=0, starting=1, draining=0, reason="no such file", is_stuck=True
)


async def test_a_fleet_that_is_stuck_is_not_waited_for_and_the_client_is_told_why() -> None:
    balancer = Balancer(buffer_capacity=2, patience=0.05)
    balancer.want(with_fleet(balancer, max=2))
    balancer.supervised({"qwen": FleetView(report=STUCK)}, leads=True)

    for model in ("qwen", None):
        waiting = ask(balancer, R1, Terms(model=model))
        assert balancer.waiting == {"qwen": 1}  # so that it is tried again
        outcome = await last_of(waiting)

        assert isinstance(outcome, Failed)
        assert outcome.code is ErrorCode.BUFFER_TIMEOUT
        assert outcome.message.endswith("; the fleet qwen: no such file")


async def test_who_asks_for_no_model_counts_for_a_fleet_that_is_stuck_only_if_all_are(
    balancer: Balancer,
) -> None:
    fleet = Fleet(max=1)
    balancer.want(balancer.stored.model_copy(update={"fleets": {"a": fleet, "b": fleet}}))
    balancer.supervised({"a": FleetView(report=STUCK)}, leads=True)

    ask(balancer, R1)

    assert balancer.waiting == {"a": 0, "b": 1}


async def test_where_there_are_no_fleets_nobody_is_held() -> None:
    balancer = Balancer(buffer_capacity=2, patience=0.05)
    balancer.want(balancer.stored.put("agent_overrides", at=1))

    outcome = await last_of(ask(balancer, R1))

    assert isinstance(outcome, Failed)
    assert outcome.code is ErrorCode.BUFFER_TIMEOUT


@pytest.mark.parametrize("model", ["qwen", None])
async def test_what_a_full_fleet_cannot_serve_counts_for_another_with_its_model(
    balancer: Balancer, model: str | None
) -> None:
    fleet = Fleet.model_validate({**QWEN, "max": 1})
    balancer.want(balancer.stored.model_copy(update={"fleets": {"a": fleet, "b": fleet}}))
    full = FleetReport(wanted=1, seen=1, ready=1, starting=0, draining=0)
    balancer.supervised({"a": FleetView(report=full)}, leads=True)

    ask(balancer, R1, Terms(model=model))

    assert balancer.waiting == {"a": 0, "b": 1}


async def test_who_asks_for_no_model_counts_rather_for_a_fleet_that_has_a_node(
    balancer: Balancer,
) -> None:
    fleet = Fleet(max=1)
    balancer.want(balancer.stored.model_copy(update={"fleets": {"a": fleet, "b": fleet}}))
    waits = FleetReport(wanted=1, seen=1, ready=0, starting=1, draining=0, lacks_node=True)
    balancer.supervised({"a": FleetView(report=waits)}, leads=True)

    ask(balancer, R1)

    assert balancer.waiting == {"a": 0, "b": 1}


async def test_who_asks_for_no_model_is_held_only_for_the_fleet_that_it_counts_for() -> None:
    balancer = Balancer(buffer_capacity=2, patience=0.05)
    balancer.want(with_fleet(balancer, max=1))
    zero = balancer.stored.fleets | {"zero": Fleet(max=1)}
    balancer.want(balancer.stored.model_copy(update={"fleets": zero}))
    agent = PlayedAgent(balancer, "qwen-1", fleet="qwen", model_names=("qwen",))
    running = ask(balancer, R1)

    outcome = await last_of(ask(balancer, R2))

    assert isinstance(outcome, Failed)
    assert outcome.code is ErrorCode.BUFFER_TIMEOUT
    agent.finish(R1)
    assert isinstance(await last_of(running), Finished)


async def test_agents_are_told_again_what_to_run_only_if_that_was_put_again(
    client: httpx.AsyncClient, play: Play
) -> None:
    agent = play("one")
    before = len(agent.states)

    await put(client, "qwen", QWEN)
    assert len(agent.states) == before

    state = (await client.get("/api/v1/balancer_desired_state")).json()
    assert (await client.put("/api/v1/balancer_desired_state", json=state)).status_code == 204
    assert len(agent.states) == before + 1
