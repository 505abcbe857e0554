from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import pytest
from answers import content
from msgspec.structs import replace
from PIL import Image

from agent.echo import ByteVocabulary, EchoEngine
from agent.engine import AnswerGrammar, Guidance, ImageRun, MixedPrompt, Picture, Sampler
from agent.prompt import LONGEST_TO_TOKENIZE, Preparer
from common.errors import ErrorCode, RequestError
from common.ids import RequestId, TokenId
from common.messages import (
    IMAGE_MARKER,
    CallsTold,
    ChatMessage,
    Conversation,
    Detokenize,
    Detokenized,
    Generate,
    JsonSchema,
    Prompt,
    RawPrompt,
    Sampling,
    Segment,
    TokenClass,
    Tokenize,
    Tokenized,
    TokenPrompt,
    ToolCall,
    ToolCallsParsed,
)


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
    assert prepared.max_tokens == 5
    shown = [prepared.output.feed(byte).segments for byte in (b"a", b"x")]
    assert (shown, prepared.output.stopped) == ([content("a"), ()], True)


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    prepared = preparer().prepare_prompt(request(Conversation((ChatMessage("user", "a"),))))

    assert prepared.prompt == list(b"<a>")


def test_another_template_may_take_the_place_of_the_models_own() -> None:
    engine = EchoEngine(slots=1, context=16)

    other = Preparer(engine, "[{{ messages[0].content }}]")

    prepared = other.prepare_prompt(request(Conversation((ChatMessage("user", "a"),))))
    assert prepared.prompt == list(b"[a]")


def test_a_model_without_a_projector_refuses_images() -> None:
    conversation = Conversation((ChatMessage("user", IMAGE_MARKER),), images=(b"x",))

    with pytest.raises(RequestError) as caught:
        preparer().prepare_prompt(request(conversation))

    assert caught.value.code is ErrorCode.MULTIMODAL_NOT_SUPPORTED


def test_what_stands_for_an_image_is_only_text_where_there_are_no_images() -> None:
    conversation = Conversation((ChatMessage("user", IMAGE_MARKER),))

    prepared = preparer(context=64).prepare_prompt(request(conversation))

    assert prepared.prompt == list(f"<{IMAGE_MARKER}>".encode())
    assert prepared.images == ()


class Eyes:
    """Every image is one token; it says what it was asked to read."""

    longest_run = 1

    def __init__(self) -> None:
        self.read_so_far: list[Any] = []

    def read(
        self, texts: Sequence[str], pictures: Sequence[Picture], *, proceed: Callable[[int], None]
    ) -> MixedPrompt:
        for picture in pictures:
            proceed(sum(map(len, texts)) + len(pictures))
            self.read_so_far.append((list(texts), picture.size))
        return MixedPrompt([TokenId(-1)], (ImageRun(0, 1, self),))


def seeing(eyes: Eyes, **options: Any) -> Preparer:
    seeing = preparer(**options)
    assert isinstance(seeing.engine, EchoEngine)
    seeing.engine.vision = eyes
    return seeing


def drawn(width: int, height: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_images_are_scaled_and_read_with_the_texts_around_them() -> None:
    eyes = Eyes()
    conversation = Conversation(
        (ChatMessage("user", "a#b#"),),
        images=(drawn(40, 20), drawn(8, 8)),
        image_marker="#",
        longest_image_side=10,
    )

    prepared = seeing(eyes).prepare_prompt(request(conversation))

    texts = ["<a", "b", ">"]
    assert eyes.read_so_far == [(texts, (10, 5)), (texts, (8, 8))]
    assert (prepared.prompt, len(prepared.images)) == ([-1], 1)


def test_a_template_that_loses_an_image_or_doubles_it_is_refused() -> None:
    for template in ("nothing", "{{ messages[0].content }}{{ messages[0].content }}"):
        conversation = Conversation((ChatMessage("user", IMAGE_MARKER),), images=(drawn(8, 8),))

        with pytest.raises(RequestError) as caught:
            seeing(Eyes(), context=64, template=template).prepare_prompt(request(conversation))

        assert caught.value.code is ErrorCode.CHAT_TEMPLATE_ERROR


def test_images_that_can_never_fit_are_refused_before_one_is_read() -> None:
    eyes = Eyes()
    conversation = Conversation(
        (ChatMessage("user", "#" * 20),), images=(drawn(8, 8),) * 20, image_marker="#"
    )

    with pytest.raises(RequestError, match="22 tokens") as caught:
        seeing(eyes, context=22).prepare_prompt(request(conversation))

    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert eyes.read_so_far == []


def test_images_of_a_request_that_nobody_waits_for_are_not_read() -> None:
    eyes = Eyes()
    conversation = Conversation(
        (ChatMessage("user", "###"),), images=(drawn(8, 8),) * 3, image_marker="#"
    )

    with pytest.raises(RequestError):
        seeing(eyes).prepare_prompt(request(conversation), lambda: len(eyes.read_so_far) < 2)

    assert len(eyes.read_so_far) == 2


THINKING = "{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"


def test_the_template_says_how_reasoning_is_told_apart() -> None:
    prepared = preparer(template=THINKING, context=64).prepare_prompt(
        request(Conversation((ChatMessage("user", "a"),), enable_thinking=True))
    )

    told = [prepared.output.feed(piece) for piece in (b"so", b"</think>", b"yes")]

    segments = [segment for output in told for segment in output.segments]
    assert segments == [Segment(TokenClass.REASONING, "so"), Segment(TokenClass.CONTENT, "yes")]
    assert prepared.output.counts[TokenClass.REASONING] == 2


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
TOOLS = "{{ tools }}{# <tool_call></tool_call> #}"


@pytest.mark.parametrize("told", [CallsTold.CHECKED, CallsTold.RAW])
def test_tool_calls_are_parsed_for_those_who_want_it(told: CallsTold) -> None:
    conversation = Conversation((ChatMessage("user", "a"),), tools=(TOOL,), calls_told=told)
    prepared = preparer(template=TOOLS, context=512).prepare_prompt(request(conversation))

    written = b'<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
    results = [*prepared.output.feed(written).results, *prepared.output.flush().results]

    calls = [
        call for result in results if isinstance(result, ToolCallsParsed) for call in result.calls
    ]
    assert [(call.name, call.arguments) for call in calls] == (
        [("clock", '{"zone": "UTC"}')] if told is CallsTold.CHECKED else []
    )


def test_calls_are_told_while_they_are_written_to_those_who_want_it() -> None:
    conversation = Conversation(
        (ChatMessage("user", "a"),), tools=(TOOL,), calls_told=CallsTold.STREAMED
    )
    prepared = preparer(template=TOOLS, context=512).prepare_prompt(request(conversation))

    pieces = [b'<tool_call>{"name": "clock", "arguments": {', b'"zone": 1}']
    told = [prepared.output.feed(piece) for piece in pieces]

    assert [delta.arguments for output in told for delta in output.calls] == ["{", '"zone": 1}']
    assert [output.segments for output in told] == [(), ()]
    assert prepared.output.flush().results == ()


@pytest.mark.parametrize(("parallel", "indices"), [(True, [0, 1]), (False, [0])])
def test_calls_behind_the_first_are_told_where_they_are_allowed(
    parallel: bool, indices: list[int]
) -> None:
    conversation = Conversation(
        (ChatMessage("user", "a"),),
        tools=(TOOL,),
        calls_told=CallsTold.STREAMED,
        parallel_calls=parallel,
    )
    prepared = preparer(template=TOOLS, context=512).prepare_prompt(request(conversation))

    told = prepared.output.feed(b'<tool_call>{"name": "clock"}{"name": "clock"}</tool_call>')
    assert [delta.index for delta in told.calls] == indices


WITHOUT_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("told", [CallsTold.CHECKED, CallsTold.STREAMED])
def test_a_model_whose_template_knows_no_tools_is_told_of_them_in_words(told: CallsTold) -> None:
    conversation = Conversation((ChatMessage("user", "a"),), tools=(TOOL,), calls_told=told)
    prepared = preparer(template=WITHOUT_TOOLS, context=2048).prepare_prompt(request(conversation))

    text = bytes(prepared.prompt).decode()
    assert text.startswith("system: You can use tools.")
    assert '"name": "clock"' in text
    assert text.endswith("user: a\n")
    answer = prepared.output.feed(b'<tool_call>{"name": "clock", "arguments": {}}</tool_call> b')
    calls = [
        call
        for result in answer.results
        if isinstance(result, ToolCallsParsed)
        for call in result.calls
    ]
    assert [call.name for call in (*calls, *answer.calls)] == ["clock"]


def test_without_tools_such_a_model_is_asked_and_read_as_ever() -> None:
    prepared = preparer(template=WITHOUT_TOOLS, context=64).prepare_prompt(
        request(Conversation((ChatMessage("user", "a"),)))
    )

    assert bytes(prepared.prompt) == b"user: a\n"
    written = "<tool_call>{}</tool_call>"
    assert prepared.output.feed(written.encode()).segments == content(written)


def test_calls_in_the_history_are_told_such_a_model_in_words() -> None:
    call = ToolCall("1", "clock", "{}")
    messages = (
        ChatMessage("user", "a"),
        ChatMessage("assistant", "", tool_calls=(call,)),
        ChatMessage("tool", "noon", tool_call_id="1"),
    )

    rendered = preparer(template=WITHOUT_TOOLS).render(Conversation(messages))
    assert rendered.text == (
        'user: a\nassistant: <tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\nnoon\n</tool_response>\n"
    )
    assert rendered.format.name == "<tool_call>"


def test_how_an_answer_will_be_written_stands_beside_its_prompt() -> None:
    prepare = preparer(template=WITHOUT_TOOLS)
    plain = Conversation((ChatMessage("user", "a"),))
    offered = Conversation(plain.messages, tools=(TOOL,))

    assert prepare.render(plain).format is prepare.format
    told = prepare.render(offered)
    assert (told.format.name, told.conversation) == ("<tool_call>", offered)
    assert prepare.format_for(offered) is told.format
    assert prepare.render(RawPrompt("b")).conversation is None


def test_a_tool_whose_schema_is_none_is_refused() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"type": "nonsense"}},
    }
    conversation = Conversation((ChatMessage("user", "a"),), tools=(tool,))

    with pytest.raises(RequestError) as caught:
        preparer(template=TOOLS, context=512).prepare_prompt(request(conversation))

    assert caught.value.code is ErrorCode.INVALID_TOOL_SCHEMA


class MarkedVocabulary(ByteVocabulary):
    """Has a control token whose name is a mark."""

    MARK = TokenId(300)

    def tokenize(self, text: str) -> list[TokenId]:
        return [self.MARK] if text == "[TOOL_CALLS]" else super().tokenize(text)

    def piece(self, token: TokenId) -> bytes:
        return b"" if token == self.MARK else super().piece(token)


class ToolMarkVocabulary(MarkedVocabulary):
    def tokenize(self, text: str) -> list[TokenId]:
        return [self.MARK] if text == "<tool_call>" else super().tokenize(text)


def test_control_tokens_that_are_marks_are_fed_as_text() -> None:
    engine = EchoEngine(slots=1, context=64)
    engine.vocabulary = MarkedVocabulary()

    prepared = Preparer(engine, "{{ tools }}[TOOL_CALLS]").prepare_prompt(request(RawPrompt("a")))

    assert prepared.marks == {MarkedVocabulary.MARK: b"[TOOL_CALLS]"}


def test_an_answer_cannot_go_on_behind_tokens_that_the_model_does_not_have() -> None:
    """What another agent said may be wrong, and samplers may not survive it."""

    class Strict(EchoEngine):
        def sampler(
            self,
            prompt: Sequence[TokenId],
            sampling: Sampling,
            constraint: Guidance | None,
            logprobs: int | None,
            resumed: Sequence[TokenId] = (),
            /,
        ) -> Sampler:
            raise AssertionError("it is not asked")

    for token in (-1, ByteVocabulary.size):
        with pytest.raises(RequestError, match=f"no token {token}"):
            Preparer(Strict(slots=1, context=16)).prepare_prompt(
                replace(request(RawPrompt("a")), resumed=(TokenId(97), TokenId(token)))
            )


class Guided(EchoEngine):
    """Remembers what the latest answer was to follow."""

    guidance: Guidance | None = None

    def sampler(
        self,
        prompt: Sequence[TokenId],
        sampling: Sampling,
        constraint: Guidance | None,
        logprobs: int | None,
        resumed: Sequence[TokenId] = (),
        /,
    ) -> Sampler:
        self.guidance = constraint
        return super().sampler(prompt, sampling, None, logprobs, resumed)


def test_an_answer_that_must_call_a_tool_follows_a_grammar_with_the_models_own_marks() -> None:
    engine = Guided(slots=1, context=512)
    engine.vocabulary = MarkedVocabulary()
    tool = {"type": "function", "function": {"name": "clock"}}
    conversation = Conversation((ChatMessage("user", "a"),), tools=(tool,), must_call=("clock",))

    Preparer(engine, "{{ tools }}[TOOL_CALLS]").prepare_prompt(request(conversation))

    assert isinstance(engine.guidance, AnswerGrammar)
    assert f"<[{MarkedVocabulary.MARK}]>" in engine.guidance.grammar


@pytest.mark.parametrize("prompt", [RawPrompt("<think>"), TokenPrompt((TokenId(97),))])
def test_what_a_client_wants_of_a_prompt_without_a_template_stays_as_it_is(prompt: Prompt) -> None:
    engine = Guided(slots=1, context=512)
    schema = JsonSchema("{}")

    Preparer(engine, "<think></think>").prepare_prompt(
        Generate(request_id=RequestId("r"), prompt=prompt, max_tokens=5, constraint=schema)
    )

    assert engine.guidance is schema


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

    assert without.template_error is not None
    assert without.prepare_prompt(request(RawPrompt("a"))).prompt == [97]
    with pytest.raises(RequestError, match="raw prompt") as caught:
        without.prepare_prompt(request(Conversation((ChatMessage("user", "a"),))))
    assert caught.value.code is ErrorCode.CHAT_TEMPLATE_ERROR


def test_tokens_are_fed_as_they_stand() -> None:
    prepared = preparer().prepare_prompt(request(TokenPrompt((TokenId(98), TokenId(97)))))

    assert prepared.prompt == [98, 97]


@pytest.mark.parametrize("token", [-1, 257])
def test_a_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    with pytest.raises(RequestError, match=f"no token {token}"):
        preparer().prepare_prompt(request(TokenPrompt((TokenId(token),))))


@pytest.mark.parametrize("prompt", [RawPrompt("a", is_plain=True), TokenPrompt((TokenId(97),))])
def test_in_a_plain_answer_nothing_is_set_apart(prompt: Prompt) -> None:
    """The same model's ordinary answers have their thoughts told apart."""
    prepared = preparer(template="{# <think></think> #}").prepare_prompt(request(prompt))

    output = prepared.output.feed(b"<think>so</think>yes")

    assert output.segments == content("<think>so</think>yes")


def test_texts_become_tokens_and_tokens_texts() -> None:
    raw = Tokenize(request_id=RequestId("r"), prompt=RawPrompt("ab"), adds_beginning=False)
    back = Detokenize(RequestId("r"), (TokenId(97), TokenId(98)))

    assert preparer().consult(raw) == Tokenized(
        RequestId("r"), (TokenId(97), TokenId(98)), (b"a", b"b"), 16
    )
    assert preparer().consult(back) == Detokenized(RequestId("r"), "ab")


def test_a_conversation_is_tokenized_as_it_would_be_fed() -> None:
    conversation = Conversation((ChatMessage("user", "a"),))
    frame = Tokenize(request_id=RequestId("r"), prompt=conversation, adds_beginning=True)

    told = preparer().consult(frame)

    assert isinstance(told, Tokenized)
    assert list(told.tokens) == preparer().prepare_prompt(request(conversation)).prompt


def test_a_text_may_be_longer_than_a_prompt_to_be_tokenized_but_not_endless() -> None:
    def ask(length: int) -> Tokenize:
        prompt = RawPrompt("a" * length)
        return Tokenize(request_id=RequestId("r"), prompt=prompt, adds_beginning=True)

    told = preparer(context=16).consult(ask(1000))
    with pytest.raises(RequestError) as caught:
        preparer().consult(ask(LONGEST_TO_TOKENIZE + 1))

    assert isinstance(told, Tokenized)
    assert len(told.tokens) == 1000
    assert caught.value.code is ErrorCode.INVALID_PROMPT


def test_tokens_that_the_model_does_not_have_are_no_text() -> None:
    with pytest.raises(RequestError, match="no token 300"):
        preparer().consult(Detokenize(RequestId("r"), (TokenId(97), TokenId(300))))


def test_marks_of_calls_are_fed_as_text_where_tools_are_told_in_words() -> None:
    engine = EchoEngine(slots=1, context=2048)
    engine.vocabulary = ToolMarkVocabulary()
    offered = Conversation((ChatMessage("user", "a"),), tools=(TOOL,))
    prepare = Preparer(engine, WITHOUT_TOOLS).prepare_prompt

    assert prepare(request(offered)).marks == {MarkedVocabulary.MARK: b"<tool_call>"}
    assert prepare(request(Conversation(offered.messages))).marks == {}


def test_a_template_that_always_opens_reasoning_is_closed_for_who_wants_none() -> None:
    prepare = preparer(context=64, template="{{ messages[0].content }}<think>\n{# </think> #}")
    messages = (ChatMessage("user", "a"),)

    thinking = prepare.prepare_prompt(request(Conversation(messages, enable_thinking=True)))
    plain = prepare.prepare_prompt(request(Conversation(messages)))

    assert bytes(thinking.prompt).endswith(b"<think>\n")
    assert thinking.output.feed(b"so").segments == (Segment(TokenClass.REASONING, "so"),)
    assert bytes(plain.prompt).endswith(b"<think>\n\n</think>\n\n")
    assert plain.output.feed(b"so").segments == content("so")


def test_another_template_than_the_one_in_use_may_be_tried() -> None:
    conversation = Conversation((ChatMessage("user", "a"),))

    def tried(template: str) -> Tokenize:
        return Tokenize(
            request_id=RequestId("r"), prompt=conversation, adds_beginning=False, template=template
        )

    told = preparer().consult(tried("[{{ messages[0].content }}]"))
    assert isinstance(told, Tokenized)
    assert b"".join(told.pieces) == b"[a]"
    with pytest.raises(RequestError) as caught:
        preparer().consult(tried("{% for"))
    assert caught.value.code is ErrorCode.CHAT_TEMPLATE_ERROR
