"""What an answer has to follow, and when."""

from typing import Any

import pytest
from guided_answers import (
    BOTH,
    HARMONY_CALL,
    HERMES_CALL,
    STRICT,
    TOOLS,
    Model,
    follows,
    refusal,
    tool,
)

from common.errors import ErrorCode
from common.messages import Constraint, Conversation, Gbnf, JsonSchema

HARMONY_THOUGHT = "<|channel|>analysis<|message|>Let <me> see<|end|><|start|>assistant"


@BOTH
@pytest.mark.parametrize(
    ("family", "thinks", "prompt", "text", "expected"),
    [
        ("qwen3", True, "", f"<think>\nLet <me> </thi</think>\n\n{HERMES_CALL}", True),
        ("qwen3", True, "", f"\n<think>x</think>{HERMES_CALL}", True),
        ("qwen3", True, "", HERMES_CALL, True),
        ("qwen3", False, "", HERMES_CALL, True),
        ("qwen3", False, "", f"<think>x</think>{HERMES_CALL}", False),
        ("qwen3", True, "", "<think>x</think>", False),
        ("qwen3", True, "", f"<think>x{HERMES_CALL}", False),
        ("qwen3", True, "", f"<think>x</think>So:{HERMES_CALL}", False),
        ("qwen3", True, "a<think>\n", f"x</think>\n\n{HERMES_CALL}", True),
        ("qwen3", False, "a<think>\n", f"x</think>\n\n{HERMES_CALL}", True),
        ("qwen3", True, "a<think>\n", HERMES_CALL, False),
        ("qwen3", True, "<think>\n\n</think>\n\n", HERMES_CALL, True),
        ("qwen3", True, "<think>\n\n</think>\n\n", f"<think>x</think>{HERMES_CALL}", False),
        ("harmony", True, "<|start|>assistant", HARMONY_THOUGHT + HARMONY_CALL, True),
        ("harmony", True, "<|start|>assistant", HARMONY_THOUGHT * 2 + HARMONY_CALL, True),
        ("harmony", True, "<|start|>assistant", HARMONY_CALL, True),
        ("harmony", False, "<|start|>assistant", HARMONY_CALL, True),
        ("harmony", False, "<|start|>assistant", HARMONY_THOUGHT + HARMONY_CALL, False),
        ("harmony", True, "<|start|>assistant", HARMONY_THOUGHT, False),
        (
            "harmony", False, "<|start|>assistant<|channel|>analysis<|message|>",
            f"x<|end|><|start|>assistant{HARMONY_CALL}", True,
        ),
    ],
)  # fmt: skip
def test_a_model_that_reasons_may_do_so_before_its_calls(
    family: str, thinks: bool, prompt: str, text: str, expected: bool, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("clock",), enable_thinking=thinks)

    matcher = model.matcher(conversation, prompt=prompt)
    assert follows(matcher, model.tokenized(text)) is expected
    if expected:
        assert model.read(text, TOOLS, prompt=prompt) == [("clock", {})]


POINT = JsonSchema(
    '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'
)
YES = Gbnf('root ::= "yes" | "no"')


@BOTH
@pytest.mark.parametrize(
    ("family", "prompt", "text", "expected"),
    [
        ("qwen3", "", "<think>x</think>\n\nWANTED", True),
        ("qwen3", "", "\nWANTED", True),
        ("qwen3", "", "WANTED", True),
        ("qwen3", "", "<think>x</think>\n\n", False),
        ("qwen3", "", "<think>x</think>\n\nWANTED.", False),
        ("qwen3", "a<think>", "x</think>\n\nWANTED", True),
        ("qwen3", "a<think>", "WANTED", False),
        ("magistral", "", "[THINK]x[/THINK]WANTED", True),
        ("command", "", "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>WANTED<|END_RESPONSE|>", True),
        ("command", "", "<|START_THINKING|>x<|END_THINKING|>WANTED", True),
        ("harmony", "", f"{HARMONY_THOUGHT}<|channel|>final<|message|>WANTED", True),
        ("harmony", "<|start|>assistant", "<|channel|>final<|message|>WANTED", True),
        ("harmony", "<|start|>assistant", "WANTED", False),
        ("harmony", "<|start|>assistant", f"{HARMONY_THOUGHT}<|channel|>final<|message|>", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("constraint", "wanted"), [(POINT, '{"x": 5}'), (YES, "yes")], ids=["schema", "grammar"]
)
def test_what_the_client_wants_may_stand_behind_reasoning(
    family: str,
    prompt: str,
    text: str,
    expected: bool,
    constraint: Constraint,
    wanted: str,
    marks_are_tokens: bool,
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), enable_thinking=True, constrains_content=True)

    matcher = model.matcher(conversation, prompt=prompt, constraint=constraint)
    assert follows(matcher, model.tokenized(text.replace("WANTED", wanted))) is expected


def test_white_space_at_the_beginning_of_a_grammar_is_not_lost() -> None:
    model = Model("qwen3", marks_are_tokens=False)
    conversation = Conversation((), enable_thinking=True, constrains_content=True)
    grammar = Gbnf('root ::= "\\n\\n\\n\\n\\nx"')

    for before in ("", "\n"):
        matcher = model.matcher(conversation, constraint=grammar)
        assert follows(matcher, model.tokenized(f"<think>y</think>{before}\n\n\n\n\nx"))


@pytest.mark.parametrize(
    ("family", "thinks", "prompt"),
    [("hermes", True, ""), ("qwen3", False, ""), ("qwen3", True, "<think>\n\n</think>\n\n")],
)
def test_without_reasoning_a_constraint_is_passed_on(
    family: str, thinks: bool, prompt: str
) -> None:
    model = Model(family, marks_are_tokens=False)
    conversation = Conversation((), enable_thinking=thinks, constrains_content=True)

    assert model.guidance(conversation, prompt=prompt, constraint=POINT) is POINT


@BOTH
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", '{"x": 5}', True),
        ("hermes", HERMES_CALL, True),
        ("hermes", "Hello", False),
        ("hermes", '{"x": "5"}', False),
        ("hermes", HERMES_CALL.replace("clock", "other"), False),
        ("hermes", HERMES_CALL + '{"x": 5}', False),
        ("harmony", '<|channel|>final<|message|>{"x": 5}', True),
        ("harmony", "<|channel|>final<|message|>Hello", False),
    ],
)
def test_tools_may_be_called_instead_of_what_the_client_wants(
    family: str, text: str, expected: bool, thinks: bool, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, enable_thinking=thinks, constrains_content=True)

    matcher = model.matcher(conversation, constraint=POINT)
    assert follows(matcher, model.tokenized(text)) is expected


@pytest.mark.parametrize("family", ["hermes", "qwen3", "harmony"])
def test_a_constraint_may_be_for_all_that_the_model_writes(family: str) -> None:
    model = Model(family, marks_are_tokens=False)
    conversation = Conversation((), tools=TOOLS, enable_thinking=True)

    assert model.guidance(conversation, constraint=POINT) is POINT


def test_a_tool_that_is_not_offered_cannot_be_called() -> None:
    code, message = refusal(Conversation((), tools=TOOLS, must_call=("clock", "clocks")))

    assert code is ErrorCode.INVALID_REQUEST
    assert message == "the answer must call 'clocks', but there is no such tool"


def test_a_call_and_a_constraint_do_not_go_together() -> None:
    conversation = Conversation((), tools=TOOLS, must_call=("clock",))

    code, message = refusal(conversation, constraint=POINT)

    assert code is ErrorCode.INVALID_REQUEST
    assert message.startswith("an answer that must call a tool cannot follow a grammar")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma 3", "```tool_code"),
        ("gemma 4", "<|channel>thought + <|tool_call>call:"),
        ("lfm2", "<|tool_call_start|>"),
        ("unknown", "calls unknown"),
        ("plain", "content only"),
    ],
)
def test_formats_whose_calls_cannot_be_forced_are_named(family: str, name: str) -> None:
    code, message = refusal(Conversation((), tools=TOOLS, must_call=("clock",)), family)

    assert code is ErrorCode.NOT_SUPPORTED
    assert f"({name})" in message


UNIQUE: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "uniqueItems": True}},
}
GUIDED: dict[str, Any] = {"type": "object", "x-guidance": {}}


@BOTH
@pytest.mark.parametrize("parameters", [UNIQUE, GUIDED], ids=["by llguidance", "by us"])
@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("hermes", HERMES_CALL),
        ("harmony", HARMONY_CALL),
        ("coder", "<tool_call>\n<function=clock>\n{}\n</function>\n</tool_call>"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_allows_any_object_unless_the_tool_is_strict(
    family: str, call: str, parameters: Any, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    tools = (tool("clock", parameters),)
    conversation = Conversation((), tools=tools, must_call=("clock",), enable_thinking=True)

    for arguments, expected in (("{}", True), ('{"a": [1, 1]}', True), ("[]", False)):
        text = call.replace("{}", arguments)
        assert follows(model.matcher(conversation), model.tokenized(text)) is expected
    assert not follows(model.matcher(conversation), model.tokenized("Hello"))


@pytest.mark.parametrize("parameters", [UNIQUE, GUIDED], ids=["by llguidance", "by us"])
def test_a_strict_tool_follows_its_schema_whatever_those_of_others_are(parameters: Any) -> None:
    model = Model("hermes", marks_are_tokens=False)
    tools = (*STRICT, tool("any", parameters))
    names = ("weather", "clock", "any")
    conversation = Conversation((), tools=tools, must_call=names)

    for name, arguments, expected in (
        ("any", '{"b": 1}', True),
        ("weather", '{"city": "Rome", "days": 3}', True),
        ("weather", '{"b": 1}', False),
    ):
        text = HERMES_CALL.replace("clock", name).replace("{}", arguments)
        assert follows(model.matcher(conversation), model.tokenized(text)) is expected


@pytest.mark.parametrize("parameters", [UNIQUE, GUIDED], ids=["by llguidance", "by us"])
@pytest.mark.parametrize("strict", [UNIQUE, GUIDED], ids=["by llguidance", "by us"])
def test_it_is_the_strict_tool_that_is_refused(parameters: Any, strict: Any) -> None:
    tools = (tool("any", parameters), tool("strict", strict, strict=True))

    code, message = refusal(Conversation((), tools=tools, must_call=("any", "strict")))

    assert code is ErrorCode.INVALID_TOOL_SCHEMA
    assert message.startswith("the tools cannot be used: strict: ")


def test_a_tool_that_need_not_be_called_may_have_any_schema() -> None:
    tools = (tool("clock"), tool("bad", {"type": "object", "not": {"required": ["a"]}}))
    model = Model("hermes", marks_are_tokens=False)
    conversation = Conversation((), tools=tools, must_call=("clock",))

    assert follows(model.matcher(conversation), model.tokenized(HERMES_CALL))


@pytest.mark.parametrize(
    ("family", "tools"),
    [("hermes", TOOLS), ("hermes", ()), ("harmony", STRICT), ("llama", STRICT), ("gemma 3", STRICT), ("unknown", STRICT), ("minicpm", STRICT)],
)  # fmt: skip
def test_other_answers_are_free(family: str, tools: tuple[dict[str, Any], ...]) -> None:
    model = Model(family, marks_are_tokens=family != "harmony")

    assert model.guidance(Conversation((), tools=tools)) is None
