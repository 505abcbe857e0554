"""Calls of tools as rules, in the notation of a model's family: what follows them is what the family's
reader reads. No I/O, no clock.
"""

import json
import re
from collections.abc import Mapping, Sequence

from agent.engine import AnswerGrammar
from agent.formats import OutputFormat
from agent.lark_rules import Rules, Written
from agent.notations import HARMONY, Notation, Part, Place
from agent.offered_tools import OfferedTool
from agent.output_parser import Text
from agent.parameter_rules import ParametersInTags, arguments_as_json
from agent.tool_calls import LONGEST_NAME
from common.errors import ErrorCode, RequestError

_TAG = re.compile(r"</[^<>]+>")


def notation_of(output: OutputFormat) -> Notation | None:
    """None: it is not known, or cannot be put into a grammar."""
    if output.has_channels:
        return HARMONY
    return None if output.calls is None else output.calls.notation


class CallRules:
    """Writes calls of these tools."""

    def __init__(
        self,
        rules: Rules,
        output: OutputFormat,
        notation: Notation,
        tools: Mapping[str, OfferedTool],
        *,
        parallel: bool,
    ) -> None:
        """Raises ``RequestError``: ``INVALID_TOOL_SCHEMA``, or ``INVALID_REQUEST`` for a name that
        cannot be written.
        """
        self._rules = rules
        self._output = output
        self._notation = notation
        self._tools = tools
        self._in_tags = ParametersInTags(rules, output, notation, tools)
        self.parallel = parallel
        last = notation.call[-1]
        self.is_only = not notation.end and isinstance(last, str) and rules.ends_answer(last)
        """Its end is that of the answer, so there is but one call."""
        final = (*notation.call, *notation.end)[-1]
        closes = () if output.calls is None else output.calls.closes
        self.is_last = not (isinstance(final, str) and closes and final.endswith(closes))
        """Nothing can follow the section of calls."""
        for name in tools:
            self._check_name(name)

    def _check_name(self, name: str) -> None:
        if (
            len(name) > LONGEST_NAME
            or name.strip() != name
            or not self._notation.names.fullmatch(name)
            or any(mark in name for mark in self._output.marks)
        ):
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"the model cannot write calls of a tool with the name {name[:64]!r}",
            )

    @property
    def never(self) -> tuple[str, ...]:
        """What the reader takes for a mark inside a call, wherever it stands."""
        notation, state = self._notation, self._output.with_tools["calls"]
        found = [*state.marks] if isinstance(state, Text) else []
        for parts in (notation.call, notation.plain_call, notation.json_parameter):
            found += [tag for part in parts if isinstance(part, str) for tag in _TAG.findall(part)]
        return tuple(dict.fromkeys(found))

    def grammar(self, start: str) -> AnswerGrammar:
        """Of an answer, in which calls are what can be wrong."""
        return AnswerGrammar(
            grammar=self._rules.write(f"start: {start}"),
            schemas=tuple(self._rules.schemas),
            never=self.never,
            code=ErrorCode.INVALID_TOOL_SCHEMA,
            noun="tools",
        )

    def section(self, *, behind: str = "") -> str:
        """One call, or several, with all that is around them. ``behind``: the mark that stands
        before it already.

        Raises ``RequestError``: ``INVALID_TOOL_SCHEMA``, or ``NOT_SUPPORTED`` where a mark ends the
        answer too early.
        """
        notation, rules = self._notation, self._rules
        begin = rules.sequence(_without(notation.begin, behind) if notation.begin else ())
        first = self._one_of(behind="" if notation.begin else behind)
        more = ""
        if self.parallel and not self.is_only:
            more = f"{rules.rule(f'{rules.sequence(notation.between)} {self._one_of()}')}*"
        end = rules.sequence(notation.end)
        return rules.rule(" ".join(filter(None, [begin, first, more, end])))

    def _one_of(self, *, behind: str = "") -> str:
        return self._rules.rule(
            " | ".join(self._call(tool, behind=behind) for tool in self._tools.values())
        )

    def _call(self, tool: OfferedTool, *, behind: str) -> str:
        rules, notation = self._rules, self._notation
        parameters = self._in_tags.parameters(tool)
        parts = notation.call
        if notation.plain_call and parameters is None:
            parts = notation.plain_call
        if self.is_only:
            parts = parts[:-1]
        parts = _without(parts, behind)
        places: dict[Part, str | Written] = {
            Place.NAME: tool.name,
            Place.NAME_IN_JSON: json.dumps(tool.name, ensure_ascii=False)[1:-1],
            Place.PARAMETERS: Written(parameters or ""),
        }
        if Place.ARGUMENTS in parts:
            places[Place.ARGUMENTS] = Written(arguments_as_json(rules, tool))
        return rules.rule(rules.sequence(places.get(part, part) for part in parts))


def _without(parts: Sequence[Part], mark: str) -> Sequence[Part]:
    """What follows the mark that they begin with."""
    if not mark:
        return parts
    first, *rest = parts
    assert isinstance(first, str)
    assert first.startswith(mark)
    left = first.removeprefix(mark)
    return [left, *rest] if left else rest
