"""The bench against real servers: our balancer with an echo agent, and a small server of OpenAI's form."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from played import Play, Until
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.keys import Keys, Role
from balancer.link import AgentListener
from common.models import EngineChoices
from deploy.agents import make_agent
from deploy.bench import Access, Api, Asking, Bench, Server, ask, find_server, open_client
from deploy.bench_report import BenchError, Closed, Open, Outcome, Plan, Usage
from deploy.settings import AgentSettings, EngineKind
from deploy.tls import client_context

ASKING = Asking(max_tokens=5, timeout=30)
TWO_CLIENTS = Closed(2)


async def run(
    server: Server, *prompts: str, asking: Asking = ASKING, arrivals: Closed | Open = TWO_CLIENTS
) -> list[Outcome]:
    bench = Bench(server, asking, Plan(prompts, arrivals))
    await bench.run()
    assert bench.unfinished == 0
    return bench.outcomes


async def ask_once(server: Server, asking: Asking = ASKING) -> Outcome:
    async with open_client() as client:
        return await ask(client, server, asking, "Hello there")


def errors(outcomes: Iterable[Outcome]) -> list[str]:
    return sorted(outcome.error or "" for outcome in outcomes)


# Our own form


@pytest.fixture
async def echo(balancer: Balancer, address: str, until: Until) -> AsyncGenerator[Server]:
    """Our routes, with an agent of two slots behind them that says prompts back."""
    listener = AgentListener(balancer)
    port = await listener.start("127.0.0.1", 0)
    agent = make_agent(
        AgentSettings(
            balancers=(f"ws://127.0.0.1:{port}",),
            name="echo",
            engine=EngineKind.ECHO,
            choices=EngineChoices(slots=2, context_size=256),
        )
    )
    task = asyncio.create_task(agent.run())
    await until(lambda: any(agent.status.slots_total for agent in balancer.agents))
    yield Server(f"http://{address}", Api.NATIVE)
    agent.stop()
    await task
    await listener.stop()


async def test_a_run_in_our_own_form_counts_what_the_agent_counts(echo: Server) -> None:
    outcomes = await run(echo, "abcdefgh", "ab", "xyz", "0123456789")

    assert errors(outcomes) == ["", "", "", ""]
    tokens = sorted((o.usage.prompt_tokens, o.output_tokens) for o in outcomes if o.usage)
    assert tokens == [(2, 2), (3, 3), (8, 5), (10, 5)]
    assert all(len(outcome.texts) == outcome.output_tokens for outcome in outcomes)
    assert all(
        outcome.sent < outcome.texts[0] <= outcome.texts[-1] <= outcome.ended
        for outcome in outcomes
    )


async def test_sampling_goes_with_the_request(address: str, play: Play, balancer: Balancer) -> None:
    agent = play()
    asking = Asking(max_tokens=7, timeout=30, temperature=0.5, extra={"top_k": 3})
    task = asyncio.create_task(ask_once(Server(f"http://{address}", Api.NATIVE), asking))

    asked = await agent.asked()
    agent.finish(asked.request_id)

    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_k) == (7, 0.5, 3)
    assert (await task).ok


async def test_what_is_refused_is_counted_by_its_reason(address: str) -> None:
    """Nobody serves, and two may wait."""
    server = Server(f"http://{address}", Api.NATIVE)
    asking = Asking(max_tokens=5, timeout=0.5)

    outcomes = await run(server, "a", "b", "c", asking=asking, arrivals=Closed(3))

    assert errors(outcomes) == [
        "503: too many requests are waiting for a slot already",
        "not over within 0.5 s",
        "not over within 0.5 s",
    ]


async def test_a_request_that_cannot_be_served_names_the_status(address: str) -> None:
    server = Server(f"http://{address}", Api.NATIVE)

    outcome = await ask_once(server, Asking(max_tokens=5, timeout=30, extra={"nope": 1}))

    assert outcome.error is not None
    assert outcome.error.startswith("HTTP 400: Invalid request parameters: sampling.nope")


async def test_an_agent_that_is_lost_fails_its_requests(address: str, play: Play) -> None:
    agent = play()
    task = asyncio.create_task(ask_once(Server(f"http://{address}", Api.NATIVE)))
    asked = await agent.asked()
    agent.say_token(asked.request_id, "a")

    agent.leave()
    outcome = await task

    assert outcome.error is not None
    assert outcome.error.startswith("502: ")
    assert len(outcome.texts) == 1


async def test_nobody_there_is_a_reason_too() -> None:
    outcome = await ask_once(Server("http://127.0.0.1:1", Api.NATIVE))

    assert outcome.error == "All connection attempts failed"


async def test_a_run_that_is_cut_short_keeps_what_it_has_measured(address: str, play: Play) -> None:
    agent = play()
    plan = Plan(("a", "b", "c"), Closed(1))
    bench = Bench(Server(f"http://{address}", Api.NATIVE), ASKING, plan)
    task = asyncio.create_task(bench.run())
    agent.finish((await agent.asked()).request_id)
    await agent.asked()

    task.cancel()
    await asyncio.wait({task})

    assert [outcome.ok for outcome in bench.outcomes] == [True]
    assert bench.unfinished == 1
    assert bench.seconds == bench.seconds > 0


async def test_a_warm_up_is_sent_first_and_not_counted(address: str, play: Play) -> None:
    agent = play(slots=2)
    plan = Plan(("a", "b"), Closed(2), warm_up=("w",))
    bench = Bench(Server(f"http://{address}", Api.NATIVE), ASKING, plan)
    task = asyncio.create_task(bench.run())

    first = await agent.asked()
    assert agent.frames.empty()
    assert bench.seconds == 0
    agent.finish(first.request_id)
    for _ in range(2):
        agent.finish((await agent.asked()).request_id)
    await task

    assert [outcome.ok for outcome in bench.outcomes] == [True, True]


# OpenAI's form

Answer = Callable[[dict[str, Any]], AsyncIterator[str] | Response]


class OpenAi:
    """A server whose answers the test gives; it remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.connections: list[int] = []
        self.answer: Answer = chat
        self.models: list[Any] = [{"id": "tiny"}]

    async def serve(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append((request.url.path, body))
        assert request.client is not None
        self.connections.append(request.client.port)
        answer = self.answer(body)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(answer, media_type="text/event-stream")

    async def list_models(self, _request: Request) -> Response:
        return JSONResponse({"data": self.models})


def event(**chunk: Any) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n"


async def chat(_body: dict[str, Any]) -> AsyncIterator[str]:
    yield ": a comment\r\n\r\n"
    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    yield event(choices=[{"index": 0, "delta": {"reasoning_content": "Hm"}}])
    yield event(choices=[{"index": 0, "delta": {"content": "\u2028a\x85"}}])
    yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    yield event(choices=[], usage={**usage, "prompt_tokens_details": {"cached_tokens": 6}})
    yield "data: [DONE]\r\n\r\n"


async def completion(_body: dict[str, Any]) -> AsyncIterator[str]:
    yield event(choices=[{"text": "a"}])
    yield event(choices=[{"text": "b", "finish_reason": "length"}], usage=None)


@pytest.fixture
def openai() -> OpenAi:
    return OpenAi()


@pytest.fixture
async def openai_address(openai: OpenAi) -> AsyncGenerator[str]:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", openai.serve, methods=["POST"]),
            Route("/v1/completions", openai.serve, methods=["POST"]),
            Route("/v1/models", openai.list_models),
        ]
    )
    async with serving(app) as port:
        yield f"http://127.0.0.1:{port}"


async def test_a_chat_is_asked_and_read(openai: OpenAi, openai_address: str) -> None:
    asking = Asking(max_tokens=5, timeout=30, ignore_eos=True)

    outcome = await ask_once(Server(openai_address, Api.OPENAI, "tiny"), asking)

    assert openai.bodies == [
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Hello there"}],
                "max_tokens": 5,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
    ]
    assert outcome.error is None
    assert outcome.usage == Usage(9, 6, 4)
    assert len(outcome.texts) == 2


async def test_a_completion_without_usage_or_end_mark_is_whole_by_its_reason(
    openai: OpenAi, openai_address: str
) -> None:
    openai.answer = completion

    outcome = await ask_once(Server(openai_address, Api.OPENAI_COMPLETIONS))

    ((path, body),) = openai.bodies
    assert (path, body["prompt"]) == ("/v1/completions", "Hello there")
    assert "ignore_eos" not in body
    assert "model" not in body
    assert (outcome.error, outcome.usage, outcome.output_tokens) == (None, None, 2)


async def in_pieces(_body: dict[str, Any]) -> AsyncIterator[str]:
    for character in event(choices=[{"text": "a"}]):
        yield character
    yield "data: [DONE]"  # and no line feed after it


async def test_an_answer_that_comes_in_pieces_is_put_together(
    openai: OpenAi, openai_address: str
) -> None:
    openai.answer = in_pieces

    outcome = await ask_once(Server(openai_address, Api.OPENAI_COMPLETIONS))

    assert (outcome.error, len(outcome.texts)) == (None, 1)


async def broken(_body: dict[str, Any]) -> AsyncIterator[str]:
    yield event(choices=[{"text": "a"}])
    yield event(error={"message": "out of memory", "code": 500})


async def cut_off(_body: dict[str, Any]) -> AsyncIterator[str]:
    yield event(choices=[{"text": "a"}])


async def garbled(_body: dict[str, Any]) -> AsyncIterator[str]:
    yield "data: {nonsense\n\n"


async def killed(_body: dict[str, Any]) -> AsyncIterator[str]:
    yield event(choices=[{"text": "a"}])
    raise OSError("its cable was pulled")


def no_stream(_body: dict[str, Any]) -> Response:
    return JSONResponse({"choices": [{"text": "all at once", "finish_reason": "stop"}]})


def refused(_body: dict[str, Any]) -> Response:
    return JSONResponse({"error": {"message": "slow\ndown"}}, status_code=429)


def missing(_body: dict[str, Any]) -> Response:
    return Response("not found", status_code=404)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (broken, "out of memory"),
        (cut_off, "the answer was cut off"),
        (garbled, "unreadable answer: "),
        (killed, "peer closed connection"),
        (no_stream, "the answer was cut off"),
        (refused, "HTTP 429: slow down"),
        (missing, "HTTP 404: not found"),
    ],
)
async def test_a_bad_answer_is_an_error_with_its_reason(
    openai: OpenAi, openai_address: str, answer: Answer, reason: str
) -> None:
    openai.answer = answer

    outcome = await ask_once(Server(openai_address, Api.OPENAI_COMPLETIONS))

    assert outcome.error is not None
    assert outcome.error.startswith(reason)


async def test_each_request_has_a_connection_of_its_own(
    openai: OpenAi, openai_address: str
) -> None:
    await run(Server(openai_address, Api.OPENAI), *"abc", arrivals=Closed(1))

    assert len(set(openai.connections)) == 3


# Who is asked when


class Gate:
    """Answers only once so many requests are there at the same time."""

    def __init__(self, parties: int) -> None:
        self._barrier = asyncio.Barrier(parties)
        self.open = 0
        self.most_open = 0

    async def answer(self, _body: dict[str, Any]) -> AsyncIterator[str]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await self._barrier.wait()
        self.open -= 1
        yield event(choices=[{"text": "a", "finish_reason": "stop"}])


async def test_closed_arrivals_keep_so_many_requests_open_and_no_more(
    openai: OpenAi, openai_address: str
) -> None:
    gate = Gate(3)
    openai.answer = gate.answer
    server = Server(openai_address, Api.OPENAI_COMPLETIONS)

    outcomes = await run(server, *"abcdefghi", arrivals=Closed(3))

    assert errors(outcomes) == [""] * 9
    assert gate.most_open == 3
    assert sorted(body["prompt"] for _, body in openai.bodies) == list("abcdefghi")


async def test_more_clients_than_requests_is_no_harm(openai: OpenAi, openai_address: str) -> None:
    outcomes = await run(Server(openai_address, Api.OPENAI), "a", arrivals=Closed(10))

    assert errors(outcomes) == [""]


async def test_open_arrivals_do_not_wait_for_answers(openai: OpenAi, openai_address: str) -> None:
    openai.answer = Gate(4).answer
    server = Server(openai_address, Api.OPENAI_COMPLETIONS)
    times = (0.0, 0.01, 0.01, 0.03)

    outcomes = await run(server, *"abcd", arrivals=Open(times))

    sent = sorted(outcome.sent for outcome in outcomes)
    assert errors(outcomes) == [""] * 4
    assert [time - sent[0] for time in sent] == pytest.approx(times)  # as planned, not as it came


# What an address speaks


async def test_our_own_form_is_found(address: str) -> None:
    found = await find_server(f"http://{address}/", api=None, model=None)

    assert found == Server(f"http://{address}", Api.NATIVE)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_openais_form_is_found_with_its_first_model(openai_address: str, path: str) -> None:
    found = await find_server(openai_address + path, api=None, model=None)

    assert found == Server(openai_address, Api.OPENAI, "tiny")


@pytest.mark.parametrize("models", [[], [None], ["tiny"], [{}]])
async def test_a_server_need_not_name_a_model(
    openai: OpenAi, openai_address: str, models: list[Any]
) -> None:
    openai.models = models

    found = await find_server(openai_address, api=Api.OPENAI_COMPLETIONS, model=None)

    assert found == Server(openai_address, Api.OPENAI_COMPLETIONS, None)


async def test_what_was_said_is_not_asked() -> None:
    nobody = "http://127.0.0.1:1"

    assert await find_server(nobody, api=Api.NATIVE, model=None) == Server(nobody, Api.NATIVE)
    assert await find_server(nobody, api=Api.OPENAI, model="m") == Server(nobody, Api.OPENAI, "m")


async def test_a_server_that_wants_a_key_is_shown_one(
    balancer: Balancer, play: Play, tmp_path: Path
) -> None:
    own = make_certificate(tmp_path, "own")
    access = Access("key-of-some-client", client_context(own.certificate))
    keys = Keys([(Role.INFERENCE, "key-of-some-client"), (Role.MANAGEMENT, "key-of-an-operator")])
    agent = play()

    async with serving(create_app(balancer, keys=keys), own) as port:
        url = f"https://127.0.0.1:{port}"
        found = await find_server(url, api=None, model=None, access=access)
        bench = Bench(found, ASKING, Plan(("a",), Closed(1)), access)
        running = asyncio.create_task(bench.run())
        agent.finish((await agent.asked()).request_id)
        await running
        stranger = Access("key-of-nobody-here", access.tls)
        refused = Bench(found, ASKING, Plan(("a",), Closed(1)), stranger)
        await refused.run()
        balancer.close()

    assert (found.address, found.api) == (url, Api.OPENAI)
    assert errors(bench.outcomes) == [""]
    assert errors(refused.outcomes) == ["HTTP 401: this key is not known"]


async def test_an_address_where_nobody_answers_is_named() -> None:
    with pytest.raises(BenchError, match=r"no answer from http://127\.0\.0\.1:1/api/v1/agents: "):
        await find_server("http://127.0.0.1:1", api=None, model=None)


async def test_an_address_that_speaks_neither_form_is_named(address: str) -> None:
    with pytest.raises(BenchError, match="speaks neither"):
        await find_server(f"http://{address}/elsewhere", api=None, model=None)


# The command


Headrace = Callable[..., Awaitable[tuple[int | None, str, str]]]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from deploy.cli import main; main()",
        "bench",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def headrace(*arguments: str) -> tuple[int | None, str, str]:
    """``headrace bench`` with these arguments: status, output and errors."""
    process = await start(*arguments)
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_it_prints_and_writes_what_it_has_measured(echo: Server, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.svg")]
    options = ["--requests", "5", "--concurrency", "2", "--max-tokens", "3", "--seed", "7"]
    target = ["--ttft-target", "60", "--gap-target", "60", "--prompt-tokens", "4"]

    status, output, _ = await headrace(echo.address, *options, *target, *files)

    document = json.loads((tmp_path / "a.json").read_text())
    assert status == 0
    assert f"5 requests to {echo.url}" in output
    assert "15 tokens, counted by usage" in output
    assert "goodput" in output
    assert document["settings"]["seed"] == 7
    assert document["settings"]["concurrency"] == 2
    assert document["settings"]["api"] == "native"
    assert document["figures"]["ok"] == len(document["requests"]) == 5
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


async def test_a_run_with_a_failure_exits_with_1(openai: OpenAi, openai_address: str) -> None:
    openai.answer = refused

    status, output, errors = await headrace(
        openai_address, "--requests", "3", "--rate", "1000", "--warm-up", "0"
    )

    assert (status, errors) == (1, "")
    assert "HTTP 429: slow down" in output
    assert re.search(r"requests ok +0 ", output)


async def test_ctrl_c_prints_what_has_been_measured_so_far(address: str, play: Play) -> None:
    agent = play()
    process = await start(f"http://{address}", "--concurrency", "1", "--warm-up", "0")
    agent.finish((await agent.asked()).request_id)
    asked = await agent.asked()

    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        output, errors = await process.communicate()

    assert await agent.cancelled() == asked.request_id
    assert (process.returncode, errors) == (130, b"")
    assert b"requests ok" in output
    assert b"interrupted, not counted" in output


async def test_nobody_at_the_address_is_one_line() -> None:
    status, output, errors = await headrace("http://127.0.0.1:1")

    assert (status, output) == (1, "")
    assert errors.startswith("headrace: no answer from http://127.0.0.1:1")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["localhost:8061"], "http://HOST:PORT"),
        (["http://"], "http://HOST:PORT"),
        (["http://a:99999"], "http://HOST:PORT"),
        (["--api", "telex"], "'--api'"),
        (["--requests", "0"], "'--requests'"),
        (["--concurrency", "0"], "'--concurrency'"),
        (["--concurrency", "-1"], "'--concurrency'"),
        (["--rate", "0"], "'--rate'"),
        (["--rate", "nan"], "'--rate'"),
        (["--rate", "1", "--concurrency", "1"], "'--rate'"),
        (["--warm-up", "-1"], "'--warm-up'"),
        (["--prompt-tokens", "0"], "'--prompt-tokens'"),
        (["--shared-prefix-tokens", "-1"], "'--shared-prefix-tokens'"),
        (["--max-tokens", "0"], "'--max-tokens'"),
        (["--temperature", "-1"], "'--temperature'"),
        (["--seed", "-1"], "'--seed'"),
        (["--timeout", "0"], "'--timeout'"),
        (["--timeout", "inf"], "'--timeout'"),
        (["--ttft-target", "-1"], "'--ttft-target'"),
        (["--gap-target", "-1"], "'--gap-target'"),
        (["--json", "/nowhere/a.json"], "'--json'"),
        (["--picture", "/nowhere/a.png"], "'--picture'"),
        (["--picture", "a.jpg"], "'--picture'"),
    ],
)
async def test_a_bad_value_gets_one_line_and_status_2(arguments: list[str], named: str) -> None:
    status, output, errors = await headrace(*arguments)

    assert (status, output) == (2, "")
    assert errors.startswith("headrace: ")
    assert len(errors.splitlines()) == 1
    assert named in errors
