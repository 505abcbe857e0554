"""Tools, calls and results in words."""

import json
from typing import Any

import msgspec

from agent.tool_prompt import has_tools, with_tools_in_words
from common.messages import ChatMessage, Conversation, ToolCall

CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The tïme.",
        "parameters": {"type": "object"},
        "strict": True,
    },
}
HI = ChatMessage("user", "Hi")
ROME = ToolCall("1", "weather", '{"city": "Rome"}')


def told(
    *messages: ChatMessage, takes_system: bool = True, **options: Any
) -> tuple[ChatMessage, ...]:
    options.setdefault("tools", (CLOCK,))
    conversation = Conversation(messages, **options)
    changed = with_tools_in_words(conversation, takes_system=takes_system)
    assert changed == msgspec.structs.replace(conversation, messages=changed.messages, tools=())
    return changed.messages


def test_tools_are_described_in_a_system_message_of_their_own() -> None:
    system, hi = told(HI)

    assert (system.role, hi) == ("system", HI)
    inside = system.content.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(inside) == {
        "name": "clock", "description": "The tïme.", "parameters": {"type": "object"},
    }  # fmt: skip
    assert "tïme" in inside
    assert "<tool_call>" in system.content


def test_tools_are_described_behind_what_the_system_says() -> None:
    system, _ = told(ChatMessage("system", "Be brief."), HI)

    assert system.content.startswith("Be brief.\n\nYou can use tools.")


def test_without_system_messages_the_user_tells_of_tools() -> None:
    (first,) = told(HI, takes_system=False)

    assert first.role == "user"
    assert first.content.startswith("You can use tools.")
    assert first.content.endswith("\n\nHi")
    assert [message.role for message in told(takes_system=False)] == ["user"]


def test_calls_are_what_the_assistant_said() -> None:
    odd = ToolCall("2", 'a"b', "in Rome", is_json=False)
    message = ChatMessage("assistant", "Well.", tool_calls=(ROME, odd))

    *_, said = told(HI, message)
    assert said == ChatMessage(
        "assistant",
        'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "a\\"b", "arguments": "in Rome"}\n</tool_call>',
    )


def test_results_in_a_row_are_one_message_of_the_user() -> None:
    sunny, rain = (ChatMessage("tool", text, tool_call_id="1") for text in ("sunny", "rain"))

    *_, results, hi = told(HI, sunny, rain, HI)
    assert results == ChatMessage(
        "user",
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>",
    )
    assert hi == HI
    assert told(sunny, tools=()) == (
        ChatMessage("user", "<tool_response>\nsunny\n</tool_response>"),
    )


def test_the_model_is_told_what_it_must_and_may_not() -> None:
    def description(**options: Any) -> str:
        return told(HI, **options)[0].content

    assert "If no tool is of use" in description()
    assert "call of the tool clock now" in description(must_call=("clock",))
    assert "one of these tools now, and with nothing else: clock, weather." in description(
        must_call=("clock", "weather")
    )
    assert "one call at most" in description(parallel_calls=False)
    assert "Several calls" in description()


def test_without_tools_in_it_a_conversation_is_left_alone() -> None:
    assert not has_tools(Conversation((HI,)))
    assert has_tools(Conversation((HI,), tools=(CLOCK,)))
    assert has_tools(Conversation((ChatMessage("assistant", "", tool_calls=(ROME,)),)))
    assert has_tools(Conversation((ChatMessage("tool", "sunny"),)))
