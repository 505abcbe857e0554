"""Answers that follow the grammars made for them: small models of each family, and what they write."""

# ruff: noqa: RUF001 - DeepSeek's marks are written with a wide vertical line

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from output_samples import TEMPLATES

from agent.answer_grammar import answer_grammar
from agent.constraint import ConstraintCompiler, GuidedMatcher
from agent.engine import Guidance
from agent.formats import OutputFormat, recognize
from agent.tools import Tools
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import (
    Constraint,
    Conversation,
    ToolCallsParsed,
)

END = TokenId(256)
MERGED = [
    '{"', '"}', '":', "</", "\n\n", '{"name', ' "a', "><", "}\n", "call", "</tool", ">{",
    "</parameter>", "</param>", "</arg_value>", "</｜DSML｜parameter>",
]  # fmt: skip
"""Tokens of several characters, some over the edges of what the grammars are made of."""


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    schema = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **schema, **more}}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (tool("weather", WEATHER), tool("clock"))
STRICT = (tool("weather", WEATHER, strict=True), tool("clock"))


class Model:
    """A small vocabulary: bytes, some longer tokens, and the marks of a family if they are tokens."""

    def __init__(self, family: str, *, marks_are_tokens: bool, ends: Sequence[str] = ()) -> None:
        self.output: OutputFormat = recognize(TEMPLATES.get(family, family))
        self.pieces = [*(bytes([n]) for n in range(256)), b"", *(text.encode() for text in MERGED)]
        if self.output.reasoning is not None:
            self.pieces += [mark.encode() for mark in self.output.reasoning.closes]
        if not marks_are_tokens:
            self.pieces += [mark.encode() for mark in self.output.marks]
        self.tokens: dict[str, TokenId] = {}
        if marks_are_tokens:
            # A mark with a control token in it is text around that.
            names = [mark for mark in self.output.marks if re.search(r"\s|\w<|>\w", mark) is None]
            for mark in names:
                self.tokens[mark] = TokenId(len(self.pieces))
                self.pieces.append(b"")
        self.ends = [mark for mark in ends if mark in self.tokens]
        self._split = re.compile(
            "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True))) or "(?!)"
        )

    def guidance(
        self, conversation: Conversation, *, prompt: str = "", constraint: Constraint | None = None
    ) -> Guidance | None:
        return answer_grammar(
            self.output,
            conversation,
            prompt=prompt,
            constraint=constraint,
            tokens=self.tokens,
            ends=self.ends,
        )

    def matcher(
        self, conversation: Conversation, *, prompt: str = "", constraint: Constraint | None = None
    ) -> GuidedMatcher:
        guidance = self.guidance(conversation, prompt=prompt, constraint=constraint)
        assert guidance is not None
        compiling = ConstraintCompiler(
            lambda: self.pieces,
            tokenize=lambda text: [TokenId(byte) for byte in text.encode()],
            ends=[END, *(self.tokens[mark] for mark in self.ends)],
            control=list(self.tokens.values()),
        )
        return compiling.compile(guidance)

    def tokenized(self, text: str) -> list[TokenId]:
        tokens: list[TokenId] = []
        at = 0
        for mark in self._split.finditer(text):
            tokens += [TokenId(byte) for byte in text[at : mark.start()].encode()]
            tokens.append(self.tokens[mark.group()])
            at = mark.end()
        return tokens + [TokenId(byte) for byte in text[at:].encode()]

    def text(self, tokens: Sequence[TokenId]) -> str:
        names = {token: mark.encode() for mark, token in self.tokens.items()}
        return b"".join(names.get(token, self.pieces[token]) for token in tokens).decode()

    def read(self, text: str, tools: Sequence[dict[str, Any]], *, prompt: str = "") -> list[Any]:
        """The calls that the family's own reader finds; else what it says instead."""
        parser = self.output.parser(prompt=prompt, tools=Tools(tools), has_tools=True)
        found: list[Any] = []
        for results in (parser.feed(text)[1], parser.flush()[1]):
            for result in results:
                if isinstance(result, ToolCallsParsed):
                    found += [(call.name, json.loads(call.arguments)) for call in result.calls]
                else:
                    found.append(result)
        return found


def follows(matcher: GuidedMatcher, tokens: Sequence[TokenId]) -> bool:
    for token in tokens:
        allowed = matcher.allows(token)
        assert allowed == matcher.allowed()[token]
        if not allowed:
            return False
        matcher.accept(token)
    return matcher.allows(END)


FAMILIES = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": ARGS}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": ARGS}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": ARGS}',
    "functionary": "<function=weather>ARGS</function>",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": ARGS}]',
    "magistral": "[TOOL_CALLS]weather[ARGS]ARGS",
    "{{ tools }}[TOOL_CALLS][CALL_ID][ARGS]": "[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]ARGS",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>ARGS"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "{{ tools }}<｜tool▁call▁begin｜>```json": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>weather\n```json\nARGS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    "<|tool_call_argument_begin|>ARGS<|tool_call_end|><|tool_calls_section_end|>",
    "command": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", '
    '"parameters": ARGS}\n]<|END_ACTION|>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": ARGS}]',
    "{{ tools }}<|tool_call|><|/tool_call|>": '<|tool_call|>[{"name": "weather", "arguments": ARGS}]'
    "<|/tool_call|>",
    "solar": "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather"
    "<|tool_call:args|>ARGS<|tool_call:end|>",
    "apertus": '<|tools_prefix|>[{"weather": ARGS}]<|tools_suffix|>',
    "gigachat": '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", '
    '"arguments": ARGS}',
    "{{ tools }}<TOOLCALL>": '<TOOLCALL>[{"name": "weather", "arguments": ARGS}]</TOOLCALL>',
    "{{ tools }}<tool_calls>": '<tool_calls>\n{"name": "weather", "arguments": ARGS}\n</tool_calls>',
    "{{ tools }}<|function_call|>": '<|function_call|>{"name": "weather", "arguments": ARGS}',
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>ARGS<|call|>",
    "coder": "<tool_call>\n<function=weather>\n<parameter=city>\nCITY\n</parameter>\n"
    "<parameter=days>\nDAYS\n</parameter>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=weather>\n<parameter=city>CITY</parameter>\n"
    "<parameter=days>DAYS</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>DAYS</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">CITY'
    '</parameter>\n<parameter name="days">DAYS</parameter>\n</invoke>\n</minimax:tool_call>',
    "minicpm": '<function name="weather"><param name="city">CITY</param>'
    '<param name="days">DAYS</param></function>',
    "deepseek 3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">CITY</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">DAYS</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}
"""Each with a call in its own notation."""

BOTH = pytest.mark.parametrize("marks_are_tokens", [True, False])


def written(form: str, *, city: str = "Rom é", days: str = "3", name: str = "weather") -> str:
    """A call."""
    arguments = json.dumps({"city": city, "days": 0}, ensure_ascii=False).replace("0", days)
    text = (
        form.replace("ARGS", arguments)
        if "[ARGS]" not in form
        else (form.replace("[ARGS]", "\0").replace("ARGS", arguments).replace("\0", "[ARGS]"))
    )
    return text.replace("CITY", city).replace("DAYS", days).replace("weather", name)


def walk(model: Model, matcher: GuidedMatcher, chance: random.Random) -> str | None:
    """What a model writes that wants nothing but to come to an end; None: it does not end."""
    opening = {TokenId(ord("{")), TokenId(ord("["))}
    wished = {
        TokenId(token) for token, piece in enumerate(model.pieces)
        if piece in (b'"', b"}", b"]", b">") or piece[:1] + piece[-1:] in (b"<>", b"[]")
    } | {*model.tokens.values()}  # fmt: skip
    rare = [TokenId(byte) for byte in range(0x80, 0x100)]
    tokens: list[TokenId] = []
    for _ in range(1500):
        allowed = matcher.allowed()
        if allowed[END] and chance.random() < 0.5:
            return model.text(tokens)
        if tokens and chr(tokens[-1]).isdigit():
            allowed[[ord("e"), ord("E")]] = False  # a number may become too large for the readers
        if chance.random() < 0.9:
            allowed[rare] = allowed[rare] & (not allowed[:0x80].any())
        possible = [TokenId(int(token)) for token in np.flatnonzero(allowed) if token != END]
        if not possible:
            return model.text(tokens)
        better = [token for token in possible if token in wished]
        if not better or chance.random() < 0.6:
            better = [token for token in possible if token not in opening] or possible
        token = chance.choice(better)
        matcher.accept(token)
        tokens.append(token)
    return None


HERMES_CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
HARMONY_CALL = "<|channel|>commentary to=functions.clock<|message|>{}<|call|>"


def refusal(
    conversation: Conversation, family: str = "hermes", constraint: Constraint | None = None
) -> tuple[ErrorCode, str]:
    with pytest.raises(RequestError) as refused:
        Model(family, marks_are_tokens=False).matcher(conversation, constraint=constraint)
    return refused.value.code, refused.value.message
