import json
from collections.abc import Callable
from typing import Any

import pytest
from bodies import PATIENT, body, json_values, nearly
from hypothesis import given

from balancer.native_requests import encode_request
from balancer.openai_errors import ParameterError, parse, refusal
from balancer.openai_tokens import TokensToText, detokenized, parse_text, tokenized
from common.errors import RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    CallsTold,
    ChatMessage,
    Conversation,
    Detokenize,
    Detokenized,
    RawPrompt,
    Tokenize,
    Tokenized,
    decode_to_agent,
)

R = RequestId("r")
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
PIXEL: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:;base64,AA=="}}


def frame(**keys: Any) -> Tokenize:
    return parse_text(body(**keys)).frame(R)


def refused(**keys: Any) -> str | None:
    with pytest.raises(ParameterError) as caught:
        frame(**keys)
    return caught.value.parameter


@pytest.mark.parametrize(
    ("keys", "adds_beginning"),
    [
        # As llama.cpp has it: no, unless it is said.
        ({"content": "Hi"}, False),
        ({"content": "Hi", "add_special": None}, False),
        ({"content": "Hi", "add_special": False, "parse_special": True}, False),
        ({"content": "Hi", "add_special": True}, True),
        # As vLLM has it: yes, unless it is said.
        ({"prompt": "Hi"}, True),
        ({"prompt": "Hi", "model": "m", "add_special_tokens": None}, True),
        ({"prompt": "Hi", "add_special_tokens": True}, True),
        ({"prompt": "Hi", "add_special_tokens": False}, False),
    ],
)
def test_a_text_is_tokenized_as_its_sender_is_used_to(
    keys: dict[str, Any], adds_beginning: bool
) -> None:
    assert frame(**keys) == Tokenize(
        request_id=R, prompt=RawPrompt("Hi"), adds_beginning=adds_beginning
    )


def test_a_chat_is_tokenized_as_it_would_be_rendered() -> None:
    tool = {"type": "function", "function": {"name": "f"}}

    assert frame(messages=[USER], tools=[tool], reasoning_effort="none") == Tokenize(
        request_id=R,
        prompt=Conversation(
            (ChatMessage("user", "Hi"),),
            tools=(tool,),
            calls_told=CallsTold.STREAMED,
            constrains_content=True,
            longest_image_side=1,
        ),
        adds_beginning=True,
    )


@pytest.mark.parametrize("text", [{"content": "x"}, {"prompt": "x"}, {"messages": [USER]}])
@pytest.mark.parametrize(("said", "tells"), [({}, False), ({"with_pieces": True}, True)])
def test_pieces_are_told_if_asked_for(
    text: dict[str, Any], said: dict[str, Any], tells: bool
) -> None:
    assert parse_text(body(**text, **said)).tells_pieces is tells


@pytest.mark.parametrize(
    ("keys", "parameter"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"content": None}, "content"),
        ({"content": [5]}, "content"),
        ({"content": "x", "prompt": "y"}, "prompt"),
        ({"content": "x", "add_special_tokens": True}, "add_special_tokens"),
        ({"content": "x", "parse_special": False}, "parse_special"),
        ({"prompt": "x", "add_special": True}, "add_special"),
        ({"messages": []}, "messages"),
        ({"messages": [USER], "content": "x"}, "content"),
        ({"messages": [{"role": "user", "content": [PIXEL]}]}, "messages"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(keys: dict[str, Any], parameter: str) -> None:
    assert refused(**keys) == parameter


def test_an_answer_has_the_numbers_and_how_many_they_are() -> None:
    event = Tokenized(R, (TokenId(5), TokenId(6)), (b"a", b"b"), context=512)

    told = tokenized(event, tells_pieces=False)

    assert told == {"tokens": [5, 6], "count": 2, "max_model_len": 512}


def test_a_piece_that_is_no_whole_character_is_told_by_its_bytes() -> None:
    event = Tokenized(R, (TokenId(5), TokenId(6), TokenId(7)), (b"a", b"\xc3", b""), context=512)

    told = tokenized(event, tells_pieces=True)

    assert told["tokens"] == [
        {"id": 5, "piece": "a"},
        {"id": 6, "piece": [0xC3]},
        {"id": 7, "piece": ""},
    ]


def test_tokens_become_text_by_both_names() -> None:
    params = parse(TokensToText, body(tokens=[5, 6], model="m"))

    assert params.frame(R) == Detokenize(R, (TokenId(5), TokenId(6)))
    assert detokenized(Detokenized(R, "Hi")) == {"content": "Hi", "prompt": "Hi"}


def test_no_tokens_are_no_text() -> None:
    assert parse(TokensToText, b'{"tokens": []}').frame(R) == Detokenize(R, ())


@pytest.mark.parametrize("tokens", [None, 5, [-1], [2**31], ["a"], [True], [[5]]])
def test_what_is_no_list_of_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        parse(TokensToText, body(tokens=tokens))

    assert caught.value.parameter in ("tokens", "tokens[0]")


FULL: list[dict[str, Any]] = [
    {"content": "x", "add_special": True, "parse_special": True, "with_pieces": True},
    {"prompt": "x", "add_special_tokens": True, "model": "m"},
    {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tokens": [5, 6], "with_pieces": None},
]


def read_tokens(data: bytes) -> TokensToText:
    return parse(TokensToText, data)


@pytest.mark.parametrize("read", [parse_text, read_tokens])
@PATIENT
@given(almost=nearly(FULL) | json_values)
def test_what_is_nearly_a_request_is_taken_or_refused(
    read: Callable[[bytes], Any], almost: Any
) -> None:
    try:
        made = encode_request(read(json.dumps(almost).encode()).frame(R))
    except RequestError as error:
        told = refusal(error)
        json.dumps(told.body, allow_nan=False)
        assert told.status == 400
    else:
        assert decode_to_agent(made) is not None


def test_a_chat_that_no_frame_can_carry_is_its_senders_error() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64}}}

    with pytest.raises(RequestError, match="ints"):
        encode_request(frame(messages=[USER], tools=[tool]))
