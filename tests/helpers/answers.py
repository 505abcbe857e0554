"""Answers, as requests make them and as tests read them."""

from collections.abc import Sequence

from agent.formats import recognize
from agent.output import OutputStream
from common.messages import Finished, Segment, TokenClass, TokenGenerated


def plain_output(stop: Sequence[str] = ()) -> OutputStream:
    """Of a model that marks nothing."""
    parser = recognize(None).parser(prompt="", tools=None, has_tools=False)
    return OutputStream(parser, stop=stop)


def content(text: str) -> tuple[Segment, ...]:
    """Ordinary text of an answer."""
    return (Segment(TokenClass.CONTENT, text),) if text else ()


def text_of(event: TokenGenerated | Finished) -> str:
    return "".join(segment.text for segment in event.segments)
