"""The llama.cpp engine with the real small model."""

from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import scheduler
from agent.engine import Chunk
from agent.llama import LlamaEngine
from agent.prompt import Preparer
from agent.scheduler import Forget, Scheduler, Start
from common.errors import DecodeError, ModelError
from common.ids import RequestId, SequenceId, TokenId
from common.messages import (
    ChatMessage,
    Conversation,
    Event,
    Finished,
    FinishReason,
    Generate,
    Prompt,
    RawPrompt,
    Sampling,
    TokenGenerated,
)
from deploy.model import default_model

GREEDY = Sampling(temperature=0, penalty_repeat=1, penalty_presence=0)
SEQUENCE = SequenceId(0)


@pytest.fixture(scope="module")
def engine() -> Generator[LlamaEngine]:
    engine = LlamaEngine(str(default_model()), slots=4, threads=1, context=512)
    yield engine
    engine.close()


def generate(
    engine: LlamaEngine, *prompts: Prompt, max_tokens: int = 12, sampling: Sampling = GREEDY
) -> list[tuple[str, Finished]]:
    """Run the prompts together; return each one's text and end."""
    preparer = Preparer(engine)
    running = Scheduler(
        vocabulary=engine.vocabulary,
        sequences=engine.slots,
        context=engine.context,
        batch_size=engine.batch_size,
    )
    events: list[Event] = []

    def carry_out(effects: list[Start | Forget | Event]) -> None:
        for effect in effects:
            match effect:
                case Start(sequence_id, tokens, sampling):
                    engine.start(sequence_id, tokens, sampling)
                case Forget(sequence_id):
                    engine.forget(sequence_id)
                case _:
                    events.append(effect)

    for n, prompt in enumerate(prompts):
        request = Generate(
            request_id=RequestId(str(n)), prompt=prompt, max_tokens=max_tokens, sampling=sampling
        )
        carry_out(running.submit(preparer.prepare(request)))
    while not running.is_idle:
        chunks = running.plan()
        carry_out(running.commit(chunks, engine.decode(chunks)))
    outcomes: list[tuple[str, Finished]] = []
    for n in range(len(prompts)):
        mine = [event for event in events if event.request_id == str(n)]
        end = mine[-1]
        assert isinstance(end, Finished)
        texts = [e.text for e in mine if isinstance(e, TokenGenerated | Finished)]
        outcomes.append(("".join(texts), end))
    return outcomes


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


def test_a_prompt_fed_in_small_chunks_gives_the_same_text(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = RawPrompt("Alice, Bob and Carol went to the sea. " * 20)
    at_once = generate(engine, prompt)

    monkeypatch.setattr(scheduler, "PROMPT_BUDGET", 37)

    assert generate(engine, prompt) == at_once


def test_the_context_limit_ends_a_stream(engine: LlamaEngine) -> None:
    prompt = RawPrompt("la " * 500)

    ((_, end),) = generate(engine, prompt, max_tokens=1000)

    assert end.reason is FinishReason.LENGTH
    assert end.usage.prompt_tokens + end.usage.content_tokens == engine.context


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
    engine.start(SEQUENCE, [TokenId(1)], GREEDY)
    beyond = TokenId(engine.vocabulary.size)
    with pytest.raises(DecodeError, match="invalid batch"):
        engine.decode([Chunk(SEQUENCE, 0, [beyond], wants_token=True)])
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


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ModelError, match="trained for 8192"):
        LlamaEngine(str(default_model()), slots=1, threads=1, context=10_000)


@pytest.mark.parametrize("size", [0, 100, 50_000])
def test_a_truncated_file_is_refused_with_the_reason(tmp_path: Path, size: int) -> None:
    broken = tmp_path / "broken.gguf"
    with default_model().open("rb") as file:
        broken.write_bytes(file.read(size))

    with pytest.raises(ModelError, match=r"broken\.gguf could not be loaded: .+"):
        LlamaEngine(str(broken), slots=1, threads=1)
