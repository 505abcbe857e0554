"""The calls that a model writes, told piece by piece while it writes them. No I/O, no clock.

Arguments are told as soon as it is sure whose they are and that an object begins; whatever else there
is of calls, ``agent.tool_calls`` reads when it is complete. What was told stays true. Cost is linear
in what is fed; nesting is only counted.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from agent.tool_calls import (
    MOST_CALLS,
    RECIPIENT,
    Part,
    Places,
    ReadCalls,
    ToolCallError,
    WrittenCall,
    made_calls,
    plain_name,
    read_blocks,
    read_harmony,
    read_json,
    read_llama,
)
from agent.tools import Tools
from common.messages import ToolCall, ToolCallDelta

_MESSAGE = "<|message|>"


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call whose arguments are an object that begins."""

    name: str
    call_id: str | None


@dataclass(frozen=True, slots=True)
class _Complete:
    """A call that could not be told earlier, as JSON."""

    text: str


_Found: TypeAlias = _Begun | _Complete | str
"""A text is more of the arguments of the call that was begun last."""


class _Scan(Protocol):
    """Reads one part of a section."""

    def feed(self, text: str) -> Iterator[_Found]: ...
    def end(self) -> Iterator[_Found]:
        """The part is over."""
        ...


class CallStream:
    """One answer's calls. For each section of calls: ``begin`` a part at each mark and ``feed`` it,
    then ``end``; ``take`` what can be told whenever it is wanted.
    """

    def __init__(
        self,
        read: ReadCalls,
        tools: Tools,
        *,
        most_calls: int = MOST_CALLS,
        make_id: Callable[[], str],
    ) -> None:
        """``most_calls``: those that follow are not told."""
        self._read = read
        self._tools = tools
        self._most_calls = most_calls
        self._make_id = make_id
        self._told: list[ToolCallDelta] = []
        self._calls = 0
        """Of the answer so far."""
        self._ids: set[str] = set()
        self._forget_section()

    def begin(self, mark: str) -> None:
        if self._begins_calls(mark):
            self._close_group()
        elif self._scan is not None:
            self._consume(self._scan.end())
        self._group.append((mark, []))
        self._scan = None if self._is_unreadable else self._scan_for(mark)

    def feed(self, text: str) -> None:
        self._group[-1][1].append(text)
        self._texts.append(text)
        if self._scan is not None:
            self._consume(self._scan.feed(text))

    def end(self) -> str:
        """The section is over. Returns what is to be shown instead, if it holds no call at all."""
        self._close_group()
        instead = "" if self._calls_in_section else "".join(self._texts)
        self._forget_section()
        return instead

    def take(self) -> tuple[ToolCallDelta, ...]:
        told = tuple(self._told)
        self._told.clear()
        return told

    def _forget_section(self) -> None:
        self._calls_in_section = 0
        self._texts: list[str] = []
        self._group: list[tuple[str, list[str]]] = []
        """Parts that are read together, and by themselves."""
        self._calls_in_group = 0
        self._scan: _Scan | None = None
        self._is_unreadable = False

    # Parts and groups of them

    def _begins_calls(self, mark: str) -> bool:
        if isinstance(self._read, Places):
            return mark == self._read.name
        if self._read is read_harmony:
            return RECIPIENT.search(mark) is not None
        return True

    def _scan_for(self, mark: str) -> _Scan | None:
        """None: the reader shall see to it."""
        if self._read in (read_json, read_blocks, read_llama):
            return _JsonCalls()
        if self._calls_in_group:
            return None
        if isinstance(self._read, Places):
            return self._scan_in_place(self._read, mark)
        if self._read is read_harmony and mark == _MESSAGE:
            recipient = RECIPIENT.search(self._group[0][0])
            if recipient is not None:
                return _Arguments(plain_name(recipient.group(1), self._tools))
        return None

    def _scan_in_place(self, places: Places, mark: str) -> _Scan | None:
        if mark == places.name:
            return _Named(self._tools)
        if mark != places.arguments or self._group[0][0] != places.name:
            return None
        ids = ("".join(texts).strip() for mark, texts in self._group if mark == places.call_id)
        name = plain_name("".join(self._group[0][1]), self._tools)
        return _Arguments(name, next(ids, None), fence="`")

    def _close_group(self) -> None:
        if self._scan is not None:
            self._consume(self._scan.end())
            self._scan = None
        parts = [Part(mark, "".join(texts)) for mark, texts in self._group]
        self._group = []
        # Where names and arguments have places of their own there is one call in each group.
        if not self._is_unreadable and parts and not (self._calls_in_group and self._has_places):
            try:
                self._tell_rest(self._read(parts, self._tools))
            except ToolCallError:
                self._is_unreadable = True
        self._calls_in_group = 0

    @property
    def _has_places(self) -> bool:
        return isinstance(self._read, Places) or self._read is read_harmony

    def _tell_rest(self, written: Sequence[WrittenCall]) -> None:
        if written:
            for call in made_calls(written, make_id=self._make_id)[self._calls_in_group :]:
                self._tell_call(call, call.arguments)

    # What is told

    def _consume(self, found: Iterator[_Found]) -> None:
        try:
            for event in found:
                match event:
                    case _Begun(name, call_id):
                        written = [WrittenCall(name, None, call_id)]
                        (call,) = made_calls(written, make_id=self._make_id)
                        self._tell_call(call, "")
                    case _Complete(text):
                        written = read_json([Part("", text)], self._tools)
                        for call in made_calls(written, make_id=self._make_id):
                            self._tell_call(call, call.arguments)
                    case str(arguments):
                        self._tell_more(arguments)
        except ToolCallError:
            self._scan = None  # the reader will say so, too

    def _tell_call(self, call: ToolCall, arguments: str) -> None:
        call_id = self._make_id() if call.call_id in self._ids else call.call_id
        self._ids.add(call_id)
        if self._calls < self._most_calls:
            self._told.append(ToolCallDelta(self._calls, arguments, call_id, call.name))
        self._calls += 1
        self._calls_in_section += 1
        self._calls_in_group += 1

    def _tell_more(self, arguments: str) -> None:
        index = self._calls - 1
        if not arguments or index >= self._most_calls:
            return
        if self._told and self._told[-1].index == index:
            latest = self._told.pop()
            arguments = latest.arguments + arguments
            self._told.append(ToolCallDelta(index, arguments, latest.call_id, latest.name))
        else:
            self._told.append(ToolCallDelta(index, arguments))


# JSON: {"name": ..., "arguments": {...}}

_BETWEEN_CALLS = re.compile(r"[\s,;]*")
_BETWEEN_KEYS = re.compile(r"[ \t\r\n,]*")
_TO_VALUE = re.compile(r"[ \t\r\n]*")
_PRIMITIVE = re.compile(r'[^\s,\[\]{}":]*')
_TURN = re.compile(r'["{}\[\]]')
_TURN_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_STRING = re.compile(r'[^"\\]*')

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")


class _JsonCalls:
    """Calls that are objects, alone or in an array. It lets pass what is no JSON: the reader will not.

    Each step gets the text and a place in it, reads on from there, and says how far it came.
    """

    def __init__(self) -> None:
        self._step: Callable[[str, int], int] | None = self._at_beginning
        """None: what follows is left to the reader."""
        self._found: list[_Found] = []
        self._in_array = False
        self._in_call = False
        # Of the call:
        self._key = ""
        self._name: str | None = None
        self._call_id: str | None = None
        self._is_begun = False
        self._object: list[str] = []
        """All of its text, unless it is told while it is written."""
        # Of the value that is being read:
        self._string: list[str] = []
        self._is_key = False
        self._is_told = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> Iterator[_Found]:
        at = 0
        while self._step is not None and at < len(text):
            start, was_in_call = at, self._in_call
            at = self._step(text, at)
            if (was_in_call or self._in_call) and not self._is_begun:
                self._object.append(text[start:at])
            if was_in_call and not self._in_call:
                if not self._is_begun:
                    self._found.append(_Complete("".join(self._object)))
                self._object = []
            yield from self._found
            self._found.clear()

    def end(self) -> Iterator[_Found]:
        return iter(())

    def _at_beginning(self, text: str, at: int) -> int:
        at = len(text) - len(text[at:].lstrip())
        if at < len(text):
            self._step = self._between_calls if text[at] in "{[" else None
        return at

    def _between_calls(self, text: str, at: int) -> int:
        start, at = at, _past(_BETWEEN_CALLS, text, at)
        if at > start or at == len(text):
            return at
        if text[at] == "{":
            self._in_call = True
            self._name = self._call_id = None
            self._is_begun = False
            self._step = self._between_keys
        elif text[at] == ("]" if self._in_array else "["):
            self._in_array = not self._in_array
        else:
            self._step = None
        return at + 1

    def _between_keys(self, text: str, at: int) -> int:
        at = _past(_BETWEEN_KEYS, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._begin_string(is_key=True)
        elif text[at] == "}":
            self._in_call = False
            self._step = self._between_calls
        else:
            self._step = None
        return at + 1

    def _before_colon(self, text: str, at: int) -> int:
        at = _past(_TO_VALUE, text, at)
        if at < len(text):
            self._step = self._before_value if text[at] == ":" else None
            at += 1
        return at

    def _before_value(self, text: str, at: int) -> int:
        at = _past(_TO_VALUE, text, at)
        if at == len(text):
            return at
        begins = text[at]
        if begins == '"':
            self._begin_string(is_key=False)
            return at + 1
        self._step = self._in_nested if begins in "{[" else self._in_primitive
        self._depth = 0
        self._is_told = False
        if begins == "{" and self._key in _ARGUMENTS and self._name and not self._is_begun:
            self._is_told = self._is_begun = True
            self._object = []
            self._found.append(_Begun(self._name, self._call_id))
        return at

    def _in_primitive(self, text: str, at: int) -> int:
        at = _past(_PRIMITIVE, text, at)
        if at < len(text):
            self._step = self._between_keys
        return at

    def _begin_string(self, *, is_key: bool) -> None:
        self._step = self._in_text
        self._string = []
        self._is_key = is_key

    def _in_text(self, text: str, at: int) -> int:
        start = at
        if self._is_escaped:
            self._is_escaped = False
            at += 1
        at = _past(_STRING, text, at)
        self._string.append(text[start:at])
        if at == len(text):
            return at
        if text[at] == "\\":
            self._string.append("\\")
            self._is_escaped = True
        else:
            self._end_string("".join(self._string))
        return at + 1

    def _end_string(self, written: str) -> None:
        try:
            value = json.loads(f'"{written}"', strict=False)
        except ValueError:
            self._step = None
            return
        if self._is_key:
            self._key = value
            self._step = self._before_colon
            return
        self._step = self._between_keys
        # "name" counts for more than the others, wherever it stands.
        if self._key == "name" or (self._key in _NAMES and self._name is None):
            self._name = value
        elif self._key == "id":
            self._call_id = value

    def _in_nested(self, text: str, at: int) -> int:
        """An object or an array: its end is found by counting, what is in it does not matter."""
        start = at
        pieces: list[str] = []
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_TURN_IN_STRING if self._in_string else _TURN).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            turn = found.group()
            if turn == '"':
                self._in_string = not self._in_string
            elif turn == "\\":
                self._is_escaped = True
            elif self._in_string:
                # The reader takes a line break in a string, but for others it would be no JSON.
                pieces += (text[start : at - 1], json.dumps(turn)[1:-1])
                start = at
            elif turn in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    self._step = self._between_keys
                    break
        if self._is_told:
            pieces.append(text[start:at])
            self._found.append("".join(pieces))
        return at


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the pattern, which may be empty, ends that begins there."""
    found = pattern.match(text, at)
    return found.end() if found else at


# Names and arguments in places of their own


class _Arguments:
    """A part that is arguments and nothing else, told as it stands, JSON or not."""

    def __init__(self, name: str, call_id: str | None = None, *, fence: str = "") -> None:
        """``fence``: the character of which three may stand behind the arguments."""
        self._name = name
        self._call_id = call_id
        self._fence = fence
        self._is_begun = False
        self._is_left = False
        """To the reader."""
        self._held: list[str] = []
        """White space, and what could be a fence: not told at the end."""

    def feed(self, text: str) -> Iterator[_Found]:
        if self._is_left:
            return
        if not self._is_begun:
            text = text.lstrip()
            if not text:
                return
            if text[0] != "{":
                self._is_left = True
                return
            self._is_begun = True
            yield _Begun(self._name, self._call_id)
        told = text.rstrip()
        if self._fence:
            while told and (told[-1] == self._fence or told[-1].isspace()):
                told = told.rstrip(self._fence).rstrip()
        if told:
            yield "".join((*self._held, told))
            self._held.clear()
        self._held.append(text[len(told) :])

    def end(self) -> Iterator[_Found]:
        held = "".join(self._held).rstrip()
        self._held.clear()
        if self._fence:
            held = held.removesuffix(self._fence * 3).rstrip()
        if held:
            yield held


class _Named:
    """A part that begins with the name: perhaps arguments follow in it, or it is JSON altogether."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._before: list[str] = []
        self._scan: _Scan | None = None

    def feed(self, text: str) -> Iterator[_Found]:
        if self._scan is None:
            if not self._before:
                text = text.lstrip()
            if not text:
                return
            if not self._before and text[0] in "{[":
                self._scan = _JsonCalls()
            else:
                name, brace, rest = text.partition("{")
                self._before.append(name)
                if not brace:
                    return
                self._scan = _Arguments(plain_name("".join(self._before), self._tools))
                text = brace + rest
        yield from self._scan.feed(text)

    def end(self) -> Iterator[_Found]:
        return iter(()) if self._scan is None else self._scan.end()
