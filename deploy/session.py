"""Runs a command's work in a process and session of its own, watched by a small parent.

Ray's processes live in the session of whoever starts them. If a signal goes to the whole group
(a terminal's Ctrl-C, ``timeout``, ``kill -- -PGID``) they would die first, and what is left could
not be stopped in order. So the parent alone stands in the caller's group: it passes signals on, waits
within a limit, and then removes whatever is left. If the parent is killed, the work notices and ends
by itself.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from deploy.machine import stop_signals

STOP_TIMEOUT = 20.0
"""Seconds that stopping may take, when what ran is over, until what still runs is killed."""


def run_apart(work: Callable[[str], int], *, drain_timeout: float = 0.0) -> int:
    """Call ``work(folder)`` in a session of its own; return its exit status.

    ``folder`` is for its temporary files and is removed at the end. Its first SIGTERM means: stop, and
    what runs may go on for ``drain_timeout`` seconds; the second: stop now.
    """
    folder = tempfile.mkdtemp(prefix="headrace-", dir="/tmp")  # Ray's sockets want short paths
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent_id = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(writing)
        _work(work, folder, parent_id, reading)
    os.close(reading)
    try:
        return _watch(child, drain_timeout)
    finally:
        _kill_group(child)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(writing)


def _work(work: Callable[[str], int], folder: str, parent_id: int, parent: int) -> NoReturn:
    """The child's whole life. ``parent``: the end of a pipe that lives as long as the parent."""
    status = 1
    try:
        os.setsid()
        threading.Thread(target=_stop_with, args=[parent], daemon=True).start()
        status = work(folder)
    except BaseException:
        traceback.print_exc()
    finally:
        if os.getppid() != parent_id:  # it was killed, so nobody else will do this
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # threads that hang in Ray's calls must not hold it up


def _stop_with(parent: int) -> None:
    """The pipe ends when the parent does, however it ends."""
    os.read(parent, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _watch(child: int, drain_timeout: float) -> int:
    asked_to_stop = 0

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop += 1
        if asked_to_stop <= 2:
            left = STOP_TIMEOUT + (drain_timeout if asked_to_stop == 1 else 0.0)
            signal.setitimer(signal.ITIMER_REAL, left)
        os.kill(child, signal.SIGTERM)

    def give_up(_number: int, _frame: FrameType | None) -> None:
        _kill_group(child)

    signal.signal(signal.SIGALRM, give_up)
    for number in stop_signals():
        signal.signal(number, pass_on)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGTERM and asked_to_stop:
        return 0  # before it had begun to listen
    if code < 0:
        print("headrace: it did not end in order and was killed", file=sys.stderr)  # noqa: T201
        return 1
    return code


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody is left
        os.killpg(leader, signal.SIGKILL)
