from pathlib import Path

import pytest

from balancer.keys import OPEN, KeysError, Role, read_keys
from deploy.access import (
    LARGEST_FILE,
    AccessError,
    check_reach,
    find_keys,
    fresh_keys,
    is_secret,
    keep_secret,
    open_keys,
    own_key,
)

CLIENT, OPERATOR, AGENT = "key-of-some-client", "key-of-an-operator", "key-of-some-agents"
ALL = f"inference {CLIENT}\nmanagement {OPERATOR}\nagent {AGENT}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(ALL)
    return path


def test_keys_are_in_a_file_or_else_in_the_environment(file: Path) -> None:
    other = {"HEADRACE_KEYS": f"agent {AGENT}"}

    assert find_keys(file, other) == ALL
    assert find_keys(None, other) == f"agent {AGENT}"
    assert find_keys(None, {}) is None
    assert open_keys(file, {}).missing == ()
    assert open_keys(None, other).missing == (Role.INFERENCE, Role.MANAGEMENT)
    assert open_keys(None, {}) is OPEN


def test_an_environment_that_says_nothing_lets_nobody_in() -> None:
    with pytest.raises(KeysError, match="HEADRACE_KEYS: there is no key in it"):
        find_keys(None, {"HEADRACE_KEYS": ""})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"agent short", "the key in line 1"),
        (b"\xff\xfe", "no text"),
        (b"#" * (LARGEST_FILE + 1), "too large"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_none_of_keys_is_named(
    tmp_path: Path, data: bytes | None, reason: str
) -> None:
    file = tmp_path / "bad"
    if data is not None:
        file.write_bytes(data)

    with pytest.raises(KeysError, match=rf"bad: .*{reason}"):
        find_keys(file, {})
    with pytest.raises(KeysError, match=rf"bad: .*{reason}"):
        own_key(Role.AGENT, file, {})


def test_one_shows_the_key_of_its_file_or_of_the_environment(file: Path) -> None:
    alone = {"HEADRACE_AGENT_KEY": "key-of-this-very-agent"}
    everything = {"HEADRACE_KEYS": ALL}

    assert own_key(Role.AGENT, file, alone) == AGENT
    assert own_key(Role.AGENT, None, alone | everything) == "key-of-this-very-agent"
    assert own_key(Role.AGENT, None, everything) == AGENT
    assert own_key(Role.MANAGEMENT, None, alone) is None
    assert own_key(Role.MANAGEMENT, None, {"HEADRACE_MANAGEMENT_KEY": OPERATOR}) == OPERATOR
    assert own_key(Role.MANAGEMENT, None, {"HEADRACE_KEYS": f"agent {AGENT}"}) is None
    assert own_key(Role.INFERENCE, None, {"HEADRACE_INFERENCE_KEY": CLIENT}) == CLIENT


def test_a_key_that_cannot_be_sent_is_refused_by_the_name_of_its_variable() -> None:
    with pytest.raises(KeysError, match="HEADRACE_AGENT_KEY: the key in line 1") as caught:
        own_key(Role.AGENT, None, {"HEADRACE_AGENT_KEY": "tiny"})

    assert "tiny" not in str(caught.value)


ANYBODY = "192.0.2.1"


@pytest.mark.parametrize(
    ("text", "client_host", "agent_host", "lacking"),
    [
        (None, "127.0.0.1", "::1", None),
        (None, "localhost", "127.0.0.5", None),
        (None, None, "127.0.0.1", None),
        (None, ANYBODY, "127.0.0.1", "inference, management"),
        (None, "127.0.0.1", ANYBODY, "agent"),
        (None, "127.0.0.1", "0.0.0.0", "agent"),
        (None, "127.0.0.1", "a-name", "agent"),
        (None, "", "127.0.0.1", "inference, management"),
        (CLIENT, ANYBODY, ANYBODY, "management, agent"),
        (ALL, ANYBODY, ANYBODY, None),
    ],
)
def test_who_is_reached_by_others_wants_keys(
    text: str | None, client_host: str | None, agent_host: str, lacking: str | None
) -> None:
    keys = OPEN if text is None else read_keys(text)

    check_reach(keys, client_host=client_host, agent_host=agent_host, insecure=True)
    if lacking is None:
        check_reach(keys, client_host=client_host, agent_host=agent_host)
    else:
        with pytest.raises(AccessError, match=f"there is no key for {lacking}:"):
            check_reach(keys, client_host=client_host, agent_host=agent_host)


def test_fresh_keys_are_one_for_each_role_and_never_the_same() -> None:
    keys = {own_key(role, None, {"HEADRACE_KEYS": fresh_keys()}) for role in Role for _ in "ab"}

    assert len(keys) == 6
    assert all(key is not None and len(key) >= 43 for key in keys)


def test_a_secret_is_for_its_owner_and_is_never_written_over(tmp_path: Path, file: Path) -> None:
    secret = tmp_path / "secret"
    file.chmod(0o640)

    keep_secret(secret, ALL)

    assert secret.read_text() == ALL
    assert (is_secret(secret), is_secret(file)) == (True, False)
    with pytest.raises(FileExistsError):
        keep_secret(secret, "")
    assert secret.read_text() == ALL
