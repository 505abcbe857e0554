"""``headrace chat``: ask a served model, once or in turns. Ctrl-C stops an answer: to go away is a cancel."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.text import Text

from common.errors import HeadraceError
from deploy.management import TIMEOUT, Place
from deploy.terminal import LINE_BREAKS, one_line, plain, seconds

SILENCE = 120.0
"""Seconds without a word, or one of the comments that come while a request waits."""

DIM, NORMAL = "\x1b[2m", "\x1b[0m"

HELP = "/new begins a new conversation, /quit ends, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    place: Place
    model: str | None = None
    """None: any that is served."""
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    think: bool = False

    @property
    def beginning(self) -> list[dict[str, str]]:
        """Of each conversation."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        told = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "reasoning_effort": None if self.think else "none",
        }
        return {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{key: value for key, value in told.items() if value is not None},
        }


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    choices: tuple[_Choice, ...] = ()
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


_chunks = msgspec.json.Decoder(_Chunk)

Show = Callable[[str, str], None]
"""Takes a piece of the thoughts, and one of the answer; one of them is empty."""


@dataclass(slots=True)
class Answer:
    """What has been read of it. No I/O here."""

    id: str | None = None
    model: str | None = None
    content: str = ""
    thoughts: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None

    def take(self, line: bytes, show: Show) -> None:
        """A line of the stream. Raises ``HeadraceError`` if it says that the request failed."""
        data = line.removeprefix(b"data:").strip()
        if data == line.strip() or data == b"[DONE]":  # a comment, or the end
            return
        try:
            chunk = _chunks.decode(data)
        except msgspec.DecodeError as error:
            raise HeadraceError(f"the answer cannot be read: {error}") from error
        if chunk.error is not None:
            raise HeadraceError(one_line(str(chunk.error.get("message", "it failed"))))
        self.id = chunk.id or self.id
        self.model = chunk.model or self.model
        self.usage = chunk.usage or self.usage
        self.timings = chunk.timings or self.timings
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            thought, word = choice.delta.reasoning_content or "", choice.delta.content or ""
            self.thoughts += thought
            self.content += word
            if thought:
                show(thought, "")
            if word:
                show("", word)

    @property
    def json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "model": self.model,
            "answer": self.content,
            "thoughts": self.thoughts,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "timings": self.timings,
        }

    @property
    def summary(self) -> str:
        """How long it took, in a few words."""
        told = self.timings or {}
        parts = [f"{(self.usage or {}).get('completion_tokens', 0)} tokens"]
        if isinstance(rate := told.get("predicted_per_second"), int | float):
            parts.append(f"{rate:.1f} tokens/s")
        waited = [told.get(key) for key in ("queue_ms", "prompt_ms")]
        if all(isinstance(each, int | float) for each in waited):
            parts.append(f"first after {seconds(sum(each or 0 for each in waited) / 1000)}")
        if self.finish_reason == "length":
            parts.append("cut off at the limit of tokens")
        return ", ".join(parts)


def ask(
    settings: ChatSettings, messages: Sequence[Mapping[str, str]], answer: Answer, show: Show
) -> None:
    """Read all of an answer into ``answer``. Raises ``HeadraceError``. If it is interrupted, the request is
    cancelled.
    """
    place = settings.place
    timeout = httpx.Timeout(TIMEOUT, read=SILENCE)
    try:
        with (
            httpx.Client(**place.options, timeout=timeout) as client,
            client.stream("POST", "/v1/chat/completions", json=settings.body(messages)) as response,
        ):
            if not response.is_success:
                response.read()
                raise place.refusal(response.status_code, _message(response))
            for line in _lines(response.iter_bytes()):
                answer.take(line, show)
    except httpx.HTTPError as error:
        raise place.silence(error) from error
    if answer.finish_reason is None:
        raise HeadraceError("the answer was cut off")


def _lines(parts: Iterable[bytes]) -> Iterable[bytes]:
    """Cut at line feeds only: JSON may hold the other characters that Unicode calls line ends."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    yield rest


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text


def answer_once(settings: ChatSettings, question: str, console: Console, *, as_json: bool) -> None:
    """Raises ``HeadraceError``."""
    answer = Answer()
    shown = Shown(console)
    messages = [*settings.beginning, {"role": "user", "content": question}]
    show = _nothing if as_json else shown.show
    try:
        ask(settings, messages, answer, show)
    finally:
        if not as_json:
            shown.end()
    if as_json:
        print(json.dumps(answer.json))  # noqa: T201


def _nothing(_thought: str, _word: str) -> None:
    pass


def converse(settings: ChatSettings, console: Console) -> None:
    """Until ``/quit``, the end of the input, or Ctrl-C at the prompt."""
    # With it lines can be edited, and called back.
    import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]

    console.print(Text(HELP, style="dim"))
    messages = settings.beginning
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        match question:
            case "":
                continue
            case "/quit":
                return
            case "/new":
                messages = settings.beginning
                console.print(Text("a new conversation", style="dim"))
                continue
            case _ if question.startswith("/") and " " not in question:
                console.print(Text(HELP, style="dim"))
                continue
            case _:
                pass
        messages.append({"role": "user", "content": question})
        content = _turn(settings, messages, console)
        if content:
            messages.append({"role": "assistant", "content": content})
        else:
            messages.pop()  # as if it had not been asked


def _turn(settings: ChatSettings, messages: Sequence[Mapping[str, str]], console: Console) -> str:
    """What was answered, perhaps only a part or nothing."""
    answer = Answer()
    shown = Shown(console)
    try:
        ask(settings, messages, answer, shown.show)
    except KeyboardInterrupt:
        shown.end()
        console.print(Text("stopped", style="dim"))
    except HeadraceError as error:
        shown.end()
        print(f"headrace: {one_line(str(error))}", file=sys.stderr)  # noqa: T201
    else:
        shown.end()
        console.print(Text(answer.summary, style="dim"))
    return answer.content


class Shown:
    """An answer on the terminal, as it comes. Elsewhere its thoughts are left out."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._thinks = False
        self._is_at_start = True
        """Of a line."""

    def show(self, thought: str, word: str) -> None:
        if thought and not self._console.is_terminal:
            return
        if self._thinks and word:
            word = "\n" + word.lstrip("\n") if self._is_at_start else "\n\n" + word.lstrip("\n")
        self._thinks = bool(thought)
        text = plain((thought or word).replace("\r", ""), keep=LINE_BREAKS)
        if not text:
            return
        # Written as it is: rich makes blanks of tabs, counted from where a piece begins.
        self._console.file.write(f"{DIM}{text}{NORMAL}" if thought else text)
        self._console.file.flush()
        self._is_at_start = text.endswith("\n")

    def end(self) -> None:
        if not self._is_at_start:
            self._console.file.write("\n")
            self._is_at_start = True
