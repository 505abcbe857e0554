"""What this machine offers to a process: cores, ports, addresses, signals, a place for its log."""

import ipaddress
import os
import signal
import socket
import time
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from common.errors import HeadraceError

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Linux control group, version 2: ``<quota> <period>`` in microseconds, or ``max <period>``."""


STAT = Path("/proc/self/stat")

_imported = time.monotonic()


class AddressError(HeadraceError):
    """What is to be listened on is no address; the text says which, and why."""


def usable_cores() -> int:
    """The cores that this process may use, as far as affinity and container limits tell."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, _quota(CPU_QUOTA) or 1024)


def default_threads(cores: int) -> int:
    """How many threads llama.cpp should use: all cores but one, which is left to everyone else.

    Its threads wait for each other after every operation, spinning; with a thread on each core,
    any other process (Ray, the balancer, a client) that takes a core for a moment stops them all.
    """
    return max(1, cores - 1)


def process_age() -> float:
    """Seconds since this process was started; where Linux does not tell, since it imported this."""
    try:
        # The name of the command comes second, and may have blanks; the start is the 22nd field.
        ticks = int(STAT.read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _imported
    return max(0.0, age)


def why_not_listen(host: str, port: int) -> str | None:
    """The system's reason why nobody can listen there; None if it can be done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


def resolve(host: str) -> list[IPv4Address | IPv6Address]:
    """What an address or a name stands for, at least one; no name is all addresses of this machine.

    Raises ``AddressError``.
    """
    if not host:
        return [IPv4Address(0), IPv6Address(0)]
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name"
        raise AddressError(f"{host!r} is no address, nor a name of one: {reason}") from error
    return [ipaddress.ip_address(address[0]) for *_, address in found]


def is_loopback(host: str) -> bool:
    """Does only this machine reach what listens there, on whatever a name stands for? Of a name that
    nobody knows nothing is certain.
    """
    try:
        return all(each.is_loopback for each in resolve(host))
    except AddressError:
        return False


def address(scheme: str, host: str, port: int) -> str:
    """Where this machine dials what listens on ``host``; all interfaces include the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def stop_signals() -> list[signal.Signals]:
    """What asks a command to end: Ctrl-C, a manager, a closed terminal (unless under ``nohup``)."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def _quota(file: Path) -> int | None:
    try:
        quota, period = file.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
