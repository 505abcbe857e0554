"""An agent with links to two balancers, whose parts the test plays."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from engines import HeldEngine, HeldVocabulary
from linked import (
    HELD,
    OTHER,
    R1,
    R2,
    R3,
    PlayedBalancer,
    PlayedLink,
    PlayedModels,
    RunningAgent,
    ask,
    to_tokenize,
    wanted,
)

from agent.link import LinkRefusedError
from common.errors import ErrorCode, ModelError
from common.ids import RequestId
from common.messages import (
    REFUSED,
    Busy,
    Cancel,
    Described,
    Failed,
    Finished,
    FinishReason,
    Status,
    Step,
    Swap,
    Tokenized,
)
from common.models import Application, Phase

R4 = RequestId("r4")
LONG = "a longer one"


@pytest.fixture
async def other_balancer() -> AsyncGenerator[PlayedBalancer]:
    balancer = PlayedBalancer()
    yield balancer
    await balancer.stop()


@pytest.fixture
async def running(
    balancer: PlayedBalancer,
    other_balancer: PlayedBalancer,
    engine: HeldEngine,
    models: PlayedModels,
) -> AsyncGenerator[RunningAgent]:
    """With both."""
    urls = [await each.start() for each in (balancer, other_balancer)]
    running = RunningAgent(*urls, models=models)
    yield running
    engine.open()
    running.agent.stop()
    await asyncio.wait({running.task})


@pytest.fixture
async def one(balancer: PlayedBalancer, running: RunningAgent) -> PlayedLink:
    return await balancer.link()


@pytest.fixture
async def two(other_balancer: PlayedBalancer, one: PlayedLink) -> PlayedLink:
    """By then the agent serves."""
    two = await other_balancer.link()
    await one.ready()
    await two.status(lambda status: status.slots_total > 0)
    return two


async def test_each_balancer_hears_of_its_own_requests_and_of_slots_that_others_have(
    one: PlayedLink, two: PlayedLink, engine: HeldEngine
) -> None:
    await one.send(ask(R1, "ab"))
    status = await two.status(lambda status: status.slots_processing == 1)
    assert status.slots_elsewhere == 1
    await two.send(ask(R2, "cd"))
    status = await one.status(lambda status: status.slots_processing == 2)
    assert status.slots_elsewhere == 1
    await one.send(ask(R3))
    assert await one.event() == Busy(R3)
    engine.open()

    for link, request_id, text in ((one, R1, "ab"), (two, R2, "cd")):
        assert (await link.outcome(request_id))[0] == text
        await link.status(lambda status: status.slots_processing == 0)


async def begin_both(one: PlayedLink, two: PlayedLink, engine: HeldEngine) -> None:
    """The first balancer's request has told its first token, and the other's is under way."""
    await one.send(ask(R1, LONG))
    await two.status(lambda status: status.slots_elsewhere == 1)
    await two.send(ask(R2, LONG))
    for link in (one, two):
        await link.status(lambda status: status.slots_processing == 2)
    told: set[RequestId] = set()
    while R1 not in told:
        engine.allow(1)
        told = await one.step()


async def test_a_lost_link_ends_only_what_came_over_it(
    balancer: PlayedBalancer,
    one: PlayedLink,
    two: PlayedLink,
    engine: HeldEngine,
) -> None:
    await begin_both(one, two, engine)

    one.socket.transport.abort()
    again = await balancer.link()
    # What winds up of the old link is not this one's.
    status = await again.status(lambda status: True)
    assert status.slots_elsewhere == status.slots_processing
    engine.open()

    text, end = await two.outcome(R2)
    assert text == LONG
    assert isinstance(end, Finished)
    await again.silent_until(lambda status: status.slots_processing == 0)


async def test_a_balancer_that_is_not_wanted_any_more_loses_its_requests_and_the_other_none(
    other_balancer: PlayedBalancer,
    running: RunningAgent,
    one: PlayedLink,
    two: PlayedLink,
    engine: HeldEngine,
) -> None:
    await begin_both(one, two, engine)

    running.agent.dial([other_balancer.url])
    await one.socket.wait_closed()
    engine.open()

    assert (await two.outcome(R2))[0] == LONG
    assert one.socket.close_code == 1000
    await two.status(lambda status: status.slots_processing == 0)


async def test_what_another_balancer_says_of_a_request_changes_nothing(
    one: PlayedLink, two: PlayedLink, engine: HeldEngine
) -> None:
    await one.begin(ask(R1, "ab"))

    await two.send(Cancel(R1), ask(R1, "cd"), to_tokenize(R1))
    assert await two.event() == Busy(R1)
    failed = await two.event()
    engine.open()

    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.INTERNAL_ERROR
    text, end = await one.outcome(R1)
    assert text == "ab"
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP
    await two.silent_until(lambda status: status.slots_processing == 0)


async def test_a_request_that_goes_by_the_name_of_anothers_question_is_refused(
    one: PlayedLink, other_balancer: PlayedBalancer, engine: HeldEngine
) -> None:
    engine.vocabulary = vocabulary = HeldVocabulary()
    two = await other_balancer.link()
    await one.ready()
    await two.status(lambda status: status.slots_total > 0)
    try:
        await one.send(to_tokenize(R1))
        await asyncio.to_thread(vocabulary.is_used.wait, 10)

        await two.send(ask(R1))

        assert await two.event() == Busy(R1)
    finally:
        vocabulary.may_go_on.set()
    assert isinstance(await one.event(), Tokenized)


async def take_all(one: PlayedLink, two: PlayedLink, engine: HeldEngine) -> None:
    """One balancer takes both slots, the other one is refused, and the first request ends."""
    await one.send(ask(R1, "a"), ask(R2, LONG))
    await two.status(lambda status: status.slots_elsewhere == 2)
    await two.send(ask(R3))
    assert await two.event() == Busy(R3)
    engine.allow(4)
    assert (await one.outcome(R1))[0] == "a"


async def test_a_free_slot_is_first_for_the_balancer_that_has_fewer(
    one: PlayedLink, two: PlayedLink, engine: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.service.OFFER_TIME", 1000.0)
    await take_all(one, two, engine)

    await one.send(ask(R4))
    assert (await one.outcome(R4))[1] == Busy(R4)
    await two.send(ask(R3, "x"))
    engine.open()

    assert (await two.outcome(R3))[0] == "x"


async def test_a_free_slot_that_the_other_balancer_leaves_is_everybodys_soon(
    one: PlayedLink, two: PlayedLink, engine: HeldEngine
) -> None:
    await take_all(one, two, engine)
    await one.status(lambda status: status.slots_elsewhere == 1)

    await one.status(lambda status: status.slots_elsewhere == 0)

    await one.send(ask(R4, "x"))
    engine.open()
    assert (await one.outcome(R4))[0] == "x"


async def test_texts_are_tokenized_for_each_balancer(one: PlayedLink, two: PlayedLink) -> None:
    await two.send(to_tokenize(R1))

    assert isinstance(await two.event(), Tokenized)


async def test_the_newest_wish_counts_whoever_tells_it(
    one: PlayedLink, two: PlayedLink, models: PlayedModels
) -> None:
    models.engines[OTHER.path] = HeldEngine(slots=3)
    await two.send(wanted(OTHER, number=7))
    await two.status(lambda status: status.awaits_turn)

    await one.send(wanted(HELD, number=6), Swap(1))  # an older one comes later

    status = await two.status(lambda status: status.applied == 7)
    assert status.model_path == OTHER.path
    status = await one.status(lambda status: status.applied == 7)
    assert (status.turn_taken, models.loads) == (1, [HELD.path, OTHER.path])


async def test_what_was_wanted_holds_until_no_link_is_left(
    balancer: PlayedBalancer,
    other_balancer: PlayedBalancer,
    one: PlayedLink,
    two: PlayedLink,
) -> None:
    await two.send(wanted(number=7))
    await two.status(lambda status: status.applied == 7)

    two.socket.transport.abort()
    two = await other_balancer.link()
    assert (await two.status(lambda status: True)).applied == 7
    one.socket.transport.abort()
    one = await balancer.link()
    assert (await one.status(lambda status: True)).applied == 7

    async with asyncio.TaskGroup() as group:
        for link in (one, two):
            group.create_task(link.socket.close())
    one = await balancer.link()  # which has forgotten all
    two = await other_balancer.link()
    await one.send(wanted(number=2))
    await two.status(lambda status: status.applied == 2)


async def test_turns_are_told_to_the_balancer_that_gave_them(
    one: PlayedLink, two: PlayedLink, models: PlayedModels
) -> None:
    models.engines[OTHER.path] = HeldEngine()
    await one.send(wanted(OTHER, number=2))
    await two.status(lambda status: status.awaits_turn)

    await two.send(Swap(5))

    status = await two.status(lambda status: status.applied == 2)
    assert status.turn_taken == 5
    status = await one.status(lambda status: status.applied == 2)
    assert status.turn_taken == 0


async def test_a_model_that_is_given_up_is_not_tried_again_because_another_balancer_wants_it(
    one: PlayedLink,
    two: PlayedLink,
    models: PlayedModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.swap.PAUSE_IN_TURN", 0.0)
    models.engines[OTHER.path] = ModelError("no memory for it")
    await one.send(wanted(OTHER, number=2))
    await one.status(lambda status: status.awaits_turn)
    await one.send(Swap(1))
    await one.status(lambda status: status.turn_taken == 1)
    await two.status(lambda status: status.application is Application.STUCK)

    await two.send(wanted(OTHER, number=2), to_tokenize(R1))

    while not isinstance(frame := await two.frame(), Step):  # read behind it
        assert isinstance(frame, Described) or (
            isinstance(frame, Status) and frame.application is Application.STUCK
        )
    await two.send(wanted(HELD, number=3))
    status = await two.status(lambda status: status.applied == 3)
    assert status.application is Application.APPLIED


async def test_what_runs_past_the_drain_is_given_back_to_whom_it_came_from(
    running: RunningAgent, one: PlayedLink, two: PlayedLink, engine: HeldEngine
) -> None:
    await begin_both(one, two, engine)

    draining = asyncio.create_task(running.agent.drain(timeout=0))
    await one.status(lambda status: status.leaving)
    await two.status(lambda status: status.phase is Phase.DRAINING)
    engine.open()

    assert (await one.outcome(R1))[1] == Busy(R1)
    assert (await two.outcome(R2))[1] == Busy(R2)
    await draining
    await running.ended()


async def test_one_balancers_refusal_ends_no_agent_that_another_wants(
    running: RunningAgent, one: PlayedLink, two: PlayedLink, engine: HeldEngine
) -> None:
    engine.open()
    await one.socket.close(REFUSED, "not you")
    await two.send(ask(R1, "ab"))
    assert (await two.outcome(R1))[0] == "ab"

    await two.socket.close(REFUSED, "nor here")

    with pytest.raises(LinkRefusedError, match="nor here"):
        await running.ended()


async def test_the_status_tells_how_long_the_start_took(
    one: PlayedLink, two: PlayedLink, models: PlayedModels
) -> None:
    await two.send(wanted(number=2))

    status = await two.status(lambda status: status.applied == 2)

    assert status.phase is Phase.READY
    parts = {Phase.PROCESS, Phase.DOWNLOAD, Phase.LOAD, Phase.WARM_UP}
    assert status.phases.keys() == parts
    assert all(seconds >= 0 for seconds in status.phases.values())
