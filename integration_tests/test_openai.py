"""The official client against the running product: real Ray, real sockets, the real small model."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncGenerator, Generator, Iterable
from typing import Any, Literal, TypeAlias

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)
from openai.types.responses import Response
from product import Up, start_up
from pydantic import BaseModel

Client: TypeAlias = Any
"""``OpenAI`` or ``AsyncOpenAI``, whose overloads are not made for arguments in dictionaries."""

MODEL = "SmolLM2-135M-Instruct.Q4_1"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0}
PLAIN: dict[str, Any] = {"repeat_penalty": 1.0, "ignore_eos": True, "cache_prompt": False}
"""The same text again, for a request that is alone: rounding depends on who shares a pass, and on what
is cached.
"""


@pytest.fixture(scope="module")
def client(up: Up) -> Generator[OpenAI]:
    with OpenAI(base_url=f"{up.address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(up: Up) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{up.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(chunks: Iterable[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_models_are_listed(client: Client) -> None:
    models = client.models.list().data

    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat(client: Client) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=12, extra_body=PLAIN, **GREEDY
    )

    assert ChatCompletion.model_validate(answer.model_dump(), strict=False)
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_a_streamed_chat_is_the_same_text(client: Client) -> None:
    said: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "max_tokens": 12, "seed": 1, "extra_body": PLAIN,
        **GREEDY,
    }  # fmt: skip
    whole = client.chat.completions.create(**said)
    chunks = list(
        client.chat.completions.create(**said, stream=True, stream_options={"include_usage": True})
    )

    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


async def test_chats_at_the_same_time(async_client: Client) -> None:
    async def one(n: int) -> str:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=5 + n, stream=True, extra_body=PLAIN
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers = await asyncio.gather(*(one(n) for n in range(8)))

    assert all(answers)


async def test_an_answer_without_a_stream(async_client: Client) -> None:
    answer = await async_client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, n=3, logprobs=True, top_logprobs=2
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
        assert (
            bytes(b for t in choice.logprobs.content for b in t.bytes or ())
            .decode(errors="replace")
            .startswith(choice.message.content or "")
        )


def test_stop_texts_seeds_and_biases(client: Client) -> None:
    def ask(**more: Any) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=20, extra_body=PLAIN, **more
        )
        return answer.choices[0].message.content or ""

    assert ask(seed=7) == ask(seed=7)
    whole = ask(**GREEDY)
    assert ask(**GREEDY, stop=[whole[8:12]]) == whole[:8]
    first = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1, logprobs=True, **GREEDY
    )
    forbidden = tokenize(client, first.choices[0].message.content or "")
    assert not ask(**GREEDY, logit_bias={str(token): -100 for token in forbidden}).startswith(
        first.choices[0].message.content or "-"
    )


def tokenize(client: Client, text: str) -> list[int]:
    return client.post("/tokenize", body={"content": text}, cast_to=httpx.Response).json()["tokens"]


def test_completions_of_texts_and_of_tokens(client: Client) -> None:
    text = "The three primary colors are red, blue and"
    said: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "extra_body": PLAIN, **GREEDY}
    one = client.completions.create(prompt=text, **said)
    batch = client.completions.create(prompt=[text, "One, two,"], **said, n=2, logprobs=1)
    tokens = client.completions.create(prompt=tokenize(client, text), **said)
    stream = list(client.completions.create(prompt=text, **said, stream=True, echo=True))

    assert Completion.model_validate(batch.model_dump())
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert batch.choices[0].text.split() != batch.choices[2].text.split()
    assert tokens.choices[0].text == one.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in stream) == text + one.choices[0].text
    logprobs = batch.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == batch.choices[0].text


class City(BaseModel):
    name: str
    inhabitants: int
    kind: Literal["small", "large"]


def test_structured_output(client: Client) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me about a city as JSON."}],
        response_format=City,
        max_tokens=200,
    )

    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_json_object(client: Client) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A JSON object, please."}],
        response_format={"type": "json_object"},
        max_tokens=300,
        temperature=0,
        stop=["\n\n\n"],
    )

    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_tools_round_trip(client: Client, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER, CLOCK], tool_choice=choice,
        parallel_tool_calls=False, max_tokens=200,
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    if choice == "required":
        assert call.function.name in {"get_weather", "clock"}
    else:
        assert call.function.name == "get_weather"
        assert [*json.loads(call.function.arguments)] == ["city"]

    messages += [
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"},
    ]
    final = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER, CLOCK], max_tokens=30
    )
    assert final.usage is not None
    assert final.usage.prompt_tokens > answer.usage.prompt_tokens


def test_the_arguments_of_a_call_are_streamed(client: Client) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "The weather in Paris?"}],
        tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=200,
    ) as stream:  # fmt: skip
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()

    [call] = final.choices[0].message.tool_calls
    assert len(deltas) > 1
    assert "".join(delta.arguments_delta for delta in deltas) == call.function.arguments


def test_without_a_choice_of_tools_none_is_called(client: Client) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER], tool_choice="none", max_tokens=10
    )

    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"model": "gpt-none"}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"extra_body": {"grammar": 'Root ::= "a"'}}, "grammar"),
        ({"extra_body": {"grammar": "%llguidance {}"}}, "grammar"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "schema": {"type": "string", "pattern": r"^hello there indeed\\!$("},
                    },
                }
            },
            "response_format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_cost_nobody_else_anything(
    client: Client, more: dict[str, Any], parameter: str, stream: bool
) -> None:
    """B40: each is refused with its reason while another stream runs on."""
    other = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=30, stream=True, extra_body=PLAIN
    )
    chunks = [next(other)]
    with pytest.raises(
        openai.BadRequestError if parameter != "model" else openai.NotFoundError
    ) as caught:
        client.chat.completions.create(
            **{"model": MODEL, "messages": QUESTION, "max_tokens": 5, "stream": stream, **more}
        )
    chunks += list(other)

    assert caught.value.param == parameter
    assert caught.value.body
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_client_that_leaves_frees_its_slot(up: Up, client: Client) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, extra_body=PLAIN
    )
    next(stream)
    stream.close()
    with pytest.raises(openai.APITimeoutError):  # it does not wait for the whole answer
        client.with_options(timeout=0.5).chat.completions.create(
            model=MODEL, messages=QUESTION, extra_body=PLAIN
        )

    up.until(lambda agents: all(agent["slots_processing"] == 0 for agent in agents))


def test_texts_become_tokens_and_back(client: Client) -> None:
    text = "Grüße, <|im_end|> 😀"
    tokens = tokenize(client, text)
    back = client.post("/detokenize", body={"tokens": tokens}, cast_to=httpx.Response).json()

    assert back["content"] == text


@pytest.fixture(scope="module")
def embedding() -> Generator[OpenAI]:
    with start_up("--slots", "2") as up:
        state = up.client.get("/api/v1/balancer_desired_state").json()
        state["inference_parameters"] |= {"enable_embeddings": True, "pooling_type": "Mean"}
        up.client.put("/api/v1/balancer_desired_state", json=state).raise_for_status()
        up.until(lambda agents: all(a["state_application_status"] == "Applied" for a in agents))
        with OpenAI(base_url=f"{up.address}/v1", api_key="none", max_retries=0) as client:
            yield client


def test_embeddings(embedding: Client) -> None:
    """The client asks for base64 by itself."""
    texts = ["Hello", "World", "word " * 990]
    many = embedding.embeddings.create(model=MODEL, input=texts)
    one = embedding.embeddings.create(model=MODEL, input="World", encoding_format="float")
    short = embedding.embeddings.create(model=MODEL, input="World", dimensions=64)
    raw = embedding.with_raw_response.embeddings.create(
        model=MODEL, input="World", encoding_format="base64"
    )

    assert [each.index for each in many.data] == [0, 1, 2]
    assert similarity(many.data[1].embedding, one.data[0].embedding) > 0.999
    assert similarity(one.data[0].embedding[:64], short.data[0].embedding) > 0.999
    assert sum(value**2 for value in short.data[0].embedding) == pytest.approx(1, abs=1e-3)
    values = base64.b64decode(json.loads(raw.content)["data"][0]["embedding"])
    assert len(struct.unpack(f"<{len(values) // 4}f", values)) == len(one.data[0].embedding)
    assert many.usage.prompt_tokens > 990


def similarity(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    lengths = sum(a * a for a in one) * sum(b * b for b in other)
    return product / lengths**0.5


def test_a_document_that_is_too_long_is_refused_with_the_limit(embedding: Client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        embedding.embeddings.create(model=MODEL, input=["fits", "word " * 30000])

    assert caught.value.param == "input[1]"
    assert caught.value.code == "context_length_exceeded"


def test_while_vectors_are_made_there_is_no_chat(embedding: Client) -> None:
    with pytest.raises(openai.InternalServerError, match="disabled"):
        embedding.chat.completions.create(model=MODEL, messages=QUESTION)


def test_comments_come_while_a_stream_waits_for_a_slot(up: Up, client: Client) -> None:
    said: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "stream": True}
    running = [client.chat.completions.create(**said, extra_body=PLAIN) for _ in range(4)]
    for stream in running:
        next(stream)
    with up.client.stream(
        "POST", "/v1/chat/completions", json={**said, "max_tokens": 3}
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        for stream in running:
            stream.close()
        rest = [line for line in lines if not line.startswith(":")]

    assert first == ": keep-alive"
    assert response.headers["x-accel-buffering"] == "no"
    assert len(response.headers.get_list("x-request-id")) == 1
    assert rest[-1] == "data: [DONE]"


def test_a_response(client: Client) -> None:
    answer = client.responses.create(
        model=MODEL, input="Why is the sky blue?", instructions="Be brief.", max_output_tokens=12
    )

    assert Response.model_validate(answer.model_dump())
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text
    assert answer.usage.output_tokens == 12


def test_a_streamed_response(client: Client) -> None:
    events = list(
        client.responses.create(
            model=MODEL, input="Why is the sky blue?", max_output_tokens=12, stream=True
        )
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]

    assert len(deltas) > 1
    assert events[-1].type == "response.incomplete"  # it was cut
    assert "".join(deltas) == events[-1].response.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]


async def test_a_response_in_a_format_and_its_round_trip(async_client: Client) -> None:
    said: list[Any] = [{"role": "user", "content": "Tell me about a city as JSON."}]
    parsed = await async_client.responses.parse(model=MODEL, input=said, text_format=City)
    again = await async_client.responses.create(
        model=MODEL, input=[*said, *parsed.output, *said], max_output_tokens=5
    )

    assert isinstance(parsed.output_parsed, City)
    assert again.usage.input_tokens > parsed.usage.input_tokens + parsed.usage.output_tokens


async def test_tools_of_responses(async_client: Client) -> None:
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    said: list[Any] = [{"role": "user", "content": "The weather in Paris?"}]
    stream = await async_client.responses.create(
        model=MODEL, input=said, tools=[tool], tool_choice="required", stream=True,
        parallel_tool_calls=False, max_output_tokens=200,
    )  # fmt: skip
    events = [event async for event in stream]
    [call] = [item for item in events[-1].response.output if item.type == "function_call"]
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    said += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    final = await async_client.responses.create(
        model=MODEL, input=said, tools=[tool], max_output_tokens=10
    )

    assert events[-1].type == "response.completed"
    assert "".join(arguments) == call.arguments
    assert [*json.loads(call.arguments)] == ["city"]
    assert final.usage.input_tokens > events[-1].response.usage.input_tokens


def test_a_response_that_cannot_be_is_refused_by_name(client: Client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="a", previous_response_id="resp_1")

    assert caught.value.param == "previous_response_id"


def test_an_answer_of_many_megabytes_comes_whole(embedding: Client) -> None:
    """More than Serve sends in one message."""
    raw = embedding.with_raw_response.embeddings.create(
        model=MODEL, input=["word"] * 600, encoding_format="float"
    )

    assert len(raw.content) > 5 * 2**20
    assert len(json.loads(raw.content)["data"]) == 600
