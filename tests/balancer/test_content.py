import re
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.content import MOST_IMAGES, marker_beside, read_image, read_images
from common.errors import ErrorCode, RequestError
from common.messages import IMAGE_MARKER


@given(st.binary())
def test_an_image_is_what_its_data_uri_carries(data: bytes) -> None:
    assert read_image(f"data:image/png;base64,{b64encode(data).decode()}") == data


@pytest.mark.parametrize("head", ["data:;base64", "DATA:image/JPEG;Base64", "data:a/b;c=d;base64"])
def test_the_kinds_of_data_uris_are_read(head: str) -> None:
    assert read_image(f"{head},eHl6") == b"xyz"


@given(st.text() | st.text().map("data:{}".format) | st.text().map("data:x;base64,{}".format))
def test_no_url_is_more_than_a_refusal(url: str) -> None:
    try:
        outcome = read_image(url)
    except RequestError as error:
        outcome = error.code

    assert isinstance(outcome, bytes) or outcome is ErrorCode.IMAGE_DECODING_FAILED


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://host/a.png", "remote images are not fetched"),
        ("file:///etc/passwd", "data URI"),
        ("", "data URI"),
        ("AAAA", "data URI"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png,AAAA", "not in base64"),
        ("data:image/png;base64,A", "broken"),
        ("data:image/png;base64,AA=A", "broken"),
        ("data:image/png;base64,A A=", "broken"),
        ("data:image/png;base64,AA AA", "broken"),
        ("data:image/png;base64,AA%AA", "broken"),
        ("data:image/png;base64,é", "broken"),
    ],
)
def test_what_is_no_image_in_a_data_uri_is_refused_without_repeating_it(url: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        read_image(url)

    assert caught.value.code is ErrorCode.IMAGE_DECODING_FAILED
    assert not url or url not in caught.value.message


def test_images_are_read_in_their_order_as_many_as_there_may_be() -> None:
    urls = [f"data:;base64,{b64encode(bytes([n])).decode()}" for n in range(MOST_IMAGES)]

    assert read_images(iter(urls)) == tuple(bytes([n]) for n in range(MOST_IMAGES))
    assert read_images([]) == ()


def test_too_many_images_are_refused_before_any_is_read() -> None:
    with pytest.raises(RequestError) as caught:
        read_images(["not read"] * (MOST_IMAGES + 1))

    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_one_image_that_cannot_be_read_refuses_them_all() -> None:
    with pytest.raises(RequestError) as caught:
        read_images(["data:;base64,eHl6", "https://host/a.png"])

    assert caught.value.code is ErrorCode.IMAGE_DECODING_FAILED


def test_the_usual_mark_stands_for_images_where_nobody_wrote_it() -> None:
    assert marker_beside([]) == IMAGE_MARKER
    assert marker_beside(iter(["a", "<__media", "__>"])) == IMAGE_MARKER


def test_another_mark_is_not_to_be_guessed_from_the_text() -> None:
    first = marker_beside([IMAGE_MARKER])
    second = marker_beside([IMAGE_MARKER, first])

    assert re.fullmatch(r"<__media_[0-9a-f]{64}__>", first)
    assert len({IMAGE_MARKER, first, second}) == 3
    assert marker_beside(iter([IMAGE_MARKER, first])) == second


@given(
    st.lists(st.text() | st.just(IMAGE_MARKER) | st.from_regex(r"<__media_[0-9]*__>"), max_size=4)
)
def test_a_mark_is_in_none_of_the_texts(texts: list[str]) -> None:
    marker = marker_beside(texts)

    assert not any(marker in text for text in texts)
