import pytest

from balancer.keys import KeysError, read_keys

ONE, OTHER = "a-key-of-some-length", "another-key-of-some-length"
FILE = f"# of the web shop\n{ONE}\n\n  {OTHER}  \n"


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (f"Bearer {ONE}", True),
        (f"bearer {OTHER}", True),
        (f"Basic {ONE}", False),
        (f"Bearer {ONE[:-1]}", False),
        (f"Bearer {ONE}x", False),
        ("Bearer", False),
        ("Bearer # of the web shop", False),
        (ONE, False),
        ("", False),
        (None, False),
    ],
)
def test_only_who_has_a_key_is_allowed(header: str | None, allowed: bool) -> None:
    assert read_keys(FILE).allow(header) is allowed


@pytest.mark.parametrize("text", ["", "\n# none\n"])
def test_a_file_without_keys_is_no_way_to_let_everybody_in(text: str) -> None:
    with pytest.raises(KeysError, match="no key"):
        read_keys(text)


@pytest.mark.parametrize("bad", ["short", "with a space inside it", "not-äscii-but-long-enough"])
def test_a_key_that_cannot_be_sent_or_is_guessed_is_refused_by_its_line(bad: str) -> None:
    with pytest.raises(KeysError) as caught:
        read_keys(f"{ONE}\n{bad}\n")

    assert "line 2" in str(caught.value)
    assert bad not in str(caught.value)
