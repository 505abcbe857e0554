"""Files with images become pixels, by the library Pillow. Bounded, for they come from anybody.

No I/O here: a file is the bytes of it.
"""

import struct
import zlib
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, ImageOps

from common.errors import ErrorCode, RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Of animated ones the first picture is taken."""

MOST_PIXELS = 64 * 2**20
"""Of a file. A few bytes can claim to be more than fits into memory."""

LONGEST_RATIO = 200
"""Of the sides; projectors divide by the shorter one."""

ORIENTATION = 0x0112
"""The EXIF tag: how the camera was held."""

UPRIGHT = 1
LYING_DOWN = range(5, 9)
"""Its values with width and height exchanged."""

FROM_CAMERAS = ("JPEG", "MPO", "WEBP")
"""Where the tag is minded. In a PNG it may stand behind the pixels, all of which would be read."""

# Pillow's decoders say in these ways that a file is broken.
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError,
    AttributeError, MemoryError, struct.error, zlib.error,
    Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImageFile:
    """See ``agent.engine.Picture``."""

    data: bytes
    size: tuple[int, int]
    """Upright, and scaled down."""

    def pixels(self) -> bytes:
        try:
            with Image.open(BytesIO(self.data), formats=FORMATS) as image:
                image.draft("RGB", self.size)  # JPEG: read no more of it than is needed
                upright = image
                if _orientation(image) != UPRIGHT:
                    upright = ImageOps.exif_transpose(image)
                scaled = _opaque(upright).resize(
                    self.size, Image.Resampling.LANCZOS, reducing_gap=3.0
                )
                return scaled.tobytes()
        except _BROKEN as error:
            raise _unreadable(str(error)) from error


def open_image(data: bytes, *, longest_side: int) -> ImageFile:
    """Reads no more than the file's head. ``longest_side``: in pixels.

    Raises ``RequestError``.
    """
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if _orientation(image) in LYING_DOWN:
                width, height = height, width
    except _BROKEN as error:
        raise _unreadable(f"it must be one of {', '.join(FORMATS)}") from error
    if width * height > MOST_PIXELS:
        raise _unreadable(f"{width} x {height} pixels are more than {MOST_PIXELS}")
    if max(width, height) > LONGEST_RATIO * min(width, height):
        raise _unreadable(f"{width} x {height} pixels are too narrow")
    scale = min(1.0, longest_side / max(width, height))
    return ImageFile(data, (max(1, round(width * scale)), max(1, round(height * scale))))


def _orientation(image: Image.Image) -> int:
    return image.getexif().get(ORIENTATION, UPRIGHT) if image.format in FROM_CAMERAS else UPRIGHT


def _opaque(image: Image.Image) -> Image.Image:
    """Red, green and blue; what is transparent becomes white, as on paper."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    drawn = image.convert("RGBA")
    paper = Image.new("RGBA", drawn.size, "white")
    return Image.alpha_composite(paper, drawn).convert("RGB")


def _unreadable(why: str) -> RequestError:
    return RequestError(ErrorCode.IMAGE_DECODING_FAILED, f"an image cannot be read: {why}")
