"""One file over HTTP into a file on this machine: resumed where it was cut, and never put together
from two versions.

A file grows at ``partial``. Beside it, in ``partial`` + ``.json``, stands which version it is of.
Whoever calls ``fetch`` holds a lock on it (``locked``).

Whatever may block (names, connections, reads) runs on a thread of its own that touches none of our
files: when ``stop`` is set it is left behind, and ends by its time-out.
"""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn, TypeAlias

import httpx
import msgspec

from agent.cached_files import (
    DownloadError,
    call_on_a_thread,
    file_sha256,
    on_a_thread,
    record_path,
    sync,
    wait,
    write_record,
)
from common.models import Download, IssueKind

log = logging.getLogger(__name__)
# It writes down each address in full, and in some a password or a signature stands.
logging.getLogger("httpx").setLevel(logging.WARNING)

CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 10.0
LOCK_TIMEOUT = 10.0
RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)

MAX_REDIRECTS = 5

REPORT_EVERY = 0.25
"""Seconds between two reports of progress."""

Progress: TypeAlias = Callable[[Download | None], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds."""

    connect: float = CONNECT_TIMEOUT
    read: float = READ_TIMEOUT
    """Without a single byte."""
    lock: float = LOCK_TIMEOUT
    retry_delays: tuple[float, ...] = RETRY_DELAYS
    """Before each further try. They begin anew whenever a try got further than all before."""


class TransientError(DownloadError):
    """Worth another try."""

    def __init__(self, kind: IssueKind, detail: str) -> None:
        super().__init__(kind, detail, is_final=False)


# Policy


class Version(msgspec.Struct, frozen=True):
    """Which version a partial file is of."""

    etag: str | None = None
    last_modified: str | None = None
    validator: str | None = None
    """For ``If-Range``; None: nothing tells two versions apart."""
    size: int | None = None


def version_of(headers: Mapping[str, str], *, size: int | None) -> Version:
    """Of the file that comes with these headers.

    A weak entity tag does not say that the bytes are the same, and a date does not if the file
    could have changed again in the same second (RFC 9110, 8.8.2.2 and 13.1.5).
    """
    etag, modified = headers.get("etag"), headers.get("last-modified")
    validator = None
    if etag is not None and etag.startswith('"'):
        validator = etag
    elif etag is None and modified is not None and "date" in headers:
        with suppress(ValueError, TypeError):
            age = parsedate_to_datetime(headers["date"]) - parsedate_to_datetime(modified)
            validator = modified if age.total_seconds() >= 1 else None
    return Version(etag=etag, last_modified=modified, validator=validator, size=size)


def content_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else None


def content_range(headers: Mapping[str, str]) -> tuple[int, int | None] | None:
    """The first byte's position and the size of the whole; None: there is no such header."""
    found = re.fullmatch(
        r"bytes (\d{1,18})-\d{1,18}/(?:(\d{1,18})|\*)",
        headers.get("content-range", "").strip(),
        re.ASCII | re.IGNORECASE,
    )
    return found and (int(found[1]), None if found[2] is None else int(found[2]))


def goes_on(headers: Mapping[str, str], *, offset: int, version: Version) -> bool:
    """Do these bytes (206) belong behind those that are here? Not all servers heed ``If-Range``."""
    found = content_range(headers)
    if found is None or found[0] != offset:
        return False
    size = found[1]
    if size is not None and version.size is not None and size != version.size:
        return False
    return all(
        headers.get(name) is None or before is None or headers[name] == before
        for name, before in (("etag", version.etag), ("last-modified", version.last_modified))
    )


def refusal(status: int, *, host: str) -> DownloadError:
    """What a status means that brings no file."""
    detail = f"{host} answered {status}"
    with suppress(ValueError):
        detail = f"{detail} {HTTPStatus(status).phrase}"
    match status:
        case 404 | 410:
            return DownloadError(IssueKind.MODEL_DOES_NOT_EXIST_AT_URL, detail, is_final=True)
        case 401 | 403 | 407:
            return DownloadError(IssueKind.DOWNLOAD_SERVER_DENIED_ACCESS, detail, is_final=True)
        case 408 | 429:
            return TransientError(IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, detail)
        case _ if 300 <= status < 500:
            return DownloadError(IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, detail, is_final=True)
        case _:
            return TransientError(IssueKind.DOWNLOAD_SERVER_ERRORED, detail)


def is_downgrade(before: httpx.URL, after: httpx.URL) -> bool:
    """Only https may follow on https: what was promised to be unread and unchanged stays so."""
    return before.scheme == "https" and after.scheme != "https"


# The way over the network


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: httpx.Headers
    host: str

    @property
    def has_an_end(self) -> bool:
        """Else the end of the file and a cut look the same."""
        return "content-length" in self.headers or "transfer-encoding" in self.headers


def _exchange(
    url: str, headers: Mapping[str, str], *, patience: Patience
) -> Generator[_Answer | bytes]:
    """The answer, then its body, if it is (a part of) the file."""
    timeout = httpx.Timeout(patience.read, connect=patience.connect)
    try:
        with httpx.Client(timeout=timeout) as client:
            request = client.build_request("GET", url, headers=headers)
            for _ in range(MAX_REDIRECTS + 1):
                with closing(client.send(request, stream=True)) as response:
                    following = response.next_request
                    if following is None:
                        host = request.url.host
                        yield _Answer(response.status_code, response.headers, host)
                        if response.status_code in (200, 206):
                            yield from response.iter_raw()
                        return
                if is_downgrade(request.url, following.url):
                    _reject(f"{request.url.host} redirects from https to {following.url.scheme}")
                if following.url.scheme not in ("http", "https"):
                    _reject(f"{request.url.host} redirects to {following.url.scheme}")
                request = following
            _reject(f"{request.url.host} redirects more than {MAX_REDIRECTS} times")
    except (httpx.ConnectTimeout, httpx.ConnectError, httpx.ProxyError) as error:
        reason = str(error) or f"no connection within {patience.connect:g} s"
        raise TransientError(IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, reason) from error
    except httpx.ReadTimeout as error:
        reason = f"the server sent nothing for {patience.read:g} s"
        raise TransientError(IssueKind.DOWNLOAD_INTERRUPTED, reason) from error
    except httpx.TransportError as error:
        raise TransientError(IssueKind.DOWNLOAD_INTERRUPTED, f"{error}") from error
    except httpx.InvalidURL as error:
        _reject(f"a redirect to a malformed address: {error}")
    except OSError as error:  # e.g. the certificates that SSL_CERT_FILE names
        raise TransientError(IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, f"{error}") from error


def _reject(detail: str) -> NoReturn:
    raise DownloadError(IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, detail, is_final=True)


# One file


@dataclass(frozen=True, slots=True)
class Source:
    url: str
    filename: str
    """For reports only."""
    magic: bytes
    """What the file begins with."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    size: int | None = None
    """If known beforehand."""
    sha256: str | None = None
    """Lower-case hexadecimal digits."""


class Reporter:
    """Does not tell everything: a download has many parts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._due = 0.0
        self._untold: Download | None = None

    def report(self, filename: str, current: int, total: int | None) -> None:
        self._untold = Download(filename, current, total)
        self.catch_up()

    def report_now(self, filename: str, current: int, total: int | None) -> None:
        self._due = 0.0
        self.report(filename, current, total)

    def catch_up(self) -> None:
        """Tell the latest, if it is time and has not been told: nothing more may come for long."""
        if self._untold is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + REPORT_EVERY
            self._progress(self._untold)
            self._untold = None


def fetch(
    source: Source,
    partial: Path,
    *,
    patience: Patience,
    reporter: Reporter,
    stop: threading.Event,
) -> None:
    """Make ``partial`` the whole file, checked and on the disk; then ``publish`` it.

    Raises ``DownloadError``, ``DownloadStopped`` and ``OSError`` (of the file: ``cache_errors``).
    """
    transfer = _Transfer(source, partial, patience=patience, reporter=reporter, stop=stop)
    transfer.complete()
    if source.sha256 is not None and file_sha256(partial, stop=stop) != source.sha256:
        log.warning("%s: its sha256 differs; fetching it once again", source.filename)
        transfer.discard()
        transfer.complete()
        if file_sha256(partial, stop=stop) != source.sha256:
            transfer.discard()
            detail = f"twice a file came whose sha256 is not {source.sha256}"
            raise DownloadError(IssueKind.MODEL_CACHE_IS_CORRUPTED, detail, is_final=True)
    call_on_a_thread(lambda: sync(partial), stop=stop)


class _Transfer:
    def __init__(
        self,
        source: Source,
        partial: Path,
        *,
        patience: Patience,
        reporter: Reporter,
        stop: threading.Event,
    ) -> None:
        self._source = source
        self._partial = partial
        self._patience = patience
        self._reporter = reporter
        self._stop = stop

    def complete(self) -> None:
        begin = furthest = self._size()
        delays = iter(self._patience.retry_delays)
        while True:
            try:
                self._try()
            except TransientError as error:
                if self._size() > furthest:
                    furthest = self._size()
                    delays = iter(self._patience.retry_delays)
                elif furthest == begin and error.kind is not IssueKind.DOWNLOAD_INTERRUPTED:
                    raise  # it has not even begun: that should be known at once
                delay = next(delays, None)
                if delay is None:
                    raise
                log.info("%s at %d: %s", self._source.filename, self._size(), error.detail)
                wait(delay, stop=self._stop)
            else:
                return

    def discard(self) -> None:
        self._partial.unlink(missing_ok=True)
        record_path(self._partial).unlink(missing_ok=True)

    def _size(self) -> int:
        try:
            return self._partial.stat().st_size
        except FileNotFoundError:
            return 0

    def _version(self) -> Version | None:
        """Of the partial file; None if it cannot be resumed."""
        try:
            version = msgspec.json.decode(record_path(self._partial).read_bytes(), type=Version)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        # Without a validator two versions could be mixed, unless the sum would tell.
        if version.validator is None and self._source.sha256 is None:
            return None
        return version

    def _try(self) -> None:
        version = self._version()
        offset = self._size() if version is not None else 0
        if version is not None and version.size == offset > 0:
            return  # the last run ended after the last byte
        if offset < len(self._source.magic):
            offset = 0  # what it begins with is looked at as it comes
        headers = {**self._source.headers, "accept-encoding": "identity"}
        if version is not None and offset:
            headers["range"] = f"bytes={offset}-"
            if version.validator is not None:
                headers["if-range"] = version.validator

        def produce() -> Generator[_Answer | bytes]:
            return _exchange(self._source.url, headers, patience=self._patience)

        with closing(on_a_thread(produce, stop=self._stop, idle=self._reporter.catch_up)) as parts:
            answer = next(parts)
            assert isinstance(answer, _Answer)
            if offset and (
                answer.status == 416
                or (
                    answer.status == 206
                    and version is not None
                    and not goes_on(answer.headers, offset=offset, version=version)
                )
            ):
                self.discard()
                raise TransientError(
                    IssueKind.DOWNLOAD_INTERRUPTED,
                    f"{answer.host} has another file now, or cannot resume; starting over",
                )
            if answer.status != (206 if offset else 200) and answer.status != 200:
                raise refusal(answer.status, host=answer.host)
            self._check(answer)
            if answer.status == 200:
                offset = 0
                size = content_length(answer.headers)
                version = self._start_over(version_of(answer.headers, size=size))
            assert version is not None
            self._receive(answer, parts, offset=offset, size=version.size)

    def _check(self, answer: _Answer) -> None:
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            _reject(f"{answer.host} compresses ({encoding}) though it was asked not to")
        if not answer.has_an_end and self._source.sha256 is None:
            _reject(f"{answer.host} does not tell where the file ends: a sha256 is needed")

    def _start_over(self, version: Version) -> Version:
        known, told = self._source.size, version.size
        if known is not None and told is not None and known != told:
            detail = f"the file should have {known} bytes, the server announces {told}"
            raise TransientError(IssueKind.DOWNLOAD_INTERRUPTED, detail)
        version = msgspec.structs.replace(version, size=known if told is None else told)
        # In this order: a record never stands beside bytes of another version.
        self.discard()
        write_record(record_path(self._partial), version)
        return version

    def _receive(
        self, answer: _Answer, parts: Iterator[_Answer | bytes], *, offset: int, size: int | None
    ) -> None:
        self._check_space(offset=offset, size=size)
        filename, magic = self._source.filename, self._source.magic
        head = magic if offset else b""
        position = offset
        self._reporter.report_now(filename, position, size)
        with self._partial.open("ab") as file:
            for part in parts:
                assert isinstance(part, bytes)
                if len(head) < len(magic):
                    head += part[: len(magic) - len(head)]
                    if not magic.startswith(head):
                        self._refuse_content(answer)
                file.write(part)
                position += len(part)
                self._reporter.report(filename, position, size)
        if size is not None and position != size:
            if position > size:
                self.discard()
            raise TransientError(IssueKind.DOWNLOAD_INTERRUPTED, f"{position} of {size} bytes came")
        if head != magic:
            self._refuse_content(answer)
        if size is None:
            # Else a run that ends now would ask for what lies behind the end.
            version = self._version() or Version()
            version = msgspec.structs.replace(version, size=position)
            write_record(record_path(self._partial), version)
        self._reporter.report_now(filename, position, position)

    def _check_space(self, *, offset: int, size: int | None) -> None:
        if size is None:
            return
        free = shutil.disk_usage(self._partial.parent).free
        if free < size - offset:
            raise DownloadError(
                IssueKind.CACHE_STORAGE_IS_FULL,
                f"{size - offset} bytes are to come, {free} are free in {self._partial.parent}",
                is_final=False,
            )

    def _refuse_content(self, answer: _Answer) -> NoReturn:
        self.discard()
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        what = "a web page" if kind == "text/html" else "something else"
        described = f" ({kind})" if kind else ""
        detail = f"{answer.host} sent {what}{described}, not a GGUF file"
        raise DownloadError(IssueKind.MODEL_CANNOT_BE_LOADED, detail, is_final=True)
