"""An operator changes the model of a running fleet, and no client notices more than time."""

import json
import math
import shutil
import signal
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from file_server import FileServer, stall_after
from product import Command, Up, free_port, start_up

from deploy.model import default_model

ROUTE = "/api/v1/continue_from_raw_prompt"
STATE = "/api/v1/balancer_desired_state"
BODY: dict[str, Any] = {
    "raw_prompt": "The capital of France is",
    "max_tokens": 8,
    "sampling": {"temperature": 0, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model: the same weights under another name."""
    return Path(shutil.copy(default_model(), tmp_path_factory.mktemp("models") / "other.gguf"))


def want(up: Up, **changes: Any) -> None:
    state = up.client.get(STATE).json()
    up.client.put(STATE, json={**state, **changes}).raise_for_status()


def want_model(up: Up, path: Path | str) -> None:
    want(up, model={"LocalToAgent": str(path)})


def serves(agents: list[dict[str, Any]], path: Path | str, count: int = 1) -> bool:
    return len(agents) == count and all(
        agent["model_path"] == str(path)
        and agent["slots_total"] > 0
        and agent["state_application_status"] == "Applied"
        for agent in agents
    )


@dataclass
class Client:
    """Asks again and again, until told to stop."""

    up: Up
    stop: threading.Event
    answers: int = 0
    failures: list[Any] = field(default_factory=list[Any])
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self.up.address, timeout=120, trust_env=False) as client:
            while not self.stop.is_set():
                try:
                    response = client.post(ROUTE, json=BODY)
                    last = json.loads(response.text.splitlines()[-1])
                    usage = last["Response"]["response"]["GeneratedToken"]["Done"]["usage"]
                except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
                    self.failures.append(repr(error))
                    return
                if usage["content_tokens"] != BODY["max_tokens"]:
                    self.failures.append(usage)
                self.answers += 1


@contextmanager
def load(up: Up, clients: int) -> Generator[list[Client]]:
    stop = threading.Event()
    running = [Client(up, stop) for _ in range(clients)]
    try:
        yield running
    finally:
        stop.set()
        for client in running:
            client.thread.join()


@pytest.mark.parametrize("agents", [1, 2])
def test_ten_swaps_under_load_fail_no_request(other: Path, agents: int) -> None:
    paths = [other, default_model()]
    # Patience is far shorter than ten swaps, and shorter than one of a large model.
    options = ["--agents", str(agents), "--slots", "4", "--threads", "1", "--buffer-timeout", "5"]
    with start_up(*options) as up:
        least_serving = agents
        with load(up, 8) as clients:
            for n in range(10):
                want_model(up, paths[n % 2])
                for state in up.follow():
                    linked = state["agents"]
                    serving = sum(agent["slots_total"] > 0 for agent in linked)
                    least_serving = min(least_serving, serving)
                    if serves(linked, paths[n % 2], agents):
                        break

    assert [client.failures for client in clients] == [[]] * 8
    assert all(client.answers > 3 for client in clients)
    assert least_serving == agents - 1, "one after another"


@pytest.fixture(scope="module")
def up(other: Path) -> Generator[Up]:
    with start_up("--slots", "2") as up:
        yield up


def answer(up: Up, **changes: Any) -> list[dict[str, Any]]:
    lines = up.client.post(ROUTE, json={**BODY, **changes}).text.splitlines()
    return [json.loads(line)["Response"]["response"]["GeneratedToken"] for line in lines]


def test_a_stream_that_runs_finishes_before_the_swap_and_a_late_request_waits(
    up: Up, other: Path
) -> None:
    before = up.agents()[0]["model_path"]
    wanted = other if before != str(other) else default_model()
    with up.client.stream("POST", ROUTE, json={**BODY, "max_tokens": 200}) as running:
        lines = running.iter_lines()
        next(lines)
        want_model(up, wanted)
        up.until(lambda agents: agents[0]["slots_total"] == 0)
        late: list[list[dict[str, Any]]] = []
        waiting = threading.Thread(target=lambda: late.append(answer(up)))
        waiting.start()
        up.until_buffered(1)
        assert up.agents()[0]["model_path"] == before

        rest = list(lines)

    assert "Done" in rest[-1]
    up.until(lambda agents: serves(agents, wanted))
    waiting.join()
    assert "Done" in late[0][-1]


@pytest.mark.parametrize("size", [0, 3, 1000, 50_000])
def test_a_broken_model_leaves_the_old_one_serving_and_shows_why(
    up: Up, tmp_path: Path, size: int
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model().read_bytes()[:size])
    before = up.agents()[0]["model_path"]

    want_model(up, broken)
    (agent,) = up.until(lambda agents: bool(agents[0]["issues"]))

    assert [*agent["issues"][0]] == ["ModelCannotBeLoaded"]
    assert (agent["model_path"], agent["slots_total"]) == (before, 2)
    assert "Done" in answer(up)[-1]
    told = up.client.get(f"/api/v1/agent/{agent['id']}/status").json()
    assert told["status"]["issues"][0]["detail"]
    want_model(up, before)
    up.until(lambda agents: serves(agents, before))


def test_a_model_too_large_for_the_memory_leaves_the_old_one_serving(up: Up) -> None:
    """What only a real load finds out: the old model is let go, and loaded again."""
    before = up.agents()[0]["model_path"]
    overrides = {
        "overrides": [{"name": "agent-1", "flash_attention": "off", "v_cache_dtype": "Q8_0"}]
    }
    route = "/api/v1/agent_overrides"

    up.client.put(route, json=overrides).raise_for_status()
    (agent,) = up.until(lambda agents: agents[0]["state_application_status"] == "Stuck")

    assert (agent["model_path"], agent["slots_total"]) == (before, 2)
    assert [*agent["issues"][0]] == ["ModelCannotBeLoaded"]
    assert "Done" in answer(up)[-1]
    up.client.put(route, json={"overrides": []}).raise_for_status()
    up.until(lambda agents: serves(agents, before))


def test_overrides_by_name_and_by_label_hold_for_some_agents_only(up: Up) -> None:
    command = Command("agent", "--balancer", up.balancer, "--name", "by-hand", "--label", "small")
    try:
        up.until(lambda agents: len(agents) == 2 and all(a["slots_total"] for a in agents))
        overrides = [{"label": "small", "slots": 3, "context_size": 128}, {"name": "x", "slots": 9}]

        up.client.put("/api/v1/agent_overrides", json={"overrides": overrides}).raise_for_status()
        up.until(lambda agents: {a["name"]: a["slots_total"] for a in agents}.get("by-hand") == 3)

        assert {a["name"]: a["slots_total"] for a in up.agents()} == {"agent-1": 2, "by-hand": 3}
        by_hand = next(a["id"] for a in up.agents() if a["name"] == "by-hand")
        told = up.client.get(f"/api/v1/agent/{by_hand}/status").json()
        assert told["status"]["figures"]["cells_total"] in {0, 128}
    finally:
        up.client.put("/api/v1/agent_overrides", json={"overrides": []})
        command.stop(signal.SIGTERM)
        command.kill_the_rest()
        up.until(lambda agents: len(agents) == 1 and agents[0]["slots_total"] == 2)


def test_a_template_override_changes_prompts_at_once_and_is_shown(up: Up) -> None:
    conversation = {
        "add_generation_prompt": True,
        "conversation_history": [{"role": "user", "content": "Hi"}],
        "enable_thinking": False,
        "max_tokens": 1,
    }

    def prompt_tokens() -> int:
        route = "/api/v1/continue_from_conversation_history"
        last = json.loads(up.client.post(route, json=conversation).text.splitlines()[-1])
        return last["Response"]["response"]["GeneratedToken"]["Done"]["usage"]["prompt_tokens"]

    (agent,) = up.agents()
    own = prompt_tokens()
    template = {"content": "{{ messages[0].content }}"}
    want(up, chat_template_override=template, use_chat_template_override=True)
    up.until(lambda agents: agents[0]["uses_chat_template_override"])

    assert prompt_tokens() == 1 < own
    route = f"/api/v1/agent/{agent['id']}/chat_template_override"
    assert up.client.get(route).json() == template
    want(up, use_chat_template_override=False)
    up.until(lambda agents: not agents[0]["uses_chat_template_override"])
    assert prompt_tokens() == own
    assert up.client.get(route).json() is None


def turns(up: Up) -> int:
    """The number of the only agent's latest turn; those of others count on too."""
    (agent,) = up.agents()
    return up.client.get(f"/api/v1/agent/{agent['id']}/status").json()["status"]["turn_taken"]


def test_the_batch_size_of_the_desired_state_bounds_documents(up: Up) -> None:
    """B41: vectors, or a refusal with the true limit."""
    parameters = up.client.get(STATE).json()["inference_parameters"]
    changes = {"n_batch": 513, "enable_embeddings": True}
    texts = {"hello": "Hello", "world": "World", "fits": "word " * 500, "long": "word " * 992}
    batch = [{"id": name, "content": text} for name, text in texts.items()]
    before = turns(up)

    want(up, inference_parameters={**parameters, **changes})
    up.until(lambda _: turns(up) > before)
    response = up.client.post(
        "/api/v1/generate_embedding_batch",
        json={"input_batch": batch, "normalization_method": "None"},
        headers={"user-agent": "test"},  # not the published client, which is told less
    )
    before = turns(up)
    want(up, inference_parameters=parameters)
    up.until(lambda _: turns(up) > before)

    told = [
        json.loads(line)["Response"]["response"]["Embedding"] for line in response.text.splitlines()
    ]
    vectors = [each["Embedding"] for each in told if "Embedding" in each]
    assert {vector["source_document_id"] for vector in vectors} == {"hello", "world", "fits"}
    (refused,) = [each["DocumentExceedsBatchSize"] for each in told[:-1] if "Embedding" not in each]
    assert (refused["source_document_id"], refused["n_batch"]) == ("long", 513)
    assert told[-1] == "Done"


def test_a_vector_for_each_token_of_a_long_document_comes_through(up: Up) -> None:
    """More than Serve's proxy takes in one message."""
    parameters = up.client.get(STATE).json()["inference_parameters"]
    changed = {**parameters, "enable_embeddings": True, "pooling_type": "None"}
    batch = [{"id": "long", "content": "word " * 1500}]

    want(up, inference_parameters=changed)
    response = up.client.post(
        "/api/v1/generate_embedding_batch",
        json={"input_batch": batch, "normalization_method": "None"},
    )
    want(up, inference_parameters=parameters)

    lines = response.text.splitlines()
    assert len(lines) > 1500
    assert json.loads(lines[-1])["Response"]["response"] == {"Embedding": "Done"}


THINKING = """{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}
{# <think></think> <tool_call></tool_call> #}"""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}},
            "required": ["zone"],
        },
    },
}


@pytest.mark.parametrize(
    ("written", "result"),
    [
        (
            '{\\"name\\": \\"clock\\", \\"arguments\\": {\\"zone\\": \\"UTC\\"}}',
            {"ToolCallParsed": [{"name": "clock", "arguments": {"ValidJson": {"zone": "UTC"}}}]},
        ),
        ('{\\"name\\": \\"clock\\", \\"arguments\\": {}}', "ToolCallValidationFailed"),
        ("no json", "ToolCallParseFailed"),
    ],
)
def test_thinking_and_tool_calls_of_a_real_model_are_told_apart(
    up: Up, written: str, result: Any
) -> None:
    """The small model knows neither, so a grammar makes it write them."""
    want(up, chat_template_override={"content": THINKING}, use_chat_template_override=True)
    up.until(lambda agents: agents[0]["uses_chat_template_override"])
    grammar = f'root ::= "<think>hm</think>ok<tool_call>{written}</tool_call>"'
    body = {
        "add_generation_prompt": True,
        "conversation_history": [{"role": "user", "content": "The time?"}],
        "enable_thinking": False,
        "max_tokens": 100,
        "grammar": {"type": "gbnf", "grammar": grammar, "root": "root"},
        "tools": [TOOL],
        "parse_tool_calls": True,
    }

    lines = up.client.post("/api/v1/continue_from_conversation_history", json=body).text
    want(up, use_chat_template_override=False)
    up.until(lambda agents: not agents[0]["uses_chat_template_override"])

    results = [
        json.loads(line)["Response"]["response"]["GeneratedToken"] for line in lines.splitlines()
    ]
    texts: dict[str, str] = {}
    for each in results:
        for kind, value in each.items():
            if kind.endswith("Token"):
                texts[kind] = texts.get(kind, "") + value
    assert texts["ReasoningToken"] == "hm"
    assert texts["ContentToken"] == "ok"
    assert texts["ToolCallToken"] == written.replace('\\"', '"')
    (told,) = (
        each
        for each in results
        if next(iter(each)).startswith(("ToolCallParse", "ToolCallValidation"))
    )
    if isinstance(result, str):
        assert [*told] == [result]
    else:
        (call,) = told["ToolCallParsed"]
        assert call.pop("id")
        assert [call] == result["ToolCallParsed"]
    usage = results[-1]["Done"]["usage"]
    counts = {kind: usage[f"{kind}_tokens"] for kind in ("content", "reasoning", "tool_call")}
    assert all(count > 0 for count in counts.values())
    assert usage["undeterminable_tokens"] == 0


def test_what_the_operator_wanted_survives_a_restart_and_a_killed_writer(
    tmp_path: Path, other: Path
) -> None:
    state = f"file://{tmp_path}/state.json"
    with start_up("--engine", "echo", "--state", state) as first:
        want_model(first, other)
        wanted = first.client.get(STATE).json()
        stop = threading.Event()

        def write() -> None:
            with httpx.Client(base_url=first.address, trust_env=False) as client:
                while not stop.is_set():
                    try:
                        client.put(STATE, json=wanted)
                    except httpx.HTTPError:
                        return

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(0.2)  # many writes; the kill comes somewhere among them
        first.command.kill_the_rest()
        stop.set()
        writer.join()

    with start_up("--engine", "echo", "--state", state) as second:
        assert second.client.get(STATE).json() == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_an_agent_killed_in_a_download_resumes_it_at_its_next_start(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    content = default_model().read_bytes()
    with FileServer() as server:
        server.publish("/m.gguf", content)
        let_go = threading.Event()
        stall = stall_after(len(content) // 2, until=let_go, begun=threading.Event())
        server.plan("/m.gguf", stall)
        options = ("--model", server.url("/m.gguf"), "--name", "fetching", "--slots", "1")
        first = Command("agent", "--balancer", up.balancer, *options)

        def fetched(agents: list[dict[str, Any]]) -> bool:
            mine = [a for a in agents if a["name"] == "fetching"]
            return bool(mine) and mine[0]["download_current"] > 0

        (agent,) = [a for a in up.until(fetched) if a["name"] == "fetching"]
        assert (agent["download_filename"], agent["download_total"]) == ("m.gguf", len(content))
        assert not agent["download_indeterminate"]
        first.kill_the_rest()
        first.ended()
        let_go.set()

        second = Command("agent", "--balancer", up.balancer, *options)
        try:
            up.until(
                lambda agents: any(a["name"] == "fetching" and a["slots_total"] for a in agents)
            )
            begins, resumes = server.ranges("/m.gguf")
            assert (begins, resumes is None) == (None, False)
        finally:
            second.stop(signal.SIGTERM)
            second.kill_the_rest()
    (found,) = tmp_path.rglob("m.gguf")
    assert found.read_bytes() == content


def test_up_fetches_a_model_from_its_address_and_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    with FileServer() as server:
        server.publish("/small.gguf", default_model().read_bytes())
        with start_up("--model", server.url("/small.gguf"), "--slots", "1") as up:
            printed = "\n".join(up.command.lines)
            assert "fetching small.gguf" in printed
            assert "model   small.gguf" in printed
            assert "Done" in answer(up)[-1]


def test_up_says_in_one_line_that_there_is_no_model_at_the_address() -> None:
    with FileServer() as server:
        ports = ["--port", str(free_port()), "--agent-port", str(free_port())]
        command = Command("up", *ports, "--model", server.url("/nope.gguf"))

        assert command.ended() == 1
        assert "ModelDoesNotExistAtUrl" in command.lines[-1]
    assert command.processes() == []


def deadly(path: Path) -> Path:
    """A model with which llama.cpp ends the process, when all of it is loaded."""
    content = default_model().read_bytes()
    key = b"llama.attention.layer_norm_rms_epsilon"
    value = content.index(key) + len(key) + 4  # behind its type
    path.write_bytes(content[:value] + struct.pack("<f", math.nan) + content[value + 4 :])
    return path


def test_a_model_that_kills_its_process_kills_one_agent_only_and_that_once(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    with start_up("--agents", "2", "--slots", "1") as up:
        want_model(up, deadly(tmp_path / "deadly.gguf"))
        agents = up.until(
            lambda agents: any(a["state_application_status"] == "Stuck" for a in agents)
        )

        assert sorted(agent["slots_total"] for agent in agents) == [0, 1]
        (stuck,) = (agent for agent in agents if agent["slots_total"] == 0)
        assert [*stuck["issues"][0]] == ["ModelCannotBeLoaded"]
        assert "Done" in answer(up)[-1]
        status = Command("status", "--port", str(up.port))
        assert status.ended() == 0
        printed = "\n".join(status.lines)
        assert "No further agent changes its model" in printed
        assert "the process ended 2 times while it was loaded" in printed

        want_model(up, other)
        up.until(lambda agents: serves(agents, other, 2))
