"""Rules for answers whose reasoning and calls are sections between marks, in text that is free.

``agent.harmony_rules`` does the same for answers that are series of messages. No I/O, no clock.
"""

from agent.call_rules import CallRules
from agent.formats import OutputFormat
from agent.lark_rules import LITTLE_SPACE, Rules, text_without
from agent.notations import Notation


def lead_to_answer(rules: Rules, output: OutputFormat, entry: str | None, *, reasons: bool) -> str:
    """What stands before calls, or before what the client wants: reasoning, and white space.

    ``entry``: the state in which the prompt lets the answer begin. ``reasons``: the model may.
    """
    reasoning = output.reasoning
    if reasoning is None:
        return rules.space
    if entry == "reasoning":
        return f"{_finished(rules, output)} {rules.space}"
    if not reasons or entry is not None or rules.ends_answer(reasoning.closes[0]):
        return rules.space
    begun = rules.literal(reasoning.opens[0] + reasoning.label)
    thought = rules.rule(f"{begun} {_finished(rules, output)} {rules.space}")
    return f"{rules.space} {thought}?"


def opening(output: OutputFormat, notation: Notation) -> str | None:
    """The mark with which each section of calls begins, and nothing else; None: there is none."""
    called = output.calls
    if called is None or called.beginnings or called.words:
        return None
    first = (*notation.begin, *notation.call)[0]
    fits = (mark for mark in called.opens if isinstance(first, str) and first.startswith(mark))
    return next(fits, None)


def free_text(
    rules: Rules, output: OutputFormat, calls: CallRules, entry: str | None, *, opens: str
) -> str:
    """A whole answer: text with calls in it. Whatever stands outside the calls is free.

    ``opens``: what each section of calls begins with.
    """
    return _FreeText(rules, output, calls, opens).start(entry)


def _in_reasoning(output: OutputFormat) -> str:
    """The body of a terminal: what the model may think, so that nothing but its end ends it."""
    assert output.reasoning is not None
    marks = [*output.reasoning.closes]
    if output.calls is not None:
        marks += [*output.calls.ends_reasoning, *output.calls.ends_reasoning_before]
    return text_without(marks)


def _finished(rules: Rules, output: OutputFormat) -> str:
    """Reasoning that has begun, and its end."""
    assert output.reasoning is not None
    return rules.up_to(_in_reasoning(output), output.reasoning.closes[0])


class _FreeText:
    def __init__(self, rules: Rules, output: OutputFormat, calls: CallRules, opens: str) -> None:
        assert output.calls is not None
        self._rules = rules
        self._output = output
        self._calls = calls
        self._opens = opens
        self._reasoning = reasoning = output.reasoning
        self._is_anywhere = reasoning is not None and reasoning.is_anywhere
        never = [*output.calls.opens, *output.calls.signs]
        if reasoning is not None and reasoning.is_anywhere:
            never += [reasoning.opens[0] + reasoning.label, *reasoning.closes]
        self._text = text_without(never)

    def start(self, entry: str | None) -> str:
        said = self._said()
        if entry == "reasoning" and self._reasoning is not None:
            return f"{self._finished()} {said} | {self._unfinished()}"
        if entry is not None or self._reasoning is None or self._is_anywhere:
            return said
        begun = self._begun(LITTLE_SPACE)
        return f"{self._once_more()} {said} | {begun} {self._unfinished()}"

    def _said(self) -> str:
        """Pieces that may follow each other in any order, calls among them, then a last one."""
        rules, calls = self._rules, self._calls
        some = rules.some(self._text)
        pieces = [rules.rule(f"{some} {rules.literal(mark)}") for mark in self._hidden()]
        last = some
        if self._is_anywhere:
            begun = self._begun(self._text)
            pieces.append(rules.rule(f"{begun} {self._finished()}"))
            last = rules.rule(f"{last} | {begun} {self._unfinished()}")
        section = calls.section(behind=self._opens)
        call = f"{rules.up_to(self._text, self._opens)} {section}"
        if not calls.is_last and self._reasoning is not None and not self._is_anywhere:
            call = f"{call} {self._once_more()}"
        if calls.is_last:
            last = rules.rule(f"{call} | {last}")
        elif calls.parallel:
            pieces.append(rules.rule(call))
        others = f"{rules.rule(' | '.join(pieces))}*" if pieces else ""
        if not calls.is_last and not calls.parallel:
            once = rules.rule(f"{call} {others}".strip())
            others = f"{others} {once}?"
        return rules.rule(f"{others} {last}".strip())

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

    # Reasoning: it begins, and comes to its end or not

    def _begun(self, before: str) -> str:
        assert self._reasoning is not None
        return self._rules.up_to(before, self._reasoning.opens[0] + self._reasoning.label)

    def _finished(self) -> str:
        return _finished(self._rules, self._output)

    def _unfinished(self) -> str:
        return self._rules.some(_in_reasoning(self._output))

    def _once_more(self) -> str:
        """The whole of it, perhaps, where it may begin: at the beginning, and behind a call."""
        return f"{self._rules.rule(f'{self._begun(LITTLE_SPACE)} {self._finished()}')}?"
