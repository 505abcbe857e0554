"""Files as clients send them: good ones, broken ones, and those that want to fill the memory."""

import struct
import zlib
from contextlib import suppress
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.images import LONGEST_RATIO, MOST_PIXELS, ORIENTATION, ImageFile, open_image
from common.errors import ErrorCode, RequestError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)


def drawn(
    color: Any = RED,
    size: tuple[int, int] = (8, 4),
    mode: str = "RGB",
    kind: str = "PNG",
    **options: Any,
) -> bytes:
    file = BytesIO()
    Image.new(mode, size, color).save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes, *, longest_side: int = 1024) -> ImageFile:
    return open_image(data, longest_side=longest_side)


def first_pixel(image: ImageFile) -> tuple[int, ...]:
    return tuple(image.pixels()[:3])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_usual_formats_are_read(kind: str) -> None:
    image = opened(drawn(kind=kind))

    assert image.size == (8, 4)
    assert len(image.pixels()) == 8 * 4 * 3
    assert first_pixel(image) == pytest.approx(RED, abs=3)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(RequestError, match="it must be one of PNG, JPEG") as caught:
        opened(drawn(kind=kind))

    assert caught.value.code is ErrorCode.IMAGE_DECODING_FAILED


@pytest.mark.parametrize(
    ("size", "scaled"),
    [
        ((100, 50), (100, 50)),
        ((2000, 1000), (1000, 500)),
        ((1000, 2000), (500, 1000)),
        ((1001, 1001), (1000, 1000)),
        ((2000, 10), (1000, 5)),
        ((3000, 15), (1000, 5)),
    ],
)
def test_what_is_too_large_is_scaled_down(size: tuple[int, int], scaled: tuple[int, int]) -> None:
    image = opened(drawn(size=size), longest_side=1000)

    assert image.size == scaled
    assert len(image.pixels()) == scaled[0] * scaled[1] * 3


def test_a_side_is_never_scaled_to_nothing() -> None:
    image = opened(drawn(size=(LONGEST_RATIO, 1)), longest_side=10)

    assert (image.size, len(image.pixels())) == ((10, 1), 30)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_a_photo_is_turned_as_the_camera_was_held(kind: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the first row is the right edge
    photo = Image.new("RGB", (64, 32), RED)
    photo.paste(BLUE, (0, 0, 32, 32))
    file = BytesIO()
    photo.save(file, kind, exif=exif)

    image = opened(file.getvalue())

    assert image.size == (32, 64)
    assert first_pixel(image) == pytest.approx(BLUE, abs=60)
    assert tuple(image.pixels()[-3:]) == pytest.approx(RED, abs=60)


@pytest.mark.parametrize(
    ("mode", "color", "seen"),
    [
        ("RGBA", (255, 0, 0, 0), WHITE),
        ("RGBA", (255, 0, 0, 255), RED),
        ("LA", (0, 0), WHITE),
        ("L", 255, WHITE),
        ("1", 1, WHITE),
        ("P", 0, (0, 0, 0)),
    ],
)
def test_every_mode_becomes_red_green_and_blue_on_white_paper(
    mode: str, color: Any, seen: tuple[int, int, int]
) -> None:
    assert first_pixel(opened(drawn(color, mode=mode))) == seen


def test_of_an_animation_the_first_picture_is_taken() -> None:
    file = BytesIO()
    second = Image.new("RGB", (8, 4), BLUE)
    Image.new("RGB", (8, 4), RED).save(file, "GIF", save_all=True, append_images=[second])

    assert first_pixel(opened(file.getvalue())) == RED


def claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is that large."""

    def part(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


@pytest.mark.parametrize("side", [8200, 10_000, 15_000, 60_000, 2**31 - 1])
def test_what_claims_to_be_enormous_is_refused_unread(side: int) -> None:
    assert side * side > MOST_PIXELS
    with pytest.raises(RequestError) as caught:
        opened(claiming(side, side))

    assert caught.value.code is ErrorCode.IMAGE_DECODING_FAILED


@pytest.mark.parametrize("size", [(LONGEST_RATIO + 1, 1), (1, LONGEST_RATIO + 1), (6001, 30)])
def test_what_is_too_narrow_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="too narrow"):
        opened(drawn(size=size))


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"GIF89a", b"BM", b"RIFF"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        opened(data)

    assert caught.value.code is ErrorCode.IMAGE_DECODING_FAILED


SAMPLES = [drawn(kind=kind, size=(40, 30)) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]


@given(
    sample=st.sampled_from(SAMPLES),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8),
    end=st.integers(0, 5000),
)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    sample: bytes, changes: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(sample)
    for at, value in changes:
        data[at % len(data)] = value
    with suppress(RequestError):
        image = opened(bytes(data[:end]), longest_side=64)
        assert len(image.pixels()) == image.size[0] * image.size[1] * 3
