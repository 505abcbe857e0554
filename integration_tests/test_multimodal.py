"""Images: the llama.cpp engine with the real small model and a projector of random weights.

What the model says of an image means nothing, so the tests ask for the same and for differences, and
for what llama.cpp's own helper makes of the same prompt.
"""

import gc
import json
import threading
import weakref
from base64 import b64encode
from collections.abc import Generator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import text_of
from llama_running import GREEDY, Running, first_logprobs
from msgspec.structs import replace
from mtmd_reference import reference_logprobs
from PIL import Image
from product import Up, start_up
from tiny_projector import PATCH, SIDE, TOKENS, write_tiny_projector
from tiny_qwen2vl import PIXELS_PER_TOKEN, WIDTH, write_tiny_qwen2vl

from agent.engine import SamplerPlace
from agent.images import open_image
from agent.llama import LlamaEngine
from agent.prompt import Preparer
from common.errors import DecodeError, ErrorCode, ProjectorError, RequestError
from common.ids import RequestId, SequenceId
from common.messages import (
    IMAGE_MARKER,
    ChatMessage,
    Conversation,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generate,
    RawPrompt,
    Sampling,
    TokenGenerated,
)
from common.models import KvLayout
from deploy.model import default_model

PLAIN = "{{ messages[0].content }}"
"""A template that adds nothing."""

ENDLESS = replace(GREEDY, ignore_eos=True)


def png(seed: int, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """Noise, another for each seed."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


CAT, DOG = png(1), png(2)
SEEN = f"This is a picture:{IMAGE_MARKER}\nIt shows"


def ask(text: str, *images: bytes) -> Conversation:
    return Conversation((ChatMessage("user", text),), images=images)


def projector(folder: Path, **options: Any) -> Path:
    path = folder / "projector.gguf"
    write_tiny_projector(path, **options)
    return path


def load(projector_path: Path, **options: Any) -> LlamaEngine:
    options = {"slots": 4, "threads": 1, "context": 512, "cells": 2048} | options
    return LlamaEngine(str(default_model()), projector_path=str(projector_path), **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return projector(tmp_path_factory.mktemp("mlp"))


@pytest.fixture(scope="module")
def loaded(path: Path) -> Generator[LlamaEngine]:
    engine = load(path)
    yield engine
    engine.close()


@pytest.fixture
def running(loaded: LlamaEngine) -> Generator[Running]:
    running = Running(loaded, template=PLAIN)
    yield running
    running.forget()


def likeliest(running: Running, name: str) -> dict[int, float]:
    return {int(token): logprob for token, logprob in first_logprobs(running, name).items()}


def alone(running: Running, name: str, prompt: Conversation, **options: Any) -> dict[int, float]:
    """What the model thinks of it when nothing is shared."""
    running.submit(name, prompt, logprobs=5, cache_salt=name, **options)
    running.run()
    return likeliest(running, name)


def assert_alike(one: dict[int, float], other: dict[int, float]) -> None:
    """Up to rounding: llama.cpp computes batches of another shape in another order."""
    for token in list(one)[:2]:
        assert other[token] == pytest.approx(one[token], abs=0.3)


KINDS: dict[str, dict[str, Any]] = {
    "one piece": {},
    "several pieces": {"tiles": True},
    "not causal": {"kind": "gemma3"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "images"),
    [
        (f"{IMAGE_MARKER}\nIt shows", [CAT]),
        (SEEN, [CAT]),
        (f"One:{IMAGE_MARKER}and two:{IMAGE_MARKER}\nThey show", [CAT, DOG]),
        (f"One:{IMAGE_MARKER}{IMAGE_MARKER}\nThey show", [CAT, DOG]),
    ],
    ids=["begin", "middle", "two", "two at once"],
)
def test_the_model_thinks_what_it_thinks_with_llama_cpps_own_helper(
    tmp_path: Path, kind: str, text: str, images: list[bytes]
) -> None:
    path = projector(tmp_path, **KINDS[kind])
    engine = load(path, slots=1)
    ours = alone(Running(engine, template=PLAIN), "ours", ask(text, *images))
    engine.close()

    theirs = reference_logprobs(default_model(), path, text, images)

    for token, logprob in list(ours.items())[:3]:
        assert theirs[token] == pytest.approx(logprob, abs=0.02)


def test_an_image_may_be_the_end_of_a_prompt(running: Running) -> None:
    """The helper gives nothing to choose from there. So: what was chosen, as a part of the prompt."""
    text = f"This is a picture:{IMAGE_MARKER}"
    running.submit("end", ask(text, CAT), max_tokens=8)
    running.run()
    words = [text_of(event) for event in running.events if isinstance(event, TokenGenerated)]
    begin = "".join(words[:3])

    running.submit("behind", ask(text + begin, CAT), max_tokens=5, cache_salt="alone")
    running.run()

    assert len(words) == 8
    assert running.outcome("behind")[0] == "".join(words[3:])


def test_an_image_changes_the_answer(running: Running) -> None:
    cat = alone(running, "cat", ask(SEEN, CAT))
    dog = alone(running, "dog", ask(SEEN, DOG))
    none = alone(running, "none", ask(SEEN.replace(IMAGE_MARKER, "")))

    assert cat != dog != none != cat
    _, end = running.outcome("cat")
    assert end.usage.input_image_tokens == TOKENS
    assert end.usage.prompt_tokens > TOKENS
    assert running.outcome("none")[1].usage.input_image_tokens == 0


def test_the_same_image_is_read_once_and_the_answer_is_the_same(running: Running) -> None:
    running.submit("first", ask(SEEN, CAT), logprobs=5)
    running.run()
    running.submit("second", ask(SEEN, CAT), logprobs=5)
    running.run()

    text, end = running.outcome("second")
    assert end.usage.cached_prompt_tokens == end.usage.prompt_tokens - 1 > TOKENS
    assert text == running.outcome("first")[0]
    assert_alike(likeliest(running, "first"), likeliest(running, "second"))


def test_another_image_at_the_same_place_is_read(running: Running) -> None:
    running.submit("cat", ask(SEEN, CAT))
    running.run()
    running.submit("dog", ask(SEEN, DOG), logprobs=5)
    running.run()

    _, end = running.outcome("dog")
    before = len(running.engine.vocabulary.tokenize("This is a picture:"))
    assert end.usage.cached_prompt_tokens in (0, before)
    assert_alike(alone(running, "dog alone", ask(SEEN, DOG)), likeliest(running, "dog"))


def test_the_next_turn_begins_behind_the_image(running: Running) -> None:
    text = SEEN + ", as anybody can see,"
    running.submit("first", ask(SEEN, CAT), max_tokens=1)
    running.run()
    running.submit("next", ask(text, CAT), logprobs=5)
    running.run()

    assert running.outcome("next")[1].usage.cached_prompt_tokens > TOKENS
    assert_alike(alone(running, "next alone", ask(text, CAT)), likeliest(running, "next"))


def test_a_stream_beside_images_says_what_it_says_alone(running: Running) -> None:
    counting = RawPrompt("One, two, three,")
    running.submit("alone", counting, max_tokens=24, cache_salt="alone")
    running.run()

    running.submit("beside", counting, max_tokens=24)
    running.step()
    for n in range(3):
        running.submit(f"image {n}", ask(SEEN, png(n)), sampling=ENDLESS)
        running.step()
        running.step()
    running.run()

    assert running.outcome("beside")[0] == running.outcome("alone")[0]
    for n in range(3):
        assert running.outcome(f"image {n}")[1].usage.content_tokens == 12


def test_penalties_look_at_the_words_and_not_at_images(running: Running) -> None:
    penalised = Sampling(temperature=0, penalty_repeat=1.5, dry_multiplier=0.8)

    running.submit("r", ask(SEEN, CAT), sampling=penalised)
    running.run()

    assert running.outcome("r")[1].usage.content_tokens == 12


def test_a_request_that_is_cancelled_while_its_images_are_fed_leaves_no_trace(
    running: Running,
) -> None:
    before = alone(running, "before", ask(SEEN, DOG))
    running.submit("cancelled", ask(f"x{IMAGE_MARKER}y{IMAGE_MARKER}z", CAT, DOG))
    running.step()
    running.step()
    running.do(running.scheduler.cancel(RequestId("cancelled")))

    _, end = running.outcome("cancelled")
    assert (end.reason, end.usage.content_tokens) == (FinishReason.CANCELLED, 0)
    assert_alike(before, alone(running, "after", ask(SEEN, DOG)))


def test_a_request_that_is_over_keeps_no_image(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.llama_vision.MOST_KEPT_BYTES", 0)
    request = Generate(request_id=RequestId("r"), prompt=ask(SEEN, CAT), max_tokens=2)
    prepared = running.preparer.prepare_prompt(request)
    encoding: Any = prepared.images[0].encoding
    embeddings = weakref.ref(encoding.embeddings)

    running.do(running.scheduler.submit(prepared))
    del prepared, encoding
    running.step()
    assert embeddings() is not None
    running.run()
    gc.collect()

    assert embeddings() is None


@pytest.fixture(scope="module")
def small(path: Path) -> Generator[LlamaEngine]:
    """Cells for three of the prompts below."""
    engine = load(path, context=128, cells=128, slots=8)
    yield engine
    engine.close()


def test_many_images_wait_for_cells_and_all_are_answered(small: LlamaEngine) -> None:
    """B18."""
    running = Running(small, template=PLAIN)
    for n in range(8):
        running.submit(f"{n}", ask(SEEN, png(n)), max_tokens=20, sampling=ENDLESS)
    waiting: list[int] = []
    while not running.scheduler.is_idle:
        running.step()
        figures = running.scheduler.figures
        assert figures.cells_running + figures.cells_cached <= small.capacity.cells
        waiting.append(figures.waiting)
    running.forget()

    assert max(waiting) > 0, "all of them fit"
    assert [running.outcome(f"{n}")[1].usage.content_tokens for n in range(8)] == [20] * 8


def test_a_paused_request_reads_its_image_again(small: LlamaEngine) -> None:
    running = Running(small, template=PLAIN)
    said = {}
    for n in range(2):
        alone(running, f"alone {n}", ask(SEEN, png(n)), max_tokens=60, sampling=ENDLESS)
        said[n] = running.outcome(f"alone {n}")[0]
    for n in range(2):
        running.submit(f"{n}", ask(SEEN, png(n)), max_tokens=60, sampling=ENDLESS)
    running.run()
    running.forget()

    assert running.scheduler.figures.pauses > 0
    for n in range(2):
        text, end = running.outcome(f"{n}")
        assert end.usage.content_tokens == 60
        assert text[:40] == said[n][:40]


def refusal(running: Running, prompt: Conversation) -> RequestError:
    with pytest.raises(RequestError) as caught:
        running.submit("refused", prompt)
    return caught.value


def test_an_image_that_is_larger_than_the_batch_is_refused_with_the_numbers(path: Path) -> None:
    engine = load(path, image_batch_size=TOKENS - 1)
    error = refusal(Running(engine, template=PLAIN), ask(SEEN, CAT))
    engine.close()

    assert error.code is ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE
    assert error.figures == {"image_tokens": TOKENS, "n_batch": TOKENS - 1}


def test_more_images_than_the_context_holds_are_refused_before_one_is_read(
    running: Running,
) -> None:
    broken = CAT[:200] + bytes(len(CAT) - 200)
    error = refusal(running, ask(IMAGE_MARKER * 32, *[broken] * 32))

    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert str(32 * TOKENS) in error.message


@pytest.mark.parametrize(
    "data",
    [b"", b"no image", CAT[:100], CAT[:200] + bytes(len(CAT) - 200)],
    ids=["empty", "text", "head", "body"],
)
def test_broken_image_data_is_refused(running: Running, data: bytes) -> None:
    assert refusal(running, ask(SEEN, data)).code is ErrorCode.IMAGE_DECODING_FAILED


def test_a_model_without_a_projector_refuses_images(running: Running) -> None:
    engine = LlamaEngine(str(default_model()), slots=1, threads=1, context=256)
    error = refusal(Running(engine), ask(SEEN, CAT))
    engine.close()

    assert error.code is ErrorCode.MULTIMODAL_NOT_SUPPORTED


def test_a_template_that_drops_an_image_is_said_to(loaded: LlamaEngine) -> None:
    error = refusal(Running(loaded, template="nothing"), ask(SEEN, CAT))

    assert error.code is ErrorCode.CHAT_TEMPLATE_ERROR


def test_a_conversation_in_the_models_own_template(loaded: LlamaEngine) -> None:
    running = Running(loaded)
    running.submit("r", ask(f"What is this?\n{IMAGE_MARKER}", CAT))
    running.run()
    running.forget()

    assert running.outcome("r")[1].usage.input_image_tokens == TOKENS


def test_the_separate_layout_copies_images_too(path: Path) -> None:
    engine = load(path, slots=2, context=256, cells=None, layout=KvLayout.SEPARATE)
    running = Running(engine, template=PLAIN)
    first = alone(running, "alone", ask(SEEN, CAT))
    running.submit("first", ask(SEEN, CAT), max_tokens=1)
    running.run()
    running.submit("second", ask(SEEN, CAT), logprobs=5)
    running.run()
    engine.close()

    assert running.outcome("second")[1].usage.cached_prompt_tokens > TOKENS
    assert_alike(first, likeliest(running, "second"))


def test_samplers_in_the_context_choose_behind_an_image(path: Path, running: Running) -> None:
    text = f"This is a picture:{IMAGE_MARKER}"
    running.submit("host", ask(text, CAT))
    running.run()
    engine = load(path, slots=1, samplers=SamplerPlace.CONTEXT)
    there = Running(engine, template=PLAIN)
    there.submit("context", ask(text, CAT))
    there.run()
    engine.close()

    assert there.outcome("context")[0] == running.outcome("host")[0]


def test_an_image_whose_decode_fails_ends_its_request_only(running: Running) -> None:
    running.submit("stream", RawPrompt("One, two, three,"), max_tokens=20)
    running.step()
    running.submit("broken", ask(SEEN, CAT))
    while not running.scheduler.is_idle:
        running.do(running.scheduler.make_room())
        chunks = running.scheduler.plan()
        if chunks[0].image is None:
            decoded = running.engine.decode(chunks)
            running.do(running.scheduler.commit(chunks, decoded, seconds=0.05))
        else:
            nobody = SequenceId(running.engine.capacity.sequences)
            broken = chunks[0]._replace(sequence_id=nobody)
            with pytest.raises(DecodeError):
                running.engine.decode([broken])
            running.do(running.scheduler.fail(chunks, "failed"))
    told: list[Event] = [event for event in running.events if event.request_id == "broken"]

    assert told == [Failed(RequestId("broken"), ErrorCode.DECODE_FAILED, "failed")]
    assert isinstance(running.outcome("stream")[1], Finished)
    assert alone(running, "after", ask(SEEN, CAT))


def embeddings_of(engine: LlamaEngine, image: bytes) -> Any:
    request = Generate(request_id=RequestId("r"), prompt=ask(SEEN, image), max_tokens=1)
    encoding: Any = Preparer(engine, PLAIN).prepare_prompt(request).images[0].encoding
    return encoding.embeddings


@pytest.mark.parametrize("kept", [0, 2**20], ids=["while somebody has it", "soon again"])
def test_an_image_is_not_encoded_twice(
    loaded: LlamaEngine, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr("agent.llama_vision.MOST_KEPT_BYTES", kept)
    first = embeddings_of(loaded, png(70))
    if kept:
        address = first.ctypes.data
        del first
        embeddings_of(loaded, png(71))
        assert embeddings_of(loaded, png(70)).ctypes.data == address
    else:
        assert embeddings_of(loaded, png(70)) is first


def test_no_more_images_are_kept_than_may_be(
    loaded: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = embeddings_of(loaded, png(80)).nbytes
    monkeypatch.setattr("agent.llama_vision.MOST_KEPT_BYTES", 3 * one)
    kept = [weakref.ref(embeddings_of(loaded, png(80 + n))) for n in (0, 1, 2, 0, 3)]

    assert [reference() is not None for reference in kept] == [True, False, True, True, True]


def test_a_projector_that_is_closed_encodes_no_more(path: Path) -> None:
    engine = load(path, slots=1)
    vision = engine.vision
    assert vision is not None

    def proceed(_count: int) -> None:
        """The model is freed on its own thread while a prompt is prepared on another."""
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join()

    with pytest.raises(RequestError) as caught:
        vision.read(["a", "b"], [open_image(CAT, longest_side=1024)], proceed=proceed)

    assert caught.value.code is ErrorCode.SHUTTING_DOWN


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_truncated_projector_is_refused_with_the_reason(
    tmp_path: Path, path: Path, size: int
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:size])

    with pytest.raises(ProjectorError, match=r"broken\.gguf could not be loaded: .+"):
        load(broken)


def test_a_projector_of_another_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    other = projector(tmp_path, model_width=64)

    with pytest.raises(ProjectorError, match="n_embd = 64"):
        load(other)


def test_a_projector_for_another_vocabulary_is_refused_with_the_reason(tmp_path: Path) -> None:
    other = projector(tmp_path, kind="idefics3")

    with pytest.raises(ProjectorError, match="tokens that the model does not have"):
        load(other)


def test_a_model_is_no_projector() -> None:
    with pytest.raises(ProjectorError, match=r"could not be loaded: .+"):
        load(default_model())


# Positions of several dimensions: an image takes fewer of them than it has tokens

WIDE, TALL = (
    png(3, (5 * PIXELS_PER_TOKEN, 2 * PIXELS_PER_TOKEN)),
    png(4, (2 * PIXELS_PER_TOKEN, 7 * PIXELS_PER_TOKEN)),
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its projector."""
    folder = tmp_path_factory.mktemp("qwen")
    write_tiny_qwen2vl(folder / "model.gguf")
    path = projector(folder, kind="qwen2vl_merger", model_width=WIDTH)
    return folder / "model.gguf", path


@pytest.fixture(scope="module")
def loaded_qwen(qwen: tuple[Path, Path]) -> Generator[LlamaEngine]:
    model, path = qwen
    engine = LlamaEngine(
        str(model), slots=4, threads=1, context=256, cells=256, projector_path=str(path)
    )
    yield engine
    engine.close()


@pytest.fixture
def seeing(loaded_qwen: LlamaEngine) -> Generator[Running]:
    running = Running(loaded_qwen, template=PLAIN)
    yield running
    running.forget()


@pytest.mark.parametrize(
    ("text", "images"),
    [
        (f"{IMAGE_MARKER} is this", [WIDE]),
        (f"What is {IMAGE_MARKER} then?", [TALL]),
        (f"One {IMAGE_MARKER} and {IMAGE_MARKER} more.", [WIDE, TALL]),
    ],
    ids=["begin", "middle", "two"],
)
def test_a_model_with_such_positions_thinks_what_it_thinks_with_the_helper(
    qwen: tuple[Path, Path], seeing: Running, text: str, images: list[bytes]
) -> None:
    ours = alone(seeing, "ours", ask(text, *images))

    theirs = reference_logprobs(*qwen, text, images)

    for token, logprob in ours.items():
        assert theirs[token] == pytest.approx(logprob, abs=0.02)


@pytest.mark.parametrize("tail", ["", "th", " and a long text behind the images of it"])
def test_such_a_model_shares_what_stands_behind_images_too(
    qwen: tuple[Path, Path], seeing: Running, tail: str
) -> None:
    begin = f"One {IMAGE_MARKER} and {IMAGE_MARKER}"
    text = f"{begin}{tail}, or?"
    seeing.submit("first", ask(f"{begin}{tail} so!", WIDE, TALL), max_tokens=1)
    seeing.run()
    seeing.submit("second", ask(text, WIDE, TALL), logprobs=5)
    seeing.run()

    theirs = reference_logprobs(*qwen, text, [WIDE, TALL])

    _, end = seeing.outcome("second")
    tokens = end.usage.input_image_tokens + len(seeing.engine.vocabulary.tokenize(text))
    assert end.usage.cached_prompt_tokens >= tokens - 2 * len(IMAGE_MARKER) - len(", or?")
    for token, logprob in likeliest(seeing, "second").items():
        assert theirs[token] == pytest.approx(logprob, abs=0.02)


def test_a_text_is_where_it_belongs_though_its_sequence_had_an_image_before(
    loaded_qwen: LlamaEngine,
) -> None:
    text = "A text that is longer than what was there before it"

    def thinks() -> dict[int, float]:
        running = Running(loaded_qwen, template=PLAIN)
        told = alone(running, "text", ask(text))
        running.forget()
        return told

    before = thinks()
    running = Running(loaded_qwen, template=PLAIN)
    alone(running, "image", ask(f"x{IMAGE_MARKER}y", WIDE))
    running.forget()

    assert thinks() == before


def test_such_a_model_reads_its_images_again_after_a_pause(seeing: Running) -> None:
    said: dict[str, str] = {}
    names = [f"{n}" for n in range(3)]
    text = f"What is {IMAGE_MARKER} then?"
    for name in names:
        seeing.submit("alone " + name, ask(text + name, WIDE), max_tokens=90, sampling=ENDLESS)
        seeing.run()
        said[name] = seeing.outcome("alone " + name)[0]
    for name in names:
        seeing.submit(
            name, ask(text + name, WIDE), max_tokens=90, sampling=ENDLESS, cache_salt=name
        )
    seeing.run()

    assert seeing.scheduler.figures.pauses > 0
    for name in names:
        assert seeing.outcome(name)[0][:30] == said[name][:30]


@pytest.mark.parametrize(
    ("kind", "rounding"),
    [("mlp", 0.3), ("qwen2vl_merger", 0.02)],  # the former's model has weights of four bits
)
def test_an_image_fed_in_parts_beside_a_stream_leaves_the_model_in_the_same_state(
    tmp_path: Path, qwen: tuple[Path, Path], kind: str, rounding: float
) -> None:
    """Its tokens do not look ahead, so it need not be fed whole."""
    model, path = qwen
    if kind == "mlp":
        model, path = default_model(), projector(tmp_path, side=10 * PATCH)
    large = png(9, (10 * PIXELS_PER_TOKEN, 10 * PIXELS_PER_TOKEN))
    text = f"What is {IMAGE_MARKER} then?"
    theirs = reference_logprobs(model, path, text, [large])
    engine = LlamaEngine(str(model), slots=2, threads=1, context=256, projector_path=str(path))
    running = Running(engine, longest_gap=0.001, template=PLAIN)
    running.submit("stream", RawPrompt("One, two,"), max_tokens=60, sampling=ENDLESS)
    running.step()

    running.submit("image", ask(text, large), logprobs=5, max_tokens=1)
    parts: list[int] = []
    while not running.scheduler.is_idle:
        running.do(running.scheduler.make_room())
        chunks = running.scheduler.plan()
        parts += [len(chunk.tokens) for chunk in chunks if chunk.image is not None]
        running.do(running.scheduler.commit(chunks, engine.decode(chunks), seconds=0.05))
    engine.close()

    assert (len(parts) > 2, sum(parts)) == (True, 100)
    for token, logprob in list(likeliest(running, "image").items())[:3]:
        assert theirs[token] == pytest.approx(logprob, abs=rounding)


# The whole product

ROUTE = "/api/v1/continue_from_conversation_history"


def look(up: Up, *images: bytes) -> list[dict[str, Any]]:
    """The results of asking about images, over HTTP."""
    urls = [f"data:image/png;base64,{b64encode(data).decode()}" for data in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "add_generation_prompt": True,
        "conversation_history": [
            {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}
        ],
        "enable_thinking": False,
        "max_tokens": 8,
    }
    lines = up.client.post(ROUTE, json=body).raise_for_status().text.splitlines()
    return [json.loads(line)["Response"]["response"]["GeneratedToken"] for line in lines]


def use_projector(up: Up, path: Path) -> None:
    state = up.client.get("/api/v1/balancer_desired_state").json()
    state["multimodal_projection"] = {"LocalToAgent": str(path)}
    up.client.put("/api/v1/balancer_desired_state", json=state).raise_for_status()


def test_an_operator_gives_a_running_model_its_eyes(path: Path, tmp_path: Path) -> None:
    with start_up("--slots", "2", "--context", "512") as up:
        assert list(look(up, CAT)[0]) == ["MultimodalNotSupported"]

        use_projector(up, path)
        for _state in up.follow():
            last = look(up, CAT)[-1]
            if "Done" in last:
                assert last["Done"]["usage"]["input_image_tokens"] == TOKENS
                break

        assert "ImageDecodingFailed" in look(up, b"no image")[-1]
        large = png(1, (1500, 500))
        assert look(up, large, large)[-1]["Done"]["usage"]["input_image_tokens"] == 2 * TOKENS

        use_projector(up, projector(tmp_path, model_width=64))
        (agent,) = up.until(lambda agents: bool(agents[0]["issues"] and agents[0]["slots_total"]))
        assert list(agent["issues"][0]) == ["MultimodalProjectionCannotBeLoaded"]
        assert "Done" in look(up, CAT)[-1]
