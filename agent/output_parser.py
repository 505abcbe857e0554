"""What a model writes, taken apart while it streams: reasoning, tool calls, content.

``agent.formats`` says which marks set these apart and how they follow each other, as a table of
states; the parser here walks through it. No I/O, no clock. Cost is linear in what is fed: only what
could be the beginning of a mark is held back and looked at again.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias
from uuid import uuid4

from agent.call_stream import CallStream
from agent.tool_calls import Part, ReadCalls, ToolCallError, made_calls
from agent.tools import Tools
from common.messages import (
    TokenClass,
    ToolCallDelta,
    ToolCallFormatUnknown,
    ToolCallResult,
    ToolCallsInvalid,
    ToolCallsParsed,
    ToolCallsUnreadable,
)

SPACE = " \t\r\n"

MOST_SPACE = 4
"""Characters of white space that an answer may begin with before a mark that only counts there."""

LONGEST_HEADER = 256
"""In characters; what is longer is no header but text."""

UNKNOWN_FORMAT = "it is not known how this model's chat template wants tool calls written"

SECTIONS = (TokenClass.REASONING, TokenClass.TOOL_CALL)


class _Marked:
    """What is looked for in a state."""

    marks: Mapping[str, str]
    signs: Mapping[str, str]

    @cached_property
    def all_marks(self) -> tuple[str, ...]:
        return (*self.marks, *self.signs)

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.all_marks), default=0)


@dataclass(frozen=True)
class Text(_Marked):
    """A state that shows what it reads, until one of its marks leads to another state."""

    token_class: TokenClass
    marks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hidden; each with the name of the state that follows."""
    signs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Not hidden: they are the beginning of what the next state shows."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        # Nothing is also a pattern, which is found everywhere: this one is found nowhere.
        return re.compile("|".join(map(re.escape, self.all_marks)) or r"(?!)")


@dataclass(frozen=True)
class Between(_Marked):
    """The beginning of an answer, and what follows a section: marks are looked for at once or,
    behind white space, or not at all: then it goes on with ``otherwise``.
    """

    otherwise: str
    marks: Mapping[str, str] = field(default_factory=dict[str, str])
    signs: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Header:
    """Hidden text up to ``end``; what it says decides how to go on."""

    end: str
    choices: tuple[tuple[re.Pattern[str], str], ...]
    """The first pattern that is found in it, with the state that follows."""
    otherwise: str

    def choose(self, header: str) -> str:
        for pattern, state in self.choices:
            if pattern.search(header):
                return state
        return self.otherwise


State: TypeAlias = Text | Between | Header


class Run(NamedTuple):
    """Consecutive characters of one class."""

    token_class: TokenClass
    length: int
    """Hidden ones too."""
    text: str
    """What is shown of them."""


class Told(NamedTuple):
    runs: list[Run]
    results: list[ToolCallResult]
    """Of the sections of tool calls that have just closed."""
    calls: tuple[ToolCallDelta, ...]
    """Of the section that is being written."""


def make_call_id() -> str:
    return f"call_{uuid4().hex}"


class OutputParser:
    """One answer's text, character by character. ``feed``, then ``flush`` once."""

    def __init__(
        self,
        states: Mapping[str, State],
        *,
        start: str,
        after_mark: bool,
        read: ReadCalls | None,
        tools: Tools | None,
        make_id: Callable[[], str] = make_call_id,
        call_stream: CallStream | None = None,
    ) -> None:
        """``after_mark``: the prompt ends with the mark that leads to ``start``.

        ``read`` turns a section's text into calls; None: it is not known how this model writes
        them. ``tools``: None if nobody wants them read. ``call_stream``: tells calls while they
        are written, instead of results.
        """
        self._states = states
        self._state = states[start]
        self._trims = after_mark
        """White space is hidden until something else comes."""
        self._read = read
        self._tools = tools
        self._make_id = make_id
        self._held = ""
        self._header_mark = ""
        self._undecided = 0
        """Hidden characters that count to whatever follows them."""
        self._latest: TokenClass | None = None
        self._parts: list[tuple[str, list[str]]] | None = None
        """Of the section of tool calls that is open, if it is to be read: marks with what follows."""
        self._call_stream = call_stream
        self._streams_section = False
        self._section_has_mark = False
        """Something hidden has opened it, so what is in it cannot be text."""
        are_unknown = tools is not None and read is None
        self._unknown: list[str] | None = [] if are_unknown else None
        """What could be tool calls in a format that is not known."""
        self._runs: list[Run] = []
        self._results: list[ToolCallResult] = []

    @property
    def token_class(self) -> TokenClass:
        """Of what has been fed and not told yet, if the stream ended here."""
        match self._state:
            case Text(token_class):
                return token_class
            case Between(otherwise):
                if self._latest is not None and not self._held.strip(SPACE):
                    return self._latest
                return self._class_of(otherwise)
            case Header() as header:
                return self._class_of(header.choose(self._header_mark + self._held))

    def feed(self, text: str) -> Told:
        text = self._held + text
        at = 0
        goes_on = True
        while goes_on and at < len(text):
            match self._state:
                case Text() as state:
                    at, goes_on = self._in_text(state, text, at)
                case Between() as state:
                    at, goes_on = self._in_between(state, text, at)
                case Header() as state:
                    at, goes_on = self._in_header(state, text, at)
        self._held = text[at:]
        return self._told()

    def flush(self, *, is_cut: bool = False) -> Told:
        """The stream ends here: what was held back is text, and open sections are closed. ``is_cut``:
        the model would have gone on.
        """
        held: str = self._held
        self._held = ""
        match self._state:
            case Text() if held:
                self._show(held)
            case Between(otherwise) if held:
                self._go(otherwise)
                self._show(held)
            case Header() as header:  # a part of a mark: not to be shown
                self._go(header.choose(self._header_mark + held))
            case _:
                pass
        if self._undecided:
            self._hide(self.token_class, 0)
        self._close_section(is_cut=is_cut)
        if self._unknown is not None:
            text = "".join(self._unknown)
            if text.strip(SPACE):
                self._results.append(ToolCallFormatUnknown(text, UNKNOWN_FORMAT))
        self._unknown = None
        return self._told()

    def _told(self) -> Told:
        calls = () if self._call_stream is None else self._call_stream.take()
        told = Told(self._runs, self._results, calls)
        self._runs, self._results = [], []
        return told

    # One step in each kind of state: how far it came, and whether it can go on without more text

    def _in_text(self, state: Text, text: str, at: int) -> tuple[int, bool]:
        if self._trims:
            at = self._skip_space(text, at)
            if at == len(text):
                return at, False
            self._trims = False
        found = state.pattern.search(text, at)
        if found is not None:
            self._show(text[at : found.start()])
            return self._pass(state, found.group(), found.start()), True
        end = len(text) - _overlap(text, at, state)
        self._show(text[at:end])
        return end, False

    def _in_between(self, state: Between, text: str, at: int) -> tuple[int, bool]:
        start = at
        if self._trims:
            start = at = self._skip_space(text, at)
        else:
            while start < len(text) and start - at < MOST_SPACE and text[start] in SPACE:
                start += 1
        for mark in state.all_marks:
            if text.startswith(mark, start):
                self._undecided += start - at
                return self._pass(state, mark, start), True
        rest = text[start : start + state.longest]
        may_be_more = bool(rest) or self._trims or start - at < MOST_SPACE
        if may_be_more and any(mark.startswith(rest) for mark in state.all_marks):
            return at, False
        self._trims = False
        self._go(state.otherwise)
        return at, True

    def _in_header(self, state: Header, text: str, at: int) -> tuple[int, bool]:
        end = text.find(state.end, at, at + LONGEST_HEADER + len(state.end))
        if end < 0 and len(text) - at <= LONGEST_HEADER:
            return at, False
        if end < 0:
            self._go(state.otherwise)
            return at, True
        header = self._header_mark + text[at:end]
        follows = state.choose(header)
        self._undecided += end - at
        if self._class_of(follows) is TokenClass.TOOL_CALL:
            self._begin_part(header)
        return self._enter(follows, state.end, end), True

    def _skip_space(self, text: str, at: int) -> int:
        end = at
        while end < len(text) and text[end] in SPACE:
            end += 1
        self._undecided += end - at
        return end

    # From state to state

    def _pass(self, state: Text | Between, mark: str, at: int) -> int:
        """Go where the mark leads; it stands at ``at``."""
        follows = state.marks.get(mark)
        if follows is not None:
            return self._enter(follows, mark, at)
        self._go(state.signs[mark])
        if isinstance(self._state, Text) and self._state.token_class is TokenClass.TOOL_CALL:
            self._begin_part("")
        return at

    def _enter(self, name: str, mark: str, at: int) -> int:
        left = self._state
        self._go(name)
        entered = self._state
        self._trims = True
        if isinstance(entered, Header):
            self._header_mark = mark
        # A mark counts to the section that it opens or, if it opens none, to the one it closes.
        classes = [state.token_class for state in (entered, left) if isinstance(state, Text)]
        token_class = classes[0] if classes else None
        if token_class is TokenClass.TOOL_CALL:
            self._begin_part(mark)
        if token_class is None:
            self._undecided += len(mark)
        else:
            self._hide(token_class, len(mark))
        return at + len(mark)

    def _go(self, name: str) -> None:
        self._state = self._states[name]
        if isinstance(self._state, Text) and self._state.token_class is not TokenClass.TOOL_CALL:
            self._close_section()

    def _class_of(self, name: str) -> TokenClass:
        state = self._states[name]
        assert isinstance(state, Text)
        return state.token_class

    # What is told

    def _show(self, text: str) -> None:
        if not text:
            return
        token_class = self.token_class
        if self._streams_section and self._call_stream is not None:
            self._call_stream.feed(text)
            self._hide(token_class, len(text))
            return
        self._tell(Run(token_class, len(text), text))
        if token_class is TokenClass.TOOL_CALL and self._parts is not None:
            self._parts[-1][1].append(text)
        if self._unknown is not None and token_class not in SECTIONS:
            self._unknown.append(text)

    def _hide(self, token_class: TokenClass, length: int) -> None:
        self._tell(Run(token_class, length, ""))

    def _tell(self, run: Run) -> None:
        self._runs.append(run._replace(length=run.length + self._undecided))
        self._undecided = 0
        self._latest = run.token_class

    # Sections of tool calls

    def _begin_part(self, mark: str) -> None:
        if self._call_stream is not None:
            if not self._streams_section:
                self._streams_section = True
                self._section_has_mark = bool(mark)
            self._call_stream.begin(mark)
            return
        if self._tools is None:
            return
        if self._parts is None:
            self._parts = []
        self._parts.append((mark, []))

    def _close_section(self, *, is_cut: bool = False) -> None:
        if self._streams_section and self._call_stream is not None:
            self._streams_section = False
            instead = self._call_stream.end()
            if is_cut and self._section_has_mark:
                return  # the beginning of a call
            if instead:  # its characters have been counted as what they were taken for
                self._runs.append(Run(TokenClass.CONTENT, 0, instead))
            return
        if self._parts is None:
            return
        assert self._tools is not None
        assert self._read is not None
        parts = [Part(mark, "".join(texts)) for mark, texts in self._parts]
        self._parts = None
        try:
            calls = made_calls(self._read(parts, self._tools), make_id=self._make_id)
        except ToolCallError as error:
            self._results.append(ToolCallsUnreadable(str(error)))
            return
        errors = self._tools.check(calls)
        if errors:
            self._results.append(ToolCallsInvalid(tuple(errors)))
        else:
            self._results.append(ToolCallsParsed(tuple(calls)))


def _overlap(text: str, at: int, state: Text) -> int:
    """How many characters at the end of ``text[at:]`` could be the beginning of a mark."""
    for length in range(min(len(text) - at, state.longest - 1), 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in state.all_marks):
            return length
    return 0
