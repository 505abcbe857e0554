"""Images among the tokens."""

import re
import weakref

import pytest
from answers import plain_output
from scheduled import R1, R2, R3, R4, Running, mixed

from agent.budget import TILE
from agent.engine import ImageRun
from agent.prompt import PreparedRequest
from common.messages import (
    Failed,
    Finished,
    Sampling,
    Usage,
)


def lengths(running: Running) -> list[list[int]]:
    """Of the chunks in each pass."""
    return [[len(chunk.tokens) for chunk in chunks] for chunks in running.passes]


def test_an_image_is_fed_whole_and_alone() -> None:
    running = Running(batch_size=4)
    running.submit(R1, "ab<cat*6>cde", max_tokens=1)

    running.run()

    assert lengths(running) == [[2], [6], [3]]
    assert running.usage(R1) == Usage(11, 0, 1, input_image_tokens=6)
    running.check()


def test_an_image_whose_tokens_do_not_look_ahead_is_fed_in_parts() -> None:
    running = Running(batch_size=4)
    running.submit(R1, "ab<cat/6>cde", max_tokens=1)

    running.run()

    assert lengths(running) == [[2], [4], [2], [3]]
    assert running.usage(R1) == Usage(11, 0, 1, input_image_tokens=6)
    running.check()


def test_an_image_in_parts_does_not_hold_up_a_stream() -> None:
    running = Running(context=2000, batch_size=512, longest_gap=0.02)
    running.submit(R1, "a", max_tokens=100, ignore_eos=True)
    running.step()
    running.submit(R2, "<cat/500>b", max_tokens=1)

    running.run()

    with_image = [sum(counts) for counts in lengths(running)[1:] if counts != [1]]
    assert max(with_image) <= TILE
    assert lengths(running).count([1]) >= len(with_image), "a token between any two parts"


def test_of_an_image_in_parts_only_the_whole_is_shared() -> None:
    running = Running(context=64, batch_size=8)
    running.submit(R1, "seen here: <cat/20>", max_tokens=1)
    for _ in range(3):
        running.step()
    running.do(running.scheduler.cancel(R1))

    running.submit(R2, "seen here: <cat/20>a", max_tokens=1)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")
    running.check()


@pytest.mark.parametrize(
    "prompt", ["<cat*6>", "<cat*6>a", "a<cat*6>", "<cat*3><dog*3>", "a<cat*1>b", "<cat/9><dog/6>a"]
)
def test_an_image_may_be_anywhere_in_a_prompt(prompt: str) -> None:
    running = Running(batch_size=4)
    running.submit(R1, prompt)

    running.run()

    words = re.sub("<.*?>", "", prompt)
    assert (running.text(R1), running.usage(R1).content_tokens) == (words, len(words))


def test_a_stream_has_its_token_between_two_images() -> None:
    running = Running(context=64)
    running.submit(R1, "a", max_tokens=20, ignore_eos=True)
    running.step()

    running.submit(R2, "<cat*6><dog*6><cow*6>b", max_tokens=1)
    running.run()

    assert lengths(running)[1:7] == [[6], [1], [6], [1], [6], [1, 1]]


def test_somebodys_text_is_fed_between_two_images() -> None:
    running = Running(slots=3, context=64, batch_size=6)
    running.submit(R1, "<cat*9><dog*9><cow*9>", max_tokens=1)
    running.submit(R2, "abcdefghij", max_tokens=1)

    running.run()

    assert lengths(running)[:5] == [[9], [6], [9], [4], [9]]


def test_texts_have_their_turn_though_documents_are_embedded_too() -> None:
    running = Running(slots=3, context=64, batch_size=8)
    running.submit(R1, "a", max_tokens=20, ignore_eos=True)
    running.step()
    running.submit(R2, "<cat*6><dog*6><cow*6><pig*6>", max_tokens=1)
    running.submit(R3, "bcdefgh", max_tokens=1)

    fed: list[list[int]] = []
    for _ in range(6):
        running.do(running.scheduler.make_room())
        chunks = running.scheduler.plan(takes_turns=True)
        fed.append([len(chunk.tokens) for chunk in chunks])
        running.do(running.scheduler.commit(chunks, running.engine.decode(chunks), seconds=0.01))

    assert fed == [[1], [6], [1], [1, 7], [1], [6]]


def test_the_same_image_at_the_same_place_is_shared() -> None:
    running = Running(context=64)
    running.submit(R1, "seen: <cat*9> once", max_tokens=1)
    running.run()

    running.submit(R2, "seen: <cat*9> twice", max_tokens=1)
    running.run()

    assert running.usage(R2) == Usage(21, 16, 1, input_image_tokens=9)
    assert running.fed == 20 + 5
    running.check()


def test_another_image_is_never_shared() -> None:
    running = Running(context=64)
    running.submit(R1, "seen here: <cat*9>", max_tokens=1)
    running.run()

    running.submit(R2, "seen here: <dog*9>", max_tokens=1)
    running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")


def test_an_image_is_not_cut_in_two_by_sharing() -> None:
    """The last token is always fed, here with all of its image."""
    running = Running(context=64)
    for request_id in (R1, R2):
        running.submit(request_id, "seen here: <cat*9>", max_tokens=1)
        running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")
    assert [chunk.image is not None for chunk in running.passes[-1]] == [True]


def test_a_long_image_at_the_end_is_fed_again_and_not_waited_for() -> None:
    running = Running(context=200)
    for request_id in (R1, R2):
        running.submit(request_id, f"seen here: <cat*{2 * TILE}>", max_tokens=1)
        running.run()

    assert running.usage(R2).cached_prompt_tokens == len("seen here: ")


def test_half_an_image_is_not_shared_while_the_rest_is_being_fed() -> None:
    running = Running(context=200, batch_size=20)
    running.submit(R1, f"seen here: <cat/{TILE - 4}>, so", max_tokens=1)
    running.step()
    running.step()

    running.submit(R2, f"seen here: <cat/{TILE - 4}>, or", max_tokens=1)
    running.run()

    assert running.shares[0].length in (len("seen here: "), len("seen here: ") + TILE - 4)


def test_an_image_that_is_being_fed_is_waited_for() -> None:
    running = Running(context=200)
    running.submit(R1, f"<cat*{TILE}>a", max_tokens=1)
    running.submit(R2, f"<cat*{TILE}>b", max_tokens=1)

    running.run()

    assert running.fed == TILE + 2


def test_a_stream_has_its_turn_between_images_and_suspects() -> None:
    running = Running(slots=4, context=100, batch_size=8)
    for request_id in (R1, R2):
        running.submit(request_id, "s" * 90, cache_prompt=False)
    while running.fed < 150:
        running.step()
    running.do(running.scheduler.fail(running.plan(), "failed"))
    running.submit(R3, "a", ignore_eos=True, max_tokens=20)
    running.submit(R4, "".join(f"<{name}*5>" for name in "klmnopqrstu"))
    waits = [0]
    while not any(isinstance(event, Finished) for event in running.told):
        tokens = len(running.told)
        running.step()
        waits.append(0 if len(running.told) > tokens else waits[-1] + 1)

    assert max(waits) <= 3


def test_an_image_gets_its_cells_from_the_youngest() -> None:
    running = Running(slots=3, context=40, cells=100, most_cached=0)
    for request_id, letter in ((R1, "a"), (R3, "b")):
        running.submit(request_id, letter, max_tokens=39, ignore_eos=True)
    running.step()
    running.submit(R2, "xy<cat*30>z", max_tokens=3)

    running.run()

    assert running.text(R2) == "xyz"
    assert len(running.text(R1)) == len(running.text(R3)) == 39
    running.check()


def test_a_younger_stream_makes_way_for_an_image() -> None:
    running = Running(slots=2, context=1650, cells=1660, batch_size=40, most_cached=0)
    running.submit(R1, "a" * 1600 + "<cat*20>b", max_tokens=1)
    running.submit(R2, "x", max_tokens=200, ignore_eos=True)

    while not any(event.request_id == R1 for event in running.told):
        running.step()

    assert running.scheduler.figures.pauses == 1
    assert len(running.text(R2)) == 42, "at once, and not when its own cells are used up"
    running.run()
    assert running.usage(R2).content_tokens == 200
    running.check()


def test_a_paused_request_is_fed_its_images_again() -> None:
    running = Running(slots=2, context=40, cells=50, most_cached=0)
    running.submit(R1, "a", max_tokens=39, ignore_eos=True)
    running.submit(R2, "b<cat*9>c", max_tokens=20, ignore_eos=True)

    running.run()

    assert running.scheduler.figures.pauses > 0
    assert [chunk.image.encoding for chunks in running.passes for chunk in chunks if chunk.image] == [
        "cat", "cat",
    ]  # fmt: skip
    assert running.text(R2) == "bc" * 10
    running.check()


def test_an_image_whose_decode_fails_ends_its_request_only() -> None:
    running = Running(context=64)
    running.submit(R1, "a", max_tokens=9, ignore_eos=True)
    running.submit(R2, "x<cat*5>y")
    running.poison = mixed("<cat*5>")[0][0]

    running.run()

    assert isinstance(running.last(R2), Failed)
    assert running.text(R1) == "a" * 9
    running.check()


def test_a_request_that_is_over_keeps_no_image() -> None:
    running = Running(context=64)
    prompt, (image,) = mixed("a<cat*5>b")
    encoding = type("Held", (), {})()
    kept = weakref.ref(encoding)
    sampler = running.engine.sampler(prompt, Sampling(), None, None)
    images = (ImageRun(image.start, image.length, encoding),)
    request = PreparedRequest(R1, prompt, 5, sampler, plain_output(), images=images)

    running.do(running.scheduler.submit(request))
    running.run()
    running.passes.clear()
    del encoding, images, request

    assert kept() is None
