"""Requests that llama.cpp's server understands as this product does, and what is read off an answer:
the shape of its JSON, the order of a stream's chunks, and the values that must not depend on the server.
"""

import enum
import json
import math
import re
import struct
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import httpx

CONTEXT = 8192
"""In tokens: what one request may have, here as there."""
SLOTS = 4
BATCH = 2048
"""In tokens, too: the longest text that is made a vector."""

ABSENT = "absent"

LOGPROB_TOLERANCE = 0.05
COSINE = 0.999

# The requests


class Setup(enum.Enum):
    """How the server must be set up to be asked."""

    PLAIN = enum.auto()
    TOOLS = enum.auto()
    """With ``TEMPLATE``."""
    EMBEDDINGS = enum.auto()
    """It makes vectors, by the mean, and no text."""


@dataclass(frozen=True, slots=True)
class Question:
    name: str
    path: str
    body: Any = None
    """None: nothing is sent, with GET; bytes: as they stand."""
    theirs: str | None = None
    """llama.cpp's path, where it has another one."""
    setup: Setup = Setup.PLAIN

    def request(self, path: str) -> tuple[str, str, bytes | None]:
        """Method, path and body."""
        if self.body is None:
            return "GET", path, None
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return "POST", path, body


TEMPLATE = """{%- if tools %}<|im_start|>system
You may call functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each call write its name and arguments:
<tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The default model's own knows no tools; this one marks calls as Hermes does."""

GREEDY = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Said in full: the defaults differ."""
FIXED = {**GREEDY, "max_tokens": 9, "ignore_eos": True}

NUMBERS = "one two three four five six seven eight nine ten eleven twelve"
TEXT = f"Repeat after me: {NUMBERS}"
ASKED = [{"role": "user", "content": TEXT}]
PROMPT = "a b c d e f g h"
"""To both the model's answer is beyond doubt: rounding depends on how prompts are cut and cached, and
would decide between tokens that are about as likely.
"""
TOKENS = [81, 278, 265, 287, 297, 275, 310, 294]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"const": True}},
    "required": ["ok"],
    "additionalProperties": False,
}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "nothing"}}}

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Paris"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CALL_TEXT = '<tool_call>\n{"name": "clock", "arguments": {"place": "Paris"}}\n</tool_call>'
TIME = [{"role": "user", "content": f"Repeat after me: {CALL_TEXT}"}]
"""Else so small a model calls nothing."""
TOLD = [
    *TIME,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12:30"},
]

# Of one black point.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}


def _chat(name: str, messages: Any = ASKED, **more: Any) -> Question:
    return Question(f"chat {name}", "/v1/chat/completions", {"messages": messages, **FIXED, **more})


def _call(name: str, messages: Any = TIME, **more: Any) -> Question:
    body = {"messages": messages, "tools": [CLOCK], **GREEDY, "max_tokens": 60, **more}
    return Question(f"tools {name}", "/v1/chat/completions", body, setup=Setup.TOOLS)


def _complete(name: str, prompt: Any = PROMPT, **more: Any) -> Question:
    return Question(f"text {name}", "/v1/completions", {"prompt": prompt, **FIXED, **more})


def _respond(name: str, given: Any = TEXT, **more: Any) -> Question:
    body = {"input": given, **GREEDY, "max_output_tokens": 9, **more}
    return Question(f"response {name}", "/v1/responses", body)


def _embed(name: str, given: Any, **more: Any) -> Question:
    return Question(
        f"embed {name}", "/v1/embeddings", {"input": given, **more}, setup=Setup.EMBEDDINGS
    )


def _tokenize(name: str, body: Any) -> Question:
    return Question(f"tokenize {name}", "/v1/tokenize", body, "/tokenize")


def _detokenize(name: str, body: Any) -> Question:
    return Question(f"detokenize {name}", "/v1/detokenize", body, "/detokenize")


LONG = "word " * (CONTEXT + 100)

QUESTIONS = [
    Question("models", "/v1/models"),
    Question("unknown route", "/v1/nothing"),
    Question("chat by GET", "/v1/chat/completions"),
    # Chats
    _chat("plain"),
    _chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    _chat("system", [{"role": "system", "content": "Be short."}, *ASKED]),
    _chat("developer", [{"role": "developer", "content": "Be short."}, *ASKED]),
    _chat("parts", [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]),
    _chat("turns", [*ASKED, {"role": "assistant", "content": NUMBERS}, *ASKED]),
    _chat("prefilled", [*ASKED, {"role": "assistant", "content": "One two three"}]),
    _chat("stop", stop=[" six"]),
    # Numbers depend on how a prompt is cut, so none of it may be cached.
    _chat("logprobs", logprobs=True, cache_prompt=False),
    _chat("top_logprobs", logprobs=True, top_logprobs=2, max_tokens=3, cache_prompt=False),
    _chat("n", n=2, max_tokens=3),
    _chat("seed", seed=1, max_tokens=3),
    _chat("grammar", grammar='root ::= "yes"', ignore_eos=False),
    _chat("json_schema", json_schema=SCHEMA, ignore_eos=False, max_tokens=40),
    _chat(
        "response_format",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        ignore_eos=False,
        max_tokens=40,
    ),
    _chat(
        "json_object",
        response_format={"type": "json_object", "schema": SCHEMA},
        ignore_eos=False,
        max_tokens=40,
    ),
    _chat("logit_bias", logit_bias={"504": 100}, max_tokens=3),
    _chat("of a model", model="SmolLM2-135M-Instruct.Q4_1", max_tokens=3),
    _chat("template", chat_template_kwargs={"enable_thinking": False}, max_tokens=3),
    _chat("stream", stream=True),
    _chat("stream usage", **USAGE),
    _chat("stream stop", stop=[" six"], stream=True),
    _chat(
        "stream logprobs",
        logprobs=True,
        top_logprobs=1,
        max_tokens=3,
        cache_prompt=False,
        stream=True,
    ),
    _chat("stream n", n=2, max_tokens=3, **USAGE),
    _chat("stream grammar", grammar='root ::= "yes"', ignore_eos=False, stream=True),
    _chat("tools of a model that knows none", TIME, tools=[CLOCK], max_tokens=1),
    # Tools
    _call("offered"),
    _call("not to be used", tool_choice="none", max_tokens=3),
    _call("told", TOLD, max_tokens=1, logit_bias={"504": 100}),
    _call("required", tool_choice="required"),
    _call("one named", tool_choice={"type": "function", "function": {"name": "clock"}}),
    _call("stream", tool_choice="required", **USAGE),
    _call("not offered", tool_choice="required", tools=None),
    _call("unknown choice", tool_choice="perhaps"),
    _call("without a name", tools=[{"type": "function", "function": {}}]),
    # Refusals of chats
    Question("chat bad JSON", "/v1/chat/completions", b'{"messages": ['),
    Question("chat no object", "/v1/chat/completions", []),
    Question("chat no messages", "/v1/chat/completions", {"max_tokens": 1}),
    _chat("empty messages", []),
    _chat("messages a text", "Hello"),
    _chat("no role", [{"content": "Hello"}]),
    _chat("unknown role", [{"role": "nobody", "content": "Hello"}], max_tokens=3),
    _chat("no content", [{"role": "user"}]),
    _chat("content a number", [{"role": "user", "content": 7}]),
    _chat("unknown part", [{"role": "user", "content": [{"type": "smell", "smell": ""}]}]),
    _chat("temperature a text", temperature="hot"),
    _chat("max_tokens a text", max_tokens="many"),
    _chat("n zero", n=0),
    _chat("stop a number", stop=7, max_tokens=3),
    _chat("too many top_logprobs", logprobs=True, top_logprobs=30, max_tokens=1),
    _chat("top_logprobs alone", top_logprobs=2, max_tokens=1),
    _chat("unknown key", smell="good", max_tokens=3),
    _chat("unknown model", model="nobody", max_tokens=3),
    _chat("bad grammar", grammar="root ::= ("),
    _chat("bad schema", json_schema=BAD_SCHEMA),
    _chat("grammar and schema", grammar='root ::= "a"', json_schema=SCHEMA),
    _chat("unknown format", response_format={"type": "poem"}, max_tokens=3),
    _chat("image", [{"role": "user", "content": [IMAGE]}]),
    _chat("too long", [{"role": "user", "content": LONG}]),
    _chat("too long stream", [{"role": "user", "content": LONG}], stream=True),
    # Completions
    _complete("plain"),
    _complete("tokens", TOKENS),
    _complete("batch", [PROMPT, PROMPT[:-2]], max_tokens=4),
    _complete("token batch", [TOKENS, TOKENS[:-1]], max_tokens=2),
    _complete("echo", echo=True, max_tokens=3),
    _complete("stop", stop=" n"),
    _complete("logprobs", logprobs=2, max_tokens=3, cache_prompt=False),
    _complete("n", n=2, max_tokens=3),
    _complete("default length", max_tokens=None, grammar='root ::= "1 "{20}', ignore_eos=False),
    _complete("grammar", grammar='root ::= " i"', ignore_eos=False),
    _complete("stream", stream=True),
    _complete("stream usage", **USAGE),
    _complete("stream logprobs", logprobs=1, max_tokens=3, cache_prompt=False, stream=True),
    _complete("stream stop", stop=" n", stream=True),
    Question("text no prompt", "/v1/completions", {"max_tokens": 1}),
    _complete("prompt a number", 7, max_tokens=1),
    _complete("empty prompt", "", max_tokens=3),
    _complete("empty batch", [], max_tokens=1),
    _complete("unknown token", [10**6], max_tokens=1),
    _complete("too long", LONG),
    _complete("suffix", suffix="!", max_tokens=3),
    # Tokens
    _tokenize("text", {"content": "Hello wörld 🙂"}),
    _tokenize("pieces", {"content": "Hi 🙂", "with_pieces": True}),
    _tokenize("special", {"content": "<|im_start|>user", "add_special": True}),
    _tokenize("special as text", {"content": "<|im_start|>user", "parse_special": False}),
    _tokenize("empty", {"content": ""}),
    _tokenize("nothing", {}),
    _tokenize("a number", {"content": 7}),
    _detokenize("tokens", {"tokens": TOKENS}),
    _detokenize("no tokens", {"tokens": []}),
    _detokenize("nothing", {}),
    _detokenize("a text", {"tokens": "Hello"}),
    _detokenize("unknown token", {"tokens": [10**6]}),
    # Vectors
    Question("embeddings off", "/v1/embeddings", {"input": "Hello"}),
    _embed("text", "The sky is blue."),
    _embed("batch", ["The sky is blue.", "Grass is green."]),
    _embed("tokens", TOKENS),
    _embed("base64", "The sky is blue.", encoding_format="base64"),
    _embed("unknown encoding", "The sky is blue.", encoding_format="binary"),
    _embed("empty text", ""),
    _embed("empty batch", []),
    _embed("too long", "word " * 2500),
    Question("embed nothing", "/v1/embeddings", {}, setup=Setup.EMBEDDINGS),
    _embed("a number", 7),
    # Responses
    _respond("plain"),
    _respond("instructions", instructions="Be short."),
    _respond("items", ASKED),
    _respond("stream", stream=True),
    _respond("schema", text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
    _respond("too long", LONG),
    Question("response nothing", "/v1/responses", {}),
]

# The answers


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    kind: str
    """Its media type."""
    body: Any = None
    """Of JSON, or its text; None of a stream."""
    events: Sequence[Any] = ()
    """What a stream's events carry: JSON, or ``[DONE]``."""
    fields: Sequence[str] = ()
    """By which names its lines begin."""


def ask(client: httpx.Client, question: Question, path: str) -> Answer:
    method, path, content = question.request(path)
    response = client.request(
        method, path, content=content, headers={"content-type": "application/json"}
    )
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind != "text/event-stream":
        return Answer(response.status_code, kind, _read(response.text))
    lines = [line for line in response.text.splitlines() if line and not line.startswith(":")]
    events = [_read(line[5:].strip()) for line in lines if line.startswith("data:")]
    return Answer(
        response.status_code,
        kind,
        events=events,
        fields=sorted({line.partition(":")[0] for line in lines}),
    )


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# What is read off them

TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}

SAME = re.compile(
    r"(choices\[\]\.(index|finish_reason|text|delta\.role|message\.(role|content))"
    r"|(response\.)?usage\.(prompt|completion|input|output|total)_tokens"
    r"|(message|choices\[\]\.(message|delta))\.tool_calls\[\]\.(type|function\.(name|arguments))"
    r"|.*logprobs.*(token|bytes\[\]|tokens\[\]|text_offset\[\])"
    r"|tokens\[\](\.(id|piece))?|content|count"
    r"|error\.type"
    r"|data\[\]\.index"
    r"|(response\.)?(status|incomplete_details\.reason)"
    r"|(response\.)?output\[\]\.(type|role|status|content\[\]\.(type|text))"
    r"|text|delta|item\.(type|role)|part\.type"
    r"|(data\[\]\.)?object|type)"
)
"""Paths whose values must agree."""

IN_PIECES = re.compile(
    r"choices\[\]\.(text|delta\.(content|tool_calls\[\]\.function\.arguments))|delta"
)
"""What a stream tells bit by bit: it must agree when it is put together."""

LOGPROBS = re.compile(r".*logprobs.*(\.logprob|logprobs\[\](\{\})?)")

FREE_MAP = re.compile(r".*top_logprobs\[\]")
"""Objects whose keys are values: tokens."""

VECTOR = "data[].embedding"


@dataclass(slots=True)
class Reading:
    types: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By path; in streams a path begins with what the chunk is for."""
    values: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    pieces: dict[str, str] = field(default_factory=dict[str, str])
    logprobs: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    vectors: list[list[float]] = field(default_factory=list[list[float]])

    def walk(self, value: Any, path: str, kind: str = "", index: str = "") -> None:
        """``kind``: what a stream's chunk is for. ``index``: of the choice it belongs to."""
        name = TYPES[type(value)]
        if "timings." in path and value is None:
            name = "number"  # of what took no time that the clock can tell there is no rate
        self.types.setdefault(kind + path, set()).add(name)
        if path == VECTOR:
            self.vectors.append(_vector(value))
        elif isinstance(value, dict):
            free = FREE_MAP.fullmatch(path) and "logprob" not in value
            for key, each in cast("dict[str, Any]", value).items():
                step = "{}" if free else f".{key}" if path else key
                self.walk(each, path + step, kind, index)
        elif isinstance(value, list):
            for each in cast("list[Any]", value):
                self.walk(each, f"{path}[]", kind, index)
        elif isinstance(value, float) and LOGPROBS.fullmatch(path):
            self.logprobs.setdefault(kind + path, []).append(value)
        elif kind and isinstance(value, str) and IN_PIECES.fullmatch(path):
            if value:
                self.pieces[path + index] = self.pieces.get(path + index, "") + value
        elif SAME.fullmatch(path):
            told = self.values.setdefault(kind + path, [])
            if not kind or "logprobs" in path:
                told.append(value)
            elif value not in told:
                told.append(value)
                told.sort(key=str)  # choices may take turns in any order

    def facts(self) -> dict[str, str]:
        types = {path: "|".join(sorted(each)) for path, each in self.types.items()}
        values = {f"{path} =": _written(each) for path, each in self.values.items()}
        pieces = {f"{path} in pieces =": _written(each) for path, each in self.pieces.items()}
        return types | values | pieces


def read(answer: Answer) -> Reading:
    reading = Reading()
    reading.values["HTTP status"] = [answer.status]
    reading.values["media type"] = [answer.kind]
    if answer.kind != "text/event-stream":
        reading.walk(answer.body, "")
        return reading
    reading.values["fields"] = [*answer.fields]
    orders: dict[str, list[str]] = {}
    for event in answer.events:
        kind = _kind(event)
        index = "".join(f"[{choice['index']}]" for choice in _choices(event))
        order = orders.setdefault(f"order{index}", [])
        if order[-1:] != [kind]:
            order.append(kind)
        if isinstance(event, dict):
            reading.walk(event, "", f"{kind}:", index)
    for path, order in orders.items():
        reading.values[path] = [" ".join(order)]
    return reading


def _choices(event: Any) -> list[Any]:
    return cast("dict[str, Any]", event).get("choices", []) if isinstance(event, dict) else []


def _kind(event: Any) -> str:
    """What a chunk is for."""
    if not isinstance(event, dict):
        return str(event)
    told = cast("dict[str, Any]", event)
    if "error" in told or "type" in told:
        return "error" if "error" in told else told["type"]
    if not told.get("choices"):
        return "usage"
    choice = told["choices"][0]
    delta: dict[str, Any] = choice.get("delta", {})
    if choice["finish_reason"] is not None:
        return "finish"
    if "role" in delta:
        return "role"
    return "call" if delta.get("tool_calls") else "text"


def _vector(value: Any) -> list[float]:
    if isinstance(value, str):
        packed = b64decode(value)
        return list(struct.unpack(f"<{len(packed) // 4}f", packed))
    return value


def _written(value: Any) -> str:
    if isinstance(value, list) and len(cast("list[Any]", value)) == 1:
        (value,) = cast("list[Any]", value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Difference: TypeAlias = tuple[str, str, str]
"""A path, what theirs is, what ours is."""


def differences(theirs: Answer, ours: Answer) -> list[Difference]:
    """Of what is inside something that differs itself nothing is said."""
    if (theirs.status < 400) != (ours.status < 400):
        return [("HTTP status", str(theirs.status), str(ours.status))]
    them, us = read(theirs), read(ours)
    found: list[Difference] = []
    their_facts, our_facts = them.facts(), us.facts()
    for path in sorted({*their_facts, *our_facts}):
        pair = their_facts.get(path, ABSENT), our_facts.get(path, ABSENT)
        if pair[0] != pair[1] and not any(_is_inside(path, other) for other, _, _ in found):
            found.append((path, *pair))
    for path in sorted({*them.logprobs} & {*us.logprobs}):
        one, other = them.logprobs[path], us.logprobs[path]
        if len(one) != len(other) or not all(map(_are_near, one, other)):
            found.append((path, str(one), str(other)))
    if len(them.vectors) == len(us.vectors) and not all(map(_are_alike, them.vectors, us.vectors)):
        found.append((VECTOR, "a vector", "another one"))
    return found


def _is_inside(path: str, other: str) -> bool:
    return path.startswith(other) and (other[-1:] == ":" or path[len(other)] in ".[{ ")


def _are_near(one: float, other: float) -> bool:
    return abs(one - other) <= LOGPROB_TOLERANCE


def _are_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    product = sum(x * y for x, y in zip(one, other, strict=True))
    return product >= COSINE * math.hypot(*one) * math.hypot(*other)
