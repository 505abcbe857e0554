"""Files in a folder that other processes use too: locks, whole files put in place in one act, and
what the operating system says when that cannot be.

Whatever may block runs on a thread of its own: when ``stop`` is set it is left behind.
"""

import errno
import fcntl
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from common.errors import HeadraceError
from common.models import IssueKind

LOOK_EVERY = 0.1
"""Seconds between two looks at ``stop``, or at a lock that somebody holds."""

QUEUED_PARTS = 16
"""That have been received and not yet written; up to 64 kB each."""

HASHED_AT_ONCE = 2**22

T = TypeVar("T")


class DownloadError(HeadraceError):
    """``is_final``: the same again would end the same way."""

    def __init__(
        self, kind: IssueKind, detail: str, *, is_final: bool, lock_path: str = ""
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.is_final = is_final
        self.lock_path = lock_path

    @property
    def detail(self) -> str:
        return str(self)


class DownloadStopped(HeadraceError):  # noqa: N818 - not an error, but asked for
    """``stop`` was set."""


def wait(seconds: float, *, stop: threading.Event) -> None:
    """Raises ``DownloadStopped`` as soon as ``stop`` is set."""
    if stop.wait(seconds):
        raise DownloadStopped("stopped")


# Threads


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class _Producer(Generic[T]):
    def __init__(self, produce: Callable[[], Generator[T]]) -> None:
        self._produce = produce
        self.parts: queue.Queue[T | _End] = queue.Queue(QUEUED_PARTS)
        self.left_behind = threading.Event()

    def run(self) -> None:
        error = None
        try:
            with closing(self._produce()) as produced:
                for part in produced:
                    if not self._put(part):
                        return
        except BaseException as caught:  # and raised again on the other thread
            error = caught
        self._put(_End(error))

    def _put(self, part: T | _End) -> bool:
        while not self.left_behind.is_set():
            with suppress(queue.Full):
                self.parts.put(part, timeout=LOOK_EVERY)
                return True
        return False


def on_a_thread(
    produce: Callable[[], Generator[T]],
    *,
    stop: threading.Event,
    idle: Callable[[], None] = lambda: None,
) -> Generator[T]:
    """What ``produce`` yields, and raises. Raises ``DownloadStopped`` soon after ``stop`` is set,
    whatever ``produce`` waits for. ``idle`` is called now and then while it waits.
    """
    producer = _Producer(produce)
    threading.Thread(target=producer.run, name="download", daemon=True).start()
    try:
        while True:
            wait(0, stop=stop)
            try:
                part = producer.parts.get(timeout=LOOK_EVERY)
            except queue.Empty:
                idle()
                continue
            if isinstance(part, _End):
                if part.error is not None:
                    raise part.error
                return
            yield part
    finally:
        producer.left_behind.set()


def call_on_a_thread(call: Callable[[], T], *, stop: threading.Event) -> T:
    """What it returns or raises, as above."""

    def produce() -> Generator[T]:
        yield call()

    with closing(on_a_thread(produce, stop=stop)) as produced:
        return next(produced)


# The cache


@contextmanager
def cache_errors() -> Generator[None]:
    """Turns what the operating system says of files into issues."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        # Not final: whoever is told of it makes room or gives the right, here and not elsewhere.
        raise DownloadError(
            IssueKind.CACHE_STORAGE_IS_FULL if full else IssueKind.CACHE_DIRECTORY_IS_NOT_WRITABLE,
            f"{where}{error.strerror or error}",
            is_final=False,
        ) from error


@contextmanager
def locked(path: Path, *, timeout: float, stop: threading.Event) -> Generator[None]:
    """A lock between processes and threads, which ends with its holder, however that ends.

    It is of the same kind as those of ``filelock``. The file remains. Raises ``DownloadError`` if
    somebody else holds it all the time.
    """
    deadline = time.monotonic() + timeout
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise DownloadError(
                IssueKind.CACHE_CANNOT_ACQUIRE_LOCK,
                f"another process holds the lock {path}",
                is_final=False,
                lock_path=str(path),
            )
        wait(LOOK_EVERY, stop=stop)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile would hold it on
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    is_ours = False
    try:
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Others may remove the file when they are done, and then this is a lock on nothing.
            is_ours = os.path.samestat(os.fstat(descriptor), path.stat())
    finally:
        if not is_ours:
            os.close(descriptor)
    return descriptor if is_ours else None


def sync(path: Path) -> None:
    """A file or a folder: what it holds survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_path(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.json")


def write_record(path: Path, record: msgspec.Struct) -> None:
    """All of it or nothing."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(msgspec.json.encode(record))
    sync(draft)
    draft.replace(path)


def publish(partial: Path, destination: Path) -> None:
    """A file that is complete gets its place, in the same folder."""
    partial.replace(destination)
    sync(destination.parent)
    record_path(partial).unlink(missing_ok=True)


def file_sha256(path: Path, *, stop: threading.Event) -> str:
    """In lower-case hexadecimal digits. Raises ``DownloadStopped``."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(HASHED_AT_ONCE):
            digest.update(data)
            wait(0, stop=stop)
    return digest.hexdigest()
