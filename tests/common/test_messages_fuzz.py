"""Whatever comes over an agent link: it is a frame, or it is refused, and that costs little."""

import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from bodies import PATIENT
from frames import broken_frames, nearly_frames, to_agent, to_balancer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common import messages as m

Decode = Callable[[bytes], Any]

EITHER: list[tuple[Decode, st.SearchStrategy[Any]]] = [
    (m.decode_to_agent, to_agent),
    (m.decode_to_balancer, to_balancer),
]
OFTEN = settings(PATIENT, max_examples=int(os.environ.get("HEADRACE_EXAMPLES", "200")))


def outcome(decode: Decode, data: bytes) -> Any:
    """The frame; None if it is refused."""
    try:
        return decode(data)
    except msgspec.MsgspecError:
        return None


@OFTEN
@given(to_agent)
def test_any_frame_survives_the_way_to_the_agent(frame: m.ToAgent) -> None:
    assert m.decode_to_agent(m.encode(frame)) == frame


@OFTEN
@given(to_balancer)
def test_any_frame_survives_the_way_to_the_balancer(frame: m.ToBalancer) -> None:
    assert m.decode_to_balancer(m.encode(frame)) == frame


@pytest.mark.parametrize(("decode", "frames"), EITHER, ids=["to_agent", "to_balancer"])
def test_what_is_nearly_a_frame_is_one_or_is_refused(
    decode: Decode, frames: st.SearchStrategy[Any]
) -> None:
    @OFTEN
    @given(st.one_of(nearly_frames(frames), broken_frames(frames), st.binary(max_size=60)))
    @example(b"\x81\xa4type\xa4st\xffp")
    def check(data: bytes) -> None:
        frame = outcome(decode, data)

        if frame is not None:  # then it is a whole one, and can be sent again
            assert outcome(decode, m.encode(frame)) is not None

    check()


# What takes a few bytes to claim


DEEP = 200_000
NESTS = {
    "lists": b"\x91" * DEEP + b"\x01",
    "objects": b"\x81\xa1x" * DEEP + b"\x01",
    "open lists": b"\x91" * DEEP,
}
CLAIMS = {
    "list": b"\xdd\xff\xff\xff\xff",
    "object": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x05",
}
HOLE = 0x7FEEDDCC


STEP = {"type": "step", "events": [{"type": "busy", "request_id": "r", "unknown": HOLE}]}
GENERATE = {
    "type": "generate",
    "request_id": "r",
    "max_tokens": 1,
    "prompt": {"type": "conversation", "messages": [], "tools": [{"x": HOLE}]},
}
FRAMES: list[tuple[Decode, dict[str, Any]]] = [
    (m.decode_to_balancer, STEP),
    (m.decode_to_balancer, {"type": "step", "events": HOLE}),
    (m.decode_to_balancer, {"type": "described", "metadata": HOLE}),
    (m.decode_to_balancer, {"unknown": HOLE, "type": "step"}),
    (m.decode_to_agent, GENERATE),
    (m.decode_to_agent, {"type": "detokenize", "request_id": "r", "tokens": HOLE}),
    (m.decode_to_agent, {"type": "cancel", "request_id": HOLE}),
    (m.decode_to_agent, {"type": HOLE}),
]


@pytest.mark.parametrize("filling", [*NESTS.values(), *CLAIMS.values()], ids=[*NESTS, *CLAIMS])
@pytest.mark.parametrize(("decode", "frame"), FRAMES)
def test_depth_and_size_that_are_only_claimed_cost_nothing(
    decode: Decode, frame: dict[str, Any], filling: bytes
) -> None:
    before, behind = msgspec.msgpack.encode(frame).split(msgspec.msgpack.encode(HOLE))
    data = before + filling + behind
    tracemalloc.start()
    try:
        told = outcome(decode, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert told is None
    assert peak < 2**20, "bytes, for a frame that is refused"
