"""An agent is asked about images."""

import asyncio
import struct
from collections.abc import Generator
from typing import NoReturn

import pytest
from engines import HeldEngine, HeldVision
from linked import (
    HELD,
    R1,
    R2,
    R3,
    PlayedBalancer,
    PlayedModels,
    RunningAgent,
    ask,
)

from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import (
    IMAGE_MARKER,
    Cancel,
    ChatMessage,
    Conversation,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Usage,
)

PIXEL = (  # a BMP of one white pixel
    b"BM" + struct.pack("<IHHI", 58, 0, 0, 54)
    + struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 24, 0, 4, 0, 0, 0, 0)
    + b"\xff\xff\xff\x00"
)  # fmt: skip


def ask_about_images(request_id: RequestId, count: int = 1, data: bytes = PIXEL) -> Generate:
    message = ChatMessage("user", "a" + IMAGE_MARKER * count + "b")
    conversation = Conversation((message,), images=(data,) * count)
    return Generate(request_id=request_id, prompt=conversation, max_tokens=100)


@pytest.fixture
def vision(engine: HeldEngine) -> Generator[HeldVision]:
    engine.vision = vision = HeldVision()
    engine.open()
    yield vision
    vision.may_go_on.set()


async def test_a_request_with_images_is_answered(
    balancer: PlayedBalancer, running: RunningAgent, vision: HeldVision
) -> None:
    link = await balancer.link()
    await link.ready()
    vision.may_go_on.set()

    await link.send(ask_about_images(R1, 2))

    usage = Usage(10, 0, 2, input_image_tokens=8)
    assert await link.outcome(R1) == ("ab", Finished(R1, FinishReason.STOP, usage))


async def test_texts_do_not_wait_for_images(
    balancer: PlayedBalancer, running: RunningAgent, models: PlayedModels, vision: HeldVision
) -> None:
    models.engines[HELD.path] = engine = HeldEngine(slots=3)
    engine.vision = vision
    engine.open()
    link = await balancer.link()
    await link.ready()
    await link.send(ask_about_images(R1), ask_about_images(R2))
    await asyncio.to_thread(vision.is_used.wait, 10)

    await link.send(ask(R3))

    async with asyncio.timeout(10):
        assert (await link.outcome(R3))[0] == "ab"


async def test_a_request_cancelled_while_its_image_is_encoded_ends_at_once_and_spares_the_rest(
    balancer: PlayedBalancer, running: RunningAgent, vision: HeldVision
) -> None:
    link = await balancer.link()
    await link.ready()
    await link.send(ask_about_images(R1, 3))
    await asyncio.to_thread(vision.is_used.wait, 10)

    await link.send(Cancel(R1))

    assert await link.event() == Finished(R1, FinishReason.CANCELLED, Usage())
    vision.may_go_on.set()
    await link.send(ask_about_images(R2))
    assert (await link.outcome(R2))[0] == "ab"
    assert vision.encoded == 2, "one of the first request, one of the second"


async def test_an_image_that_cannot_be_read_is_its_requests_error(
    balancer: PlayedBalancer, running: RunningAgent, vision: HeldVision
) -> None:
    link = await balancer.link()
    await link.ready()

    await link.send(ask_about_images(R1, data=b"no image"))

    failed = await link.event()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.figures) == (ErrorCode.IMAGE_DECODING_FAILED, {})


async def test_an_error_is_told_with_its_figures(
    balancer: PlayedBalancer,
    running: RunningAgent,
    vision: HeldVision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {"image_tokens": 4, "n_batch": 3}

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RequestError(ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE, "4 are more than 3", figures)

    monkeypatch.setattr(vision, "read", refuse)
    link = await balancer.link()
    await link.ready()

    await link.send(ask_about_images(R1))

    expected = Failed(R1, ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE, "4 are more than 3", figures)
    assert await link.event() == expected
