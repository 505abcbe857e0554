import pytest

from deploy.bench_report import PictureFormat
from deploy.fleet_picture import Series, to_picture, to_text

SOME = Series([10, 20, 30, 50], [0, 2, 1, 1], [3, 0, 0, 0], [0, 0, 20, 40])


def test_a_line_for_each_thing_that_changes() -> None:
    assert to_text(SOME, title="f", width=4) == "\n".join(
        [
            "f",
            "agents   |██▄▄| at most 2",
            "waiting  |█   | at most 3",
            "served/s | █ █| at most 2",
        ]
    )


def test_what_is_little_can_still_be_seen() -> None:
    line = to_text(Series([0, 1, 2], [1, 1000, 1000], [0] * 3, [0] * 3), title="f", width=2)

    assert "▁" not in line.splitlines()[1]
    low = Series([0, 1, 2, 3, 4], [1, 1, 1, 1000, 1000], [0] * 5, [0] * 5)
    assert to_text(low, title="f", width=4).splitlines()[1] == "agents   |▁▁██| at most 1e+03"


def test_a_short_time_of_many_agents_is_not_lost() -> None:
    series = Series([], [], [], [])
    for second in range(1000):
        series.add(second, agents=5 if second == 333 else 1, waiting=0, served=second)

    assert series.highest(series.agents, 10) == [1, 1, 1, 5, 1, 1, 1, 1, 1, 1]
    assert series.rates(2) == ([0.0, 499.5], [pytest.approx(1.0, rel=0.01)] * 2)


@pytest.mark.parametrize(
    "series",
    [Series([], [], [], []), Series([5], [1], [0], [0]), Series([5, 5], [1, 2], [0, 0], [0, 1])],
)
def test_what_has_no_length_can_be_drawn(series: Series) -> None:
    assert to_text(series, title="f").startswith("f\nagents")
    assert to_picture({"f": series}, title="t", format=PictureFormat.SVG)


@pytest.mark.parametrize(
    ("format", "beginning"), [(PictureFormat.PNG, b"\x89PNG\r\n"), (PictureFormat.SVG, b"<?xml")]
)
def test_some_fleets_are_drawn_beside_each_other(format: PictureFormat, beginning: bytes) -> None:
    data = to_picture({"f": SOME, "g": SOME}, title="two", format=format)

    assert data.startswith(beginning)
    assert to_picture({}, title="none", format=format).startswith(beginning)
