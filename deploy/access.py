"""Who is let in, and with what one asks to be let in: keys from files and the environment.

They are never among a command's arguments or settings, which others can read: only the name of a file is.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from balancer.keys import OPEN, Keys, KeysError, Role, first_key, read_keys, write_keys
from common.errors import HeadraceError
from deploy.machine import is_loopback

KEYS = "HEADRACE_KEYS"
"""An environment variable: the text of a keys file."""

OWN_KEY = {role: f"HEADRACE_{role.upper()}_KEY" for role in Role}
"""Those with the one key that a command shows."""

LARGEST_FILE = 2**20
"""In bytes."""


class AccessError(HeadraceError):
    """Others could reach what no key protects."""


def find_keys(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The text of the file, or else of the environment; None: there is none.

    Raises ``KeysError``, also for what cannot be understood.
    """
    if file is None and KEYS not in environment:
        return None
    text = environment[KEYS] if file is None else _read(file)
    try:
        read_keys(text)
    except KeysError as error:
        raise KeysError(f"{KEYS if file is None else file}: {error}") from error
    return text


def open_keys(file: Path | None, environment: Mapping[str, str]) -> Keys:
    """As ``find_keys``; everybody is let in if there are none."""
    text = find_keys(file, environment)
    return OPEN if text is None else read_keys(text)


def own_key(role: Role, file: Path | None, environment: Mapping[str, str]) -> str | None:
    """What to show in this role: from the file, or else from the environment, from a variable for it
    alone or from one with all keys. None: there is none. Raises ``KeysError``.
    """
    if file is not None:
        source, text = str(file), _read(file)
    elif OWN_KEY[role] in environment:
        source, text = OWN_KEY[role], environment[OWN_KEY[role]]
    elif KEYS in environment:
        source, text = KEYS, environment[KEYS]
        if role in open_keys(None, environment).missing:
            return None
    else:
        return None
    try:
        return first_key(text, role)
    except KeysError as error:
        raise KeysError(f"{source}: {error}") from error


def check_reach(
    keys: Keys, *, client_host: str | None, agent_host: str, insecure: bool = False
) -> None:
    """``client_host``: None if there is no listener for clients. Raises ``AccessError`` if others than
    this machine reach a listener that wants no key.
    """
    reached: list[tuple[Role, str]] = []
    if client_host is not None and not is_loopback(client_host):
        reached += [(Role.INFERENCE, client_host), (Role.MANAGEMENT, client_host)]
    if not is_loopback(agent_host):
        reached.append((Role.AGENT, agent_host))
    lacking = {role: host for role, host in reached if role in keys.missing}
    if lacking and not insecure:
        hosts = " and ".join(dict.fromkeys(host or "its address" for host in lacking.values()))
        raise AccessError(
            f"others can reach {hosts}, and there is no key for {', '.join(lacking)}: list them in a "
            "keys file (headrace keys makes one), or say that it is meant to be insecure"
        )


def fresh_keys() -> str:
    """The text of a file with a new key for each role."""
    return "# ROLE KEY; a role may have several keys.\n" + write_keys(
        (role, secrets.token_urlsafe(32)) for role in Role
    )


def keep_secret(file: Path, text: str) -> None:
    """Write a file that only we can read. Raises ``OSError``, also if there is such a file already."""
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w") as output:
        output.write(text)


def is_secret(file: Path) -> bool:
    """Can nobody but its owner read it?"""
    return not file.stat().st_mode & 0o077


def _read(file: Path) -> str:
    try:
        with file.open("rb") as data:
            text = data.read(LARGEST_FILE + 1)
    except OSError as error:
        raise KeysError(f"{file}: {error.strerror}") from error
    if len(text) > LARGEST_FILE:
        raise KeysError(f"{file}: it is no keys file, it is too large")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise KeysError(f"{file}: it is no text") from error
