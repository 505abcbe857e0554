import pytest

from agent.echo import EchoEngine
from agent.prompt import Preparer
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import ChatMessage, Conversation, Generate, Prompt, RawPrompt


def preparer(
    *, context: int = 16, template: str | None = "<{{ messages[0].content }}>"
) -> Preparer:
    engine = EchoEngine(slots=1, context=context)
    engine.chat_template = template
    return Preparer(engine)


def request(prompt: Prompt) -> Generate:
    return Generate(request_id=RequestId("r"), prompt=prompt, max_tokens=5, stop=("x",))


def test_a_raw_prompt_is_fed_as_it_stands() -> None:
    prepared = preparer().prepare_prompt(request(RawPrompt("ab")))

    assert prepared.prompt == [97, 98]
    assert (prepared.max_tokens, prepared.stop) == (5, ("x",))


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    prepared = preparer().prepare_prompt(request(Conversation((ChatMessage("user", "a"),))))

    assert prepared.prompt == list(b"<a>")


def test_the_beginning_token_is_there_once() -> None:
    engine = EchoEngine(slots=1, context=16)
    engine.vocabulary.beginning = TokenId(ord("^"))
    engine.chat_template = None

    prepare = Preparer(engine).prepare_prompt

    assert prepare(request(RawPrompt("a"))).prompt == list(b"^a")
    assert prepare(request(RawPrompt("^a"))).prompt == list(b"^a")


@pytest.mark.parametrize("length", [16, 17, 1000])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_the_numbers(
    length: int,
) -> None:
    with pytest.raises(
        RequestError, match=f"context_length_exceeded.* {length} tokens.* 16"
    ) as caught:
        preparer().prepare_prompt(request(RawPrompt("a" * length)))

    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_prompt_that_is_far_too_long_is_not_even_tokenized() -> None:
    engine = EchoEngine(slots=1, context=16)
    engine.vocabulary.longest_piece = 4
    prepare = Preparer(engine).prepare_prompt

    with pytest.raises(RequestError, match="has 17 tokens"):
        prepare(request(RawPrompt("a" * 17)))
    with pytest.raises(RequestError, match="at least 250 tokens"):
        prepare(request(RawPrompt("a" * 1000)))


def test_the_longest_prompt_that_fits_is_taken() -> None:
    assert len(preparer().prepare_prompt(request(RawPrompt("a" * 15))).prompt) == 15


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        preparer().prepare_prompt(request(RawPrompt("")))


@pytest.mark.parametrize("template", [None, "{% for %}"])
def test_without_a_template_only_raw_prompts_work(template: str | None) -> None:
    without = preparer(template=template)

    assert not without.has_template
    assert without.prepare_prompt(request(RawPrompt("a"))).prompt == [97]
    with pytest.raises(RequestError, match="raw prompt") as caught:
        without.prepare_prompt(request(Conversation((ChatMessage("user", "a"),))))
    assert caught.value.code is ErrorCode.CHAT_TEMPLATE_ERROR
