"""Whole answers walked through the grammars that are made for them, and read back."""

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
    Gbnf,
    JsonSchema,
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


@BOTH
@pytest.mark.parametrize(("family", "form"), FAMILIES.items())
def test_a_call_in_the_familys_own_notation_is_allowed_and_read(
    family: str, form: str, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))
    text = written(form)

    assert follows(model.matcher(conversation), model.tokenized(text))
    assert model.read(text, TOOLS) == [("weather", {"city": "Rom é", "days": 3})]


@BOTH
@pytest.mark.parametrize(("family", "form"), FAMILIES.items())
@pytest.mark.parametrize(
    "change",
    [
        {"name": "clock"},
        {"name": "weathers"},
        {"days": '"x"'},
        {"days": "100"},
        {"days": ""},
    ],
)
def test_other_tools_and_wrong_arguments_are_not_allowed(
    family: str, form: str, marks_are_tokens: bool, change: dict[str, str]
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))

    assert not follows(model.matcher(conversation), model.tokenized(written(form, **change)))


@BOTH
@pytest.mark.parametrize(("family", "form"), FAMILIES.items())
def test_nothing_but_the_call_is_allowed(family: str, form: str, marks_are_tokens: bool) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))
    text = written(form)

    for wrong in (f"Well, {text}", text + "x", text[:-1], ""):
        assert not follows(model.matcher(conversation), model.tokenized(wrong))


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


@BOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_written_is_read_as_calls_of_the_right_tools(
    family: str, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation(
        (), tools=TOOLS, must_call=("weather", "clock"), enable_thinking=True
    )
    ended = 0
    for seed in range(8):
        text = walk(model, model.matcher(conversation), random.Random(seed))
        if text is None:
            continue
        ended += 1
        calls = model.read(text, TOOLS)
        assert calls, text
        for name, arguments in calls:
            assert name in ("weather", "clock")
            if name == "weather":
                assert {"city", "days"} <= arguments.keys() <= {"city", "days", "unit"}, text
    assert ended >= 3


SEVERAL = {
    "hermes": ("{F}\n{F}", '<tool_call>{"name": "weather", "arguments": ARGS}</tool_call>'),
    "llama": ("{F}; {F}", '{"name": "weather", "parameters": ARGS}'),
    "magistral": ("{F}{F}", "[TOOL_CALLS]weather[ARGS]ARGS"),
    "mistral": ("[TOOL_CALLS][{F}, {F}]", '{"name": "weather", "arguments": ARGS}'),
    "kimi": (
        "<|tool_calls_section_begin|>{F}{F}<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
    ),
    "coder": ("{F}\n{F}", FAMILIES["coder"]),
    "harmony": (
        "{F}<|start|>assistant{F}",
        "<|channel|>commentary to=functions.weather<|message|>ARGS<|call|>",
    ),
}


@BOTH
@pytest.mark.parametrize(("family", "forms"), SEVERAL.items())
def test_there_may_be_several_calls_unless_they_are_not_to_be_parallel(
    family: str, forms: tuple[str, str], marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    whole, one = forms
    text = whole.replace("{F}", written(one))
    single = whole.replace("{F}", "\0", 1)
    single = single[: single.index("\0") + 1] + single[single.index("{F}") + 3 :]

    many = Conversation((), tools=TOOLS, must_call=("weather",))
    assert follows(model.matcher(many), model.tokenized(text))
    assert len(model.read(text, TOOLS)) == 2
    at_most_one = Conversation((), tools=TOOLS, must_call=("weather",), parallel_calls=False)
    assert not follows(model.matcher(at_most_one), model.tokenized(text))
    assert follows(model.matcher(at_most_one), model.tokenized(single.replace("\0", written(one))))


@pytest.mark.parametrize("parallel", [True, False])
def test_where_a_mark_ends_the_answer_it_ends_the_call(parallel: bool) -> None:
    model = Model("harmony", marks_are_tokens=True, ends=["<|call|>", "<|return|>"])
    conversation = Conversation((), tools=TOOLS, must_call=("clock",), parallel_calls=parallel)
    text = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    matcher = model.matcher(conversation)

    assert follows(matcher, model.tokenized(text))
    assert matcher.allows(model.tokens["<|call|>"])
    assert not matcher.allows(model.tokens["<|start|>"])
    assert model.read(text, TOOLS) == [("clock", {})]


HERMES_CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
HARMONY_CALL = "<|channel|>commentary to=functions.clock<|message|>{}<|call|>"
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


def test_a_mark_that_is_a_control_token_is_that_token_and_not_its_text() -> None:
    model = Model("hermes", marks_are_tokens=True)
    conversation = Conversation((), tools=TOOLS, must_call=("clock",))

    assert not follows(
        model.matcher(conversation), [TokenId(byte) for byte in HERMES_CALL.encode()]
    )
    assert follows(model.matcher(conversation), model.tokenized(HERMES_CALL))


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
    conversation = Conversation((), enable_thinking=True)

    matcher = model.matcher(conversation, prompt=prompt, constraint=constraint)
    assert follows(matcher, model.tokenized(text.replace("WANTED", wanted))) is expected


def test_white_space_at_the_beginning_of_a_grammar_is_not_lost() -> None:
    model = Model("qwen3", marks_are_tokens=False)
    conversation = Conversation((), enable_thinking=True)
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
    conversation = Conversation((), enable_thinking=thinks)

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
    conversation = Conversation((), tools=TOOLS, enable_thinking=thinks)

    matcher = model.matcher(conversation, constraint=POINT)
    assert follows(matcher, model.tokenized(text)) is expected


def refusal(
    conversation: Conversation, family: str = "hermes", constraint: Constraint | None = None
) -> tuple[ErrorCode, str]:
    with pytest.raises(RequestError) as refused:
        Model(family, marks_are_tokens=False).matcher(conversation, constraint=constraint)
    return refused.value.code, refused.value.message


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


@pytest.mark.parametrize(
    ("parameters", "cause"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"x-guidance": {}}, "'x-guidance' is not supported"),
    ],
)
@pytest.mark.parametrize("family", ["hermes", "coder", "harmony"])
def test_a_schema_that_cannot_be_kept_to_is_refused_with_the_tools_name(
    family: str, parameters: Any, cause: str
) -> None:
    tools = (tool("good", WEATHER), tool("bad", parameters))

    code, message = refusal(Conversation((), tools=tools, must_call=("good", "bad")), family)

    assert code is ErrorCode.INVALID_TOOL_SCHEMA
    assert message.startswith("the tools cannot be used: bad: ")
    assert cause in message


def test_a_tool_that_need_not_be_called_may_have_any_schema() -> None:
    tools = (tool("clock"), tool("bad", {"type": "object", "not": {"required": ["a"]}}))
    model = Model("hermes", marks_are_tokens=False)
    conversation = Conversation((), tools=tools, must_call=("clock",))

    assert follows(model.matcher(conversation), model.tokenized(HERMES_CALL))


@pytest.mark.parametrize(
    ("family", "name"),
    [("kimi", "a b"), ("harmony", "a b"), ("coder", "a>b"), ("apertus", "name"), ("hermes", "</tool_call>"), ("hermes", " a")],
)  # fmt: skip
def test_a_name_that_the_notation_cannot_hold_is_refused(family: str, name: str) -> None:
    code, message = refusal(Conversation((), tools=(tool(name),), must_call=(name,)), family)

    assert code is ErrorCode.INVALID_REQUEST
    assert repr(name) in message


def test_names_are_written_as_json_where_they_stand_in_json() -> None:
    name = 'say "é\\ñ"'
    model = Model("hermes", marks_are_tokens=False)
    text = HERMES_CALL.replace("clock", json.dumps(name, ensure_ascii=False)[1:-1])
    matcher = model.matcher(Conversation((), tools=(tool(name),), must_call=(name,)))

    assert follows(matcher, model.tokenized(text))
    assert model.read(text, (tool(name),)) == [(name, {})]


def test_a_name_may_be_the_beginning_of_another_one() -> None:
    tools = (tool("get"), tool("get_all"))
    model = Model("kimi", marks_are_tokens=True)
    conversation = Conversation((), tools=tools, must_call=("get", "get_all"))

    for name in ("get", "get_all"):
        text = written(FAMILIES["kimi"], name=name)
        assert follows(model.matcher(conversation), model.tokenized(text))


REFERRING = {
    "type": "object",
    "properties": {
        "point": {"$ref": "#/$defs/Point"},
        "note": {"type": "string"},
        "way": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
    },
    "required": ["point", "note"],
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "go", "arguments": {"point": {"x": 1}, "note": ""}}</tool_call>', True),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"point": {"y": 1}, "note": ""}}</tool_call>', False),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"x": 1}\n</parameter>\n<parameter=note>\n"<b>"\n\n'
         '</parameter>\n</function>\n</tool_call>', True),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"y": 1}\n</parameter>\n<parameter=note>\na\n'
         '</parameter>\n</function>\n</tool_call>', False),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"x": 1}\n</parameter>\n<parameter=note>\n</tool_call>\n'
         '</parameter>\n</function>\n</tool_call>', False),
        ("coder", '<tool_call>\n<function=go>\n<parameter=point>\n{"x": 1}\n</parameter>\n</function>\n</tool_call>', False),
    ],
)  # fmt: skip
def test_schemas_may_refer_to_their_definitions(family: str, text: str, expected: bool) -> None:
    tools = (tool("go", REFERRING),)
    model = Model(family, marks_are_tokens=False)
    matcher = model.matcher(Conversation((), tools=tools, must_call=("go",)))

    assert follows(matcher, model.tokenized(text)) is expected
    if expected:
        ((name, arguments),) = model.read(text, tools)
        assert (name, arguments["point"]) == ("go", {"x": 1})


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, {"a": 1}),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}, {"a": "x"}),
        ({"type": "object", "properties": {"a": {"enum": ["x", "</parameter>"]}}}, {"a": "x"}),
        ({"type": "object", "properties": {"a": {"enum": ["x", "\n"]}}}, {"a": "x"}),
        ({"type": "object", "properties": {"a>": {"type": "string"}}}, {"a>": "x"}),
        ({"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, {"a": 1}),
        ({"type": "object", "properties": {}, "required": ["a"]}, {"a": 1}),
        ({"type": "object"}, {"a": 1}),
        (None, {"a": 1}),
    ],
)
def test_parameters_that_do_not_fit_in_tags_are_written_as_json(
    parameters: Any, arguments: dict[str, Any]
) -> None:
    tools = (tool("go", parameters),)
    model = Model("coder", marks_are_tokens=False)
    matcher = model.matcher(Conversation((), tools=tools, must_call=("go",)))
    text = f"<tool_call>\n<function=go>\n{json.dumps(arguments)}\n</function>\n</tool_call>"

    assert follows(matcher, model.tokenized(text))
    assert model.read(text, tools) == [("go", arguments)]


@BOTH
@pytest.mark.parametrize(
    ("family", "mark"),
    [("hermes", "</tool_call>"), ("harmony", "<|end|>"), ("kimi", "<|tool_call_end|>"), ("mistral", "[TOOL_CALLS]"),
     ("functionary", "</function>"), ("magistral", "[ARGS]")],
)  # fmt: skip
def test_a_string_in_json_does_not_hold_a_mark_that_would_end_it(
    family: str, mark: str, marks_are_tokens: bool
) -> None:
    model = Model(family, marks_are_tokens=marks_are_tokens)
    conversation = Conversation((), tools=TOOLS, must_call=("weather",))
    start, end = written(FAMILIES[family], city="CUT").split("CUT")
    marked = [TokenId(byte) for byte in f"a{mark}".encode()]
    almost = marked[:-1]

    before, behind = model.tokenized(start), model.tokenized(end)
    assert follows(model.matcher(conversation), [*before, *almost, *behind])
    assert not follows(model.matcher(conversation), [*before, *marked, *behind])
    if not marks_are_tokens:
        whole = TokenId(model.pieces.index(mark.encode()))
        assert not follows(model.matcher(conversation), [*before, whole, *behind])


def test_arguments_are_an_object_even_if_the_schema_does_not_say_so() -> None:
    tools = (tool("clock", {"properties": {"a": {"type": "integer"}}}),)
    model = Model("hermes", marks_are_tokens=False)
    conversation = Conversation((), tools=tools, must_call=("clock",))

    assert follows(model.matcher(conversation), model.tokenized(HERMES_CALL))
    for other in ("5", "[]", '{"a": "b"}'):
        wrong = HERMES_CALL.replace("{}", other)
        assert not follows(model.matcher(conversation), model.tokenized(wrong))


# Answers that may call a tool: text is free, and calls of strict tools are not

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


@pytest.mark.parametrize(
    ("family", "tools"),
    [("hermes", TOOLS), ("hermes", ()), ("harmony", STRICT), ("llama", STRICT), ("gemma 3", STRICT), ("unknown", STRICT), ("minicpm", STRICT)],
)  # fmt: skip
def test_other_answers_are_free(family: str, tools: tuple[dict[str, Any], ...]) -> None:
    model = Model(family, marks_are_tokens=family != "harmony")

    assert model.guidance(Conversation((), tools=tools)) is None


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
