"""What marks to look for in an answer, from the chat template that its prompt was rendered with.

``agent.format_families`` knows the marks. Here they become the table of states through which
``agent.output_parser`` walks. No I/O, no clock.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.call_stream import CallStream
from agent.format_families import (
    AROUND_CONTENT,
    CALLS,
    HIDDEN,
    REASONING,
    TOOL_CALL,
    UNKNOWN_CALLS,
    Calls,
    Reasoning,
)
from agent.output_parser import Between, Header, OutputParser, State, Text, make_call_id
from agent.tool_calls import MOST_CALLS, ReadCalls, read_harmony
from agent.tools import Tools
from common.messages import TokenClass


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    name: str
    """For operators."""
    marks: tuple[str, ...]
    """Control tokens with these names must be fed as text; all others as nothing."""
    with_tools: Mapping[str, State]
    without_tools: Mapping[str, State]
    entries: tuple[tuple[str, str], ...]
    """How a prompt may end, but for white space, and the state in which the answer begins then."""
    read: ReadCalls | None
    reasoning: Reasoning | None = None
    calls: Calls | None = None
    around_content: tuple[str, str] | None = None
    """What stands before and behind the content, perhaps."""
    has_channels: bool = False
    """The answer is a series of messages with headers, each for one of several channels."""

    def entry(self, prompt: str) -> str | None:
        """The state in which the answer to this rendered prompt begins, if its end says so."""
        ending = prompt[-256:].rstrip()
        return next((state for end, state in self.entries if ending.endswith(end)), None)

    def without_reasoning(self, prompt: str) -> str:
        """Some templates let every answer begin in a section of reasoning: here it is closed again."""
        if self.reasoning is None or self.entry(prompt) != "reasoning":
            return prompt
        return f"{prompt.rstrip()}\n\n{self.reasoning.closes[0]}\n\n"

    def parser(
        self,
        *,
        prompt: str,
        tools: Tools | None,
        has_tools: bool,
        make_id: Callable[[], str] = make_call_id,
        call_stream: CallStream | None = None,
    ) -> OutputParser:
        """For one answer. ``prompt``: as rendered; its end may have opened a section already.
        ``has_tools``: some are offered. ``tools``: None if their calls are not to be read, or only
        by ``call_stream``.
        """
        start = self.entry(prompt)
        return OutputParser(
            self.with_tools if has_tools else self.without_tools,
            start=start or "start",
            after_mark=start is not None,
            read=self.read,
            tools=tools,
            make_id=make_id,
            call_stream=call_stream,
        )

    def streaming_parser(
        self,
        *,
        prompt: str,
        tools: Tools,
        most_calls: int = MOST_CALLS,
        make_id: Callable[[], str] = make_call_id,
    ) -> OutputParser:
        """For one answer whose calls are told while they are written, and not checked."""
        stream = None
        if self.read is not None:
            stream = CallStream(self.read, tools, most_calls=most_calls, make_id=make_id)
        return self.parser(prompt=prompt, tools=None, has_tools=True, call_stream=stream)


def _tagged(
    reasoning: Reasoning | None,
    calls: Calls | None,
    *,
    hides: tuple[str, ...] = (),
    around_content: tuple[str, str] | None = None,
    are_calls_unknown: bool = False,
) -> OutputFormat:
    """``hides``: marks around the content. ``are_calls_unknown``: there may be calls, but it is not
    known how they look.
    """
    names = [part.name for part in (reasoning, calls) if part is not None]
    if are_calls_unknown:
        names.append("calls unknown")
    marks = hides
    entries: dict[str, str] = {}
    if reasoning is not None:
        marks += reasoning.opens + reasoning.closes
        entries = {mark + reasoning.label: "reasoning" for mark in reasoning.opens}
        entries |= dict.fromkeys(reasoning.closes, "start")
    if calls is not None:
        marks += calls.opens + calls.closes + calls.inside + calls.quotes
    return OutputFormat(
        name=" + ".join(names) or "content only",
        marks=tuple(dict.fromkeys([*marks, *_control_tokens(marks)])),
        with_tools=_states(
            reasoning,
            calls,
            hides,
            has_tools=True,
            content=TokenClass.UNDETERMINABLE if are_calls_unknown else TokenClass.CONTENT,
        ),
        without_tools=_states(reasoning, calls, hides, has_tools=False, content=TokenClass.CONTENT),
        entries=tuple(entries.items()),
        read=None if calls is None else calls.read,
        reasoning=reasoning,
        calls=calls,
        around_content=around_content,
    )


def _control_tokens(marks: tuple[str, ...]) -> list[str]:
    """Marks may be control tokens with text behind them."""
    return [name for mark in marks for name in re.findall(r"<\|\w+\|?>", mark)]


def _states(
    reasoning: Reasoning | None,
    calls: Calls | None,
    hides: tuple[str, ...],
    *,
    has_tools: bool,
    content: TokenClass,
) -> Mapping[str, State]:
    """``start`` is the beginning, and again what follows a section."""
    states: dict[str, State] = {}
    start = dict.fromkeys(hides, "content")
    in_content = dict.fromkeys(hides, "content")
    in_reasoning: dict[str, str] = {}
    signs_at_start: dict[str, str] = {}
    signs: dict[str, str] = {}
    signs_in_reasoning: dict[str, str] = {}
    if reasoning is not None:
        opens = dict.fromkeys(reasoning.opens, "labelled" if reasoning.label else "reasoning")
        in_reasoning = dict.fromkeys(reasoning.closes, "start")
        start |= opens
        if reasoning.is_anywhere:
            in_content |= opens | in_reasoning
        if reasoning.label:
            states["labelled"] = Between("content", {reasoning.label: "reasoning", **opens})
    if calls is not None:
        opens = dict.fromkeys((*calls.opens, *(calls.words if has_tools else ())), "calls")
        ends = dict.fromkeys(calls.closes, "start")
        states["calls"] = Text(TokenClass.TOOL_CALL, dict.fromkeys(calls.inside, "calls") | ends)
        start |= opens
        in_content |= opens
        in_reasoning |= dict.fromkeys(calls.ends_reasoning, "calls")
        if has_tools:
            signs = dict.fromkeys(calls.signs, "calls")
            signs_at_start = dict.fromkeys(calls.beginnings, "calls")
            signs_in_reasoning = dict.fromkeys(calls.ends_reasoning_before, "start")
    return states | {
        "start": Between("content", start, signs | signs_at_start),
        "content": Text(content, in_content, signs),
        "reasoning": Text(TokenClass.REASONING, in_reasoning, signs_in_reasoning),
    }


def _harmony() -> OutputFormat:
    """gpt-oss: messages with headers. The channel, or the recipient before or behind it, decides."""
    begins = {"<|start|>": "header", "<|channel|>": "header"}
    ends = {"<|end|>": "start", "<|call|>": "start", "<|return|>": "start"}
    states: dict[str, State] = {
        "start": Between("content", {**begins, **ends, "to=": "header", "<|message|>": "content"}),
        "header": Header(
            "<|message|>",
            (
                (re.compile(r"to=(?!assistant\b)\S"), "calls"),
                (re.compile(r"analysis"), "reasoning"),
            ),
            otherwise="content",
        ),
        "content": Text(TokenClass.CONTENT, {**begins, **ends}),
        "reasoning": Text(TokenClass.REASONING, {**begins, **ends}),
        "calls": Text(TokenClass.TOOL_CALL, {**begins, **ends}),
    }
    return OutputFormat(
        name="harmony",
        marks=(*begins, *ends, "<|message|>", "<|constrain|>"),
        with_tools=states,
        without_tools=states,
        entries=(
            ("<|start|>assistant", "start"),
            ("<|channel|>analysis<|message|>", "reasoning"),
            ("<|channel|>final<|message|>", "content"),
        ),
        read=read_harmony,
        has_channels=True,
    )


PLAIN = _tagged(None, None)
"""Nothing is marked."""


def recognize(template: str | None) -> OutputFormat:
    """How a model writes whose chat template this is; None: it has none."""
    if template is None:
        return PLAIN
    if "<|channel|>" in template:
        return _harmony()
    around = next((marks for sign, *marks in AROUND_CONTENT if sign in template), None)
    calls = None
    if not any(sign in template for sign in UNKNOWN_CALLS):
        calls = next(
            (found for signs, found in CALLS if all(sign in template for sign in signs)), None
        )
    reasoning, hides = _beside_calls(template)
    return _tagged(
        reasoning,
        calls,
        hides=hides,
        around_content=None if around is None else (around[0], around[1]),
        are_calls_unknown=calls is None and _mentions_tools(template),
    )


def recognize_told(template: str | None) -> OutputFormat | None:
    """How a model writes that is told in words to call tools between ``<tool_call>`` and its end.

    None: its template speaks of tools itself, so that there is nothing to be told.
    """
    if template is None or "<|channel|>" in template or _mentions_tools(template):
        return None
    reasoning, hides = _beside_calls(template)
    return _tagged(reasoning, TOOL_CALL, hides=hides)


def _beside_calls(template: str) -> tuple[Reasoning | None, tuple[str, ...]]:
    """The reasoning, and marks around the content."""
    hides = tuple(mark for sign, marks in HIDDEN if sign in template for mark in marks)
    return next((found for sign, found in REASONING if sign in template), None), hides


def _mentions_tools(template: str) -> bool:
    return re.search(r"\b(?:tools|tool_calls)\b", template) is not None
