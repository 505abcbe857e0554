"""What an agent may tell of a request, by example and at random, for what OpenAI's clients are told of it."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from balancer.exchange import Timing, Told
from balancer.openai_results import Head, Json
from common.ids import RequestId, TokenId
from common.messages import (
    Finished,
    FinishReason,
    Logprobs,
    Segment,
    TokenClass,
    TokenGenerated,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

CONTENT, REASONING = TokenClass.CONTENT, TokenClass.REASONING
TOOL_CALL, UNDETERMINABLE = TokenClass.TOOL_CALL, TokenClass.UNDETERMINABLE

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
TIMING = Timing(arrived=10.0, dispatched=10.5, started=11.5, ended=13.5)


def head(kind: str) -> Head:
    return Head("id-1", kind, 1_700_000_000, "m")


CHAT = head("chat.completion")
CHUNK = head("chat.completion.chunk")
TEXT = head("text_completion")


def token(
    *segments: tuple[TokenClass, str],
    request_id: RequestId = A,
    logprobs: Logprobs | None = None,
    calls: tuple[ToolCallDelta, ...] = (),
) -> Told:
    parts = tuple(Segment(*segment) for segment in segments)
    return Told("agent", TokenGenerated(request_id, TokenId(1), parts, logprobs, calls))


def end(
    request_id: RequestId = A,
    *,
    reason: FinishReason = FinishReason.STOP,
    usage: Usage | None = None,
    timing: Timing | None = TIMING,
    segments: tuple[Segment, ...] = (),
) -> Told:
    used = usage or Usage(prompt_tokens=5, content_tokens=2)
    return Told("agent", Finished(request_id, reason, used, segments), timing)


def logprob(piece: bytes, value: float = -0.5) -> TokenLogprob:
    return TokenLogprob(TokenId(1), value, piece)


def official_json(value: Json) -> Any:
    """As it travels: no NaN, and keys are texts."""
    return json.loads(json.dumps(value, allow_nan=False))


def indices(n: int) -> dict[RequestId, int]:
    return {request_id: index for index, request_id in enumerate((A, B, C)[:n])}


CALLS = [
    token((TOOL_CALL, "f("), calls=(ToolCallDelta(0, '{"x"', "c1", "f"),)),
    token((TOOL_CALL, "1)g"), calls=(ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "", "c2", "g"))),
    token((TOOL_CALL, "()"), calls=(ToolCallDelta(1, "{}"),)),
]


@dataclass(frozen=True)
class Run:
    events: list[Told]
    prompts: dict[RequestId, int]
    has_logprobs: bool


pieces = st.builds(
    TokenLogprob, st.integers(0, 9).map(TokenId), st.floats(-20, 0), st.binary(max_size=3)
)
segment_lists = st.lists(
    st.builds(Segment, st.sampled_from(TokenClass), st.text(max_size=3)), max_size=3
).map(tuple)
counts = st.integers(0, 20)
usages = st.builds(Usage, *[counts] * 7)


@st.composite
def call_deltas(draw: st.DrawFn, begun: list[int]) -> tuple[ToolCallDelta, ...]:
    """More of the calls that have begun, or new ones."""
    made: list[ToolCallDelta] = []
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        arguments = draw(st.text(max_size=3))
        if begun and draw(st.booleans()):
            made.append(ToolCallDelta(draw(st.sampled_from(begun)), arguments))
        else:
            begun.append(len(begun))
            made.append(ToolCallDelta(begun[-1], arguments, f"c{begun[-1]}", draw(st.text())))
    return tuple(made)


@st.composite
def runs(draw: st.DrawFn, *, has_calls: bool) -> Run:
    """Answers to up to two prompts, told in any order."""
    has_logprobs = draw(st.booleans())
    ids = [A, B, C][: draw(st.integers(1, 3))]
    firsts = draw(st.integers(1, len(ids)))
    queues: dict[RequestId, list[Told]] = {}
    for request_id in ids:
        begun: list[int] = []

        def calls(begun: list[int] = begun) -> tuple[ToolCallDelta, ...]:
            return draw(call_deltas(begun)) if has_calls else ()

        queues[request_id] = [
            Told(
                "agent",
                TokenGenerated(
                    request_id,
                    TokenId(1),
                    draw(segment_lists),
                    Logprobs(draw(pieces), tuple(draw(st.lists(pieces, max_size=2))))
                    if has_logprobs
                    else None,
                    calls(),
                ),
            )
            for _ in range(draw(st.integers(0, 4)))
        ]
        reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
        last = Finished(request_id, reason, draw(usages), draw(segment_lists), calls())
        queues[request_id].append(Told("agent", last, TIMING))
    turns = [request_id for request_id, queue in queues.items() for _ in queue]
    events = [queues[request_id].pop(0) for request_id in draw(st.permutations(turns))]
    prompts = {request_id: int(n >= firsts) for n, request_id in enumerate(ids)}
    return Run(events, prompts, has_logprobs)


def check_frame(chunks: list[Json], whole: Json, *, tells_usage: bool) -> None:
    """What streams of both kinds have in common with their object."""
    *others, last = chunks
    assert last["timings"] == whole["timings"]
    assert not any("timings" in chunk for chunk in others)
    if tells_usage:
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert {chunk["usage"] for chunk in others} == {None}
    else:
        assert not any("usage" in chunk for chunk in chunks)
    for name in ("id", "created", "model", "system_fingerprint"):
        assert {chunk[name] for chunk in chunks} == {whole[name]}


def parts_of(chunks: list[Json], index: int) -> list[Json]:
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def put_together(parts: list[Json]) -> Json:
    """The choice of a chat that the chunks of a stream make."""
    role = parts[0]["delta"]["role"]
    assert not any("role" in part["delta"] for part in parts[1:])
    *others, last = parts
    assert (last["delta"], last["finish_reason"] is None) == ({}, False)
    assert all(part["finish_reason"] is None for part in others)
    calls: dict[int, Json] = {}
    for part in parts:
        for delta in part["delta"].get("tool_calls", ()):
            if "id" in delta:
                calls[delta["index"]] = {**delta, "function": {**delta["function"]}}
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    told: Json = {
        "role": role,
        "content": "".join(part["delta"].get("content") or "" for part in parts),
    }
    if reasoning := "".join(part["delta"].get("reasoning_content", "") for part in parts):
        told["reasoning_content"] = reasoning
    if calls:
        told["content"] = told["content"] or None
        told["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in calls.values()
        ]
    logprobs = [each for part in parts if part["logprobs"] for each in part["logprobs"]["content"]]
    return {"message": told, "logprobs": logprobs, "finish_reason": last["finish_reason"]}
