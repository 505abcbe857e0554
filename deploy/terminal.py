"""What may be written to a terminal, and how numbers look there. No I/O here.

Names, models' answers and messages come from others: what would steer the terminal is taken out.
"""

import unicodedata

from rich.text import Text

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

WIDE = 200
"""Characters of a line that is not for a terminal."""

LINE_BREAKS = frozenset("\n\t")

UNFIT = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode's categories: control characters, halves of characters, other line breaks."""

TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They turn the order of what is shown around, also of what follows."""


def plain(text: str, *, keep: frozenset[str] = frozenset()) -> str:
    """``keep``: control characters that are meant."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        REPLACEMENT
        if char not in keep and (char in TURNING or unicodedata.category(char) in UNFIT)
        else char
        for char in text
    )


def cell(text: str | None, style: str = "") -> Text:
    """For a table: on one line, nothing in it is markup."""
    return Text(plain(text or ""), style=style, no_wrap=True, overflow="ellipsis")


def one_line(text: str) -> str:
    """Of what may have several."""
    return plain(" ".join(text.split()))


def seconds(value: float | None) -> str:
    """Such as ``0.12 s``, ``3.4 s``, ``65 s``, ``5 min``, ``3 h``."""
    if value is None:
        return ""
    if value < 1:
        return f"{value:.2f} s"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def size(count: float) -> str:
    """Of bytes, such as ``1.2 GB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def part(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def bar(value: int, total: int, *, width: int) -> Text:
    """``value`` of ``total`` boxes, no wider than ``width``."""
    boxes = min(total, width)
    full = min(boxes, -(-value * boxes // total)) if total > 0 else 0
    return Text.assemble(("\u25a0" * full, "green"), ("\u25a1" * (boxes - full), "dim"))
