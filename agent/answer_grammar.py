"""What a whole answer has to follow: reasoning, calls of tools, and what the client wants besides.

Here it is decided what may follow what, from the marks that the model's family uses;
``agent.section_rules``, ``agent.harmony_rules`` and ``agent.call_rules`` write the parts.
No I/O, no clock.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from agent.call_rules import CallRules, notation_of
from agent.engine import AnswerGrammar, Guidance
from agent.formats import OutputFormat
from agent.harmony_rules import final_message, free_messages, lead_to_message
from agent.json_schema import SchemaError
from agent.lark import to_lark
from agent.lark_rules import Rules
from agent.offered_tools import OfferedTool, has_strict_tools, offered_tools, tools_as_strict
from agent.section_rules import free_text, lead_to_answer, opening
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Constraint, Conversation, Gbnf, JsonSchema


def answer_grammar(
    output: OutputFormat,
    conversation: Conversation,
    *,
    prompt: str,
    constraint: Constraint | None,
    tokens: Mapping[str, TokenId],
    ends: Collection[str],
) -> Guidance | None:
    """1. The answer must call tools: reasoning, and calls, in which schemas are followed where they
    can be, also those of tools that are not strict. 2. The client wants something: reasoning,
    and this, or calls in its place. 3. A tool is strict: text, in which calls follow their schemas.
    4. Else it is free: None.

    ``prompt``: as rendered; its end may have opened a section already. ``tokens``: the marks of the
    format, and parts of them, that are control tokens of the model. ``ends``: those of them that end
    an answer.

    Raises ``RequestError``: ``INVALID_REQUEST``, ``NOT_SUPPORTED`` or ``INVALID_TOOL_SCHEMA`` if it
    cannot be as asked, ``INVALID_SCHEMA`` or ``INVALID_GRAMMAR`` for the constraint.
    """
    entry = output.entry(prompt)
    if conversation.must_call:  # 1
        if constraint is not None:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                "an answer that must call a tool cannot follow a grammar or a schema as well",
            )
        return _forced(tokens, ends, output, conversation, entry)
    if constraint is not None and not conversation.constrains_content:
        return constraint
    rules = Rules(tokens, ends)
    if constraint is not None:  # 2
        if conversation.tools or _is_led_to(output, entry, reasons=conversation.enable_thinking):
            return _wanted(rules, output, conversation, entry, constraint)
        return constraint
    if has_strict_tools(conversation):  # 3
        return _free(rules, output, conversation, entry)
    return None  # 4


def _forced(
    tokens: Mapping[str, TokenId],
    ends: Collection[str],
    output: OutputFormat,
    conversation: Conversation,
    entry: str | None,
) -> AnswerGrammar:
    tools = offered_tools(conversation)
    missing = [name for name in conversation.must_call if name not in tools]
    if missing:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"the answer must call {missing[0]!r}, but there is no such tool",
        )
    notation = notation_of(output)
    if notation is None:
        raise RequestError(
            ErrorCode.NOT_SUPPORTED,
            "calls of tools cannot be forced: how this model writes them "
            f"({output.name}) cannot be put into a grammar",
        )

    def written(tools: Mapping[str, OfferedTool]) -> AnswerGrammar:
        rules = Rules(tokens, ends)
        called = {name: tools[name] for name in conversation.must_call}
        calls = CallRules(rules, output, notation, called, parallel=conversation.parallel_calls)
        lead = _lead(rules, output, entry, reasons=conversation.enable_thinking)
        return calls.grammar(f"{lead} {calls.section()}")

    # Only a strict tool is promised to follow its schema; the others may have any.
    promised = tools_as_strict(conversation)
    if all(tools[name] == promised[name] for name in conversation.must_call):
        return written(tools)
    try:
        return replace(written(tools), otherwise=written(promised))
    except RequestError as error:
        if error.code is not ErrorCode.INVALID_TOOL_SCHEMA:
            raise
        return written(promised)


def _is_led_to(output: OutputFormat, entry: str | None, *, reasons: bool) -> bool:
    """Does anything stand before what the client wants: reasoning, or the header of a message?"""
    if output.has_channels:
        return entry != "content"
    return entry == "reasoning" or (reasons and entry is None and output.reasoning is not None)


def _lead(rules: Rules, output: OutputFormat, entry: str | None, *, reasons: bool) -> str:
    write = lead_to_message if output.has_channels else lead_to_answer
    return write(rules, output, entry, reasons=reasons)


def _wanted(
    rules: Rules,
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
                wanted = rules.json("", schema)
            except SchemaError as error:
                raise RequestError(code, f"the {noun} cannot be used: {error}") from error
        case Gbnf(text, root):
            code, noun, wanted = ErrorCode.INVALID_GRAMMAR, "grammar", "wanted"
            lines.append(to_lark(text, root, first=wanted))
    if output.has_channels:
        wanted = final_message(rules, wanted, is_json=isinstance(constraint, JsonSchema))
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
    rules: Rules, output: OutputFormat, conversation: Conversation
) -> CallRules | None:
    """Of what the client wants, the model may call a tool; None: it may not, or a call could not be
    told from what is wanted.
    """
    notation = notation_of(output)
    if not conversation.tools or notation is None:
        return None
    if not output.has_channels and opening(output, notation) is None:
        return None
    tools = tools_as_strict(conversation)
    return CallRules(rules, output, notation, tools, parallel=conversation.parallel_calls)


def _free(
    rules: Rules, output: OutputFormat, conversation: Conversation, entry: str | None
) -> AnswerGrammar | None:
    """None: it cannot be told where text ends and a call begins."""
    tools = tools_as_strict(conversation)
    parallel = conversation.parallel_calls
    if output.has_channels:
        return free_messages(rules, output, tools, entry, parallel=parallel)
    notation = notation_of(output)
    opens = None if notation is None else opening(output, notation)
    if notation is None or opens is None:
        return None
    calls = CallRules(rules, output, notation, tools, parallel=parallel)
    return calls.grammar(free_text(rules, output, calls, entry, opens=opens))
