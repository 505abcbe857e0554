"""The llama.cpp engine with the real small model."""

import math
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_running import GREEDY, Running, first_logprobs, generate
from msgspec.structs import replace

from agent.engine import Chunk, SamplerPlace
from agent.llama import (
    ALIKE,
    ATTENTION_TILE,
    Attention,
    Device,
    LlamaEngine,
    check_loadable,
    split_alike,
)
from common.errors import DecodeError, ModelError
from common.ids import RequestId, SequenceId, TokenId
from common.messages import (
    ChatMessage,
    Conversation,
    Finished,
    FinishReason,
    Pooling,
    RawPrompt,
    Sampling,
    TokenGenerated,
    TokenPrompt,
)
from common.models import CacheType, FlashAttention, KvLayout
from deploy.model import default_model

ENDLESS = replace(GREEDY, ignore_eos=True)
SEQUENCE = SequenceId(0)


@pytest.fixture(scope="module")
def engine() -> Generator[LlamaEngine]:
    engine = LlamaEngine(str(default_model()), slots=4, threads=1, context=512, cells=2048)
    yield engine
    engine.close()


def test_it_knows_things(engine: LlamaEngine) -> None:
    ((text, end),) = generate(engine, RawPrompt("The capital of France is"), max_tokens=2)

    assert text.strip(" .,") == "Paris"
    assert (end.reason, end.usage.content_tokens) == (FinishReason.LENGTH, 2)


def test_a_conversation_ends_by_itself(engine: LlamaEngine) -> None:
    conversation = Conversation((ChatMessage("user", "Say hello."),))

    ((text, end),) = generate(engine, conversation, max_tokens=200)

    assert "ello" in text
    assert "<|im_end|>" not in text
    assert end.reason is FinishReason.STOP


def test_streams_in_one_batch_do_not_mix(engine: LlamaEngine) -> None:
    france, japan = RawPrompt("The capital of France is"), RawPrompt("The capital of Japan is")

    together = generate(engine, france, japan, france, japan, max_tokens=2)

    assert [text.split()[0].strip(".,") for text, _ in together] == [
        "Paris", "Tokyo", "Paris", "Tokyo",
    ]  # fmt: skip


def test_a_sequence_that_was_forgotten_remembers_nothing(engine: LlamaEngine) -> None:
    prompt = RawPrompt("One, two, three,")
    before = generate(engine, prompt)

    generate(engine, RawPrompt("A secret word: abracadabra. " * 10))

    assert generate(engine, prompt) == before


def test_a_prompt_fed_in_small_chunks_gives_the_same_text(engine: LlamaEngine) -> None:
    prompt = RawPrompt("Alice, Bob and Carol went to the sea. " * 20)
    ((at_once, _),) = generate(engine, prompt)

    running = Running(engine, longest_gap=0.001)
    running.submit("stream", RawPrompt("One, two, three,"), max_tokens=30)
    running.step()
    running.submit("prompt", prompt)
    running.run()
    running.forget()

    assert running.outcome("prompt")[0] == at_once


def test_a_shared_prefix_leaves_the_model_in_the_same_state(engine: LlamaEngine) -> None:
    """Up to rounding: llama.cpp computes batches of another shape in another order."""
    system = "You know the capitals of all countries and answer in one word. " * 5
    question = RawPrompt(system + "The capital of Japan is")
    running = Running(engine)
    running.submit("alone", question, logprobs=5, cache_salt="another")
    running.run()

    running.submit("first", RawPrompt(system + "The capital of France is"))
    running.run()
    running.submit("second", question, logprobs=5)
    running.run()
    running.forget()

    text, end = running.outcome("second")
    assert text.startswith(" Tokyo")
    assert end.usage.prompt_tokens > end.usage.cached_prompt_tokens > 60
    alone, shared = first_logprobs(running, "alone"), first_logprobs(running, "second")
    for token in list(alone)[:2]:
        assert shared[token] == pytest.approx(alone[token], abs=0.3)


def seen_meanwhile(engine: LlamaEngine, work: Callable[[], object]) -> set[int]:
    """What another thread reads of the progress while one computes."""
    seen: set[int] = set()
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        seen.add(engine.progress)
    thread.join()
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="it cannot be known elsewhere")
def test_progress_inside_a_pass_can_be_seen_and_each_pass_begins_anew(engine: LlamaEngine) -> None:
    tokens = engine.vocabulary.tokenize("word " * 400)
    long, short = (
        Chunk(SEQUENCE, 0, tokens, wants_token=False),
        Chunk(SEQUENCE, 0, tokens[:1], False),
    )

    seen = seen_meanwhile(engine, lambda: engine.decode([long]))
    engine.forget(SEQUENCE)
    of_one_pass = engine.progress
    for _ in range(3):
        engine.decode([short])
        engine.forget(SEQUENCE)

    assert len(seen) > 20
    assert 100 < engine.progress <= of_one_pass


@pytest.mark.skipif(sys.platform != "linux", reason="it cannot be known elsewhere")
def test_progress_inside_an_embedding_can_be_seen(engine: LlamaEngine) -> None:
    engine.embedder.begin([engine.embedder.tokenize("word " * 400)], Pooling.LAST)

    assert len(seen_meanwhile(engine, lambda: engine.embedder.advance(None))) > 20


def test_chats_that_take_turns_on_fewer_slots_never_hear_of_each_other(
    engine: LlamaEngine,
) -> None:
    """B15: three chats on two slots. Each is about one word, which the model says again and again; a
    word of another chat could only come out of what that one has left in the cache.
    """
    words = ("apple", "tiger", "river")
    turns = 60
    start = {word: f"The secret word is {word}." for word in words}
    histories = dict(start)
    read: dict[str, list[list[TokenId]]] = {word: [] for word in words}
    running = Running(engine)
    open_turns: dict[str, str] = {}
    begun = cached = said = 0
    while begun < turns or open_turns:
        while begun < turns and len(open_turns) < 2:
            word = words[begun % 3]
            name = f"{word} {begun}"
            # Now and then another chat, which begins like the one before.
            longer = histories[word] if begun % 30 < 27 else start[word]
            histories[word] = f"{longer} Question {begun}. The secret word is"
            open_turns[name] = histories[word]
            running.submit(name, RawPrompt(histories[word]), max_tokens=2)
            begun += 1
        running.step()
        ended = {event.request_id for event in running.events if isinstance(event, Finished)}
        for name in open_turns.keys() & ended:
            word, asked = name.split()[0], open_turns.pop(name)
            text, end = running.outcome(name)
            histories[word] = asked + text
            prompt = engine.vocabulary.tokenize(asked)
            known = max((_common(prompt, tokens) for tokens in read[word]), default=0)
            read[word].append(engine.vocabulary.tokenize(histories[word]))

            heard = {each for each in words if each in text}
            assert heard <= {word}
            said += bool(heard)
            assert end.usage.prompt_tokens == len(prompt)
            assert end.usage.cached_prompt_tokens <= known, "more than this chat has ever fed"
            cached += end.usage.cached_prompt_tokens
    figures = running.scheduler.figures
    running.forget()

    assert said > 0.7 * turns, "else the words would show nothing"
    assert figures.prompt_tokens_cached == cached
    assert cached > figures.prompt_tokens_fed, "hardly anything was shared"


def _told(running: Running, name: str) -> list[tuple[TokenId, float]]:
    """The tokens of an answer, each with its logprob to the last bit."""
    told: list[tuple[TokenId, float]] = []
    for event in running.events:
        if isinstance(event, TokenGenerated) and event.request_id == name:
            assert event.logprobs is not None
            told.append((event.token, event.logprobs.chosen.logprob))
    return told


def test_an_answer_is_the_same_to_the_last_bit_wherever_it_goes_on(engine: LlamaEngine) -> None:
    """Prompts of less and more than a tile; each answer goes on from another place, and then prompt
    and answer so far are fed at once, beside others. Texts would show too little: they are the same
    by chance, for as long as no two tokens are nearly as likely.
    """
    facts = [f"Question {n}. " + "The sea and the moon. " * 5 * n for n in range(4)]
    prompts = [tuple(engine.vocabulary.tokenize(fact)) for fact in facts]
    assert min(map(len, prompts)) < ATTENTION_TILE < max(map(len, prompts)) < ALIKE
    alone: list[list[tuple[TokenId, float]]] = []
    for prompt in prompts:
        running = Running(engine)
        running.submit("it", TokenPrompt(prompt), max_tokens=12, sampling=ENDLESS, logprobs=0)
        running.run()
        running.forget()
        alone.append(_told(running, "it"))

    running = Running(engine)
    for n, (prompt, answer) in enumerate(zip(prompts, alone, strict=True)):
        told = (token for token, _ in answer[: 1 + 3 * n])
        left = TokenPrompt((*prompt, *told))
        options = {"max_tokens": 11 - 3 * n, "sampling": ENDLESS, "logprobs": 0}
        running.submit(str(n), left, **options)
    running.run()
    running.forget()

    for n, answer in enumerate(alone):
        assert _told(running, str(n)) == answer[1 + 3 * n :]


def test_an_answer_is_the_same_to_the_last_bit_beside_one_that_was_given_before(
    engine: LlamaEngine,
) -> None:
    """Of the answer that is here twice then, no cells are given up as long as nobody needs them: what
    runs would go on in those, and its cells would not be in order any more.
    """
    options = {"sampling": ENDLESS, "logprobs": 0}
    running = Running(engine)
    running.submit("it", RawPrompt("The sea and the moon."), max_tokens=100, **options)
    running.run()
    running.forget()
    alone = _told(running, "it")

    running = Running(engine)
    running.submit("before", RawPrompt("Whales are"), max_tokens=30, **options)
    running.run()
    running.submit("it", RawPrompt("The sea and the moon."), max_tokens=100, **options)
    running.submit("again", RawPrompt("Whales are"), max_tokens=30, **options)
    running.run()
    running.forget()

    assert _told(running, "again") == _told(running, "before")
    assert _told(running, "it") == alone


def test_a_pass_is_cut_so_that_what_must_be_alike_is_in_small_parts() -> None:
    def chunk(sequence: int, position: int, count: int, wants_token: bool = True) -> Chunk:
        return Chunk(
            SequenceId(sequence), position, [TokenId(n) for n in range(count)], wants_token
        )

    row, whole, long = chunk(0, 2000, 1), chunk(1, 0, 40), chunk(2, ALIKE - 30, 200)

    assert split_alike([row, whole]) == [[row, whole]]
    parts = split_alike([row, whole, long])
    assert [
        [(c.sequence_id, c.position, len(c.tokens), c.wants_token) for c in p] for p in parts
    ] == [
        [(1, 0, 40, True), (2, ALIKE - 30, 23, False)],
        [(2, ALIKE - 7, 7, False)],
        [(0, 2000, 1, True), (2, ALIKE, 170, True)],
    ]
    assert all(sum(len(c.tokens) for c in part) < ATTENTION_TILE for part in parts[:-1])


def _common(one: list[TokenId], other: list[TokenId]) -> int:
    """How many tokens they begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_a_paused_stream_goes_on_where_it_was(small: LlamaEngine) -> None:
    """B11 with a real model: three streams in the cells of one and a half."""
    running = Running(small)
    starts = {"ones": 1, "thirties": 31, "fifties": 51}
    for name, start in starts.items():
        numbers = ", ".join(str(n) for n in range(start, start + 8))
        running.submit(name, RawPrompt(numbers + ","), max_tokens=60, sampling=ENDLESS)
    running.run()
    running.forget()

    assert running.scheduler.figures.pauses > 0
    for name, start in starts.items():
        text, end = running.outcome(name)
        assert end.usage.content_tokens == 60
        counted = [int(number) for number in text.strip(" ,").split(",")[:11]]
        assert counted == list(range(counted[0], counted[0] + len(counted)))
        assert counted[0] > start + 7


@pytest.fixture(scope="module")
def small() -> Generator[LlamaEngine]:
    engine = LlamaEngine(str(default_model()), slots=4, threads=1, context=128, cells=192)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def separate() -> Generator[LlamaEngine]:
    engine = LlamaEngine(
        str(default_model()), slots=3, threads=1, context=256, layout=KvLayout.SEPARATE
    )
    yield engine
    engine.close()


def test_the_separate_layout_shares_by_copying(separate: LlamaEngine) -> None:
    system = "You know the capitals of all countries and answer in one word. " * 5
    prompts = [RawPrompt(f"{system}The capital of {name} is") for name in ("France", "Japan")]

    running = Running(separate)
    for name, prompt in zip(("first", "second"), prompts, strict=True):
        running.submit(name, prompt)
        running.run()
    running.forget()

    assert running.outcome("first")[0].startswith(" Paris")
    assert running.outcome("second")[0].startswith(" Tokyo")
    assert running.outcome("second")[1].usage.cached_prompt_tokens > 60


@pytest.fixture(scope="module")
def attached() -> Generator[LlamaEngine]:
    engine = LlamaEngine(
        str(default_model()), slots=4, threads=1, context=512, samplers=SamplerPlace.CONTEXT
    )
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(
            temperature=0.9, top_k=40, top_p=0.95, penalty_repeat=1, penalty_presence=0, seed=7
        ),
        Sampling(seed=11),
        Sampling(
            seed=5, ignore_eos=True, logit_bias=((TokenId(28), -math.inf), (TokenId(30), 2.0))
        ),
        Sampling(seed=3, dry_multiplier=0.8, xtc_probability=0.5),
    ],
    ids=["greedy", "truncated", "defaults", "biased", "not on every backend"],
)
def test_samplers_in_the_context_give_the_same_text(
    engine: LlamaEngine, attached: LlamaEngine, sampling: Sampling
) -> None:
    prompts = [RawPrompt("Once upon a time"), RawPrompt("The capital of France is")]
    for prompt in prompts:
        here = generate(engine, prompt, max_tokens=40, sampling=sampling)
        there = generate(attached, prompt, max_tokens=40, sampling=sampling)
        assert here == there


def test_a_sequence_can_be_used_again_after_its_sampler_was_in_the_context(
    attached: LlamaEngine,
) -> None:
    running = Running(attached)
    running.submit("cancelled", RawPrompt("One, two, three,"), sampling=Sampling(seed=1))
    running.step()
    running.step()
    running.do(running.scheduler.cancel(RequestId("cancelled")))
    running.submit("next", RawPrompt("The capital of France is"), max_tokens=1)
    running.run()
    running.forget()

    assert running.outcome("next")[0] == " Paris"


def test_the_context_limit_ends_a_stream(engine: LlamaEngine) -> None:
    prompt = RawPrompt("la " * 500)

    ((_, end),) = generate(engine, prompt, max_tokens=1000, sampling=ENDLESS)

    assert end.reason is FinishReason.LENGTH
    assert end.usage.prompt_tokens + end.usage.content_tokens == engine.capacity.context


def test_the_same_seed_gives_the_same_text(engine: LlamaEngine) -> None:
    prompt = RawPrompt("Once upon a time")
    sampling = Sampling(temperature=1.5, top_p=1.0, min_p=0.0, seed=42)

    first, second = (generate(engine, prompt, sampling=sampling) for _ in range(2))
    (other,) = generate(engine, prompt, sampling=Sampling(temperature=1.5, top_p=1.0, seed=43))

    assert first == second
    assert other[0] != first[0][0]


def test_penalties_look_at_the_prompt_too(engine: LlamaEngine) -> None:
    prompt = RawPrompt("red blue red blue red blue red")
    penalised = Sampling(temperature=0, penalty_repeat=10.0, penalty_presence=0)

    ((plain, _),) = generate(engine, prompt, max_tokens=1)
    ((other, _),) = generate(engine, prompt, max_tokens=1, sampling=penalised)

    assert plain == " blue"
    assert other != " blue"


def test_a_failed_decode_is_told_and_survived(engine: LlamaEngine) -> None:
    engine.start(SEQUENCE, engine.sampler([TokenId(1)], GREEDY, None, None))
    beyond = TokenId(engine.vocabulary.size)
    with pytest.raises(DecodeError, match="invalid batch"):
        engine.decode([Chunk(SEQUENCE, 0, [beyond], wants_token=True)])
    engine.stop(SEQUENCE)
    engine.forget(SEQUENCE)

    assert generate(engine, RawPrompt("The capital of France is"), max_tokens=1)[0][0] == " Paris"


# The model's vocabulary lacks some control characters and some bytes of rarer planes.
@given(text=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x2FFF), max_size=60))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_turn_back_into_the_text(engine: LlamaEngine, text: str) -> None:
    tokens = engine.vocabulary.tokenize(text)

    assert b"".join(engine.vocabulary.piece(token) for token in tokens).decode() == text


def test_special_tokens_are_recognised_and_never_shown(engine: LlamaEngine) -> None:
    (token,) = engine.vocabulary.tokenize("<|im_end|>")

    assert engine.vocabulary.is_end(token)
    assert engine.vocabulary.piece(token) == b""


@pytest.mark.parametrize("context", [0, 10_000])
def test_a_context_is_never_longer_than_the_model_knows(context: int) -> None:
    engine = LlamaEngine(str(default_model()), slots=1, threads=1, context=context)
    capacity = engine.capacity
    engine.close()

    assert (capacity.context, capacity.cells) == (8192, context or 8192)


@pytest.mark.parametrize(("slots", "context"), [(200, 100), (64, 16)])
def test_many_slots_share_few_cells(slots: int, context: int) -> None:
    """llama.cpp aborts if it could not have all sequences in one batch."""
    engine = LlamaEngine(str(default_model()), slots=slots, threads=1, context=context)
    text, _ = generate(engine, RawPrompt("The capital of France is"), max_tokens=4)[0]
    engine.close()

    assert text.startswith(" Paris")


@pytest.mark.parametrize("context", [1, 2, 15])
def test_a_context_that_is_too_small_is_refused_with_the_reason(context: int) -> None:
    with pytest.raises(ModelError, match=f"a context of {context} tokens is too small"):
        LlamaEngine(str(default_model()), slots=4, threads=1, context=context)


@pytest.mark.parametrize("cache_type", CacheType)
def test_every_type_of_kv_cache_answers(cache_type: CacheType) -> None:
    attention = Attention(k_cache=cache_type, v_cache=cache_type)
    engine = LlamaEngine(str(default_model()), slots=1, threads=1, context=256, attention=attention)
    text, _ = generate(engine, RawPrompt("The capital of France is"))[0]
    engine.close()

    # Four bits are too few for so small a model to remember by.
    assert "Paris" in text or cache_type in {CacheType.Q4_0, CacheType.Q4_1, CacheType.IQ4_NL}


def test_quantized_values_without_flash_attention_are_refused_with_the_reason() -> None:
    attention = Attention(flash=FlashAttention.OFF, v_cache=CacheType.Q8_0)

    with pytest.raises(ModelError, match="need flash attention"):
        LlamaEngine(str(default_model()), slots=1, threads=1, attention=attention)


def test_too_many_parts_of_a_split_are_refused() -> None:
    with pytest.raises(ModelError, match="more than"):
        LlamaEngine(
            str(default_model()), slots=1, threads=1, device=Device(tensor_split=(1.0,) * 99)
        )


def test_the_models_own_words_are_its_metadata(engine: LlamaEngine) -> None:
    assert engine.metadata["general.architecture"] == "llama"
    assert engine.metadata["llama.context_length"] == "8192"
    assert engine.metadata["tokenizer.chat_template"] == engine.chat_template


@pytest.mark.parametrize("size", [0, 100, 50_000])
def test_a_truncated_file_is_refused_with_the_reason(tmp_path: Path, size: int) -> None:
    broken = tmp_path / "broken.gguf"
    with default_model().open("rb") as file:
        broken.write_bytes(file.read(size))

    with pytest.raises(ModelError, match=r"broken\.gguf could not be loaded: .+"):
        LlamaEngine(str(broken), slots=1, threads=1)
    with pytest.raises(ModelError, match=r"broken\.gguf could not be loaded: .+"):
        check_loadable(str(broken))
