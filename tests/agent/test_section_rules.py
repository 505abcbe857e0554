"""Answers that may call a tool: text is free, and calls of strict tools are not."""

import random

import pytest
from guided_answers import BOTH, FAMILIES, HARMONY_CALL, HERMES_CALL, STRICT, Model, follows, walk

from common.messages import Conversation

WRONG = '{"city": "Rome"}'
RIGHT = '{"city": "Rome", "days": 3}'


def calling(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@BOTH
@pytest.mark.parametrize(
    ("family", "prompt", "text", "expected"),
    [
        ("hermes", "", "Well, 1 < 2. é\n\n", True),
        ("hermes", "", "", True),
        ("hermes", "", calling(RIGHT), True),
        ("hermes", "", f"Let me see:\n\n{calling(RIGHT)}", True),
        ("hermes", "", f"a {calling(RIGHT)}\n{calling(RIGHT)} b", True),
        ("hermes", "", calling(WRONG), False),
        ("hermes", "", f"Let me <tool_ {calling(WRONG)}", False),
        ("hermes", "", f"a {calling(RIGHT)} {calling(WRONG)}", False),
        ("hermes", "", calling('{"any": [1]}', "clock"), True),
        ("hermes", "", calling("{}", "other"), False),
        ("hermes", "", '{"name": "weather", "arguments": {}}', True),
        ("qwen3", "", f"<think>a</think>\n{calling(RIGHT)}", True),
        ("qwen3", "", f"<think>a</think>b{calling(WRONG)}", False),
        ("qwen3", "", "<think>a</think>b", True),
        ("qwen3", "", "<think>a", True),
        ("qwen3", "x<think>", "a", True),
        ("qwen3", "x<think>", f"a</think>b{calling(RIGHT)}c", True),
        ("qwen3", "x<think>", f"a</think>b{calling(WRONG)}c", False),
        ("qwen3", "<think>\n\n</think>", f"b{calling(RIGHT)}c", True),
        ("qwen3", "<think>\n\n</think>", f"b{calling(WRONG)}c", False),
        ("magistral", "", "a[THINK]b[/THINK]c", True),
        ("magistral", "", "a[THINK]b", True),
        ("magistral", "", f"a[THINK]b[/THINK]c[TOOL_CALLS]weather[ARGS]{RIGHT}", True),
        ("magistral", "", f"a[THINK]b[/THINK]c[TOOL_CALLS]weather[ARGS]{WRONG}", False),
        ("magistral", "", f"[TOOL_CALLS]weather[ARGS]{RIGHT} and text", False),
        ("command", "", "<|START_RESPONSE|>a<|END_RESPONSE|>", True),
        ("deepseek 3.2", "", f"a{FAMILIES['deepseek 3.2'].replace('CITY', 'x').replace('DAYS', '3')}b", True),
        ("deepseek 3.2", "", f"a{FAMILIES['deepseek 3.2'].replace('CITY', 'x').replace('DAYS', 'y')}b", False),
        ("coder", "", FAMILIES["coder"].replace("CITY", "x").replace("DAYS", "3"), True),
        ("coder", "", FAMILIES["coder"].replace("CITY", "x").replace("DAYS", "y"), False),
    ],
)  # fmt: skip
def test_calls_of_a_strict_tool_follow_its_schema_and_text_is_free(
    family: str, prompt: str, text: str, expected: bool, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=STRICT)

    matcher = model.matcher(conversation, prompt=prompt)
    assert follows(matcher, model.tokenized(text)) is expected


@pytest.mark.parametrize(
    ("family", "form", "between"),
    [
        ("hermes", HERMES_CALL, "\n"),
        ("qwen3", HERMES_CALL, " and "),
        ("magistral", "[TOOL_CALLS]clock[ARGS]{}", ""),
        ("harmony", HARMONY_CALL, "<|start|>assistant"),
    ],
)
def test_where_calls_are_not_parallel_one_may_be_written(
    family: str, form: str, between: str
) -> None:
    model = Model(family, marks_are_tokens=True)
    one = Conversation((), tools=STRICT, parallel_calls=False)
    many = Conversation((), tools=STRICT)
    twice = model.tokenized(form + between + form)

    assert follows(model.matcher(one), model.tokenized(form))
    assert not follows(model.matcher(one), twice)
    assert follows(model.matcher(many), twice)


@BOTH
@pytest.mark.parametrize("family", ["hermes", "qwen3", "magistral", "coder", "glm", "deepseek"])
def test_whatever_is_written_with_a_strict_tool_is_read(
    family: str, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    ended = 0
    for seed in range(8):
        matcher = model.matcher(Conversation((), tools=STRICT))
        text = walk(model, matcher, random.Random(seed))
        if text is None:
            continue
        ended += 1
        for name, arguments in model.read(text, STRICT):
            assert name in ("weather", "clock"), text
            assert name == "clock" or {"city", "days"} <= arguments.keys(), text
    assert ended >= 3
