"""What clients put into messages beside text: images, and what stands for them. No I/O here."""

import hashlib
from base64 import b64decode
from collections.abc import Iterable

from common.errors import ErrorCode, RequestError
from common.messages import IMAGE_MARKER

MOST_IMAGES = 64
"""In a conversation."""


def read_image(url: str) -> bytes:
    """What a data URI carries. Raises ``RequestError``, and never repeats its content."""

    def refuse(why: str) -> RequestError:
        return RequestError(ErrorCode.IMAGE_DECODING_FAILED, f"an image cannot be read: {why}")

    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        raise refuse("its url must be a data URI; remote images are not fetched")
    head, comma, data = rest.partition(",")
    if not comma:
        raise refuse("its data URI has no comma")
    if not head.lower().endswith(";base64"):
        raise refuse("its data URI is not in base64")
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise refuse("its base64 is broken") from error


def read_images(urls: Iterable[str]) -> tuple[bytes, ...]:
    """Raises ``RequestError`` for one that cannot be read, or if there are too many."""
    given = tuple(urls)
    if len(given) > MOST_IMAGES:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"more than {MOST_IMAGES} images in a conversation"
        )
    return tuple(map(read_image, given))


def marker_beside(texts: Iterable[str]) -> str:
    """What stands for images, unlike anything that the client has written."""
    written = list(texts)
    if not any(IMAGE_MARKER in text for text in written):
        return IMAGE_MARKER
    # No text contains its own sum.
    digest = hashlib.sha256("".join(written).encode()).hexdigest()
    return f"<__media_{digest}__>"
