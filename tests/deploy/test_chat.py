"""The chat in a terminal, against the real balancer."""

import asyncio
import io
import json

import pytest
from commands import headrace, on_terminal
from played import Play
from rich.console import Console

from common.errors import ErrorCode, HeadraceError
from common.ids import RequestId, TokenId
from common.messages import (
    Cancel,
    Conversation,
    Failed,
    Generate,
    Segment,
    TokenClass,
    TokenGenerated,
)
from deploy.chat import Answer, Shown

CTRL_C = "\x03"
CTRL_D = "\x04"


@pytest.fixture
def port(address: str) -> str:
    return address.rpartition(":")[2]


def thought(request_id: RequestId, text: str) -> TokenGenerated:
    return TokenGenerated(request_id, TokenId(1), (Segment(TokenClass.REASONING, text),))


def history(asked: Generate) -> list[tuple[str, str]]:
    assert isinstance(asked.prompt, Conversation)
    return [(message.role, message.content) for message in asked.prompt.messages]


async def test_a_question_is_answered_once(port: str, play: Play) -> None:
    agent = play("one")
    asking = asyncio.create_task(headrace("chat", "--port", port, "Why?", "--system", "Be brief."))

    asked = await agent.asked()
    agent.say_token(asked.request_id, "Be")
    agent.say_token(asked.request_id, "cause.")
    agent.finish(asked.request_id)

    done = await asking
    assert (done.status, done.output, done.errors) == (0, "Because.\n", "")
    assert history(asked) == [("system", "Be brief."), ("user", "Why?")]
    assert isinstance(asked.prompt, Conversation)
    assert not asked.prompt.enable_thinking


async def test_standard_input_is_the_question_and_the_options_go_with_it(
    port: str, play: Play
) -> None:
    agent = play("one")
    options = ("--max-tokens", "7", "--temperature", "0.5", "--think", "--model", "played")
    asking = asyncio.create_task(headrace("chat", "--port", port, *options, given="Why?\n"))

    asked = await agent.asked()
    agent.say(thought(asked.request_id, "Hm."))
    agent.say_token(asked.request_id, "So.")
    agent.finish(asked.request_id)

    assert (await asking).output == "So.\n"  # what is read by a program is the answer alone
    assert history(asked) == [("user", "Why?")]
    assert (asked.max_tokens, asked.sampling.temperature) == (7, 0.5)
    assert isinstance(asked.prompt, Conversation)
    assert asked.prompt.enable_thinking


async def test_as_json_it_is_one_object_with_usage_and_timings(port: str, play: Play) -> None:
    agent = play("one")
    asking = asyncio.create_task(headrace("chat", "--port", port, "--json", "Why?"))

    asked = await agent.asked()
    agent.say(thought(asked.request_id, "Hm."))
    agent.say_token(asked.request_id, "So\x1b[2J.")
    agent.finish(asked.request_id)

    done = await asking
    told = json.loads(done.output)
    assert (told["answer"], told["thoughts"], told["finish_reason"]) == (
        "So\x1b[2J.",
        "Hm.",
        "stop",
    )
    assert told["usage"]["prompt_tokens"] == 5
    assert "predicted_per_second" in told["timings"]
    assert told["id"].startswith("chatcmpl-")
    assert len(done.output.splitlines()) == 1
    assert "\x1b" not in done.output


async def test_a_request_that_fails_is_one_line_and_status_1(port: str, play: Play) -> None:
    agent = play("one")
    asking = asyncio.create_task(headrace("chat", "--port", port, "Why?"))

    asked = await agent.asked()
    agent.say_token(asked.request_id, "Be")
    agent.say(Failed(asked.request_id, ErrorCode.DECODE_FAILED, "it\nbroke"))

    done = await asking
    assert (done.status, done.output, done.errors) == (1, "Be\n", "headrace: it broke\n")


async def test_what_is_refused_is_one_line(port: str, play: Play) -> None:
    play("one")

    done = await headrace("chat", "--port", port, "--model", "nope", "Why?")

    assert done.status == 1
    assert len(done.errors.splitlines()) == 1
    assert "nope" in done.errors


async def test_a_talk_remembers_what_was_said_until_a_new_one(port: str, play: Play) -> None:
    agent = play("one")
    async with on_terminal("chat", "--port", port) as terminal:
        await terminal.shows("> ")
        terminal.type("one\r")
        asked = await agent.asked()
        agent.say_token(asked.request_id, "first answer")
        agent.finish(asked.request_id)
        await terminal.shows("first answer")
        await terminal.shows("> ", times=2)
        terminal.type("two\r")
        again = await agent.asked()
        agent.finish(again.request_id)
        await terminal.shows("> ", times=3)
        terminal.type("/new\rthree\r")
        anew = await agent.asked()
        agent.finish(anew.request_id)
        await terminal.shows("> ", times=5)
        terminal.type("/quit\r")

        assert await terminal.ended() == 0
    assert history(again) == [("user", "one"), ("assistant", "first answer"), ("user", "two")]
    assert history(anew) == [("user", "three")]


async def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_chat(port: str, play: Play) -> None:
    agent = play("one")
    async with on_terminal("chat", "--port", port) as terminal:
        await terminal.shows("> ")
        terminal.type("one\r")
        asked = await agent.asked()
        agent.say_token(asked.request_id, "a long answer")
        await terminal.shows("a long answer")

        terminal.type(CTRL_C)

        assert await agent.next_frame() == Cancel(asked.request_id)
        agent.finish(asked.request_id)
        await terminal.shows("stopped")
        await terminal.shows("> ", times=2)
        ended = asyncio.create_task(terminal.ended())
        while not ended.done():
            # Python's line editor misses a signal that comes just before it waits for a key: then it
            # is pressed again, as people do.
            terminal.type(CTRL_C)
            await asyncio.wait({ended}, timeout=1)
        assert await ended == 0


async def test_thoughts_are_dim_and_apart_on_a_terminal(port: str, play: Play) -> None:
    agent = play("one")
    async with on_terminal("chat", "--port", port, "--think") as terminal:
        await terminal.shows("> ")
        terminal.type("one\r")
        asked = await agent.asked()
        agent.say(thought(asked.request_id, "Hm."))
        agent.say_token(asked.request_id, "\nSo.")
        agent.finish(asked.request_id)

        await terminal.shows("tokens/s")
        assert "\x1b[2mHm.\x1b[0m\r\n\r\nSo.\r\n" in terminal.written
        await terminal.shows("> ", times=2)
        terminal.type(CTRL_D)
        assert await terminal.ended() == 0


async def test_a_talk_needs_a_terminal_and_json_a_question(port: str) -> None:
    async with on_terminal("chat", "--port", port, "--json") as terminal:
        await terminal.shows("it needs a question")
        assert await terminal.ended() == 2


def test_an_answer_cannot_steer_the_terminal() -> None:
    output = io.StringIO()
    shown = Shown(Console(file=output, width=20))

    shown.show("", "a\x1b]0;title\x07\r\n\tb [red]c[/red] \u202e" + 30 * "x")
    shown.end()

    assert output.getvalue() == "a\ufffd]0;title\ufffd\n\tb [red]c[/red] \ufffd" + 30 * "x" + "\n"


def test_a_line_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(HeadraceError, match="cannot be read"):
        Answer().take(b"data: {", lambda _thought, _word: None)
