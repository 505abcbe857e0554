"""An agent changes its model, or its template."""

import asyncio

import pytest
from engines import HeldEngine, HeldVocabulary
from linked import (
    HELD,
    OTHER,
    R1,
    R2,
    R3,
    PlayedBalancer,
    PlayedModels,
    RunningAgent,
    ask,
    to_tokenize,
    wanted,
)

from common.errors import ModelError, ProjectorError
from common.ids import TokenId
from common.messages import (
    Busy,
    Cancel,
    Described,
    Generate,
    Swap,
    Tokenize,
    Tokenized,
)
from common.models import (
    Application,
    Download,
    IssueKind,
    LocalModel,
    NoModel,
)


async def test_a_model_without_a_template_is_an_issue(
    balancer: PlayedBalancer, running: RunningAgent, engine: HeldEngine
) -> None:
    engine.chat_template = None
    link = await balancer.link()

    await link.send(wanted())
    status = await link.status(lambda status: status.slots_total > 0)
    assert [issue.kind for issue in status.issues] == [IssueKind.UNABLE_TO_FIND_CHAT_TEMPLATE]

    await link.send(wanted(chat_template="{{ messages }}"))
    status = await link.status(lambda status: status.uses_chat_template_override)
    assert status.issues == ()

    await link.send(wanted(embeddings_only=True))
    status = await link.status(lambda status: not status.uses_chat_template_override)
    assert status.issues == ()


async def test_a_template_that_does_not_compile_leaves_the_old_one_in_use(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.send(wanted(chat_template="{{ messages }}"))
    await link.status(lambda status: status.uses_chat_template_override)

    await link.send(wanted(chat_template="{% for"))
    status = await link.status(lambda status: status.application is Application.STUCK)

    (issue,) = status.issues
    assert issue.kind is IssueKind.CHAT_TEMPLATE_DOES_NOT_COMPILE
    assert issue.template == "{% for"
    assert (status.slots_total, status.uses_chat_template_override) == (2, True)


async def test_what_is_loaded_is_described_over_every_link(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    first = await balancer.link()
    assert await first.description() == Described(None, None)
    await first.send(wanted(chat_template="{{ messages }}"))
    described = Described({"general.architecture": "echo"}, "{{ messages }}", 32)
    assert await first.description() == described

    first.socket.transport.abort()

    assert await (await balancer.link()).description() == described


async def test_a_swap_waits_for_what_runs_only_so_long_and_then_gives_it_back(
    balancer: PlayedBalancer, engine: HeldEngine, models: PlayedModels
) -> None:
    running = RunningAgent(await balancer.start(), models=models, longest_drain=0)
    other = HeldEngine()
    models.engines[OTHER.path] = other
    link = await balancer.link()
    await link.ready()
    await link.begin(ask(R1, "abc"))

    await link.send(wanted(OTHER, number=2))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))
    await link.status(lambda status: status.swapping)
    engine.open()

    assert (await link.outcome(R1))[1] == Busy(R1)
    assert (await link.status(lambda status: status.turn_taken == 1)).model_path == OTHER.path
    running.agent.stop()
    await running.ended()


async def test_texts_being_tokenized_are_not_given_back(
    balancer: PlayedBalancer, engine: HeldEngine, models: PlayedModels
) -> None:
    running = RunningAgent(await balancer.start(), models=models, longest_drain=0)
    engine.vocabulary = vocabulary = HeldVocabulary()
    models.engines[OTHER.path] = HeldEngine()
    link = await balancer.link()
    await link.ready()
    await link.send(to_tokenize(R1), ask(R2))
    await link.status(lambda status: status.slots_processing == 1)

    try:
        await link.send(wanted(OTHER, number=2))
        await link.status(lambda status: status.awaits_turn)
        await link.send(Swap(1))
        assert await link.event() == Busy(R2)
    finally:
        vocabulary.may_go_on.set()

    assert await link.event() == Tokenized(R1, (TokenId(97), TokenId(98)), (b"a", b"b"), 32)
    await link.status(lambda status: status.turn_taken == 1)
    running.agent.stop()
    await running.ended()


async def test_a_model_is_swapped_in_turn_when_nothing_runs(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    models: PlayedModels,
) -> None:
    other = HeldEngine(slots=3, context=64)
    other.open()
    models.engines[OTHER.path] = other
    link = await balancer.link()
    await link.ready()
    await link.begin(ask(R1, "abc"))

    await link.send(wanted(OTHER, number=2))
    status = await link.status(lambda status: status.awaits_turn)
    assert (status.draining, status.model_path, status.applied) == (False, HELD.path, 0)
    await link.send(Swap(7), ask(R2))
    assert await link.event() == Busy(R2)
    status = await link.status(lambda status: status.swapping)
    assert status.draining
    engine.open()
    assert (await link.outcome(R1))[0] == "abc"
    status = await link.status(lambda status: status.turn_taken == 7)

    assert (status.slots_total, status.draining, status.swapping) == (3, False, False)
    assert (status.model_path, status.application) == (OTHER.path, Application.APPLIED)
    assert status.applied == 2
    await link.send(ask(R3, "xyz"))
    assert (await link.outcome(R3))[0] == "xyz"
    assert models.loads == [HELD.path, OTHER.path]


async def test_a_model_that_cannot_be_loaded_leaves_the_old_one_serving_and_says_why(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    models: PlayedModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.swap.PAUSE_IN_TURN", 0.0)
    models.engines[OTHER.path] = ModelError("no memory for it")
    engine.open()
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(OTHER))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))
    status = await link.status(lambda status: status.turn_taken == 1)

    (issue,) = status.issues
    assert (issue.kind, issue.detail) == (IssueKind.MODEL_CANNOT_BE_LOADED, "no memory for it")
    assert (status.application, status.slots_total) == (Application.STUCK, 2)
    assert models.loads == [HELD.path, OTHER.path, OTHER.path, HELD.path]
    await link.send(ask(R1, "abc"))
    assert (await link.outcome(R1))[0] == "abc"


async def test_whatever_a_load_ends_with_leaves_the_old_model_serving(
    balancer: PlayedBalancer,
    running: RunningAgent,
    models: PlayedModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.swap.PAUSE_IN_TURN", 0.0)
    models.engines[OTHER.path] = UnicodeError("not what anybody expected")
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(OTHER))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))

    status = await link.status(lambda status: status.turn_taken == 1)
    assert (status.application, status.slots_total) == (Application.STUCK, 2)


async def test_whatever_a_search_ends_with_leaves_the_old_model_serving(
    balancer: PlayedBalancer, running: RunningAgent, models: PlayedModels
) -> None:
    models.engines[OTHER.path] = UnicodeError("not what anybody expected")
    models.checks = True
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(OTHER))

    status = await link.status(lambda status: status.application is Application.RETRYING)
    assert [issue.detail for issue in status.issues] == ["not what anybody expected"]
    assert status.slots_total == 2


async def test_a_file_that_is_missing_is_told_while_the_old_model_serves(
    balancer: PlayedBalancer, running: RunningAgent
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(LocalModel("/models/nope.gguf")))

    status = await link.status(lambda status: status.application is Application.STUCK)
    assert [issue.kind for issue in status.issues] == [IssueKind.MODEL_FILE_DOES_NOT_EXIST]
    assert status.slots_total == 2


async def test_a_newer_wish_ends_a_download_and_hides_it(
    balancer: PlayedBalancer, running: RunningAgent, models: PlayedModels
) -> None:
    models.fetches = True
    link = await balancer.link()
    await link.send(wanted(LocalModel("/models/slow.gguf")))
    status = await link.status(lambda status: status.download is not None)
    assert status.download == Download("slow.gguf", 1, 2)

    models.fetches = False
    await link.send(wanted())

    status = await link.status(lambda status: status.slots_total > 0)
    assert (status.download, status.issues) == (None, ())


async def test_no_model_may_be_wanted(balancer: PlayedBalancer, running: RunningAgent) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(wanted(NoModel()))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))

    status = await link.status(lambda status: status.turn_taken == 1)
    assert (status.slots_total, status.model_path) == (0, None)
    assert status.application is Application.APPLIED


@pytest.mark.parametrize(
    "frame",
    [
        ask(R1),
        to_tokenize(R1),
    ],
)
async def test_a_swap_waits_for_prompts_that_are_still_prepared_for_nobody(
    balancer: PlayedBalancer,
    running: RunningAgent,
    engine: HeldEngine,
    models: PlayedModels,
    frame: Generate | Tokenize,
) -> None:
    """Their threads use the model's vocabulary, which must not be freed under them."""
    vocabulary = HeldVocabulary()
    engine.vocabulary = vocabulary
    models.engines[OTHER.path] = HeldEngine(slots=2)
    link = await balancer.link()
    await link.ready()
    await link.send(frame)
    await asyncio.to_thread(vocabulary.is_used.wait, 10)

    await link.send(Cancel(R1), wanted(OTHER))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))
    await link.status(lambda status: status.swapping)
    assert models.loads == [HELD.path]

    vocabulary.may_go_on.set()
    await link.status(lambda status: status.turn_taken == 1)
    assert models.loads == [HELD.path, OTHER.path]


async def test_a_projector_that_cannot_be_loaded_leaves_the_old_model_serving_and_says_why(
    balancer: PlayedBalancer,
    running: RunningAgent,
    models: PlayedModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.swap.PAUSE_IN_TURN", 0.0)
    link = await balancer.link()
    await link.ready()
    models.engines[OTHER.path] = ProjectorError("it is for another model")
    models.engines["/p.gguf"] = ModelError("a projector is no model")

    await link.send(wanted(OTHER, multimodal_projection=LocalModel("/p.gguf")))
    await link.status(lambda status: status.awaits_turn)
    await link.send(Swap(1))

    status = await link.status(lambda status: status.turn_taken == 1)
    (issue,) = status.issues
    assert issue.kind is IssueKind.MULTIMODAL_PROJECTION_CANNOT_BE_LOADED
    assert (issue.model_path, issue.detail) == ("/p.gguf", "it is for another model")
    assert (status.application, status.slots_total) == (Application.STUCK, 2)
    assert status.model_path == HELD.path
