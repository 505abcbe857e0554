"""The same as in ``test_section_rules`` where an answer is a series of messages."""

import pytest
from guided_answers import STRICT, Model, follows

from common.messages import Conversation

WRONG = '{"city": "Rome"}'
RIGHT = '{"city": "Rome", "days": 3}'


ANALYSIS = "<|channel|>analysis<|message|>I <b>think</b><|end|><|start|>assistant"


@pytest.mark.parametrize("ends", [("<|call|>", "<|return|>"), ()])
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<|channel|>final<|message|>Well, to=functions.x 1 < 2", True),
        ("", f"{ANALYSIS}<|channel|>final<|message|>a", True),
        ("", "<|channel|>analysis<|message|>a", True),
        ("", f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{RIGHT}", True),
        ("", f"{ANALYSIS}<|channel|>commentary to=functions.weather<|message|>{RIGHT}", True),
        ("", f"{ANALYSIS} to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{RIGHT}", True),
        ("", f"<|channel|>commentary<|message|>a<|end|><|start|>assistant{ANALYSIS}<|channel|>final<|message|>", True),
        ("", f"{ANALYSIS}<|channel|>commentary to=functions.weather<|message|>{WRONG}", False),
        ("", f"{ANALYSIS} to=functions.weather<|channel|>commentary<|message|>{WRONG}", False),
        ("", f"{ANALYSIS}<|channel|>commentary to=functions.other<|message|>{{}}", False),
        ("<|channel|>analysis<|message|>", "a <b>", True),
        ("<|channel|>analysis<|message|>", f"a<|end|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>{RIGHT}", True),
        ("<|channel|>analysis<|message|>", f"a<|end|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>{WRONG}", False),
    ],
)  # fmt: skip
def test_the_same_where_an_answer_is_a_series_of_messages(
    prompt: str, text: str, expected: bool, ends: tuple[str, ...]
) -> None:
    model = Model("harmony", marks_are_tokens=True, ends=ends)
    if not ends and "to=functions" in text.replace("Well, to=", ""):
        text += "<|call|>"

    matcher = model.matcher(Conversation((), tools=STRICT), prompt=prompt)
    assert follows(matcher, model.tokenized(text)) is expected
