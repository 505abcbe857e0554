import json
from collections.abc import Sequence
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from balancer.limits import (
    CONSTANTS,
    LARGEST_BODY,
    UNLIMITED,
    Limit,
    LimitError,
    Limits,
    Tally,
    check_documents,
    limit_answer,
)
from common.errors import ErrorCode
from common.ids import RequestId
from common.messages import MAX_FRAME_BYTES, Generate, RawPrompt

TOLD_THE_BUFFER = {Limit.BUFFERED_REQUESTS}
OF_THE_DESIRED_STATE = {Limit.PROMPT_TOKENS}
SUMS = [Limit.OPEN_REQUESTS, Limit.OPEN_BYTES, Limit.OPEN_SOCKETS, Limit.OBSERVERS, Limit.AGENTS]


def ask(max_tokens: int) -> Generate:
    return Generate(request_id=RequestId("r"), prompt=RawPrompt("Hi"), max_tokens=max_tokens)


def test_each_limit_has_one_place_where_it_stands() -> None:
    settable = {Limit(each.name) for each in fields(Limits)}

    assert not settable & set(CONSTANTS)
    assert settable | set(CONSTANTS) | TOLD_THE_BUFFER | OF_THE_DESIRED_STATE == set(Limit)


def test_the_largest_body_fits_into_a_frame() -> None:
    assert LARGEST_BODY * 2 < MAX_FRAME_BYTES


@pytest.mark.parametrize("wrong", [{"body_bytes": LARGEST_BODY + 1}, {"open_requests": 0}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Limits).validate_json(json.dumps(wrong))


@pytest.mark.parametrize(
    ("asked", "most", "granted"),
    [(10, None, 10), (10, 10, 10), (UNLIMITED, None, UNLIMITED), (UNLIMITED, 10, 10)],
)
def test_an_answer_may_be_as_long_as_it_may(asked: int, most: int | None, granted: int) -> None:
    assert limit_answer(ask(asked), Limits(max_tokens=most)) == ask(granted)


def test_who_asks_for_a_longer_one_is_told_how_long_it_may_be() -> None:
    with pytest.raises(LimitError, match="n is 11, the most that is allowed here is 10") as caught:
        limit_answer(ask(11), Limits(max_tokens=10), "n")

    error = caught.value
    assert (error.code, error.limit, error.parameter) == (
        ErrorCode.INVALID_REQUEST,
        "max_tokens",
        "n",
    )


def test_documents_are_counted() -> None:
    check_documents(["a", "b"], Limits(documents=2), "input")
    with pytest.raises(LimitError, match="input has 3 documents, 2 are allowed"):
        check_documents(["a", "b", "c"], Limits(documents=2), "input")


@given(st.lists(st.tuples(st.sampled_from(SUMS), st.integers(1, 4))))
def test_no_more_is_open_than_may_be_and_nothing_is_lost(
    asked: Sequence[tuple[Limit, int]],
) -> None:
    most = 6
    tally = Tally(Limits(**dict.fromkeys(SUMS, most)))
    held: list[tuple[Limit, int]] = []
    for limit, amount in asked:
        before = tally.used(limit)
        assert before is not None
        if before + amount <= most:
            tally.acquire(limit, amount)
            held.append((limit, amount))
            continue
        with pytest.raises(LimitError) as caught:
            tally.acquire(limit, amount)
        assert (caught.value.limit, caught.value.code) == (limit, ErrorCode.OVERLOADED)
        assert tally.used(limit) == before

    for limit, amount in held:
        tally.release(limit, amount)

    assert [tally.used(limit) for limit in SUMS] == [0] * len(SUMS)
