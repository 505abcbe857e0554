"""What people have reported of other servers, asked of the running product: real Ray, real model.

Each test names the report in its first line; the rest of them are tests of the scheduler alone.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from typing import Any

import httpx
import pytest
from product import Up, start_up

ROUTE = "/api/v1/continue_from_raw_prompt"
GREEDY = {"temperature": 0, "penalty_repeat": 1, "penalty_presence": 0, "ignore_eos": True}
SLOTS = 4
CONTEXT = 400


@pytest.fixture(scope="module")
def crowded() -> Generator[Up]:
    """Four slots in the cells of one and a half requests."""
    options = ["--slots", str(SLOTS), "--context", str(CONTEXT), "--kv-cells", "600"]
    with start_up(*options, "--buffer-timeout", "120") as up:
        yield up


@pytest.fixture
async def client(crowded: Up) -> AsyncGenerator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=crowded.address, timeout=120, limits=limits, trust_env=False
    ) as client:
        yield client


async def answer(client: httpx.AsyncClient, prompt: str, **options: Any) -> list[dict[str, Any]]:
    body = {"raw_prompt": prompt, "max_tokens": 8, "sampling": GREEDY} | options
    response = await client.post(ROUTE, json=body)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message["Response"]["response"]["GeneratedToken"] for message in messages]


def text(messages: list[dict[str, Any]]) -> str:
    return "".join(result.get("ContentToken", "") for result in results(messages))


def usage(messages: list[dict[str, Any]]) -> dict[str, int]:
    return results(messages)[-1]["Done"]["usage"]


async def test_streams_that_do_not_fit_together_all_come_to_their_end(
    client: httpx.AsyncClient,
) -> None:
    """B11: nobody gets an error because of somebody else."""
    names = ["one", "two", "three", "four"]

    answers = await asyncio.gather(
        *(answer(client, f"A long story, number {name}:", max_tokens=250) for name in names)
    )

    assert [usage(each)["content_tokens"] for each in answers] == [250] * SLOTS
    metrics = (await client.get("/metrics")).text
    (pauses,) = (line for line in metrics.splitlines() if line.startswith("headrace_scheduler_pa"))
    assert float(pauses.rpartition(" ")[2]) > 0


async def test_a_prompt_that_cannot_fit_is_refused_while_others_go_on(
    client: httpx.AsyncClient,
) -> None:
    """B13: at once, with the numbers."""
    good, (refusal,) = await asyncio.gather(
        answer(client, "Once upon a time"), answer(client, "word " * 500)
    )

    assert usage(good)["content_tokens"] == 8
    description = refusal["Error"]["error"]["description"]
    assert refusal["Error"]["error"]["code"] == 400
    assert "context_length_exceeded" in description
    assert str(CONTEXT) in description


@pytest.mark.parametrize(
    ("grammar", "result", "cause"),
    [
        (
            {"type": "gbnf", "grammar": 'Root ::= "x"', "root": "root"},
            "GrammarInitializationFailed",
            "root",
        ),
        (
            {"type": "gbnf", "grammar": '%llguidance {}\nstart: "x"', "root": "root"},
            "GrammarInitializationFailed",
            "llguidance",
        ),
        (
            {"type": "json_schema", "schema": '{"type": "strin"}'},
            "GrammarSyntaxError",
            "strin",
        ),
    ],
)
async def test_a_grammar_that_cannot_be_used_is_refused_with_the_cause(
    client: httpx.AsyncClient, grammar: dict[str, str], result: str, cause: str
) -> None:
    """B40: and the stream beside it is untouched."""
    beside, refused = await asyncio.gather(
        answer(client, "One, two, three,", max_tokens=40), answer(client, "x", grammar=grammar)
    )

    ((name, message),) = results(refused)[0].items()
    assert name == result
    assert cause in message
    assert usage(beside)["content_tokens"] == 40


async def test_a_pattern_with_an_escape_is_honoured(client: httpx.AsyncClient) -> None:
    """B40, the schema that was ignored in silence."""
    schema = json.dumps({"type": "string", "pattern": r"^hello there indeed\!$"})

    told = await answer(
        client,
        "Say something: ",
        max_tokens=30,
        grammar={"type": "json_schema", "schema": schema},
        sampling={"temperature": 0},
    )

    assert json.loads(text(told)) == "hello there indeed!"


async def test_documents_are_embedded_beside_a_stream_and_bad_ones_are_named(
    client: httpx.AsyncClient,
) -> None:
    state = (await client.get("/api/v1/balancer_desired_state")).json()
    enabled = state["inference_parameters"] | {"enable_embeddings": True, "pooling_type": "Mean"}
    changed = state | {"inference_parameters": enabled}
    contents = {"empty": "", "short": "hello", "long": "word " * 300, "too long": "word " * 2100}
    documents = [{"id": name, "content": content} for name, content in contents.items()]

    body = {"raw_prompt": "One, two, three,", "max_tokens": 60, "sampling": GREEDY}
    async with client.stream("POST", ROUTE, json=body) as running:
        stream = running.aiter_lines()
        await anext(stream)
        await client.put("/api/v1/balancer_desired_state", json=changed)
        try:
            response = await client.post(
                "/api/v1/generate_embedding_batch",
                json={"input_batch": documents, "normalization_method": "L2"},
                headers={"user-agent": "test"},  # not the published client, which is told less
            )
        finally:
            await client.put("/api/v1/balancer_desired_state", json=state)
        rest = [json.loads(line) async for line in stream]

    assert usage(rest)["content_tokens"] == 60
    lines = [json.loads(line)["Response"]["response"] for line in response.text.splitlines()]
    *told, end = (line["Embedding"] for line in lines)
    vectors = {
        each["Embedding"]["source_document_id"]: each["Embedding"]["embedding"]
        for each in told
        if "Embedding" in each
    }
    assert vectors.keys() == {"short", "long"}
    assert all(sum(x * x for x in vector) == pytest.approx(1) for vector in vectors.values())
    (refused,) = (each["DocumentExceedsBatchSize"] for each in told if "Embedding" not in each)
    assert refused["source_document_id"] == "too long"
    assert "'empty'" in end["Error"]


async def test_sixty_four_streams_are_interleaved_and_none_is_cut(
    client: httpx.AsyncClient,
) -> None:
    """B43."""
    answers = await asyncio.gather(
        *(answer(client, f"Number {n} is", max_tokens=6) for n in range(64))
    )

    assert [usage(each)["content_tokens"] for each in answers] == [6] * 64


async def test_what_was_read_once_is_not_read_again(client: httpx.AsyncClient) -> None:
    system = "You are a patient teacher who explains everything in simple words. " * 6
    await answer(client, system + "First question.")

    told = await answer(client, system + "Another question.")

    used = usage(told)
    assert used["prompt_tokens"] > used["cached_prompt_tokens"] > 60
