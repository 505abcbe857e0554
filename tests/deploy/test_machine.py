import socket
from pathlib import Path

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
