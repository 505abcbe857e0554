"""Answers as models of each family write them, and what is to be made of them."""

# ruff: noqa: RUF001 - DeepSeek's marks are written with a wide vertical line

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.tools import Tools
from common.messages import TokenClass

OFFERED: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "description": ""}},
]
TOOLS = Tools(OFFERED)

CONTENT = TokenClass.CONTENT
REASONING = TokenClass.REASONING
CALL = TokenClass.TOOL_CALL
UNDETERMINABLE = TokenClass.UNDETERMINABLE

ROME = ("weather", {"city": "Rome"})
OSLO = ("weather", {"city": "Oslo", "days": 3})
CLOCK: tuple[str, Any] = ("clock", {})

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "unknown": "{% if tools %}{{ tools }}{% endif %}{{ messages }}",
    "unknown think": "{{ tools }}<think></think>",
    "hermes": "{{ tools }}<tool_call>{...}</tool_call>",
    "qwen3": "{{ tools }}<think></think><tool_call>{...}</tool_call>",
    "coder": "{{ tools }}<tool_call>\n<function=a>\n<parameter=b>\nc\n</parameter></function></tool_call>",
    "nemotron": "{{ tools }}<think></think><tool_call>\n<function=a>",
    "glm": "{{ tools }}<think></think><tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value></tool_call>",
    "llama": "{{ tools }}<|python_tag|>",
    "functionary": "{{ tools }}<function=a>{}</function><|python_tag|>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "magistral": "{{ tools }}[THINK][/THINK][TOOL_CALLS][ARGS]",
    "deepseek": "{{ tools }}<think></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "deepseek 3.2": "{{ tools }}{% set d = '｜DSML｜' %}'function_calls>'</think>",
    "kimi": "{{ tools }}<think></think><|tool_calls_section_begin|><|tool_call_begin|>",
    "command": "{{ tools }}<|START_THINKING|><|START_ACTION|><|START_RESPONSE|>",
    "gemma 3": "{{ tools }}```tool_code",
    "function gemma": "{{ tools }}<start_function_call>call:",
    "gemma 4": "{{ tools }}<|channel>thought<channel|><|tool_call>call:",
    "harmony": "{{ tools }}<|start|><|channel|>",
    "seed": "{{ tools }}<seed:think></seed:think><seed:tool_call><function=a>",
    "minimax": "{{ tools }}<think></think><minimax:tool_call><invoke name=",
    "lfm2": "{{ tools }}<|tool_list_start|>",
    "granite": "{{ tools }}<think></think><response></response><|tool_call|>",
    "solar": "{{ tools }}<|think|><|tool_call:begin|>",
    "apertus": "{{ tools }}<|inner_prefix|><|tools_prefix|>",
    "minicpm": '{{ tools }}<think></think><function name="a"><param name="b">',
    "gigachat": "{{ tools }}<|role_sep|><|message_sep|>",
    "kimi vl": "<tool_call>◁think▷◁/think▷",
    "thinking": "<tool_call><thinking></thinking>",
    "reasoning": "<tool_call><reasoning></reasoning>",
}


@dataclass(frozen=True)
class Sample:
    family: str
    text: str
    shown: Mapping[TokenClass, str]
    """All of each class, put together."""
    results: list[Any] = field(default_factory=list[Any])
    """A list of calls, each its name and arguments; or the name of another result's type."""
    prompt: str = ""
    has_tools: bool = True


def _content(text: str) -> dict[TokenClass, str]:
    return {CONTENT: text}


THINK = "Let me see … 1 < 2 🦉"
SAID = "Günther asks: a[0] <b> {c}? 雨!"

_R1_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_J_ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
_J_OSLO = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'

SAMPLES = [
    *(Sample(family, SAID, _content(SAID)) for family in TEMPLATES if "unknown" not in family and family != "plain"),
    # Formats that are not known
    Sample("plain", SAID, _content(SAID), ["ToolCallFormatUnknown"]),
    Sample("plain", SAID, _content(SAID), has_tools=False),
    Sample("plain", "", {}),
    Sample("unknown", SAID, {UNDETERMINABLE: SAID}, ["ToolCallFormatUnknown"]),
    Sample("unknown", SAID, _content(SAID), has_tools=False),
    Sample(
        "unknown think", f"<think>{THINK}</think>{SAID}", {REASONING: THINK, UNDETERMINABLE: SAID},
        ["ToolCallFormatUnknown"],
    ),
    # Reasoning: opened by the model, by the prompt, never closed, and never opened
    Sample("qwen3", f"<think>\n{THINK}</think>\n\n{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample("qwen3", f"\n<think>{THINK}</think>{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample("qwen3", f"{THINK}</think>{SAID}", {REASONING: THINK, CONTENT: SAID}, prompt="x<think>\n"),
    Sample("qwen3", f"\n{SAID}", _content(SAID), prompt="<think>\n\n</think>\n\n"),
    Sample("qwen3", f"\n\n{SAID}", _content(f"\n\n{SAID}")),
    Sample("qwen3", f"<think>{THINK}", {REASONING: THINK}),
    Sample("qwen3", f"{THINK}</thi", {REASONING: f"{THINK}</thi"}, prompt="<think>"),
    Sample("qwen3", f"{SAID}</think> more", _content(f"{SAID}</think> more")),
    Sample("qwen3", f"{SAID}<think> more", _content(f"{SAID}<think> more")),
    Sample("qwen3", "<think></think>", {}),
    Sample("kimi vl", f"◁think▷{THINK}◁/think▷{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample("thinking", f"<thinking>{THINK}</thinking>{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample("reasoning", f"<reasoning>{THINK}</reasoning>{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample("magistral", f"[THINK]{THINK}[/THINK]{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample("seed", f"<seed:think>{THINK}</seed:think>{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample(
        "command",
        f"<|START_THINKING|>{THINK}<|END_THINKING|><|START_RESPONSE|>{SAID}<|END_RESPONSE|>",
        {REASONING: THINK, CONTENT: SAID},
    ),
    Sample(
        "granite", f"<think>{THINK}</think><response>{SAID}</response>",
        {REASONING: THINK, CONTENT: SAID},
    ),
    Sample("gemma 4", f"<|channel>thought\n{THINK}<channel|>{SAID}", {REASONING: THINK, CONTENT: SAID}),
    Sample("gemma 4", f"{SAID}<channel|>", _content(SAID), prompt="<|channel>thought\n<channel|>"),
    # Hermes and Qwen
    Sample("hermes", f"<tool_call>\n{_J_ROME}\n</tool_call>", {CALL: f"{_J_ROME}\n"}, [[ROME]]),
    Sample(
        "hermes", f"<tool_call>{_J_ROME}</tool_call>\n<tool_call>{_J_OSLO}</tool_call>\n",
        {CALL: _J_ROME + _J_OSLO}, [[ROME, OSLO]],
    ),
    Sample(
        "qwen3", f"<think>{THINK}</think>{SAID}<tool_call>{_J_ROME}</tool_call>{SAID}",
        {REASONING: THINK, CONTENT: SAID * 2, CALL: _J_ROME}, [[ROME]],
    ),
    Sample(
        "hermes", f"<tool_call>{_J_ROME}</tool_call> and <tool_call>{_J_OSLO}</tool_call>",
        {CALL: _J_ROME + _J_OSLO, CONTENT: "and "}, [[ROME], [OSLO]],
    ),
    Sample("hermes", f"<tool_call>{_J_ROME}", {CALL: _J_ROME}, [[ROME]]),
    Sample("hermes", "<tool_call>{\"name\":", {CALL: '{"name":'}, ["ToolCallsUnreadable"]),
    Sample("hermes", "<tool_call></tool_call>", {}, ["ToolCallsUnreadable"]),
    Sample("hermes", "<tool_call>[1]</tool_call>", {CALL: "[1]"}, ["ToolCallsUnreadable"]),
    Sample(
        "hermes", '<tool_call>{"name": "nobody"}</tool_call>', {CALL: '{"name": "nobody"}'},
        ["ToolCallsInvalid"],
    ),
    Sample(
        "hermes", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
        {CALL: '{"name": "weather", "arguments": {}}'}, ["ToolCallsInvalid"],
    ),
    Sample(
        "hermes", '<tool_call>{"name": "weather", "arguments": "in Rome"}</tool_call>',
        {CALL: '{"name": "weather", "arguments": "in Rome"}'}, [[("weather", "in Rome")]],
    ),
    Sample("hermes", "a <tool_ca", _content("a <tool_ca")),
    # In tags
    Sample(
        "coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        {CALL: "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
         "</parameter>\n</function>\n<function=clock>\n</function>\n"},
        [[OSLO, CLOCK]],
    ),
    Sample(
        "coder", "<tool_call><function=weather><parameter=city>Ro", {CALL: "<function=weather><parameter=city>Ro"},
        ["ToolCallsUnreadable"],
    ),
    Sample(
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        {CALL: "weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>3</arg_value>\n"},
        [[OSLO]],
    ),
    Sample(
        "seed", "<seed:tool_call><function=weather><parameter=city>Rome</parameter></function></seed:tool_call>",
        {CALL: "<function=weather><parameter=city>Rome</parameter></function>"}, [[ROME]],
    ),
    Sample(
        "minimax",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">Rome</parameter></invoke>'
        '<invoke name="clock"></invoke></minimax:tool_call>',
        {CALL: '<invoke name="weather"><parameter name="city">Rome</parameter></invoke><invoke name="clock"></invoke>'},
        [[ROME, CLOCK]],
    ),
    Sample(
        "minicpm", '<function name="weather"><param name="city">Rome</param></function>',
        {CALL: '<function name="weather"><param name="city">Rome</param>'}, [[ROME]],
    ),
    Sample(
        "deepseek 3.2",
        '<｜DSML｜function_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Oslo'
        '</｜DSML｜parameter><｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        {CALL: '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Oslo'
         '</｜DSML｜parameter><｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter></｜DSML｜invoke>'},
        [[OSLO]],
    ),
    Sample(
        "coder", "Well.\n<function=clock>\n</function>\n</tool_call>",
        {CONTENT: "Well.\n", CALL: "<function=clock>\n</function>\n"}, [[CLOCK]],
    ),
    Sample(
        "coder", "<function=clock>", _content("<function=clock>"), has_tools=False,
    ),
    Sample(
        "nemotron", f"{THINK} <tool_call>? \n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        {REASONING: f"{THINK} <tool_call>? \n", CALL: "<function=clock>\n</function>\n"}, [[CLOCK]],
        prompt="<think>\n",
    ),
    Sample(
        "qwen3", f"<think><tool_call>{_J_ROME}</tool_call></think>",
        {REASONING: f"<tool_call>{_J_ROME}</tool_call>"},
    ),
    Sample(
        "glm", "<tool_call>weather<arg_key>city</arg_key><arg_value><tool_call></arg_value></tool_call>",
        {CALL: "weather<arg_key>city</arg_key><arg_value><tool_call></arg_value>"},
        [[("weather", {"city": "<tool_call>"})]],
    ),
    # Llama 3
    Sample(
        "llama", '{"name": "weather", "parameters": {"city": "Rome"}}',
        {CALL: '{"name": "weather", "parameters": {"city": "Rome"}}'}, [[ROME]],
    ),
    Sample(
        "llama", '\n{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "clock"}',
        {CALL: '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "clock"}'}, [[ROME, CLOCK]],
    ),
    Sample(
        "llama", '{"name": "weather", "parameters": {}}', _content('{"name": "weather", "parameters": {}}'),
        has_tools=False,
    ),
    Sample("llama", '{"city": "Rome"}', _content('{"city": "Rome"}')),
    Sample("llama", f'{SAID} {{"name": 1}}', _content(f'{SAID} {{"name": 1}}')),
    Sample("llama", '<|python_tag|>weather.call(city="Rome")', {CALL: 'weather.call(city="Rome")'}, [[ROME]]),
    Sample(
        "llama", '<|python_tag|>{"name": "clock", "parameters": {}}',
        {CALL: '{"name": "clock", "parameters": {}}'}, [[CLOCK]],
    ),
    Sample("llama", "<|python_tag|>print(1)", {CALL: "print(1)"}, ["ToolCallsInvalid"]),
    Sample("llama", '{"name": "weather", "par', {CALL: '{"name": "weather", "par'}, ["ToolCallsUnreadable"]),
    Sample(
        "llama", '<function=weather>{"city": "Rome"}</function>',
        {CALL: '<function=weather>{"city": "Rome"}</function>'}, [[ROME]],
    ),
    Sample(
        "functionary", f'{SAID}<function=weather>{{"city": "Rome"}}</function><function=clock>{{}}</function>{SAID}',
        {CALL: '<function=weather>{"city": "Rome"}<function=clock>{}', CONTENT: SAID * 2}, [[ROME, CLOCK]],
    ),
    # Mistral
    Sample(
        "mistral", f"[TOOL_CALLS][{_J_ROME}, {_J_OSLO}]", {CALL: f"[{_J_ROME}, {_J_OSLO}]"}, [[ROME, OSLO]],
    ),
    Sample(
        "mistral", '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Rome"}[TOOL_CALLS]clock[ARGS]{}',
        {CALL: 'weatherabc123def{"city": "Rome"}clock{}'}, [[ROME, CLOCK]],
    ),
    Sample(
        "magistral", f'[THINK]{THINK}[/THINK]{SAID}[TOOL_CALLS]weather[ARGS]{{"city": "Rome"}}',
        {REASONING: THINK, CONTENT: SAID, CALL: 'weather{"city": "Rome"}'}, [[ROME]],
    ),
    Sample(
        "magistral", "[THINK]I call [TOOL_CALLS] now[/THINK]", {REASONING: "I call [TOOL_CALLS] now"},
    ),
    Sample("mistral", '[TOOL_CALLS]weather{"city": "Rome"}', {CALL: 'weather{"city": "Rome"}'}, [[ROME]]),
    Sample(
        "mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Ro', {CALL: 'weather{"city": "Ro'},
        [[("weather", '{"city": "Ro')]],
    ),
    Sample("mistral", "[TOOL_CALLS]", {}, ["ToolCallsUnreadable"]),
    # DeepSeek, Kimi, Solar
    Sample(
        "deepseek",
        f"{THINK}</think>{SAID}<｜tool▁calls▁begin｜>" + _R1_CALL.format("weather", '{"city": "Rome"}') + "\n"
        + _R1_CALL.format("clock", "{}") + "<｜tool▁calls▁end｜>",
        {REASONING: THINK, CONTENT: SAID,
         CALL: 'functionweather\n```json\n{"city": "Rome"}\n```functionclock\n```json\n{}\n```'},
        [[ROME, CLOCK]], prompt="<｜Assistant｜><think>\n",
    ),
    Sample(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        {CALL: 'weather{"city": "Rome"}'}, [[ROME]], prompt="<｜Assistant｜></think>",
    ),
    Sample(
        "kimi",
        f"<think>{THINK}<|tool_calls_section_begin|>" + _KIMI_CALL.format("weather:0", '{"city": "Rome"}')
        + _KIMI_CALL.format("clock:1", "{}") + "<|tool_calls_section_end|>",
        {REASONING: THINK, CALL: 'functions.weather:0{"city": "Rome"}functions.clock:1{}'}, [[ROME, CLOCK]],
    ),
    Sample(
        "solar",
        f"<|think|>{THINK}<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>weather"
        '<|tool_call:args|>{"city": "Rome"}<|tool_call:end|>',
        {REASONING: THINK, CALL: 'a1weather{"city": "Rome"}'}, [[ROME]],
    ),
    Sample(
        "solar", f"<|think|>{THINK}<|end|><|begin|>assistant<|content|>{SAID}<|end|>",
        {REASONING: THINK, CONTENT: SAID},
    ),
    # JSON with other names, or between other marks
    Sample(
        "command",
        f'<|START_THINKING|>{THINK}<|END_THINKING|><|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "Rome"}}]<|END_ACTION|>',
        {REASONING: THINK, CALL: '[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}]'},
        [[ROME]],
    ),
    Sample("granite", f"<|tool_call|>[{_J_ROME}]", {CALL: f"[{_J_ROME}]"}, [[ROME]]),
    Sample(
        "apertus",
        f'<|inner_prefix|>{THINK}<|tools_prefix|>[{{"weather": {{"city": "Rome"}}}}, {{"clock": {{}}}}]<|tools_suffix|>'
        f"<|inner_suffix|>{SAID}",
        {REASONING: THINK, CALL: '[{"weather": {"city": "Rome"}}, {"clock": {}}]', CONTENT: SAID}, [[ROME, CLOCK]],
    ),
    Sample(
        "gigachat", f"{SAID}<|message_sep|>\n\nfunction call<|role_sep|>\n{_J_ROME}",
        {CONTENT: SAID, CALL: _J_ROME}, [[ROME]],
    ),
    # Like programs
    Sample(
        "lfm2", f'<|tool_call_start|>[weather(city="Oslo", days=3), clock()]<|tool_call_end|>{SAID}',
        {CALL: '[weather(city="Oslo", days=3), clock()]', CONTENT: SAID}, [[OSLO, CLOCK]],
    ),
    Sample("lfm2", "<|tool_call_start|>[weather(city=", {CALL: "[weather(city="}, ["ToolCallsUnreadable"]),
    Sample(
        "gemma 3", f"{SAID}\n```tool_code\nweather(city='Rome')\n```\n{SAID}",
        {CALL: "weather(city='Rome')\n", CONTENT: f"{SAID}\n{SAID}"}, [[ROME]],
    ),
    Sample("gemma 3", "```tool_code\nclock()```", _content("```tool_code\nclock()```"), has_tools=False),
    Sample(
        "function gemma",
        "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>",
        {CALL: "call:weather{city:<escape>Rome<escape>}"}, [[ROME]],
    ),
    Sample(
        "gemma 4",
        f'<|channel>thought\n{THINK}<channel|><|tool_call>call:weather{{city:<|"|>Oslo<|"|>,days:3}}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|>",
        {REASONING: THINK, CALL: 'call:weather{city:<|"|>Oslo<|"|>,days:3}call:clock{}'}, [[OSLO, CLOCK]],
    ),
    Sample("gemma 4", "<|tool_call>call:weather{ci", {CALL: "call:weather{ci"}, ["ToolCallsUnreadable"]),
    Sample("gemma 4", f"<|channel><|channel>thought\n<channel|>{SAID}", _content(SAID)),
    Sample("gemma 4", f"<channel|>{SAID}", _content(SAID)),
    Sample("gemma 4", f"<|channel>{SAID}", _content(SAID)),
    # gpt-oss
    Sample(
        "harmony",
        f"<|channel|>analysis<|message|>{THINK}<|end|><|start|>assistant<|channel|>final<|message|>{SAID}<|return|>",
        {REASONING: THINK, CONTENT: SAID}, prompt="<|start|>assistant",
    ),
    Sample(
        "harmony",
        f"<|channel|>analysis<|message|>{THINK}<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        {REASONING: THINK, CALL: '{"city": "Rome"}'}, [[ROME]], prompt="<|start|>assistant",
    ),
    Sample(
        "harmony",
        f' to=functions.weather<|channel|>commentary json<|message|>{{"city": "Rome"}}<|end|><|start|>assistant'
        f"<|channel|>commentary to=functions.clock<|message|>{{}}<|end|><|start|>assistant<|channel|>final<|message|>{SAID}",
        {CALL: '{"city": "Rome"}{}', CONTENT: SAID}, [[ROME, CLOCK]], prompt="<|start|>assistant",
    ),
    Sample(
        "harmony", f"<|channel|>commentary to=assistant<|channel|>analysis<|message|>{THINK}", {REASONING: THINK},
        prompt="<|start|>assistant",
    ),
    Sample(
        "harmony", f"<|channel|>commentary<|message|>{SAID}<|end|>", _content(SAID), prompt="<|start|>assistant",
    ),
    Sample("harmony", "<|channel|>anal", {}, prompt="<|start|>assistant"),
    Sample(
        "harmony", "<|channel|>commentary to=browser.search<|message|>{}<|call|>", {CALL: "{}"}, ["ToolCallsInvalid"],
        prompt="<|start|>assistant",
    ),
]  # fmt: skip
