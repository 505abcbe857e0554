"""What templates of several shapes take, found by trying them."""

from typing import Any

import pytest

from agent.history import HistoryForm, Ids, find_form, written
from agent.template import ChatTemplate
from common.errors import ErrorCode, RequestError
from common.messages import ChatMessage, Conversation, ToolCall

ROME = ToolCall("call_of_more_than_nine", "weather", '{"city": "Rome", "days": 3}')
CALLED = (
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", "", tool_calls=(ROME,)),
    ChatMessage("tool", "sunny", tool_call_id=ROME.call_id),
)

LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}CALL{% endfor %}{{ m.content or '' }}|{% endfor %}"


def render(call: str, messages: tuple[ChatMessage, ...] = CALLED, *, loop: str = LOOP) -> str:
    return ChatTemplate(loop.replace("CALL", call), {}).render(Conversation(messages))


VALUES = "{{ c.function.name }} {{ c.function.arguments | tojson }}"
TEXT = "{{ c.function.name + ' ' + c.function.arguments }}"
EITHER = (
    "{{ c.function.name }} {% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
)
TAGS = "{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}"
BARE = "{{ c.function.name }} {{ c.function.arguments }}"


@pytest.mark.parametrize("call", [VALUES, TEXT, EITHER, BARE])
def test_arguments_are_written_once_as_json_whatever_the_template_takes(call: str) -> None:
    assert render(call) == 'Weather?|weather {"city": "Rome", "days": 3}|sunny|'


def test_arguments_may_be_taken_apart() -> None:
    assert render(TAGS) == "Weather?|weather city=Rome days=3|sunny|"


def test_arguments_that_are_no_json_are_given_as_they_are() -> None:
    call = ToolCall("1", "weather", "in Rome", is_json=False)

    messages = (ChatMessage("assistant", "", tool_calls=(call,)),)
    assert render(EITHER, messages) == "weather in Rome|"
    with pytest.raises(RequestError) as caught:
        render(TAGS, messages)
    assert caught.value.code is ErrorCode.CHAT_TEMPLATE_ERROR


def test_a_template_may_want_calls_without_content() -> None:
    loop = (
        "{% for m in messages %}{% if m.content is none %}"
        "{% for c in m.tool_calls %}CALL{% endfor %}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
    )

    assert render(VALUES, loop=loop) == 'Weather?|weather {"city": "Rome", "days": 3}|sunny|'


def test_calls_without_content_have_an_empty_one_where_that_will_do() -> None:
    loop = LOOP.replace("m.content or ''", "m.content")

    assert render(VALUES, loop=loop) == 'Weather?|weather {"city": "Rome", "days": 3}|sunny|'


NINE = (
    "{% if c.id | length != 9 %}{{ raise_exception('nine, please') }}{% endif %}{{ c.id }} "
    + VALUES
)


def test_ids_become_short_where_others_are_refused() -> None:
    loop = LOOP.replace("{{ m.content", "{{ m.tool_call_id }}{{ m.content")

    first, call, result, _ = render(NINE, loop=loop).split("|")
    call_id = call.split()[0]
    assert (first, len(call_id), result) == ("Weather?", 9, f"{call_id}sunny")
    short = ToolCall("a1B2c3D4e", "clock", "{}")
    messages = (ChatMessage("assistant", "", tool_calls=(short,)),)
    assert render(NINE, messages) == "a1B2c3D4e clock {}|"


def test_ids_become_names_where_calls_have_no_other() -> None:
    loop = LOOP.replace("{{ m.content", "{{ m.tool_call_id }}{{ m.content")
    clock = ToolCall("x", "clock", "{}")
    messages = (*CALLED, ChatMessage("assistant", "", tool_calls=(clock,)))

    text = render("{{ c.id }} {{ c.function.arguments | tojson }}", messages, loop=loop)
    assert text == (
        'Weather?|functions.weather:0 {"city": "Rome", "days": 3}|functions.weather:0sunny|'
        "functions.clock:1 {}|"
    )


def test_kimi_numbers_its_calls_where_it_names_them_too() -> None:
    call = "{{ c.function.name }}{# <|tool_call_argument_begin|> #} {{ c.id }} {{ c.function.arguments | tojson }}"

    assert "weather functions.weather:0 {" in render(call)


def test_only_what_there_is_has_a_key() -> None:
    form = HistoryForm()

    assert written([ChatMessage("user", "Hi")], form) == [{"role": "user", "content": "Hi"}]
    assert written([ChatMessage("user", "Hi", name="Ann")], form) == [
        {"role": "user", "content": "Hi", "name": "Ann"}
    ]


def test_calls_have_the_usual_shape() -> None:
    _, calls, result = written(CALLED, HistoryForm())

    function = {"name": "weather", "arguments": {"city": "Rome", "days": 3}}
    assert calls == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": ROME.call_id, "type": "function", "function": function}],
    }
    assert result == {
        "role": "tool", "content": "sunny", "name": "weather", "tool_call_id": ROME.call_id,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("{{ m.reasoning_content }}{{ m.reasoning }}", "reasoning_content"),
        ("{{ m.reasoning }}", "reasoning"),
        ("{% if 'thinking' in m %}{% endif %}", "thinking"),
        ("{{ enable_thinking }}", "reasoning_content"),
    ],
)
def test_reasoning_has_the_name_that_the_template_knows(source: str, key: str) -> None:
    message = ChatMessage("assistant", "4", reasoning="2 + 2")

    form = find_form(source, lambda messages, tools: "")
    assert written([message], form) == [{"role": "assistant", "content": "4", key: "2 + 2"}]


def test_reasoning_is_left_out_where_it_is_refused_beside_content() -> None:
    loop = LOOP.replace(
        "{{ m.content",
        "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
        "{{ m.thinking }}{{ m.content",
    )

    def said(content: str) -> str:
        message = ChatMessage("assistant", content, reasoning="hm", tool_calls=(ROME,))
        return render(
            "{{ c.function.name }}{{ c.function.arguments | tojson }}", (message,), loop=loop
        )

    assert said("").endswith("}hm|")
    assert said("so").endswith("}so|")


def test_a_template_that_takes_nothing_gets_the_usual_form() -> None:
    def refuse(messages: Any, tools: Any) -> str:
        raise RequestError(ErrorCode.CHAT_TEMPLATE_ERROR, "never")

    assert find_form("tool_calls", refuse) == HistoryForm()
    assert find_form("tool_calls", refuse).ids is Ids.AS_GIVEN
