"""What a whole answer has to follow: reasoning, calls of tools, and what the client wants besides.

Written in llguidance's dialect of Lark (its ``docs/syntax.md``), from the marks that the model's
family uses and the notation of its calls: what follows the grammar is what the family's reader reads.
No I/O, no clock.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, assert_never, cast

from agent.engine import AnswerGrammar, Guidance
from agent.formats import OutputFormat
from agent.json_schema import OPTIONS, SchemaError, check_schema
from agent.lark import to_lark
from agent.notations import HARMONY, HARMONY_RECIPIENT_FIRST, Notation, Part, Perhaps, Place
from agent.output_parser import Text
from agent.tool_calls import LONGEST_NAME
from agent.tools import Tools
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Constraint, Conversation, Gbnf, JsonSchema

_ANY = "/(?s:.*)/"
_SOME = "/(?s:.+)/"
_SPACE = r"/[ \t\r\n]/"
_LITTLE_SPACE = r"/[ \t\r\n]{0,4}/"

_TAG = re.compile(r"</[^<>]+>")

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_NEEDS_NO_TYPE = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})

_REMARKS = frozenset({"title", "description", "default", "examples", "deprecated"})
_IN_TAGS = _REMARKS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
}  # fmt: skip
"""What a tool's schema may say so that its parameters can stand in tags, one by one."""


def answer_grammar(
    output: OutputFormat,
    conversation: Conversation,
    *,
    prompt: str,
    constraint: Constraint | None,
    tokens: Mapping[str, TokenId],
    ends: Collection[str],
) -> Guidance | None:
    """None: the answer is free.

    ``prompt``: as rendered; its end may have opened a section already. ``tokens``: the marks of the
    format, and parts of them, that are control tokens of the model. ``ends``: those of them that end
    an answer.

    Raises ``RequestError``: ``INVALID_REQUEST``, ``NOT_SUPPORTED`` or ``INVALID_TOOL_SCHEMA`` if it
    cannot be as asked, ``INVALID_SCHEMA`` or ``INVALID_GRAMMAR`` for the constraint.
    """
    entry = output.entry(prompt)
    rules = _Rules(tokens, ends)
    if conversation.must_call:
        if constraint is not None:
            _refuse("an answer that must call a tool cannot follow a grammar or a schema as well")
        tools = _offered(conversation)
        missing = [name for name in conversation.must_call if name not in tools]
        if missing:
            _refuse(f"the answer must call {missing[0]!r}, but there is no such tool")
        called = {name: tools[name] for name in conversation.must_call}
        notation = _notation(output)
        if notation is None:
            _refuse(
                "calls of tools cannot be forced: how this model writes them "
                f"({output.name}) cannot be put into a grammar",
                ErrorCode.NOT_SUPPORTED,
            )
        calls = _Calls(rules, output, notation, called, parallel=conversation.parallel_calls)
        lead = _lead(rules, output, entry, reasons=conversation.enable_thinking)
        return calls.grammar(f"{lead} {calls.section()}")
    if constraint is not None:
        reasons = _may_reason(output, entry, wants=conversation.enable_thinking)
        has_header = output.has_channels and entry != "content"
        if not (reasons or has_header or conversation.tools):
            return constraint
        return _constrained(rules, output, conversation, entry, constraint)
    if any(_is_strict(tool) for tool in conversation.tools):
        return _free(rules, output, conversation, entry)
    return None


def _may_reason(output: OutputFormat, entry: str | None, *, wants: bool) -> bool:
    """May reasoning come first, or has it been begun already?"""
    if entry == "reasoning":
        return True
    if output.has_channels:
        return wants and entry != "content"
    return wants and entry is None and output.reasoning is not None


def _refuse(message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> NoReturn:
    raise RequestError(code, message)


# The tools


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    schema: Mapping[str, Any] | None
    """None: any object."""


def _offered(conversation: Conversation) -> dict[str, _Tool]:
    """With their schemas."""
    tools: dict[str, _Tool] = {}
    for tool in conversation.tools:
        function = _function(tool)
        name: Any = function.get("name")
        tools.setdefault(name, _Tool(name, function.get("parameters")))
    return tools


def _as_offered(tool: _Tool) -> Mapping[str, Any]:
    parameters = {} if tool.schema is None else {"parameters": tool.schema}
    return {"function": {"name": tool.name, **parameters}}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return _function(tool).get("strict") is True


def _read_schema(tool: _Tool) -> str:
    """Of an object, as JSON."""
    schema = _ANY_OBJECT if tool.schema is None else tool.schema
    if not _NEEDS_NO_TYPE & schema.keys():
        schema = {"type": "object", **schema}
    try:
        return check_schema(json.dumps(schema))
    except SchemaError as error:
        _refuse(f"the tools cannot be used: {tool.name}: {error}", ErrorCode.INVALID_TOOL_SCHEMA)


# Writing rules


class _Rules:
    """The rules and terminals of one grammar. Names of rules are those of ``agent.lark`` never."""

    def __init__(self, tokens: Mapping[str, TokenId], ends: Collection[str]) -> None:
        self._tokens = tokens
        self._ends = ends
        names = sorted(tokens, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._names: dict[str, str] = {}
        """By the lines that define them, without their names."""
        self.schemas: list[tuple[str, str]] = []
        self.space = f"{self.terminal(_SPACE)}{{0,4}}"

    def write(self, *lines: str) -> str:
        # A forced text is not to be forced into certain tokens.
        defined = (f"{name}{line}" for line, name in self._names.items())
        return "\n".join(['%llguidance {"no_forcing": true}', *lines, *defined])

    def rule(self, body: str) -> str:
        return self._define(f": {body}", "x")

    def lazy(self, terminal: str) -> str:
        """It ends where it can."""
        return self._define(f"[lazy]: {terminal}", "x")

    def terminal(self, body: str) -> str:
        return self._define(f": {body}", "X")

    def _define(self, line: str, letter: str) -> str:
        return self._names.setdefault(line, f"{letter}{len(self._names)}")

    def ends_answer(self, mark: str) -> bool:
        return mark in self._ends

    def is_token(self, mark: str) -> bool:
        return mark in self._tokens

    def literal(self, text: str) -> str:
        """This text, in which marks that are control tokens are these tokens."""
        lead, rest = self._split(text)
        return f"{_quoted(lead)} {rest}".strip() if lead else rest

    def closing(self, mark: str) -> str:
        """Where the answer may end: a mark that ends it needs not be said."""
        return "" if self.ends_answer(mark) else self.literal(mark)

    def _split(self, text: str) -> tuple[str, str]:
        """The text before the first control token, and the expression for what follows."""
        first = self._marks.search(text)
        if first is None:
            return text, ""
        pieces: list[str] = []
        at = first.start()
        for mark in self._marks.finditer(text, at):
            if self.ends_answer(mark.group()):
                _refuse(
                    f"{mark.group()} ends an answer of this model, so that nothing can follow it",
                    ErrorCode.NOT_SUPPORTED,
                )
            if mark.start() > at:
                pieces.append(_quoted(text[at : mark.start()]))
            pieces.append(f"<[{self._tokens[mark.group()]}]>")
            at = mark.end()
        if at < len(text):
            pieces.append(_quoted(text[at:]))
        return text[: first.start()], " ".join(pieces)

    def up_to(self, text: str, mark: str) -> str:
        """``text``, a terminal's body, and the mark behind it."""
        lead, rest = self._split(mark)
        if not rest:
            return self.lazy(self.terminal(f"({text}) {_quoted(lead)}"))
        if not lead:
            return f"{self.terminal(f'({text}) & {_SOME}')}? {rest}"
        return f"{self.terminal(f'({text}) {_quoted(lead)}')} {rest}"

    def json(self, name: str, schema: str) -> str:
        """``name``: to tell if the schema cannot be used."""
        if (name, schema) not in self.schemas:
            self.schemas.append((name, schema))
        options = f'{{"x-guidance": {json.dumps(OPTIONS)}'
        inner = schema.strip()[1:].lstrip()
        return self.rule(f"%json {options}{'' if inner.startswith('}') else ', '}{inner}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text_without(marks: Iterable[str]) -> str:
    """The body of a terminal: any text that holds none of them."""
    inner = "|".join("".join(_escaped(c) for c in mark) for mark in dict.fromkeys(marks))
    return f"{_ANY} & ~/(?s:.*)(?:{inner})(?s:.*)/" if inner else _ANY


def _escaped(character: str) -> str:
    return (
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
    )


# Reasoning


def _in_reasoning(output: OutputFormat) -> str:
    """The body of a terminal: what the model may think, so that nothing but its end ends it."""
    if output.has_channels:
        return _text_without(mark for mark in output.marks if mark.startswith("<|"))
    assert output.reasoning is not None
    marks = [*output.reasoning.closes]
    if output.calls is not None:
        marks += [*output.calls.ends_reasoning, *output.calls.ends_reasoning_before]
    return _text_without(marks)


def _lead(rules: _Rules, output: OutputFormat, entry: str | None, *, reasons: bool) -> str:
    """What stands before calls, or before what the client wants: reasoning, and white space."""
    if output.has_channels:
        return _analysis(rules, output, entry, reasons=reasons)
    if output.reasoning is None:
        return rules.space
    opens, closes = output.reasoning.opens[0], output.reasoning.closes[0]
    if entry == "reasoning":
        return f"{rules.up_to(_in_reasoning(output), closes)} {rules.space}"
    if not reasons or entry is not None or rules.ends_answer(closes):
        return rules.space
    thought = rules.rule(
        f"{rules.literal(opens + output.reasoning.label)} "
        f"{rules.up_to(_in_reasoning(output), closes)} {rules.space}"
    )
    return f"{rules.space} {thought}?"


def _analysis(rules: _Rules, output: OutputFormat, entry: str | None, *, reasons: bool) -> str:
    """Messages in the channel for reasoning, each up to the beginning of the next message."""
    if entry == "content":
        _refuse("the prompt has begun the text of the answer", ErrorCode.NOT_SUPPORTED)
    if not reasons and entry != "reasoning":
        return ""
    rest = rules.rule(rules.up_to(_in_reasoning(output), "<|end|><|start|>assistant"))
    whole = rules.rule(f"{rules.literal('<|channel|>analysis<|message|>')} {rest}")
    return f"{rest} {whole}*" if entry == "reasoning" else f"{whole}*"


# Calls


_Item: TypeAlias = str | Place | Perhaps


class _Calls:
    """Writes calls of these tools."""

    def __init__(
        self,
        rules: _Rules,
        output: OutputFormat,
        notation: Notation,
        tools: Mapping[str, _Tool],
        *,
        parallel: bool,
    ) -> None:
        self._rules = rules
        self._output = output
        self._notation = notation
        self._tools = tools
        self._parallel = parallel
        last = notation.call[-1]
        self.is_only = not notation.end and isinstance(last, str) and rules.ends_answer(last)
        """Its end is that of the answer, so there is but one call."""
        final = (*notation.call, *notation.end)[-1]
        closes = () if output.calls is None else output.calls.closes
        self.is_last = not (isinstance(final, str) and closes and final.endswith(closes))
        """Nothing can follow the section of calls."""
        self._reads = Tools([_as_offered(tool) for tool in tools.values()])
        for name in tools:
            self._check_name(name)

    @property
    def never(self) -> tuple[str, ...]:
        """What the reader takes for a mark inside a call, wherever it stands."""
        notation, state = self._notation, self._output.with_tools["calls"]
        found = [*state.marks] if isinstance(state, Text) else []
        for parts in (notation.call, notation.plain_call, notation.json_parameter):
            found += [tag for part in parts if isinstance(part, str) for tag in _TAG.findall(part)]
        return tuple(dict.fromkeys(found))

    def grammar(self, start: str) -> AnswerGrammar:
        return AnswerGrammar(
            grammar=self._rules.write(f"start: {start}"),
            schemas=tuple(self._rules.schemas),
            never=self.never,
            code=ErrorCode.INVALID_TOOL_SCHEMA,
            noun="tools",
        )

    def section(self, *, behind: str = "") -> str:
        """``behind``: the mark that stands before it already."""
        notation, rules = self._notation, self._rules
        begin = _without(notation.begin, behind) if notation.begin else ()
        first = self._one_of(behind="" if notation.begin else behind)
        end = self._sequence(notation.end)
        more = ""
        if self._parallel and not self.is_only:
            again = f"{self._sequence(notation.between)} {self._one_of()}"
            more = f"{rules.rule(again)}*"
        return rules.rule(" ".join(f"{self._sequence(begin)} {first} {more} {end}".split()))

    def _one_of(self, *, behind: str = "") -> str:
        return self._rules.rule(
            " | ".join(self._call(tool, behind=behind) for tool in self._tools.values())
        )

    def _call(self, tool: _Tool, *, behind: str) -> str:
        notation = self._notation
        parameters = self._parameters(tool) if notation.text_parameter else None
        parts = notation.call
        if notation.plain_call and parameters is None:
            parts = notation.plain_call
        if self.is_only:
            parts = parts[:-1]
        return self._rules.rule(self._sequence(_without(parts, behind), tool, parameters or ""))

    def _sequence(
        self, parts: Sequence[Part], tool: _Tool | None = None, parameters: str = ""
    ) -> str:
        rules = self._rules
        written: list[str] = []
        for item in _merged(parts, "" if tool is None else tool.name):
            match item:
                case str():
                    written.append(rules.literal(item))
                case Perhaps(text):
                    written.append(f"{rules.rule(rules.literal(text))}?")
                case Place.SPACE:
                    written.append(rules.space)
                case Place.ARGUMENTS:
                    assert tool is not None
                    written.append(rules.json(tool.name, _read_schema(tool)))
                case Place.PARAMETERS:
                    written.append(parameters)
                case Place.NUMBER:
                    written.append(rules.terminal("/[0-9]{1,3}/"))
                case Place.MISTRAL_ID:
                    written.append(rules.terminal("/[a-zA-Z0-9]{9}/"))
                case Place.SOLAR_ID:
                    written.append(rules.terminal("/[a-z0-9]{10}/"))
                case Place.NAME | Place.NAME_IN_JSON | Place.KEY | Place.VALUE:
                    raise AssertionError("it has been put in already")
                case _:
                    assert_never(item)
        return " ".join(written)

    def _check_name(self, name: str) -> None:
        if (
            len(name) > LONGEST_NAME
            or name.strip() != name
            or not self._notation.names.fullmatch(name)
            or any(mark in name for mark in self._output.marks)
        ):
            _refuse(f"the model cannot write calls of a tool with the name {name[:64]!r}")

    # Parameters in tags

    def _parameters(self, tool: _Tool) -> str | None:
        """None: they cannot stand there, one by one."""
        schema = tool.schema
        if schema is None or not schema.keys() <= _IN_TAGS or schema.get("type") != "object":
            return None
        properties: Any = schema.get("properties")
        required: Any = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if not set(cast("list[str]", required)) <= properties.keys() or not _refers_to(
            properties, tuple(f"#/{key}/" for key in definitions)
        ):
            return None
        written: list[str] = []
        for key, value in cast("dict[str, Any]", properties).items():
            parameter = self._parameter(tool, key, value, definitions)
            if parameter is None:
                return None
            written.append(parameter if key in required else f"{parameter}?")
        return " ".join(written)

    def _parameter(
        self, tool: _Tool, key: str, schema: Any, definitions: Mapping[str, Any]
    ) -> str | None:
        if (
            not isinstance(schema, dict)
            or not key
            or re.search(r'["<>\n]', key)
            or key != key.strip()
        ):
            return None
        is_text = self._reads.takes_text(tool.name, key)
        parts = self._notation.text_parameter if is_text else self._notation.json_parameter
        at = parts.index(Place.VALUE)
        before = [key if part is Place.KEY else part for part in parts[:at]]
        close = parts[at + 1]
        assert isinstance(close, str)
        behind = self._sequence(parts[at + 2 :])
        if is_text:
            value = self._text(cast("dict[str, Any]", schema), close)
            if value is None:
                return None
        else:
            inner = {**cast("dict[str, Any]", schema), **definitions}
            value = self._value(tool, key, inner) + " " + self._rules.literal(close)
        return self._rules.rule(f"{self._sequence(before)} {value} {behind}".strip())

    def _value(self, tool: _Tool, key: str, schema: Mapping[str, Any]) -> str:
        try:
            written = check_schema(json.dumps(schema))
        except SchemaError as error:
            _refuse(
                f"the tools cannot be used: {tool.name}: {key}: {error}",
                ErrorCode.INVALID_TOOL_SCHEMA,
            )
        return self._rules.json(f"{tool.name}: {key}", written)

    def _text(self, schema: Mapping[str, Any], close: str) -> str | None:
        """A text, as it stands, up to and with ``close``; None: it cannot be told so."""
        assert self._output.calls is not None
        never = [
            close.strip(), "<![CDATA[", *self._output.calls.closes, *self._output.calls.inside,
        ]  # fmt: skip
        if not _REMARKS | {"type", "enum", "const"} >= schema.keys():
            return None
        if "enum" not in schema and "const" not in schema:
            return self._rules.up_to(_text_without(never), close)
        values: Any = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        texts = [value for value in values if isinstance(value, str)]
        if not texts or any(
            mark in text or text != text.strip("\n") for text in texts for mark in never
        ):
            return None
        return self._rules.rule(" | ".join(self._rules.literal(text + close) for text in texts))


def _notation(output: OutputFormat) -> Notation | None:
    if output.has_channels:
        return HARMONY
    return None if output.calls is None else output.calls.notation


def _merged(parts: Sequence[Part], name: str) -> list[_Item]:
    """With the name put in, and texts that follow each other in one."""
    items: list[_Item] = []
    for part in parts:
        item = part
        if part is Place.NAME:
            item = name
        elif part is Place.NAME_IN_JSON:
            item = json.dumps(name, ensure_ascii=False)[1:-1]
        if isinstance(item, str) and items and isinstance(items[-1], str):
            items[-1] += item
        else:
            items.append(item)
    return items


def _without(parts: Sequence[Part], mark: str) -> Sequence[Part]:
    """What follows the mark that they begin with."""
    if not mark:
        return parts
    first, *rest = parts
    assert isinstance(first, str)
    assert first.startswith(mark)
    left = first.removeprefix(mark)
    return [left, *rest] if left else rest


def _refers_to(value: Any, places: tuple[str, ...]) -> bool:
    """Do all references in it lead there?"""
    todo = [value]
    for inner in todo:  # which grows on the way
        if isinstance(inner, dict):
            items = cast("dict[str, Any]", inner)
            reference = items.get("$ref")
            if isinstance(reference, str) and not (places and reference.startswith(places)):
                return False
            if not {"$id", "$anchor", "$dynamicRef", "$defs", "definitions"}.isdisjoint(items):
                return False
            todo.extend(items.values())
        elif isinstance(inner, list):
            todo.extend(cast("list[Any]", inner))
    return True


# What the client wants


def _constrained(
    rules: _Rules,
    output: OutputFormat,
    conversation: Conversation,
    entry: str | None,
    constraint: Constraint,
) -> AnswerGrammar:
    lead = _lead(rules, output, entry, reasons=conversation.enable_thinking)
    lines: list[str] = []
    match constraint:
        case JsonSchema(schema):
            code, noun = ErrorCode.INVALID_SCHEMA, "JSON schema"
            try:
                wanted = rules.json("", check_schema(schema))
            except SchemaError as error:
                _refuse(f"the {noun} cannot be used: {error}", code)
        case Gbnf(text, root):
            code, noun, wanted = ErrorCode.INVALID_GRAMMAR, "grammar", "wanted"
            lines.append(to_lark(text, root, first=wanted))
    if output.has_channels:
        kind = ""
        if isinstance(constraint, JsonSchema):
            kind = f"{rules.rule(rules.literal(' <|constrain|>json'))}?"
        header = rules.literal("<|channel|>final")
        wanted = f"{header} {kind} {rules.literal('<|message|>')} {wanted}"
    elif output.around_content is not None:
        before, behind = output.around_content
        inside = f"{rules.literal(before)} {wanted} {rules.closing(behind)}"
        wanted = rules.rule(f"{wanted} | {inside}")
    calls = _calls_instead(rules, output, conversation)
    if calls is not None:
        wanted = f"({wanted} | {calls.section()})"
    return AnswerGrammar(
        grammar=rules.write(f"start: {lead} {wanted}", *lines),
        schemas=tuple(rules.schemas),
        never=() if calls is None else calls.never,
        code=code,
        noun=noun,
    )


def _calls_instead(
    rules: _Rules, output: OutputFormat, conversation: Conversation
) -> "_Calls | None":
    """Of what the client wants, the model may call a tool; None: it may not, or a call could not be
    told from what is wanted.
    """
    notation = _notation(output)
    if not conversation.tools or notation is None or not _has_opening(output, notation):
        return None
    tools = _strict_where_wanted(conversation)
    return _Calls(rules, output, notation, tools, parallel=conversation.parallel_calls)


def _has_opening(output: OutputFormat, notation: Notation) -> bool:
    """Is there a mark before calls that nothing else begins with?"""
    return output.has_channels or _opening(output, notation) is not None


def _opening(output: OutputFormat, notation: Notation) -> str | None:
    called = output.calls
    if called is None or called.beginnings or called.words:
        return None
    first = (*notation.begin, *notation.call)[0]
    fits = (mark for mark in called.opens if isinstance(first, str) and first.startswith(mark))
    return next(fits, None)


def _strict_where_wanted(conversation: Conversation) -> dict[str, _Tool]:
    """The tools, those that are not strict with any object for their arguments."""
    strict = {_function(tool).get("name") for tool in conversation.tools if _is_strict(tool)}
    return {
        name: tool if name in strict else _Tool(name, None)
        for name, tool in _offered(conversation).items()
    }


# Answers that may call a tool, and if they do, as the tool wants it


def _free(
    rules: _Rules, output: OutputFormat, conversation: Conversation, entry: str | None
) -> AnswerGrammar | None:
    """None: it cannot be told where text ends and a call begins."""
    notation = _notation(output)
    if notation is None:
        return None
    tools = _strict_where_wanted(conversation)
    parallel = conversation.parallel_calls
    if output.has_channels:
        if not all(rules.is_token(mark) for mark in output.marks):
            return None
        return _free_messages(rules, output, tools, entry, parallel=parallel)
    opens = _opening(output, notation)
    if opens is None:
        return None
    calls = _Calls(rules, output, notation, tools, parallel=parallel)
    return calls.grammar(_FreeText(rules, output, calls, opens).start(entry, parallel=parallel))


class _FreeText:
    """Text with calls in it. Whatever stands outside the calls is free."""

    def __init__(self, rules: _Rules, output: OutputFormat, calls: "_Calls", opens: str) -> None:
        """``opens``: what each section of calls begins with."""
        assert output.calls is not None
        self._rules = rules
        self._output = output
        self._calls = calls
        self._opens = opens
        self._reasoning = reasoning = output.reasoning
        never = [*output.calls.opens, *output.calls.signs]
        if reasoning is not None and reasoning.is_anywhere:
            never += [reasoning.opens[0] + reasoning.label, *reasoning.closes]
        self._text = _text_without(never)

    def start(self, entry: str | None, *, parallel: bool) -> str:
        said = self._said(parallel=parallel)
        if self._reasoning is None or (self._reasoning.is_anywhere and entry != "reasoning"):
            return said
        if entry == "reasoning":
            return f"{self._finished()} {said} | {self._unfinished()}"
        if entry is not None:
            return said
        begun = self._begun(_LITTLE_SPACE)
        return f"{self._once_more()} {said} | {begun} {self._unfinished()}"

    def _said(self, *, parallel: bool) -> str:
        rules, calls = self._rules, self._calls
        pieces = [rules.rule(f"{self._some()} {rules.literal(mark)}") for mark in self._hidden()]
        last = self._some()
        if self._reasoning is not None and self._reasoning.is_anywhere:
            begun = self._begun(self._text)
            pieces.append(rules.rule(f"{begun} {self._finished()}"))
            last = rules.rule(f"{last} | {begun} {self._unfinished()}")
        others = f"{rules.rule(' | '.join(pieces))}*" if pieces else ""
        section = calls.section(behind=self._opens)
        call = rules.rule(f"{rules.up_to(self._text, self._opens)} {section}")
        if calls.is_last:
            last = rules.rule(f"{call} | {last}")
            return rules.rule(f"{others} {last}".strip())
        if self._reasoning is not None and not self._reasoning.is_anywhere:
            call = rules.rule(f"{call} {self._once_more()}")
        if parallel:
            return rules.rule(f"{rules.rule(' | '.join([*pieces, call]))}* {last}")
        once = rules.rule(f"{call} {others}".strip())
        return rules.rule(f"{others} {once}? {last}".strip())

    def _some(self) -> str:
        return f"{self._rules.terminal(f'({self._text}) & {_SOME}')}?"

    def _begun(self, before: str) -> str:
        reasoning = self._reasoning
        assert reasoning is not None
        return self._rules.up_to(before, reasoning.opens[0] + reasoning.label)

    def _finished(self) -> str:
        assert self._reasoning is not None
        return self._rules.up_to(_in_reasoning(self._output), self._reasoning.closes[0])

    def _unfinished(self) -> str:
        return f"{self._rules.terminal(f'({_in_reasoning(self._output)}) & {_SOME}')}?"

    def _once_more(self) -> str:
        """Reasoning, where it may begin."""
        return f"{self._rules.rule(f'{self._begun(_LITTLE_SPACE)} {self._finished()}')}?"

    def _hidden(self) -> list[str]:
        """Control tokens that may be anywhere, and mean nothing here."""
        assert self._output.calls is not None
        called, reasoning = self._output.calls, self._reasoning
        other = {*called.opens, *called.closes, *called.inside, *called.quotes}
        if reasoning is not None:
            other |= {*reasoning.opens, *reasoning.closes}
        return [
            mark
            for mark in self._output.marks
            if self._rules.is_token(mark)
            and not self._rules.ends_answer(mark)
            and not any(mark in known for known in other)
        ]


def _free_messages(
    rules: _Rules,
    output: OutputFormat,
    tools: Mapping[str, _Tool],
    entry: str | None,
    *,
    parallel: bool,
) -> AnswerGrammar:
    """The same where answers are series of messages, whose marks are control tokens."""
    marks = [mark for mark in output.marks if mark.startswith("<|")]
    text = f"{rules.terminal(f'({_text_without(marks)}) & {_SOME}')}?"
    in_header = _text_without([*marks, "to="])
    header = f"{rules.terminal(f'({in_header}) & {_SOME}')}?"
    channel, constrain = rules.literal("<|channel|>"), rules.literal("<|constrain|>")
    message = rules.literal("<|message|>")
    plain = rules.rule(f"{header} ({channel} {header})? ({constrain} {header})? {message} {text}")
    writers = [
        _Calls(rules, output, notation, tools, parallel=False)
        for notation in (HARMONY, HARMONY_RECIPIENT_FIRST)
    ]
    call = rules.rule(" | ".join(calls.section() for calls in writers))
    last = f"({call} | {plain})"
    closes = [mark for mark in ("<|end|>", "<|return|>") if not rules.ends_answer(mark)]
    if not closes:
        return writers[0].grammar(text if entry in ("reasoning", "content") else last)
    closed = rules.rule(" | ".join(map(rules.literal, closes)))
    begins = rules.literal("<|start|>assistant")
    ended = f"{plain} {closed}"
    if parallel and not writers[0].is_only:
        ended = f"({ended} | {call})"
    messages = rules.rule(f"{rules.rule(f'{ended} {begins}')}* {last} {closed}?")
    if entry in ("reasoning", "content"):
        messages = rules.rule(f"{text} ({closed} {begins} {messages})?")
    return writers[0].grammar(messages)
