"""How the calls of each family of models are written, so that its reader reads them. Data, nothing else.

``agent.call_rules`` makes grammars of it. The facts are those of the models' own templates, which
llama.cpp collects in ``models/templates``.
"""

# ruff: noqa: RUF001 - DeepSeek's marks are written with a wide vertical line

import enum
import re
from dataclasses import dataclass
from typing import TypeAlias


class Place(enum.Enum):
    SPACE = enum.auto()
    """A little white space, or none."""
    NAME = enum.auto()
    NAME_IN_JSON = enum.auto()
    """Without quotes around it."""
    ARGUMENTS = enum.auto()
    """As JSON."""
    PARAMETERS = enum.auto()
    """Each in its tags."""
    NUMBER = enum.auto()
    """Of the call."""
    MISTRAL_ID = enum.auto()
    SOLAR_ID = enum.auto()
    KEY = enum.auto()
    """A parameter's name."""
    VALUE = enum.auto()


@dataclass(frozen=True, slots=True)
class Perhaps:
    text: str


Part: TypeAlias = str | Place | Perhaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """``begin call between call ... end``"""

    call: tuple[Part, ...]
    begin: tuple[Part, ...] = ()
    between: tuple[Part, ...] = ()
    end: tuple[Part, ...] = ()
    text_parameter: tuple[Part, ...] = ()
    """For ``PARAMETERS``: one whose value is text, as it stands."""
    json_parameter: tuple[Part, ...] = ()
    plain_call: tuple[Part, ...] = ()
    """In place of ``call`` where the parameters do not fit in tags."""
    names: re.Pattern[str] = re.compile(r"[\w.:/-]+")
    """What tools may be called, whole."""


_ANY_NAME = re.compile(r"(?s:.+)")
_JSON: tuple[Part, ...] = (
    '{"name": "',
    Place.NAME_IN_JSON,
    '", "arguments": ',
    Place.ARGUMENTS,
    "}",
)


def json_in(
    begin: tuple[Part, ...], end: tuple[Part, ...] = (), *, between: tuple[Part, ...] = (", ",)
) -> Notation:
    """Objects, all between the same marks."""
    return Notation(begin=begin, call=_JSON, between=between, end=end, names=_ANY_NAME)


def json_each_in(begin: str, end: str) -> Notation:
    """Objects, each between marks of its own."""
    return Notation(
        call=(begin, Place.SPACE, *_JSON, Place.SPACE, end),
        between=(Place.SPACE,),
        names=_ANY_NAME,
    )


HERMES = json_each_in("<tool_call>", "</tool_call>")

LLAMA = Notation(
    call=('{"name": "', Place.NAME_IN_JSON, '", "parameters": ', Place.ARGUMENTS, "}"),
    between=("; ",),
    names=_ANY_NAME,
)

FUNCTION_TAG = Notation(call=("<function=", Place.NAME, ">", Place.ARGUMENTS, "</function>"))

CODER = Notation(
    call=(
        "<tool_call>\n<function=", Place.NAME, ">\n", Place.PARAMETERS, "</function>\n</tool_call>",
    ),
    between=(Place.SPACE,),
    text_parameter=("<parameter=", Place.KEY, ">\n", Place.VALUE, "\n</parameter>\n"),
    json_parameter=("<parameter=", Place.KEY, ">\n", Place.VALUE, "\n</parameter>\n"),
    plain_call=(
        "<tool_call>\n<function=", Place.NAME, ">\n", Place.ARGUMENTS, "\n</function>\n</tool_call>",
    ),
)  # fmt: skip

SEED = Notation(
    call=(
        "<seed:tool_call>\n<function=", Place.NAME, ">\n", Place.PARAMETERS,
        "</function>\n</seed:tool_call>",
    ),
    between=(Place.SPACE,),
    text_parameter=("<parameter=", Place.KEY, ">", Place.VALUE, "</parameter>\n"),
    json_parameter=("<parameter=", Place.KEY, ">", Place.VALUE, "</parameter>\n"),
    plain_call=(
        "<seed:tool_call>\n<function=", Place.NAME, ">\n", Place.ARGUMENTS,
        "\n</function>\n</seed:tool_call>",
    ),
)  # fmt: skip

GLM = Notation(
    call=("<tool_call>", Place.NAME, Place.SPACE, Place.PARAMETERS, "</tool_call>"),
    between=(Place.SPACE,),
    text_parameter=(
        "<arg_key>", Place.KEY, "</arg_key>", Place.SPACE,
        "<arg_value>", Place.VALUE, "</arg_value>", Place.SPACE,
    ),
    json_parameter=(
        "<arg_key>", Place.KEY, "</arg_key>", Place.SPACE,
        "<arg_value>", Place.VALUE, "</arg_value>", Place.SPACE,
    ),
    plain_call=("<tool_call>", Place.SPACE, *_JSON, Place.SPACE, "</tool_call>"),
)  # fmt: skip

MINIMAX = Notation(
    begin=("<minimax:tool_call>\n",),
    call=('<invoke name="', Place.NAME, '">', Place.SPACE, Place.PARAMETERS, "</invoke>"),
    between=(Place.SPACE,),
    end=(Place.SPACE, "</minimax:tool_call>"),
    text_parameter=(
        '<parameter name="', Place.KEY, '">', Place.VALUE, "</parameter>", Place.SPACE,
    ),
    json_parameter=(
        '<parameter name="', Place.KEY, '">', Place.VALUE, "</parameter>", Place.SPACE,
    ),
    plain_call=('<invoke name="', Place.NAME, '">', Place.ARGUMENTS, "</invoke>"),
)  # fmt: skip

MINICPM = Notation(
    call=('<function name="', Place.NAME, '">', Place.PARAMETERS, "</function>"),
    between=(Place.SPACE,),
    text_parameter=('<param name="', Place.KEY, '">', Place.VALUE, "</param>"),
    json_parameter=('<param name="', Place.KEY, '">', Place.VALUE, "</param>"),
    plain_call=('<function name="', Place.NAME, '">', Place.ARGUMENTS, "</function>"),
)


def dsml(section: str) -> Notation:
    """DeepSeek 3.2 and later."""
    return Notation(
        begin=(f"<｜DSML｜{section}>\n",),
        call=(
            '<｜DSML｜invoke name="', Place.NAME, '">\n', Place.PARAMETERS, "</｜DSML｜invoke>\n",
        ),
        end=(f"</｜DSML｜{section}>",),
        text_parameter=(
            '<｜DSML｜parameter name="', Place.KEY, '" string="true">', Place.VALUE,
            "</｜DSML｜parameter>\n",
        ),
        json_parameter=(
            '<｜DSML｜parameter name="', Place.KEY, '" string="false">', Place.VALUE,
            "</｜DSML｜parameter>\n",
        ),
        plain_call=(
            '<｜DSML｜invoke name="', Place.NAME, '">\n', Place.ARGUMENTS, "\n</｜DSML｜invoke>\n",
        ),
    )  # fmt: skip


MISTRAL = Notation(call=("[TOOL_CALLS]", Place.NAME, "[ARGS]", Place.ARGUMENTS))
MISTRAL_WITH_IDS = Notation(
    call=("[TOOL_CALLS]", Place.NAME, "[CALL_ID]", Place.MISTRAL_ID, "[ARGS]", Place.ARGUMENTS)
)
MISTRAL_LIST = json_in(("[TOOL_CALLS]", Place.SPACE, "["), ("]",))

DEEPSEEK = Notation(
    begin=("<｜tool▁calls▁begin｜>",),
    call=(
        "<｜tool▁call▁begin｜>", Place.NAME, "<｜tool▁sep｜>", Place.ARGUMENTS, "<｜tool▁call▁end｜>",
    ),
    end=("<｜tool▁calls▁end｜>",),
)  # fmt: skip
DEEPSEEK_R1 = Notation(
    begin=("<｜tool▁calls▁begin｜>",),
    call=(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", Place.NAME, "\n```json\n", Place.ARGUMENTS,
        "\n```<｜tool▁call▁end｜>",
    ),
    between=(Place.SPACE,),
    end=("<｜tool▁calls▁end｜>",),
)  # fmt: skip

KIMI = Notation(
    begin=("<|tool_calls_section_begin|>",),
    call=(
        "<|tool_call_begin|>functions.", Place.NAME, ":", Place.NUMBER,
        "<|tool_call_argument_begin|>", Place.ARGUMENTS, "<|tool_call_end|>",
    ),
    end=("<|tool_calls_section_end|>",),
)  # fmt: skip

SOLAR = Notation(
    begin=(Perhaps("<|begin|>assistant"), "<|tool_calls|>"),
    call=(
        "<|tool_call:begin|>", Place.SOLAR_ID, "<|tool_call:name|>", Place.NAME,
        "<|tool_call:args|>", Place.ARGUMENTS, "<|tool_call:end|>",
    ),
)  # fmt: skip

COMMAND = Notation(
    begin=("<|START_ACTION|>[", Place.SPACE),
    call=(
        '{"tool_call_id": "', Place.NUMBER, '", "tool_name": "', Place.NAME_IN_JSON,
        '", "parameters": ', Place.ARGUMENTS, "}",
    ),
    between=(",", Place.SPACE),
    end=(Place.SPACE, "]<|END_ACTION|>"),
    names=_ANY_NAME,
)  # fmt: skip

APERTUS = Notation(
    begin=("<|tools_prefix|>[",),
    call=('{"', Place.NAME_IN_JSON, '": ', Place.ARGUMENTS, "}"),
    between=(", ",),
    end=("]<|tools_suffix|>",),
    names=re.compile(r"(?!(?:name|tool_name|function)\Z)(?s:.+)"),
)

HARMONY = Notation(
    call=(
        "<|channel|>commentary to=functions.", Place.NAME, Perhaps(" <|constrain|>json"),
        "<|message|>", Place.ARGUMENTS, "<|call|>",
    ),
    between=("<|start|>assistant",),
    names=re.compile(r"[^\s<]+"),
)  # fmt: skip
HARMONY_RECIPIENT_FIRST = Notation(
    call=(
        " to=functions.", Place.NAME, "<|channel|>commentary", Perhaps(" <|constrain|>json"),
        "<|message|>", Place.ARGUMENTS, "<|call|>",
    ),
    names=HARMONY.names,
)  # fmt: skip
