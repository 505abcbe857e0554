"""Which family a chat template belongs to."""

# ruff: noqa: RUF001 - DeepSeek's marks are written with a wide vertical line

import pytest
from output_samples import TEMPLATES

from agent.format_families import CALLS, HIDDEN, REASONING
from agent.formats import recognize, recognize_told
from agent.output_parser import Header


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("plain", "content only"),
        ("unknown", "calls unknown"),
        ("unknown think", "<think> + calls unknown"),
        ("hermes", "<tool_call>"),
        ("qwen3", "<think> + <tool_call>"),
        ("coder", "<tool_call><function=>"),
        ("nemotron", "<think> + <tool_call><function=>"),
        ("gigachat", "function call<|role_sep|>"),
        ("glm", "<think> + <tool_call>"),
        ("llama", "<|python_tag|> or JSON"),
        ("functionary", "<function=>"),
        ("mistral", "[TOOL_CALLS]"),
        ("magistral", "[THINK] + [TOOL_CALLS]"),
        ("deepseek", "<think> + <｜tool▁calls▁begin｜>"),
        ("deepseek 3.2", "<think> + <｜DSML｜function_calls>"),
        ("kimi", "<think> + <|tool_calls_section_begin|>"),
        ("command", "<|START_THINKING|> + <|START_ACTION|>"),
        ("gemma 3", "```tool_code"),
        ("function gemma", "<start_function_call>"),
        ("gemma 4", "<|channel>thought + <|tool_call>call:"),
        ("harmony", "harmony"),
        ("granite", "<think> + <|tool_call|>"),
    ],
)
def test_a_template_is_recognized_by_its_marks(family: str, name: str):
    assert recognize(TEMPLATES[family]).name == name


def test_llama_3_2_is_recognized_by_its_instruction():
    template = (
        '{{ tools }}Respond with {"name": function name, "parameters": dictionary of arguments}'
    )

    assert recognize(template).name == "<|python_tag|> or JSON"


def test_no_template_means_content_only():
    assert recognize(None).name == "content only"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (TEMPLATES["plain"], "<tool_call>"),
        ("<think></think>", "<think> + <tool_call>"),
        (TEMPLATES["unknown"], None),
        (TEMPLATES["hermes"], None),
        ("<|start|><|channel|>", None),
        ("{% for call in message.tool_calls %}", None),
        (None, None),
    ],
)
def test_only_templates_that_know_no_tools_need_them_in_words(
    template: str | None, name: str | None
):
    told = recognize_told(template)

    assert (told and told.name) == name


def test_calls_that_look_like_those_of_others_stay_unknown():
    assert recognize("{{ tools }}]<]minimax[>[<tool_call>").name == "calls unknown"


@pytest.mark.parametrize(
    ("family", "control_tokens"),
    [
        (
            "harmony",
            {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"},
        ),
        ("gemma 4", {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}),
        ("mistral", {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        ("llama", {"<|python_tag|>"}),
        ("deepseek 3.2", {"｜DSML｜", "<think>", "</think>"}),
        ("solar", {"<|begin|>", "<|think|>", "<|end|>", "<|content|>", "<|tool_calls|>"}),
        ("command", {"<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_THINKING|>"}),
    ],
)
def test_control_tokens_that_are_needed_are_named(family: str, control_tokens: set[str]):
    assert control_tokens <= set(recognize(TEMPLATES[family]).marks)


def all_templates() -> list[str]:
    alone = [sign for sign, _ in REASONING] + [sign for sign, _ in HIDDEN]
    calls = ["".join(signs) for signs, _ in CALLS]
    return [
        "",
        "{{ tools }}",
        "<|channel|>",
        *alone,
        *calls,
        *(a + b for a in alone for b in calls),
    ]


def test_no_mark_is_the_beginning_of_another_one():
    # Else it would depend on where the text is cut which of them is found.
    for template in all_templates():
        found = recognize(template)
        for state in (*found.with_tools.values(), *found.without_tools.values()):
            if isinstance(state, Header):
                continue
            marks = sorted(state.all_marks)
            assert len(set(marks)) == len(marks), (template, marks)
            assert not any(b.startswith(a) for a in marks for b in marks if a != b), (
                template,
                marks,
            )
