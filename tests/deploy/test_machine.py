import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deploy import machine


@pytest.mark.parametrize(
    ("text", "cores"),
    [("150000 100000", 1), ("400000 100000", 4), ("50000 100000", 1), ("max 100000", 64), ("", 64)],
)
def test_a_containers_quota_counts_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cores: int
) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(machine, "CPU_QUOTA", quota)

    def all_cores(_pid: int) -> range:
        return range(64)

    monkeypatch.setattr(machine.os, "sched_getaffinity", all_cores, raising=False)

    assert machine.usable_cores() == cores


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 7)])
def test_one_core_is_left_to_everyone_else(cores: int, threads: int) -> None:
    assert machine.default_threads(cores) == threads


def test_a_port_is_free_until_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine.why_not_listen("127.0.0.1", port) == "Address already in use"

    assert machine.why_not_listen("127.0.0.1", port) is None


def test_an_address_of_another_machine_is_said_to_be_that() -> None:
    assert machine.why_not_listen("192.0.2.250", 8061) == "Cannot assign requested address"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8061"),
        ("0.0.0.0", "http://127.0.0.1:8061"),
        ("::1", "http://[::1]:8061"),
        ("10.0.0.7", "http://10.0.0.7:8061"),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_dial(host: str, address: str) -> None:
    assert machine.address("http", host, 8061) == address


def test_a_process_knows_when_it_was_started() -> None:
    telling = "from deploy.machine import process_age; print(process_age())"
    before = time.monotonic()

    told = subprocess.run([sys.executable, "-c", telling], capture_output=True, check=True)

    # The kernel counts in hundredths.
    assert 0.0 < float(told.stdout) <= time.monotonic() - before + 0.02


@pytest.mark.parametrize("text", ["", "1 (a b) S 1 2"])
def test_where_no_start_is_told_it_is_that_of_our_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text)
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine, "_imported", time.monotonic() - 5.0)

    assert 5.0 <= machine.process_age() < 60.0


def test_the_start_is_read_behind_a_name_with_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is whatever the process says."""
    real = machine.process_age()
    pid, _, rest = machine.STAT.read_text().partition(" ")
    stat = tmp_path / "stat"
    stat.write_text(f"{pid} (a ) b (c) {rest.rpartition(')')[2]}")
    monkeypatch.setattr(machine, "STAT", stat)

    assert machine.process_age() == pytest.approx(real, abs=1.0)


NAMES = {
    "of-this-machine": ("127.0.1.1", "::1"),
    "of-both": ("127.0.0.1", "192.0.2.1"),
    "of-a-network": ("192.0.2.1",),
    "of-all": ("0.0.0.0",),
    "localhost": ("127.0.0.1",),
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system's resolver knows."""

    def look_up(host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        host.encode("idna")
        if host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in NAMES[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("of-this-machine", True),
        ("of-both", False),
        ("of-a-network", False),
        ("of-all", False),
        ("of-nobody", False),
        ("", False),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(
    names: None, host: str, is_loopback: bool
) -> None:
    assert machine.is_loopback(host) is is_loopback


@pytest.mark.parametrize("host", ["of-nobody", "of nobody", "a" * 70, "127.0.0.1.9"])
def test_what_is_neither_an_address_nor_a_name_is_refused(names: None, host: str) -> None:
    with pytest.raises(machine.AddressError, match=f"'{host}' is no address, nor a name of one: "):
        machine.resolve(host)
