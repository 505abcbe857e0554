"""Rules for answers that are series of messages with headers, as gpt-oss writes them.

The header says which channel a message is for: reasoning, calls of tools or the text for the user.
``agent.section_rules`` does the same for all other families. No I/O, no clock.
"""

from collections.abc import Mapping

from agent.call_rules import CallRules
from agent.engine import AnswerGrammar
from agent.formats import OutputFormat
from agent.lark_rules import Rules, text_without
from agent.notations import HARMONY, HARMONY_RECIPIENT_FIRST
from agent.offered_tools import OfferedTool
from common.errors import ErrorCode, RequestError


def lead_to_message(rules: Rules, output: OutputFormat, entry: str | None, *, reasons: bool) -> str:
    """Messages in the channel for reasoning, each up to the beginning of the next message.

    ``entry``: the state in which the prompt lets the answer begin. ``reasons``: the model may.
    Raises ``RequestError`` (``NOT_SUPPORTED``) where nothing can be led to any more.
    """
    if entry == "content":
        raise RequestError(ErrorCode.NOT_SUPPORTED, "the prompt has begun the text of the answer")
    if not reasons and entry != "reasoning":
        return ""
    thought = text_without(_marks(output))
    rest = rules.rule(rules.up_to(thought, "<|end|><|start|>assistant"))
    whole = rules.rule(f"{rules.literal('<|channel|>analysis<|message|>')} {rest}")
    return f"{rest} {whole}*" if entry == "reasoning" else f"{whole}*"


def final_message(rules: Rules, wanted: str, *, is_json: bool) -> str:
    """The message for the user, with this in it."""
    kind = f"{rules.rule(rules.literal(' <|constrain|>json'))}?" if is_json else ""
    header = rules.literal("<|channel|>final")
    return " ".join(filter(None, [header, kind, rules.literal("<|message|>"), wanted]))


def free_messages(
    rules: Rules,
    output: OutputFormat,
    tools: Mapping[str, OfferedTool],
    entry: str | None,
    *,
    parallel: bool,
) -> AnswerGrammar | None:
    """A whole answer: messages, of which only calls are not free. None: the marks are no control
    tokens, so that text could hold them.
    """
    if not all(map(rules.is_token, output.marks)):
        return None
    marks = _marks(output)
    text = rules.some(text_without(marks))
    header = rules.some(text_without([*marks, "to="]))
    channel, constrain = rules.literal("<|channel|>"), rules.literal("<|constrain|>")
    message = rules.literal("<|message|>")
    plain = rules.rule(f"{header} ({channel} {header})? ({constrain} {header})? {message} {text}")
    writers = [
        CallRules(rules, output, notation, tools, parallel=False)
        for notation in (HARMONY, HARMONY_RECIPIENT_FIRST)
    ]
    grammar, is_only = writers[0].grammar, writers[0].is_only
    call = rules.rule(" | ".join(calls.section() for calls in writers))
    last = f"({call} | {plain})"
    begun = entry in ("reasoning", "content")
    closes = [mark for mark in ("<|end|>", "<|return|>") if not rules.ends_answer(mark)]
    if not closes:
        return grammar(text if begun else last)
    closed = rules.rule(" | ".join(map(rules.literal, closes)))
    ended = f"{plain} {closed}"
    if parallel and not is_only:
        ended = f"({ended} | {call})"
    begins = rules.literal("<|start|>assistant")
    messages = rules.rule(f"{rules.rule(f'{ended} {begins}')}* {last} {closed}?")
    if begun:
        messages = rules.rule(f"{text} ({closed} {begins} {messages})?")
    return grammar(messages)


def _marks(output: OutputFormat) -> list[str]:
    """Not the words that only count in headers."""
    return [mark for mark in output.marks if mark.startswith("<|")]
