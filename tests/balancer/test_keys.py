import base64

import pytest

from balancer.keys import (
    LONGEST_KEY,
    MOST_KEYS,
    OPEN,
    Keys,
    KeysError,
    Role,
    first_key,
    given_key,
    key_in_subprotocols,
    read_keys,
    write_keys,
)
from common.errors import ErrorCode, RequestError

SHOP, ALICE, BOX, BOTH = (
    "key-of-the-shop-1",
    "key-of-alice-0001",
    "key-of-a-gpu-box",
    "key-of-both-0001",
)
FILE = f"""# of the web shop
{SHOP}

  management   {ALICE}
agent {BOX}
inference {BOTH}
agent\t{BOTH}
"""
ALLOWED = {
    SHOP: {Role.INFERENCE},
    ALICE: {Role.MANAGEMENT},
    BOX: {Role.AGENT},
    BOTH: {Role.INFERENCE, Role.AGENT},
}


def refusal(keys: Keys, key: str | None, role: Role) -> ErrorCode | None:
    try:
        keys.check(key, role)
    except RequestError as error:
        return error.code
    return None


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("key", ALLOWED)
def test_a_key_allows_what_it_is_listed_for_and_nothing_else(key: str, role: Role) -> None:
    expected = None if role in ALLOWED[key] else ErrorCode.FORBIDDEN

    assert refusal(read_keys(FILE), key, role) is expected


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("key", [None, "", SHOP[:-1], f"{SHOP}x", "# of the web shop", "agent"])
def test_any_other_key_is_unknown(key: str | None, role: Role) -> None:
    assert refusal(read_keys(FILE), key, role) is ErrorCode.UNAUTHORIZED


def test_a_role_without_a_key_is_open_and_is_named() -> None:
    keys = read_keys(f"agent {BOX}")

    assert keys.missing == (Role.INFERENCE, Role.MANAGEMENT)
    assert refusal(keys, None, Role.MANAGEMENT) is None
    assert refusal(keys, None, Role.AGENT) is ErrorCode.UNAUTHORIZED
    assert OPEN.missing == tuple(Role)


def test_a_refusal_names_the_role_that_is_wanted_and_no_key() -> None:
    with pytest.raises(RequestError, match=r"^this key is not one for management$"):
        read_keys(FILE).check(SHOP, Role.MANAGEMENT)
    with pytest.raises(RequestError, match=r"^this key is not known$"):
        read_keys(FILE).check(SHOP[:-1], Role.MANAGEMENT)
    with pytest.raises(RequestError, match="a key for agent is needed"):
        read_keys(FILE).check(None, Role.AGENT)


@pytest.mark.parametrize(
    ("authorization", "api_key", "key"),
    [
        (f"Bearer {SHOP}", None, SHOP),
        (f"bearer   {SHOP} ", None, SHOP),
        (f"Bearer {SHOP}", ALICE, SHOP),
        (None, ALICE, ALICE),
        (f"Basic {SHOP}", f" {ALICE} ", ALICE),
        (f"Basic {SHOP}", None, None),
        (SHOP, None, None),
        ("Bearer", None, None),
        ("", "", None),
        (None, None, None),
    ],
)
def test_a_key_comes_in_one_of_two_headers(
    authorization: str | None, api_key: str | None, key: str | None
) -> None:
    assert given_key(authorization=authorization, api_key=api_key) == key


@pytest.mark.parametrize("text", ["", "\n# none\n"])
def test_a_file_without_keys_is_no_way_to_let_everybody_in(text: str) -> None:
    with pytest.raises(KeysError, match="no key"):
        read_keys(text)


@pytest.mark.parametrize(
    "bad",
    [
        "short",
        "agent short",
        "management",
        "with a space inside it",
        "owner of-everything-there-is",
        "Agent of-everything-there-is",
        "not-äscii-but-long-enough",
        "agent with-a-bell-\x07-inside-it",
        f"agent {'x' * (LONGEST_KEY + 1)}",
    ],
)
def test_a_key_that_cannot_be_used_is_refused_by_its_line(bad: str) -> None:
    with pytest.raises(KeysError) as caught:
        read_keys(f"# first\n{SHOP}\n{bad}\n")

    assert "line 3" in str(caught.value)
    assert bad.split()[-1] not in str(caught.value).replace("management", "", 1)


def test_more_keys_than_can_be_compared_are_refused() -> None:
    lines = [f"agent key-number-{n:06}" for n in range(MOST_KEYS + 1)]

    read_keys("\n".join(lines[:-1]))
    with pytest.raises(KeysError, match="more than"):
        read_keys("\n".join(lines))


def test_the_first_key_of_a_role_is_what_one_shows() -> None:
    assert [first_key(FILE, role) for role in Role] == [BOTH, ALICE, BOX]


def test_a_file_with_one_key_alone_is_that_of_whoever_reads_it() -> None:
    assert [first_key(f"# mine\n{BOX}\n", role) for role in Role] == [BOX] * 3


def test_who_finds_no_key_of_its_own_takes_no_other() -> None:
    with pytest.raises(KeysError, match="no key for agent"):
        first_key(f"{SHOP}\nmanagement {ALICE}\n", Role.AGENT)


def test_what_is_written_can_be_read() -> None:
    keys = [(Role.MANAGEMENT, ALICE), (Role.AGENT, BOX)]

    assert read_keys(write_keys(keys)).missing == (Role.INFERENCE,)
    assert first_key(write_keys(keys), Role.AGENT) == BOX


@pytest.mark.parametrize(
    ("offered", "key"),
    [
        (["headrace", "headrace.key.w6Q_"], "ä?"),
        ([], None),
        (["headrace"], None),
        (["headrace.key."], None),
        (["headrace.key.%%%"], None),
        (["headrace.key.gICA"], None),
    ],
)
def test_a_browser_shows_its_key_as_a_subprotocol(offered: list[str], key: str | None) -> None:
    assert key_in_subprotocols(offered) == key


def test_any_key_can_be_shown_so() -> None:
    shown = base64.urlsafe_b64encode(SHOP.encode()).decode().rstrip("=")

    assert key_in_subprotocols(["headrace", f"headrace.key.{shown}"]) == SHOP
