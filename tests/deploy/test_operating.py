"""The commands of operators, as processes against the real balancer."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from commands import headrace, on_terminal
from engines import HeldEngine
from linked import PlayedModels, RunningAgent
from played import Play, Until, ask, want

from agent.echo import EchoEngine
from balancer.balancer import Balancer
from balancer.desired_state import ChatTemplateOverride, LocalModel
from balancer.link import AgentListener
from common.ids import AgentId, RequestId
from common.messages import PROTOCOL, Cancel, Join, Status
from common.models import UrlModel

R1, R2, R3 = (RequestId(f"r{n}") for n in range(1, 4))

CTRL_C = "\x03"

OLD, NEW, MISSING = "/models/old.gguf", "/models/new.gguf", "/models/missing.gguf"


@pytest.fixture
def port(address: str) -> str:
    return address.rpartition(":")[2]


async def told(*arguments: str) -> dict[str, Any]:
    """The one line of JSON that a command prints."""
    done = await headrace(*arguments, "--json")
    assert (done.status, done.errors, len(done.output.splitlines())) == (0, "", 1)
    return json.loads(done.output)


# Seeing


async def test_status_is_a_table_or_json(port: str, play: Play) -> None:
    play("one", slots=3)

    shown = await headrace("status", "--port", port)
    overview = await told("status", "--port", port)

    assert "one" in shown.output
    assert "ready" in shown.output
    assert overview["agents"]["id-of-one"]["slots"] == 3


async def test_explain_tells_the_way_of_a_request(
    port: str, play: Play, balancer: Balancer
) -> None:
    agent = play("one")
    ask(balancer, R1)
    await agent.asked()
    agent.say_token(R1, "a")
    agent.finish(R1)

    shown = await headrace("explain", "--port", port, R1)
    raw = await told("explain", "--port", port, R1)

    words = [line.split()[2:5] for line in shown.output.splitlines()[5:]]
    assert words[0][:2] == ["balancer", "arrived"]
    assert ["dispatcher", "one", "dispatched"] in words
    assert ["scheduler", "one", "first"] in words
    assert "over after" in shown.output
    assert [each["what"] for each in raw["decisions"]][-1] == "over"


async def test_what_nobody_knows_is_one_line_and_status_1(port: str) -> None:
    for command in ("explain", "cancel"):
        done = await headrace(command, "--port", port, "nope")

        assert (done.status, done.output) == (1, "")
        assert done.errors.startswith("headrace: ")
        assert len(done.errors.splitlines()) == 1


async def test_a_request_is_found_by_what_its_client_calls_it(
    port: str, play: Play, client: Any, balancer: Balancer
) -> None:
    agent = play("one")
    asked = asyncio.create_task(
        client.post(
            "/v1/completions",
            json={"model": "played", "prompt": "Hi", "max_tokens": 5},
            headers={"x-client-request-id": "question-1"},
            timeout=None,
        )
    )
    request = await agent.asked()

    shown = await headrace("explain", "--port", port, "question-1")
    done = await told("cancel", "--port", port, "question-1")

    assert "its client calls it question-1" in " ".join(shown.output.split())
    assert shown.output.startswith(request.request_id)
    assert done == {"cancelled": "question-1"}
    assert (await asked).status_code == 410


# Acting


@pytest.fixture
def engine() -> HeldEngine:
    """Of the old model."""
    return HeldEngine(slots=2, context=256)


@pytest.fixture
def models(engine: HeldEngine) -> PlayedModels:
    return PlayedModels(**{OLD: engine, NEW: EchoEngine(slots=2, context=256)})


@pytest.fixture
async def start(
    balancer: Balancer, models: PlayedModels, engine: HeldEngine, until: Until
) -> AsyncGenerator[Callable[[int], Awaitable[None]]]:
    """Let so many real agents join, all called one, which serve the old model."""
    want(balancer, model=LocalModel(LocalToAgent=OLD))
    listener = AgentListener(balancer)
    url = f"ws://127.0.0.1:{await listener.start('127.0.0.1', 0)}"
    agents: list[RunningAgent] = []

    async def start(count: int) -> None:
        agents.extend(RunningAgent(url, models=models) for _ in range(count))
        await until(lambda: [a.status.model_path for a in balancer.agents] == [OLD] * count)

    yield start
    engine.open()
    for each in agents:
        each.agent.stop()
    for each in agents:
        await each.ended()
    await listener.stop()


Start = Callable[[int], Awaitable[None]]


async def test_a_drained_agent_gets_nothing_until_it_is_undrained(
    port: str, start: Start, balancer: Balancer, until: Until
) -> None:
    await start(1)

    drained = await told("drain", "--port", port, "one", "--wait")
    ask(balancer, R1)
    assert balancer.buffered == 1
    shown = await headrace("status", "--port", port)
    (agent,) = balancer.agents
    undrained = await told("undrain", "--port", port, agent.agent_id)

    who = {"id": agent.agent_id, "name": "one"}
    assert drained == {"drained": [who], "idle": True}
    assert undrained == {"undrained": [who]}
    assert "held" in shown.output
    await until(lambda: balancer.buffered == 0)


async def test_drain_waits_until_nothing_runs_there(
    port: str, start: Start, balancer: Balancer, engine: HeldEngine
) -> None:
    await start(1)
    ask(balancer, R1)
    async with on_terminal("drain", "--port", port, "one", "--wait") as terminal:
        await terminal.shows("one: 1 request(s) run")

        engine.open()

        await terminal.shows("nothing runs there any more")
        assert await terminal.ended() == 0


async def test_drain_waits_until_the_agent_says_that_it_takes_nothing_new(
    port: str, play: Play
) -> None:
    agent = play("one")
    async with on_terminal("drain", "--port", port, "one", "--wait") as terminal:
        await terminal.shows("one gets nothing new")
        await terminal.shows("one: has not said yet that it takes nothing new")

        agent.report(slots=1, slots_processing=1)  # it was dispatched a moment before
        await terminal.shows("one: 1 request(s) run")
        agent.report(slots=1, held=True)

        await terminal.shows("nothing runs there any more")
        assert await terminal.ended() == 0


async def test_an_agent_that_never_says_so_is_an_error(port: str, play: Play) -> None:
    play("one")

    done = await headrace("drain", "--port", port, "one", "--wait")

    assert done.status == 1
    assert done.output.splitlines()[-1] == "one: has not said yet that it takes nothing new"
    assert done.errors == (
        "headrace: one: not drained 10 s after it was asked: it does not answer, "
        "or somebody has undrained it\n"
    )


async def test_an_interrupted_wait_leaves_the_agent_drained(
    port: str, start: Start, balancer: Balancer, until: Until
) -> None:
    await start(1)
    ask(balancer, R1)
    async with on_terminal("drain", "--port", port, "one", "--wait") as terminal:
        await terminal.shows("one: 1 request(s) run")
        terminal.type(CTRL_C)

        assert await terminal.ended() == 130
        await terminal.shows("undrain lets it take requests again")
    await until(lambda: all(agent.status.held for agent in balancer.agents))


async def test_a_name_that_several_have_is_refused_with_their_ids_unless_all_are_meant(
    port: str, balancer: Balancer, play: Play
) -> None:
    play("twin")
    other = Join(
        protocol=PROTOCOL,
        agent_id=AgentId("second"),
        name="twin",
        status=Status(version=1, slots_desired=1, slots_total=1, slots_processing=0),
    )
    balancer.join(other, lambda _data: None, lambda _reason: None)

    refused = await headrace("drain", "--port", port, "twin")
    both = await told("drain", "--port", port, "twin", "--all")

    assert refused.status == 1
    assert refused.errors == (
        "headrace: 2 agents are called 'twin': id-of-twin, second; say --all, or an id\n"
    )
    assert {each["id"] for each in both["drained"]} == {"id-of-twin", "second"}


async def test_an_agent_that_nobody_knows_is_refused_with_those_that_there_are(
    port: str, play: Play
) -> None:
    play("one")

    done = await headrace("drain", "--port", port, "other")

    assert (done.status, done.output) == (1, "")
    assert done.errors == "headrace: there is no agent 'other'; there are: one\n"


async def test_names_in_errors_cannot_steer_the_terminal(port: str, play: Play) -> None:
    play("\x1b[2Jone")

    done = await headrace("drain", "--port", port, "other")

    assert done.errors == "headrace: there is no agent 'other'; there are: \ufffd[2Jone\n"


async def test_a_request_is_cancelled(port: str, play: Play, balancer: Balancer) -> None:
    agent = play("one")
    ask(balancer, R1)
    await agent.asked()

    done = await told("cancel", "--port", port, R1)

    assert done == {"cancelled": R1}
    assert await agent.next_frame() == Cancel(R1)


async def test_a_fleet_is_scaled(port: str, client: Any) -> None:
    fleet = {"model": {"LocalToAgent": "/m.gguf"}, "slots": 3, "max": 2}
    assert (await client.put("/api/v1/fleets/small", json=fleet)).status_code == 204

    scaled = await told("scale", "--port", port, "small", "--max", "5")
    refused = await headrace("scale", "--port", port, "small", "--min", "9")
    unknown = await headrace("scale", "--port", port, "large", "--min", "1")

    assert scaled == {"fleet": "small", "min": 0, "max": 5}
    now = (await client.get("/api/v1/fleets/small")).json()["fleet"]
    assert (now["slots"], now["max"], now["min"]) == (3, 5, 0)
    assert (refused.status, unknown.status) == (1, 1)
    assert "min (9) is more than max (5)" in refused.errors
    assert unknown.errors == "headrace: there is no such fleet\n"


# A change of the model, with real agents


async def test_a_swap_is_waited_for_until_all_agents_serve_the_model(
    port: str, balancer: Balancer, start: Start
) -> None:
    await start(2)

    done = await told("swap", "--port", port, NEW)

    assert done == {"model": {"LocalToAgent": NEW}, "serving": 2, "problem": None}
    assert [agent.status.model_path for agent in balancer.agents] == [NEW, NEW]


async def test_a_swap_tells_what_each_agent_does_in_plain_lines(port: str, start: Start) -> None:
    await start(2)

    done = await headrace("swap", "--port", port, NEW)

    assert (done.status, done.errors) == (0, "")
    lines = done.output.splitlines()
    assert lines.count("one: done") == 2
    assert lines[-1] == "2 agent(s) serve it"


async def test_a_swap_that_an_agent_cannot_follow_has_status_1_and_the_reason(
    port: str, balancer: Balancer, start: Start
) -> None:
    await start(2)

    done = await headrace("swap", "--port", port, MISSING, "--json")

    assert done.status == 1
    problem = json.loads(done.output)["problem"]
    assert problem.startswith("one cannot serve it")
    assert problem.endswith(f"ModelFileDoesNotExist: {MISSING}: it is not here")
    assert done.errors == f"headrace: {problem}\n"
    assert [agent.status.model_path for agent in balancer.agents] == [OLD, OLD]


async def test_an_interrupted_swap_goes_on(
    port: str, balancer: Balancer, models: PlayedModels, start: Start
) -> None:
    await start(2)
    models.fetches = True
    async with on_terminal("swap", "--port", port, NEW) as terminal:
        await terminal.shows("fetching slow.gguf, 50% of 2 B", times=2)
        terminal.type(CTRL_C)

        assert await terminal.ended() == 130
        await terminal.shows("the agents go on changing their model")
    assert balancer.desired_state.model == LocalModel(LocalToAgent=NEW)


async def test_a_swap_need_not_be_waited_for(port: str, balancer: Balancer) -> None:
    done = await told("swap", "--port", port, "https://host/m.gguf", "--no-wait")

    assert done == {
        "model": {"Url": {"url": "https://host/m.gguf"}},
        "serving": None,
        "problem": None,
    }
    assert balancer.desired_state.model_reference == UrlModel("https://host/m.gguf")


async def test_a_swap_without_agents_is_over_at_once(port: str) -> None:
    done = await headrace("swap", "--port", port, NEW)

    assert (done.status, done.errors) == (0, "")
    assert done.output == "no agent follows the desired state now; those that come will serve it\n"


async def test_a_projector_goes_with_its_model(port: str, balancer: Balancer) -> None:
    await told("swap", "--port", port, "/m.gguf", "--projector", "/p.gguf", "--no-wait")
    assert balancer.desired_state.multimodal_projection == LocalModel(LocalToAgent="/p.gguf")

    done = await headrace("swap", "--port", port, "None", "--no-wait")

    assert done.output == "there is no projector any more: it belonged to the other model\n"
    assert balancer.desired_state.multimodal_projection == "None"
    assert balancer.desired_state.model == "None"


async def test_a_chat_template_is_not_used_with_another_model_unless_it_is_kept(
    port: str, balancer: Balancer
) -> None:
    template = ChatTemplateOverride(content="{{ messages }}")
    want(balancer, chat_template_override=template, use_chat_template_override=True)

    kept = await headrace("swap", "--port", port, "/m.gguf", "--keep-template", "--no-wait")
    assert (kept.output, balancer.desired_state.template) == ("", template)
    again = await headrace("swap", "--port", port, "/m.gguf", "--no-wait")
    assert (again.output, balancer.desired_state.template) == ("", template)
    done = await headrace("swap", "--port", port, "/other.gguf", "--no-wait")

    assert done.output == (
        "the chat template is the model's own again: the other one belonged to the other model "
        "(--keep-template keeps it)\n"
    )
    assert balancer.desired_state.template is None
    assert balancer.desired_state.chat_template_override == template


async def test_scale_wants_to_know_what() -> None:
    done = await headrace("scale", "small")

    assert done.status == 2
    assert "--min" in done.errors


# Completion of names


async def completed(words: str) -> list[str]:
    """What bash is offered for the last word."""
    code = """
import sys
import deploy.operating
deploy.operating.COMPLETION_TIMEOUT = 60
sys.argv[0] = "headrace"
from deploy.cli import main
main()
"""
    told = {
        "_HEADRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env={**os.environ, **told}, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode().split()


async def test_names_of_agents_and_fleets_are_completed(port: str, play: Play, client: Any) -> None:
    for name in ("gpu-1", "gpu-2", "cpu-1", "gpu-\x1b[2J"):
        play(name)
    await client.put("/api/v1/fleets/small", json={"model": {"LocalToAgent": "/m.gguf"}})

    assert await completed(f"headrace drain --port {port} gpu") == ["gpu-1", "gpu-2"]
    assert await completed(f"headrace undrain --port {port} c") == ["cpu-1"]
    assert await completed(f"headrace scale --port {port} s") == ["small"]
    assert await completed("headrace drain --port 1 gpu") == []
