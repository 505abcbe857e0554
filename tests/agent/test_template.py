import pytest

from agent import template
from agent.template import ChatTemplate
from common.errors import ErrorCode, RequestError
from common.messages import ChatMessage, Conversation

TEXTS = {"bos_token": "<s>", "eos_token": "</s>", "nl_token": "\n"}
HI = Conversation((ChatMessage("user", "Hi"),), enable_thinking=True)


def render(source: str, conversation: Conversation = HI) -> str:
    return ChatTemplate(source, TEXTS).render(conversation)


def test_a_template_sees_the_published_variables() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m['content'] }}]{% endfor %}"
        "{% if tools %}tools{% endif %}{{ enable_thinking }}{{ add_generation_prompt }}{{ eos_token }}"
    )

    assert render(source) == "<s>[user:Hi]TrueTrue</s>"


def test_tojson_is_json_and_not_html() -> None:
    conversation = Conversation(HI.messages, tools=({"name": "<é&>"},))

    assert render("{{ tools | tojson }}", conversation) == '[{"name": "<é&>"}]'


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")

    assert caught.value.code is ErrorCode.CHAT_TEMPLATE_ERROR


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute.of_it }}",
        "{{ 'a' + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set x = 10 %}{{ x ** 1000000000 }}",
        "{{ 'x' * 1000000000 }}{{ 1000000000 * [1] }}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set x = namespace(n=10) %}{% for i in range(60) %}{% set x.n = x.n * x.n %}{% endfor %}",
    ],
)
def test_a_template_that_breaks_out_or_breaks_is_an_error_of_its_request(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)

    assert caught.value.code is ErrorCode.CHAT_TEMPLATE_ERROR


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{% for i in x %}" * 25 + "{% endfor %}" * 25,  # too deep for Python
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
    ids=["syntax", "nested", "parentheses"],
)
def test_a_template_that_does_not_compile_says_so(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, TEXTS)


def test_nothing_is_computed_before_it_is_rendered() -> None:
    ChatTemplate("{{ 9 ** (9 ** 9) }}", TEXTS)


def test_arithmetic_within_reason_works() -> None:
    assert render("{{ 2 ** 10 }} {{ '-' * 3 }} {{ 3 * 4 }} {{ 1.5 ** 2 }}") == "1024 --- 12 2.25"


def test_a_template_may_tell_the_time() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", TEXTS, strftime=lambda form: f"<{form}>")

    assert template.render(Conversation((ChatMessage("user", "Hi"),))) == "<%Y>"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-31")


def test_what_is_marked_for_training_is_rendered_as_it_stands() -> None:
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"


def test_json_is_written_as_a_template_asks() -> None:
    value = "{'b': 'é', 'a': 1}"

    assert render(f"{{{{ {value} | tojson }}}}") == '{"b": "é", "a": 1}'
    assert render(f"{{{{ {value} | tojson(ensure_ascii=True) }}}}") == '{"b": "\\u00e9", "a": 1}'
    compact = "tojson(separators=(',', ':'), sort_keys=true)"
    assert render(f"{{{{ {value} | {compact} }}}}") == '{"a":1,"b":"é"}'


def test_without_tools_there_is_no_such_variable() -> None:
    source = "{% if tools is defined %}no{% endif %}{% for tool in tools %}no{% endfor %}yes"

    assert render(source) == "yes"


def test_template_arguments_are_variables() -> None:
    source = "{{ effort }} {{ enable_thinking }}"

    conversation = Conversation(HI.messages, template_arguments={"effort": "high"})
    assert render(source, conversation) == "high False"
    conversation = Conversation(HI.messages, template_arguments={"enable_thinking": True})
    assert render(source, conversation) == " True"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "range", "add_generation_prompt", "bos_token", "raise_exception",
     "strftime_now", "namespace"],
)  # fmt: skip
def test_a_template_argument_must_not_take_the_place_of_something_else(name: str) -> None:
    conversation = Conversation(HI.messages, template_arguments={name: "x", "fine": 1})

    with pytest.raises(RequestError, match=f"called {name}$") as caught:
        render("", conversation)

    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_it_is_found_out_whether_system_messages_come_through() -> None:
    def takes_system(source: str) -> bool:
        return ChatTemplate(source, TEXTS).takes_system

    assert takes_system("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not takes_system("{{ messages[1].content }}")
    assert not takes_system("{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}")


def test_what_filters_make_of_lists_is_a_list_in_json() -> None:
    assert render("{{ [{'a': 1}, {'a': 2}] | map(attribute='a') | tojson }}") == "[1, 2]"
    with pytest.raises(RequestError, match="Undefined"):
        render("{{ nothing | tojson }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in x|map('upper') %}{% for b in x|map('upper') %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for a in x %}{% for b in x %}{{ b.upper() }}{% endfor %}{% endfor %}",
    ],
)
def test_loops_in_loops_and_calls_in_calls_come_to_an_end(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "MOST_STEPS", 20_000)

    with pytest.raises(RequestError, match="more than 20000 steps"):
        render(f"{{% set x = 'x' * 5000 %}}{source}")


def test_loops_are_what_they_were_although_they_are_counted() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{% else %}none{% endfor %}"
        "{% for c in 'ab'|map('upper') if c != 'B' %}{{ c }}{{ loop.first }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{% for n in [] %}{% else %}empty{% endfor %}"
        "{% for n in [[1], 2] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}"
    )
    messages = tuple(ChatMessage("user", text) for text in "xyz")

    text = ChatTemplate(source, {}).render(Conversation(messages))

    assert text == "1/3,2/3,3/3ATruea1empty12"
