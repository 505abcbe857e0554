"""What others say cannot steer the terminal."""

import io

import pytest
from rich.console import Console

from deploy.terminal import LINE_BREAKS, bar, cell, one_line, plain, seconds, size


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("agent-1", "agent-1"),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        ("a\x9b31mb", "a\ufffd31mb"),
        ("a\nb\tc\rd", "a\ufffdb\ufffdc\ufffdd"),
        ("abc\u202edef", "abc\ufffddef"),
        ("a\u2028b", "a\ufffdb"),
        ("half \ud800", "half \ufffd"),
        (
            "Müller \N{FACE WITH TEARS OF JOY} 漢字 é\u00a0!",
            "Müller \N{FACE WITH TEARS OF JOY} 漢字 é\u00a0!",
        ),
    ],
)
def test_control_characters_are_taken_out_and_all_that_can_be_read_stays(
    text: str, shown: str
) -> None:
    assert plain(text) == shown


def test_an_answer_keeps_its_lines() -> None:
    assert plain("a\n\tb\x07", keep=LINE_BREAKS) == "a\n\tb\ufffd"
    assert one_line("a\n  b\x1b ") == "a b\ufffd"


def test_a_name_is_no_markup() -> None:
    console = Console(file=io.StringIO(), width=40)

    console.print(cell("[red]agent[/red]"))

    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "[red]agent[/red]\n"


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, ""), (0.123, "0.12 s"), (3.44, "3.4 s"), (65, "65 s"), (600, "10 min"), (7500, "2 h")],
)
def test_durations_are_short(value: float | None, words: str) -> None:
    assert seconds(value) == words


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1500, "2 kB"), (105_000_000, "105 MB"), (2.5e9, "2.5 GB")]
)
def test_sizes_are_short(count: float, words: str) -> None:
    assert size(count) == words


@pytest.mark.parametrize(
    ("value", "total", "boxes"),
    [(0, 0, ""), (1, 4, "■□□□"), (4, 4, "■■■■"), (1, 64, "■□□□□□□□"), (65, 64, "■■■■■■■■")],
)
def test_a_bar_has_a_box_for_each_slot_as_far_as_there_is_room(
    value: int, total: int, boxes: str
) -> None:
    assert bar(value, total, width=8).plain == boxes
