"""What prompts share, what is kept of them, and who gets the cells when they run short."""

from typing import Any

import pytest
from scheduled import R1, R2, R3, R4, Running

from agent.echo import EchoEngine
from agent.scheduler import Share
from common.ids import RequestId, SequenceId
from common.messages import (
    Failed,
    Finished,
    FinishReason,
    Note,
    Usage,
)

SYSTEM = "You are a helpful assistant. "


def test_a_second_prompt_takes_over_what_a_finished_one_has_fed() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM + "One?")
    running.run()
    fed = running.fed

    running.submit(R2, SYSTEM + "Two?")
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len(SYSTEM)
    assert running.fed - fed == len("Two?") + len(SYSTEM + "Two?")  # and the answer's rows
    assert running.text(R2) == SYSTEM + "Two?"
    running.check()


def test_the_answer_is_cached_too_so_the_next_turn_of_a_chat_is_cheap() -> None:
    running = Running(context=400)
    running.submit(R1, SYSTEM)
    running.run()

    running.submit(R2, SYSTEM + SYSTEM + "And then?")
    running.run()

    assert running.usage(R2).cached_prompt_tokens == 2 * len(SYSTEM)


def test_a_prompt_that_is_cached_whole_still_feeds_its_last_token() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM)
    running.run()

    running.submit(R2, SYSTEM)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len(SYSTEM) - 1
    assert running.text(R2) == SYSTEM


def test_a_running_prompt_is_shared_while_it_runs() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM + "One?")
    running.step()

    running.submit(R2, SYSTEM + "Two?")
    running.step()

    assert running.shares == [Share(SequenceId(0), SequenceId(1), len(SYSTEM))]
    running.run()
    assert running.text(R1) == SYSTEM + "One?"
    assert running.text(R2) == SYSTEM + "Two?"


def test_a_prefix_that_is_being_fed_is_waited_for() -> None:
    long = SYSTEM * 20
    running = Running(slots=4, context=2000, batch_size=100)
    for n, request_id in enumerate((R1, R2, R3)):
        running.submit(request_id, f"{long}Question {n}?", max_tokens=1)

    running.run()

    distinct = len("Question n?")
    assert running.fed <= len(long) + 3 * distinct
    assert [running.usage(r).cached_prompt_tokens >= len(long) for r in (R1, R2, R3)] == [
        False, True, True,
    ]  # fmt: skip


def test_those_that_wait_for_a_prefix_let_others_pass() -> None:
    running = Running(slots=4, context=2000, batch_size=100)
    running.submit(R1, SYSTEM * 20 + "One?")
    running.submit(R2, SYSTEM * 20 + "Two?")
    running.submit(R3, "Something else?")

    running.step()
    running.step()

    assert running.text(R3) != ""
    assert running.scheduler.figures.waiting == 1


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_a_prefix_that_will_not_come_is_fed_by_the_next(how: str) -> None:
    running = Running(slots=4, context=2000, batch_size=100)
    running.submit(R1, SYSTEM * 20)
    running.submit(R2, SYSTEM * 20)
    chunks = running.step()

    if how == "cancel":
        running.do(running.scheduler.cancel(R1))
    else:
        chunks = running.plan()
        running.do(running.scheduler.fail(chunks, "broken"))
    running.run()

    assert running.text(R2) == SYSTEM * 20


def test_a_request_may_want_its_prompt_read_anew_and_others_share_it_then() -> None:
    running = Running(slots=2, context=200)
    running.submit(R1, "a" * 50, max_tokens=1)
    running.run()

    running.submit(R2, "a" * 50, max_tokens=1, cache_prompt=False)
    running.step()
    assert running.fed == 100
    running.run()
    running.submit(R3, "a" * 50, max_tokens=1)
    running.step()

    assert running.fed == 101


def test_nothing_is_shared_across_salts() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM, salt="tenant a")
    running.run()

    running.submit(R2, SYSTEM, salt="tenant b")
    running.run()
    running.submit(R3, SYSTEM)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == 0
    assert running.usage(R3).cached_prompt_tokens == 0
    assert running.shares == []


def test_the_least_recently_used_prompt_is_dropped_first() -> None:
    running = Running(slots=1, context=100, cells=100, sequences=8)
    texts = {name: name * 20 for name in "abc"}
    for name in "ab":
        running.submit(RequestId(name), texts[name])
        running.run()
    running.submit(RequestId("a again"), texts["a"])
    running.run()

    running.submit(RequestId("c"), texts["c"])  # 40 cells, and 80 are taken
    running.run()
    running.submit(RequestId("a at last"), texts["a"])
    running.run()
    running.submit(RequestId("b at last"), texts["b"])
    running.run()

    assert running.usage(RequestId("a at last")).cached_prompt_tokens == 19
    assert running.usage(RequestId("b at last")).cached_prompt_tokens == 0
    running.check()


def test_a_prompt_does_not_push_out_its_own_beginning() -> None:
    running = Running(slots=1, context=100, cells=1000, sequences=3)
    for name in "abc":
        running.submit(RequestId(name), name * 20)
        running.run()

    running.submit(RequestId("a again"), "a" * 20)  # the oldest of them, and all IDs are taken
    running.run()

    assert running.usage(RequestId("a again")).cached_prompt_tokens == 19


@pytest.mark.parametrize(
    "bound",
    [{"sequences": 4}, {"sequences": 8, "most_cached": 4 * len(SYSTEM)}],
    ids=["sequence IDs", "cells"],
)
def test_the_same_question_again_and_again_pushes_out_nothing_else(bound: dict[str, Any]) -> None:
    running = Running(slots=1, context=200, cells=2000, **bound)
    running.submit(RequestId("other"), "x" * 20)
    running.run()

    for n in range(20):
        running.submit(RequestId(f"r{n}"), SYSTEM)
        running.run()
    running.submit(RequestId("other again"), "x" * 20)
    running.run()

    assert running.usage(RequestId("r19")).cached_prompt_tokens == len(SYSTEM) - 1
    assert running.usage(RequestId("other again")).cached_prompt_tokens == 19
    running.check()


def test_what_is_here_twice_gives_up_no_cells_while_nobody_needs_them() -> None:
    """What runs would go on in those, and its cells would not be in order any more."""
    running = Running(slots=1, context=200, cells=2000, sequences=8)
    cached: list[int] = []

    for n in range(3):
        running.submit(RequestId(f"r{n}"), SYSTEM)
        running.run()
        cached.append(running.scheduler.figures.cells_cached)

    assert cached == sorted(set(cached)), "more each time"


def test_the_cache_keeps_no_more_than_it_may() -> None:
    """B19: a bound, and it is shown."""
    running = Running(slots=1, context=200, cells=2000, most_cached=100)

    for n in range(50):
        running.submit(RequestId(f"r{n}"), f"{n:02}" + "x" * 30)
        running.run()
        assert running.scheduler.figures.cells_cached <= 100
    running.check()


def test_the_cache_keeps_no_more_than_it_may_also_when_a_request_fails_that_shared_it() -> None:
    running = Running(slots=3, context=200, cells=600, most_cached=100)
    running.submit(R1, "p" * 80, max_tokens=2)
    running.step()
    running.submit(R2, "p" * 80, ignore_eos=True)
    while not isinstance(running.last(R1), Finished):
        running.step()
    running.submit(R3, "z" * 80, max_tokens=1)
    running.step()
    assert isinstance(running.last(R3), Finished)

    running.do(running.scheduler.fail(running.plan(), "failed"))

    assert isinstance(running.last(R2), Failed)
    assert running.scheduler.figures.cells_cached <= 100
    running.check()


def test_the_cache_keeps_no_more_than_it_may_also_when_a_request_ends_that_brought_nothing_new() -> (
    None
):
    running = Running(slots=3, context=200, cells=600, most_cached=100)
    running.submit(R1, "z" * 80, ignore_eos=True)
    running.step()
    running.submit(R2, "p" * 80, max_tokens=1)
    running.step()
    running.submit(R3, "p" * 80 + "q")
    running.plan()

    running.do(running.scheduler.cancel(R1))
    running.do(running.scheduler.cancel(R3))

    assert len(running.shares) == 1
    assert running.scheduler.figures.cells_cached <= 100
    running.check()


def test_two_chats_with_a_common_beginning_keep_their_own_sequences() -> None:
    """B15 and B17: from the second turn on each finds its own history, whole, and no other's."""
    running = Running(slots=2, context=4000, cells=8000, sequences=8)
    histories = {"a": SYSTEM, "b": SYSTEM}
    turns = 10
    for turn in range(turns):
        for name in "ab":
            request_id = RequestId(f"{name}{turn}")
            prompt = histories[name] + f"[{name} asks {turn}]"
            running.submit(request_id, prompt, max_tokens=30)
            running.run()
            if turn > 0:
                cached = running.usage(request_id).cached_prompt_tokens
                assert cached >= 0.9 * len(histories[name])
            histories[name] = prompt + running.text(request_id)

    assert "b asks" not in histories["a"]
    assert "a asks" not in histories["b"]


def test_a_model_that_cannot_share_a_part_is_fed_and_correct() -> None:
    running = Running(context=400, shares_part=False)
    running.submit(R1, SYSTEM + "One?")
    running.run()

    running.submit(R2, SYSTEM + "Two?")
    running.run()
    held = 2 * (SYSTEM + "One?")
    running.submit(R3, held + "And then?")
    running.run()

    assert running.usage(R2).cached_prompt_tokens == 0
    assert running.text(R2) == SYSTEM + "Two?"
    assert running.usage(R3).cached_prompt_tokens == len(held)
    assert len(running.shares) == 1, "it was tried in vain"


def test_a_share_that_the_engine_refuses_is_fed_instead() -> None:
    class Forgetful(EchoEngine):
        def share(self, source: SequenceId, destination: SequenceId, length: int, /) -> bool:
            return False

    running = Running(engine=Forgetful(slots=2, context=200))
    running.submit(R1, SYSTEM)
    running.run()

    running.submit(R2, SYSTEM + "Two?")
    running.step()
    assert running.scheduler.figures.cells_running == len(SYSTEM + "Two?")
    running.run()

    assert running.shares
    assert running.text(R2) == SYSTEM + "Two?"
    assert running.usage(R2).cached_prompt_tokens == 0
    running.check()


def test_a_layout_that_copies_counts_what_it_copies() -> None:
    running = Running(context=200, shares_cells=False)
    running.submit(R1, SYSTEM + "One?")
    running.step()
    running.submit(R2, SYSTEM + "Two?")
    running.step()

    running.check()
    assert running.engine.used == 2 * len(SYSTEM + "One?") + 1


# Short cells


def test_four_streams_in_the_cells_of_one_all_come_to_their_end() -> None:
    """B11: nobody is aborted; the youngest wait for the others."""
    running = Running(slots=4, context=1024, cells=1024, batch_size=512)
    for n, request_id in enumerate((R1, R2, R3, R4)):
        running.submit(request_id, f"{n}" * 100, max_tokens=500, ignore_eos=True)

    running.run()

    for n, request_id in enumerate((R1, R2, R3, R4)):
        assert running.text(request_id) == f"{n}" * 500
        assert running.usage(request_id) == Usage(100, 0, 500)
    assert running.scheduler.figures.pauses > 0
    running.check()


def test_the_oldest_goes_on_while_the_youngest_is_paused() -> None:
    running = Running(slots=2, context=100, cells=100)
    running.submit(R1, "a" * 30, max_tokens=60, ignore_eos=True)
    running.submit(R2, "b" * 30, max_tokens=60, ignore_eos=True)
    running.run()

    ends = [event.request_id for event in running.told if isinstance(event, Finished)]
    assert ends == [R1, R2]
    assert running.scheduler.figures.pauses == 1
    assert (running.text(R1), running.text(R2)) == ("a" * 60, "b" * 60)


def test_a_large_prompt_drops_what_is_cached_and_nobody_fails() -> None:
    """B12: cells nearly full, then a prompt that needs them."""
    running = Running(slots=2, context=600, cells=1000)
    for n in range(4):
        running.submit(RequestId(f"c{n}"), f"{n}" * 120)
        running.run()
    assert running.scheduler.figures.cells_free < 100

    running.submit(R1, "x" * 512)
    running.run()

    end = running.last(R1)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    assert running.text(R1) == "x" * (600 - 512)
    assert all(running.passes), "a pass without work"


def test_a_request_that_waits_for_cells_is_not_overtaken() -> None:
    running = Running(slots=3, context=100, cells=100)
    running.submit(R1, "a" * 40, max_tokens=20, ignore_eos=True)
    running.submit(R2, "b" * 60, max_tokens=3)
    running.submit(R3, "c", max_tokens=3)

    running.run()

    told = [event.request_id for event in running.told]
    assert told.index(R2) < told.index(R3)


# What operators are told


def told_of(running: Running, request_id: RequestId) -> list[tuple[Note, str]]:
    return [(each.note, each.why) for each in running.noted if each.request_id == request_id]


def test_operators_are_told_what_of_a_prompt_is_shared_and_with_whom() -> None:
    running = Running(context=200)
    running.submit(R1, SYSTEM + "One?")
    running.step()
    running.submit(R2, SYSTEM + "Two?")
    running.run()
    running.submit(R3, SYSTEM + "Two?")
    running.run()

    length = len(SYSTEM + "One?")
    whys = [told_of(running, request_id) for request_id in (R1, R2, R3)]
    assert whys == [
        [(Note.ADMITTED, f"it has {length} tokens; no other sequence holds how they begin")],
        [
            (
                Note.ADMITTED,
                f"it has {length} tokens; the first {len(SYSTEM)} are shared with a running request",
            )
        ],
        [
            (
                Note.ADMITTED,
                f"it has {length} tokens; the first {length - 1} are shared with a finished request",
            )
        ],
    ]
    last = running.noted[-1]
    assert (last.tokens, last.cached) == (length, length - 1)


def test_operators_are_told_once_that_a_prompt_waits_for_anothers() -> None:
    running = Running(slots=4, context=2000, batch_size=100)
    running.submit(R1, SYSTEM * 20 + "One?")
    running.submit(R2, SYSTEM * 20 + "Two?")
    running.run()

    assert [note for note, _ in told_of(running, R2)] == [Note.WAITS_FOR_PREFIX, Note.ADMITTED]


def test_operators_are_told_who_waits_for_cells_and_who_gave_them_up() -> None:
    running = Running(slots=3, context=100, cells=100)
    running.submit(R1, "a" * 30, max_tokens=60, ignore_eos=True)
    running.submit(R2, "b" * 30, max_tokens=60, ignore_eos=True)
    running.step()
    running.submit(R3, "c" * 60, max_tokens=1)
    running.run()

    assert [note for note, _ in told_of(running, R2)] == [
        Note.ADMITTED,
        Note.PAUSED,
        Note.WAITS_FOR_CELLS,
        Note.ADMITTED,
    ]
    assert told_of(running, R3)[0] == (
        Note.WAITS_FOR_CELLS,
        "60 of 100 KV cells are in use by 2 requests, and it has 60 tokens",
    )


def test_operators_are_told_of_a_pass_that_failed_and_not_of_want_of_cells() -> None:
    running = Running(slots=2)
    running.submit(R1, "ab")
    running.submit(R2, "cd")
    running.do(running.scheduler.fail(running.plan(), "flaky"))
    running.run()

    assert told_of(running, R1)[1] == (
        Note.DECODE_FAILED,
        "a pass with 2 requests failed: it is fed again, alone",
    )


def test_what_a_request_waits_for_is_not_told_anew_because_another_waits_before_it() -> None:
    running = Running(slots=4, context=400, cells=420, batch_size=16)
    running.submit(R1, "x" * 100 + SYSTEM, max_tokens=1)
    running.submit(R2, "y" * 390, max_tokens=1)
    running.submit(R3, "x" * 100 + SYSTEM + "?", max_tokens=1)
    running.run()

    notes = [note for note, _ in told_of(running, R3)]
    assert len(notes) <= 3, notes
