"""The marks of each family of models, and how its chat templates are recognised. Data, nothing else.

The facts are those of the models' own templates, which llama.cpp collects in ``models/templates``.
"""

# ruff: noqa: RUF001 - DeepSeek's marks are written with a wide vertical line

from dataclasses import dataclass, replace

from agent.notations import (
    APERTUS,
    CODER,
    COMMAND,
    DEEPSEEK,
    DEEPSEEK_R1,
    FUNCTION_TAG,
    GLM,
    HERMES,
    KIMI,
    LLAMA,
    MINICPM,
    MINIMAX,
    MISTRAL,
    MISTRAL_LIST,
    MISTRAL_WITH_IDS,
    SEED,
    SOLAR,
    Notation,
    Place,
    dsml,
    json_in,
)
from agent.tool_calls import (
    Places,
    ReadCalls,
    read_blocks,
    read_gemma,
    read_json,
    read_llama,
    read_python,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    label: str = ""
    """What follows an opening; without it, what was opened is not reasoning."""
    is_anywhere: bool = False
    """Its marks are tokens of their own, which ordinary text does not hold. Other reasoning begins
    where an answer begins, or behind another section.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    name: str
    read: ReadCalls
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    """None: the section lasts until the answer ends."""
    inside: tuple[str, ...] = ()
    """Marks within the section, which the reader needs and nobody sees."""
    quotes: tuple[str, ...] = ()
    """Control tokens that belong to the text of a call."""
    ends_reasoning: tuple[str, ...] = ()
    """Those of ``opens`` that count while the model reasons, too: it may forget to close that."""
    ends_reasoning_before: tuple[str, ...] = ()
    """Openings with what usually follows them: models also reason about how to call tools. Only
    looked for if tools are offered.
    """
    words: tuple[str, ...] = ()
    """Openings that ordinary text may hold: they count only if tools are offered."""
    beginnings: tuple[str, ...] = ()
    """Not hidden, and only looked for where an answer begins and if tools are offered."""
    signs: tuple[str, ...] = ()
    """Like ``beginnings``, but anywhere."""
    notation: Notation | None = None
    """How to write calls that ``read`` reads; None: that is not known here."""


_THINK = Reasoning(name="<think>", opens=("<think>",), closes=("</think>",))

REASONING: tuple[tuple[str, Reasoning], ...] = (
    ("<|START_THINKING|>", Reasoning(
        name="<|START_THINKING|>", opens=("<|START_THINKING|>",), closes=("<|END_THINKING|>",),
        is_anywhere=True,
    )),
    ("[THINK]", Reasoning(
        name="[THINK]", opens=("[THINK]",), closes=("[/THINK]",), is_anywhere=True,
    )),
    ("<|channel>", Reasoning(
        name="<|channel>thought", opens=("<|channel>",), label="thought", closes=("<channel|>",),
        is_anywhere=True,
    )),
    ("◁think▷", Reasoning(name="◁think▷", opens=("◁think▷",), closes=("◁/think▷",))),
    ("<seed:think>", Reasoning(
        name="<seed:think>", opens=("<seed:think>",), closes=("</seed:think>",),
    )),
    ("<mm:think>", Reasoning(name="<mm:think>", opens=("<mm:think>",), closes=("</mm:think>",))),
    ("<|think|>", Reasoning(
        name="<|think|>", opens=("<|think|>",), closes=("<|end|>",), is_anywhere=True,
    )),
    ("<|inner_prefix|>", Reasoning(
        name="<|inner_prefix|>", opens=("<|inner_prefix|>",), closes=("<|inner_suffix|>",),
        is_anywhere=True,
    )),
    ("[BEGIN FINAL RESPONSE]", Reasoning(
        name="[BEGIN FINAL RESPONSE]", opens=("Here are my reasoning steps:",),
        closes=("[BEGIN FINAL RESPONSE]",),
    )),
    ("</think>", _THINK),
    ("<think>", _THINK),
    ("</thinking>", Reasoning(name="<thinking>", opens=("<thinking>",), closes=("</thinking>",))),
    ("</reasoning>", Reasoning(
        name="<reasoning>", opens=("<reasoning>",), closes=("</reasoning>",),
    )),
)  # fmt: skip
"""What stands in a template, and the marks that it tells of. The first one that is found counts."""

_JSON_BEGINNINGS = tuple(
    f'{{{space}"{key}"'
    for space in ("", " ", "\n", "\n  ", "\n    ")
    for key in ("name", "type", "function", "parameters")
)

TOOL_CALL = Calls(
    name="<tool_call>",
    read=read_blocks,
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    notation=HERMES,
)
_MISTRAL = Calls(
    name="[TOOL_CALLS]",
    read=Places(name="[TOOL_CALLS]", call_id="[CALL_ID]", arguments="[ARGS]"),
    opens=("[TOOL_CALLS]",),
    inside=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    notation=MISTRAL_LIST,
)
_DEEPSEEK = Calls(
    name="<｜tool▁calls▁begin｜>",
    read=Places(name="<｜tool▁call▁begin｜>", arguments="<｜tool▁sep｜>"),
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    closes=("<｜tool▁calls▁end｜>",),
    inside=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ends_reasoning=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    notation=DEEPSEEK,
)
_LFM2 = Calls(
    name="<|tool_call_start|>",
    read=read_python,
    opens=("<|tool_call_start|>",),
    closes=("<|tool_call_end|>",),
)
_TOOL_CALLS = Calls(
    name="<tool_calls>",
    read=read_blocks,
    opens=("<tool_calls>",),
    closes=("</tool_calls>",),
    notation=json_in(("<tool_calls>\n",), ("\n</tool_calls>",), between=("\n",)),
)
_PHI = Calls(
    name="<|tool_call|>",
    read=read_json,
    opens=("<|tool_call|>",),
    closes=("<|/tool_call|>",),
    notation=json_in(("<|tool_call|>[",), ("]",)),
)
_LLAMA = Calls(
    name="<|python_tag|> or JSON",
    read=read_llama,
    opens=("<|python_tag|>",),
    beginnings=_JSON_BEGINNINGS,
    signs=("<function=",),
    notation=LLAMA,
)
_GEMMA_3 = Calls(
    name="```tool_code",
    read=read_python,
    words=("```tool_call\n", "```tool_code\n"),
    closes=("```",),
)

CALLS: tuple[tuple[tuple[str, ...], Calls], ...] = (
    (("[TOOL_CALLS]", "[CALL_ID]"), replace(_MISTRAL, notation=MISTRAL_WITH_IDS)),
    (("[TOOL_CALLS]", "[ARGS]"), replace(_MISTRAL, notation=MISTRAL)),
    (("[TOOL_CALLS]",), _MISTRAL),
    (("｜DSML｜", "function_calls>"), Calls(
        name="<｜DSML｜function_calls>", read=read_blocks, opens=("<｜DSML｜function_calls>",),
        closes=("</｜DSML｜function_calls>",), quotes=("｜DSML｜",),
        ends_reasoning=("<｜DSML｜function_calls>",),
        notation=dsml("function_calls"),
    )),
    (("｜DSML｜", "tool_calls>"), Calls(
        name="<｜DSML｜tool_calls>", read=read_blocks, opens=("<｜DSML｜tool_calls>",),
        closes=("</｜DSML｜tool_calls>",), quotes=("｜DSML｜",),
        ends_reasoning=("<｜DSML｜tool_calls>",),
        notation=dsml("tool_calls"),
    )),
    (("<｜tool▁call▁begin｜>", "```json"), replace(_DEEPSEEK, notation=DEEPSEEK_R1)),
    (("<｜tool▁call▁begin｜>",), _DEEPSEEK),
    (("<|tool_calls_section_begin|>",), Calls(
        name="<|tool_calls_section_begin|>",
        read=Places(name="<|tool_call_begin|>", arguments="<|tool_call_argument_begin|>"),
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        closes=("<|tool_calls_section_end|>",),
        inside=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ends_reasoning=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        notation=KIMI,
    )),
    (("<|tool_call:begin|>",), Calls(
        name="<|tool_call:begin|>",
        read=Places(name="<|tool_call:name|>", arguments="<|tool_call:args|>"),
        opens=("<|tool_calls|>", "<|tool_call:begin|>"),
        inside=(
            "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>",
        ),
        notation=SOLAR,
    )),
    (("<|tool_call>",), Calls(
        name="<|tool_call>call:", read=read_gemma, opens=("<|tool_call>",),
        closes=("<tool_call|>",), quotes=('<|"|>',),
    )),
    (("<start_function_call>",), Calls(
        name="<start_function_call>", read=read_gemma, opens=("<start_function_call>",),
        closes=("<end_function_call>",), quotes=("<escape>",),
    )),
    (("<|START_ACTION|>",), Calls(
        name="<|START_ACTION|>", read=read_json, opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
        notation=COMMAND,
    )),
    (("<|tools_prefix|>",), Calls(
        name="<|tools_prefix|>", read=read_json, opens=("<|tools_prefix|>",),
        closes=("<|tools_suffix|>",), ends_reasoning=("<|tools_prefix|>",),
        notation=APERTUS,
    )),
    (("<|tool_list_start|>",), _LFM2),
    (("<|tool_call_start|>",), _LFM2),
    (("List of tools: [",), _LFM2),
    (("<|tool_call|>", "<|/tool_call|>"), replace(
        _PHI, notation=json_in(("<|tool_call|>[",), ("]<|/tool_call|>",)),
    )),
    (("<|tool_call|>",), _PHI),
    (("<seed:tool_call>",), Calls(
        name="<seed:tool_call>", read=read_blocks, opens=("<seed:tool_call>",),
        closes=("</seed:tool_call>",),
        notation=SEED,
    )),
    (("<minimax:tool_call>",), Calls(
        name="<minimax:tool_call>", read=read_blocks, opens=("<minimax:tool_call>",),
        closes=("</minimax:tool_call>",),
        notation=MINIMAX,
    )),
    (("<TOOLCALL>",), Calls(
        name="<TOOLCALL>", read=read_blocks, opens=("<TOOLCALL>",), closes=("</TOOLCALL>",),
        notation=json_in(("<TOOLCALL>[",), ("]</TOOLCALL>",)),
    )),
    (("<tool_calls>[",), replace(
        _TOOL_CALLS, notation=json_in(("<tool_calls>[",), ("]</tool_calls>",)),
    )),
    (("<tool_calls>",), _TOOL_CALLS),
    (("<tool_call>", "<function="), replace(
        TOOL_CALL, name="<tool_call><function=>", signs=("<function=",),
        ends_reasoning_before=("<tool_call><function=", "<tool_call>\n<function="),
        notation=CODER,
    )),
    (("<tool_call>", "<arg_key>"), replace(TOOL_CALL, notation=GLM)),
    (("<tool_call>",), TOOL_CALL),
    (("<|function_call|>",), Calls(
        name="<|function_call|>", read=read_json, opens=("<|function_call|>",),
        notation=json_in(("<|function_call|>", Place.SPACE)),
    )),
    (("<|role_sep|>", "<|message_sep|>"), Calls(
        name="function call<|role_sep|>", read=read_json,
        opens=("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
        notation=json_in(("<|message_sep|>\n\nfunction call<|role_sep|>\n",)),
    )),
    (("<function name=\"", "<param name=\""), Calls(
        name="<function name=>", read=read_blocks, signs=("<function name=\"",),
        closes=("</function>",), notation=MINICPM,
    )),
    (("<function=",), Calls(
        name="<function=>", read=read_llama, opens=("<|python_tag|>",), signs=("<function=",),
        closes=("</function>",), notation=FUNCTION_TAG,
    )),
    (("<|python_tag|>",), _LLAMA),
    (('"parameters": dictionary',), _LLAMA),
    (("```tool_call",), _GEMMA_3),
    (("```tool_code",), _GEMMA_3),
)  # fmt: skip
"""What stands in a template, all of it, and the calls that it tells of. The first one counts."""

HIDDEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("<|START_RESPONSE|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    ("<|START_TEXT|>", ("<|START_TEXT|>", "<|END_TEXT|>")),
    ("</response>", ("<response>", "</response>")),
    ("<|tool_call:begin|>", ("<|begin|>assistant", "<|content|>", "<|end|>")),
)
"""What stands in a template, and marks around the content that nobody wants to see."""

AROUND_CONTENT: tuple[tuple[str, str, str], ...] = (
    ("<|START_RESPONSE|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ("</response>", "<response>", "</response>"),
    ("<|tool_call:begin|>", "<|begin|>assistant<|content|>", "<|end|>"),
)
"""What stands in a template, and what its model writes before and behind the content once it has
reasoned.
"""

UNKNOWN_CALLS = ("]<]minimax[>[", "<|open|>", "<atem:function_calls>", ">>>${recipient}")
"""In templates whose calls look like those of others, or are not known here."""
