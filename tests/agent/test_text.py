"""What may be shown of a stream of bytes, and when."""

from hypothesis import given
from hypothesis import strategies as st

from agent.text import TextStream


def feed(stream: TextStream, data: bytes, sizes: list[int]) -> list[str]:
    """Cut ``data`` into pieces of these sizes, again and again; feed them; flush."""
    shown: list[str] = []
    at = n = 0
    while at < len(data) and not stream.stopped:
        size = sizes[n % len(sizes)]
        shown.append(stream.feed(data[at : at + size]))
        at, n = at + size, n + 1
    return [*shown, stream.flush()]


def test_a_character_is_shown_when_it_is_whole() -> None:
    stream = TextStream()

    assert [stream.feed(bytes([byte])) for byte in "é!".encode()] == ["", "é", "!"]


def test_an_unfinished_character_shows_as_a_replacement_at_the_end() -> None:
    stream = TextStream()

    assert stream.feed("é".encode()[:1]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_text_and_what_follows_is_never_shown() -> None:
    stream = TextStream(["END"])

    assert stream.feed(b"one E") == "one "
    assert stream.feed(b"NDing") == ""
    assert stream.stopped
    assert stream.flush() == ""


def test_what_only_looked_like_a_stop_text_is_shown_after_all() -> None:
    stream = TextStream(["END"])

    assert [stream.feed(b"EN"), stream.feed(b"ERGY E"), stream.flush()] == ["", "ENERGY ", "E"]
    assert not stream.stopped


def test_the_earliest_of_several_stop_texts_counts() -> None:
    stream = TextStream(["second", "first"])

    assert stream.feed(b"a first, a second") == "a "


@given(st.text(), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_whole_characters_come_out_however_bytes_are_cut(text: str, sizes: list[int]) -> None:
    shown = feed(TextStream(), text.encode(errors="replace"), sizes)

    assert "".join(shown) == text.encode(errors="replace").decode()


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_stop_texts_cut_the_text_as_if_it_had_come_at_once(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    shown = "".join(feed(TextStream(stop), text.encode(), sizes))

    assert not any(s in shown for s in stop)
    assert text.startswith(shown)
    if not any(s in text for s in stop):
        assert shown == text
