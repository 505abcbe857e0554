import hashlib
import socket
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from file_server import (
    CERTIFICATE,
    Answer,
    FileServer,
    announce,
    another_range,
    chunked,
    compressed,
    cut_after,
    endless,
    hang_up,
    ignore_if_range,
    ignore_range,
    page,
    pieces_of,
    redirect,
    silent,
    stall_after,
    status,
    too_much,
)

from agent.cached_files import (
    DownloadError,
    DownloadStopped,
    cache_errors,
    call_on_a_thread,
    locked,
    on_a_thread,
    record_path,
)
from agent.download import (
    Patience,
    Progress,
    Reporter,
    Source,
    Version,
    content_range,
    fetch,
    goes_on,
    is_downgrade,
    version_of,
)
from common.models import Download, IssueKind

MAGIC = b"GGUF"
MODEL = MAGIC + bytes(range(256)) * 2000
OTHER = MAGIC + bytes(reversed(range(256))) * 2000
PATH = "/models/m.gguf"
DATES = {
    "last-modified": "Mon, 02 Nov 2026 10:00:00 GMT",
    "date": "Mon, 02 Nov 2026 10:00:01 GMT",
}
RETRIES = 2


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with FileServer() as server:
        server.publish(PATH, MODEL)
        yield server


class Fetch:
    """What these tests do again and again."""

    def __init__(self, server: FileServer, folder: Path) -> None:
        self.server = server
        self.partial = folder / "m.gguf.partial"
        self.stop = threading.Event()
        self.reports: list[Download | None] = []
        self.retry_delays = (0.0,) * RETRIES
        self.progress: Progress = self.reports.append

    def __call__(
        self, url: str | None = None, *, read: float = 10.0, connect: float = 10.0, **known: Any
    ) -> bytes:
        source = Source(url or self.server.url(PATH), "m.gguf", MAGIC, **known)
        patience = Patience(connect=connect, read=read, retry_delays=self.retry_delays)
        fetch(
            source,
            self.partial,
            patience=patience,
            reporter=Reporter(self.progress),
            stop=self.stop,
        )
        return self.partial.read_bytes()

    def fails(self, *args: Any, **known: Any) -> tuple[IssueKind, bool]:
        """And how: the issue, and whether it is final."""
        with pytest.raises(DownloadError) as caught:
            self(*args, **known)
        assert caught.value.detail
        return caught.value.kind, caught.value.is_final

    @property
    def ranges(self) -> list[str | None]:
        return self.server.ranges(PATH)

    def leave(self, content: bytes, version: Version) -> None:
        """What a run before has left."""
        self.partial.write_bytes(content)
        record_path(self.partial).write_bytes(msgspec.json.encode(version))


@pytest.fixture
def fetch_it(server: FileServer, tmp_path: Path) -> Fetch:
    return Fetch(server, tmp_path)


def version(**known: Any) -> Version:
    tagged = Version(etag='"one"', validator='"one"', size=len(MODEL))
    return msgspec.structs.replace(tagged, **known)


# What goes well


def test_a_file_is_fetched_and_its_progress_told(server: FileServer, fetch_it: Fetch) -> None:
    assert fetch_it() == MODEL
    assert server.requests[0].headers["accept-encoding"] == "identity"
    assert fetch_it.reports[0] == Download("m.gguf", 0, len(MODEL))
    assert fetch_it.reports[-1] == Download("m.gguf", len(MODEL), len(MODEL))


def test_a_cut_file_is_resumed_where_it_was_cut(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, cut_after(1000), cut_after(500))

    assert fetch_it() == MODEL
    assert fetch_it.ranges == [None, "bytes=1000-", "bytes=1500-"]
    assert server.requests[1].headers["if-range"] == '"one"'


def test_as_long_as_it_gets_further_it_is_tried_again(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, *[cut_after(100)] * (3 * RETRIES))

    assert fetch_it() == MODEL


def test_what_an_earlier_run_left_is_resumed(fetch_it: Fetch) -> None:
    fetch_it.leave(MODEL[:700], version())

    assert fetch_it() == MODEL
    assert fetch_it.ranges == ["bytes=700-"]


def test_what_an_earlier_run_completed_is_not_asked_for(fetch_it: Fetch) -> None:
    fetch_it.leave(MODEL, version())

    assert fetch_it() == MODEL
    assert fetch_it.ranges == []


def test_a_stalled_file_is_resumed(server: FileServer, fetch_it: Fetch) -> None:
    end = threading.Event()
    server.plan(PATH, stall_after(1000, until=end, begun=threading.Event()))

    assert fetch_it(read=0.2) == MODEL
    assert fetch_it.ranges == [None, "bytes=1000-"]
    end.set()


def test_a_file_of_unknown_length_is_fetched(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, chunked)

    assert fetch_it() == MODEL
    assert fetch_it.reports[0] == Download("m.gguf", 0, None)
    assert fetch_it() == MODEL  # now it is known, and nobody is asked
    assert fetch_it.ranges == [None]


def test_a_server_may_send_less_than_it_was_asked_for(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, cut_after(1000), *[pieces_of(500)] * (2 * RETRIES))

    assert fetch_it() == MODEL
    assert fetch_it.ranges[:3] == [None, "bytes=1000-", "bytes=1500-"]


def test_a_date_is_as_good_as_a_tag(server: FileServer, fetch_it: Fetch) -> None:
    server.publish(PATH, MODEL, etag=None, headers=DATES)
    server.plan(PATH, cut_after(1000))

    assert fetch_it() == MODEL
    assert server.requests[1].headers["if-range"] == DATES["last-modified"]


def test_redirects_are_followed_and_resumed(server: FileServer, fetch_it: Fetch) -> None:
    server.always("/a", redirect("/b"))
    server.always("/b", redirect(server.url(PATH, host="localhost")))
    server.plan(PATH, cut_after(1000))

    assert fetch_it(server.url("/a"), headers={"authorization": "Bearer secret"}) == MODEL
    assert fetch_it.ranges == [None, "bytes=1000-"]
    assert [request.headers.get("authorization") for request in server.requests[:3]] == [
        "Bearer secret",
        "Bearer secret",
        None,  # another server
    ]


def test_the_environment_says_which_proxy_to_use(
    server: FileServer, fetch_it: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url(""))
    monkeypatch.setenv("http_proxy", server.url(""))
    server.publish("http://models.invalid/m.gguf", MODEL)

    assert fetch_it("http://models.invalid/m.gguf") == MODEL


# Two versions


def test_a_file_that_changed_in_between_is_begun_anew(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, cut_after(1000, then=lambda: server.publish(PATH, OTHER, etag='"two"')))

    assert fetch_it() == OTHER
    assert fetch_it.ranges == [None, "bytes=1000-"]


def test_a_server_that_sends_too_much_is_not_believed(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, cut_after(1000), too_much)

    assert fetch_it() == MODEL
    assert fetch_it.ranges == [None, "bytes=1000-", None]


def test_what_ends_before_it_can_be_recognised_is_begun_anew(fetch_it: Fetch) -> None:
    fetch_it.leave(MODEL[:3], version())

    assert fetch_it() == MODEL
    assert fetch_it.ranges == [None]


@pytest.mark.parametrize("lie", [ignore_if_range, another_range])
def test_a_server_that_resumes_wrongly_is_noticed(
    server: FileServer, fetch_it: Fetch, lie: Answer
) -> None:
    server.plan(PATH, cut_after(1000, then=lambda: server.publish(PATH, OTHER, etag='"two"')), lie)

    assert fetch_it() == OTHER
    assert fetch_it.ranges == [None, "bytes=1000-", None]


def test_a_server_that_knows_no_ranges_sends_all_again(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, cut_after(1000), ignore_range)

    assert fetch_it() == MODEL


def test_what_no_range_satisfies_is_begun_anew(server: FileServer, fetch_it: Fetch) -> None:
    fetch_it.leave(OTHER[:-1], version(size=None))
    server.publish(PATH, MODEL[:5000])

    assert fetch_it() == MODEL[:5000]
    assert fetch_it.ranges == [f"bytes={len(OTHER) - 1}-", None]


@pytest.mark.parametrize(
    "headers", [{}, {"etag": 'W/"one"'}, {**DATES, "date": DATES["last-modified"]}]
)
def test_without_a_strong_validator_nothing_is_resumed(
    server: FileServer, fetch_it: Fetch, headers: dict[str, str]
) -> None:
    server.publish(PATH, MODEL, etag=None, headers=headers)
    server.plan(PATH, cut_after(1000))

    assert fetch_it() == MODEL
    assert fetch_it.ranges == [None, None]


def test_what_has_no_readable_record_is_begun_anew(fetch_it: Fetch) -> None:
    fetch_it.leave(OTHER[:1000], version())
    record_path(fetch_it.partial).write_bytes(b"{")

    assert fetch_it() == MODEL
    assert fetch_it.ranges == [None]


# Sums


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_sum_stands_in_for_a_validator(server: FileServer, fetch_it: Fetch) -> None:
    server.publish(PATH, MODEL, etag=None)
    server.plan(PATH, cut_after(1000))

    assert fetch_it(sha256=sha256(MODEL)) == MODEL
    assert fetch_it.ranges == [None, "bytes=1000-"]


def test_a_file_with_another_sum_is_fetched_once_again(server: FileServer, fetch_it: Fetch) -> None:
    fetch_it.leave(OTHER[:1000], version(validator=None, etag=None))

    assert fetch_it(sha256=sha256(MODEL)) == MODEL
    assert fetch_it.ranges == ["bytes=1000-", None]


def test_a_file_whose_sum_differs_twice_is_given_up(fetch_it: Fetch) -> None:
    assert fetch_it.fails(sha256=sha256(OTHER)) == (IssueKind.MODEL_CACHE_IS_CORRUPTED, True)
    assert fetch_it.ranges == [None, None]
    assert not fetch_it.partial.exists()


def test_with_a_sum_the_end_of_the_connection_may_be_that_of_the_file(
    server: FileServer, fetch_it: Fetch
) -> None:
    server.plan(PATH, endless)

    assert fetch_it(sha256=sha256(MODEL)) == MODEL


# What fails


@pytest.mark.parametrize(
    ("code", "kind", "is_final"),
    [
        (404, IssueKind.MODEL_DOES_NOT_EXIST_AT_URL, True),
        (410, IssueKind.MODEL_DOES_NOT_EXIST_AT_URL, True),
        (401, IssueKind.DOWNLOAD_SERVER_DENIED_ACCESS, True),
        (403, IssueKind.DOWNLOAD_SERVER_DENIED_ACCESS, True),
        (400, IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, True),
        (416, IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, True),
        (304, IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, True),
        (408, IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, False),
        (429, IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, False),
        (500, IssueKind.DOWNLOAD_SERVER_ERRORED, False),
        (503, IssueKind.DOWNLOAD_SERVER_ERRORED, False),
        (206, IssueKind.DOWNLOAD_SERVER_ERRORED, False),
        (299, IssueKind.DOWNLOAD_SERVER_ERRORED, False),
    ],
)
def test_each_status_has_its_issue(
    server: FileServer, fetch_it: Fetch, code: int, kind: IssueKind, is_final: bool
) -> None:
    server.always(PATH, status(code))

    assert fetch_it.fails() == (kind, is_final)
    assert len(fetch_it.ranges) == 1  # before anything has come, it is told at once


def test_a_server_that_errs_in_the_middle_is_asked_again(
    server: FileServer, fetch_it: Fetch
) -> None:
    server.plan(PATH, cut_after(1000), status(503), cut_after(1000), status(429))

    assert fetch_it() == MODEL
    assert fetch_it.ranges == [None, *["bytes=1000-"] * 2, *["bytes=2000-"] * 2]


class Impatience(threading.Event):
    """Does not wait, but remembers how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if timeout:
            self.waits.append(timeout)
        return self.is_set()


def test_tries_that_get_no_further_are_ever_more_apart(server: FileServer, fetch_it: Fetch) -> None:
    fetch_it.stop = stop = Impatience()
    fetch_it.retry_delays = (1.0, 2.0, 4.0)
    server.plan(PATH, cut_after(1000), cut_after(0), status(500), cut_after(1000), cut_after(0))

    assert fetch_it() == MODEL
    assert stop.waits == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_what_gets_no_further_is_given_up_and_kept(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, cut_after(1000))
    server.plan(PATH, *[cut_after(0)] * RETRIES)

    assert fetch_it.fails() == (IssueKind.DOWNLOAD_INTERRUPTED, False)
    assert fetch_it.ranges == [None, *["bytes=1000-"] * RETRIES]
    assert fetch_it() == MODEL
    assert fetch_it.ranges[-1] == "bytes=1000-"


def test_to_begin_anew_and_anew_is_no_progress(server: FileServer, fetch_it: Fetch) -> None:
    server.publish(PATH, MODEL, etag=None)
    server.always(PATH, cut_after(1000))

    assert fetch_it.fails() == (IssueKind.DOWNLOAD_INTERRUPTED, False)
    assert fetch_it.ranges == [None] * (1 + RETRIES)


@pytest.mark.parametrize("lie", [announce(len(MODEL) + 1), hang_up])
def test_a_connection_that_ends_early_is_an_interruption(
    server: FileServer, fetch_it: Fetch, lie: Answer
) -> None:
    server.always(PATH, lie)

    assert fetch_it.fails() == (IssueKind.DOWNLOAD_INTERRUPTED, False)


def test_another_size_than_the_known_one_is_refused(fetch_it: Fetch) -> None:
    assert fetch_it.fails(size=len(MODEL) + 1) == (IssueKind.DOWNLOAD_INTERRUPTED, False)


def test_nobody_listens(fetch_it: Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    kind = fetch_it.fails(f"http://127.0.0.1:{port}/m.gguf")

    assert kind == (IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, False)


def test_a_name_that_is_none(fetch_it: Fetch) -> None:
    kind = fetch_it.fails("http://no-such-host.invalid/m.gguf")

    assert kind == (IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, False)


def test_a_server_that_does_not_answer(server: FileServer, fetch_it: Fetch) -> None:
    end = threading.Event()
    server.always(PATH, silent(until=end))

    with pytest.raises(DownloadError, match=r"sent nothing for 0\.1 s") as caught:
        fetch_it(read=0.1)
    end.set()
    assert caught.value.kind is IssueKind.DOWNLOAD_INTERRUPTED


@pytest.mark.parametrize("target", ["/loop", "ftp://127.0.0.1/m.gguf"])
def test_redirects_that_lead_nowhere_are_refused(
    server: FileServer, fetch_it: Fetch, target: str
) -> None:
    server.always("/loop", redirect(target))

    kind = fetch_it.fails(server.url("/loop"))

    assert kind == (IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, True)
    assert len(server.requests) == (6 if target == "/loop" else 1)


def test_https_never_becomes_http(
    server: FileServer, fetch_it: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(CERTIFICATE)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with FileServer(certificate=certificate) as safe:
        safe.publish(PATH, MODEL)
        safe.always("/away", redirect(server.url(PATH)))

        assert fetch_it(safe.url(PATH)) == MODEL
        fetch_it.partial.unlink()
        kind = fetch_it.fails(safe.url("/away"))

    assert kind == (IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, True)
    assert server.requests == []


def test_a_certificate_that_nobody_knows(
    fetch_it: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(CERTIFICATE)
    with FileServer(certificate=certificate) as stranger:
        kind = fetch_it.fails(stranger.url(PATH))

    assert kind == (IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, False)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(10_000)])
def test_what_is_no_model_is_refused(server: FileServer, fetch_it: Fetch, content: bytes) -> None:
    server.publish(PATH, content)

    assert fetch_it.fails() == (IssueKind.MODEL_CANNOT_BE_LOADED, True)
    assert not fetch_it.partial.exists()


def test_a_web_page_is_called_one(server: FileServer, fetch_it: Fetch) -> None:
    server.plan(PATH, page)

    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 sent a web page \(text/html\)"):
        fetch_it()


@pytest.mark.parametrize("answer", [compressed, endless])
def test_what_cannot_be_relied_on_is_refused(
    server: FileServer, fetch_it: Fetch, answer: Answer
) -> None:
    server.plan(PATH, answer)

    assert fetch_it.fails() == (IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, True)


def test_a_file_for_which_there_is_no_room_is_not_begun(
    server: FileServer, fetch_it: Fetch
) -> None:
    server.plan(PATH, announce(10**17))

    assert fetch_it.fails() == (IssueKind.CACHE_STORAGE_IS_FULL, False)
    assert not fetch_it.partial.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has such a disk")
def test_a_disk_that_fills_up_is_an_issue(fetch_it: Fetch) -> None:
    with pytest.raises(DownloadError) as caught, cache_errors(), Path("/dev/full").open("wb") as f:
        f.write(MODEL)

    assert caught.value.kind is IssueKind.CACHE_STORAGE_IS_FULL


# Stopping


def test_a_stalled_download_can_be_stopped(server: FileServer, fetch_it: Fetch) -> None:
    end = threading.Event()
    server.plan(PATH, stall_after(1000, until=end, begun=fetch_it.stop))

    with pytest.raises(DownloadStopped):
        fetch_it(read=60)

    end.set()


def test_a_download_that_runs_can_be_stopped_and_goes_on_later(
    server: FileServer, fetch_it: Fetch
) -> None:
    def stop(report: Download | None) -> None:
        if report is not None and report.current == 0:
            fetch_it.stop.set()

    fetch_it.progress = stop
    with pytest.raises(DownloadStopped):
        fetch_it()
    fetch_it.stop.clear()
    fetch_it.progress = fetch_it.reports.append
    assert fetch_it() == MODEL


def test_what_a_thread_raises_is_raised_here() -> None:
    def produce() -> Generator[int]:
        yield 1
        raise ValueError("two")

    got: list[int] = []
    with pytest.raises(ValueError, match="two"):
        got.extend(on_a_thread(produce, stop=threading.Event()))
    assert call_on_a_thread(lambda: 3, stop=threading.Event()) == 3


def test_a_thread_that_is_left_behind_ends(tmp_path: Path) -> None:
    ended = threading.Event()

    def produce() -> Generator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    numbers = on_a_thread(produce, stop=threading.Event())
    assert next(numbers) == 1
    numbers.close()

    assert ended.wait(60)


# Locks


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path, never = tmp_path / "m.lock", threading.Event()

    with locked(path, timeout=0, stop=never):
        with pytest.raises(DownloadError) as caught, locked(path, timeout=0.2, stop=never):
            pass
        assert caught.value.kind is IssueKind.CACHE_CANNOT_ACQUIRE_LOCK
        assert caught.value.lock_path == str(path)
        assert not caught.value.is_final
    with locked(path, timeout=0, stop=never):
        pass


def test_who_waits_for_a_lock_can_be_stopped(tmp_path: Path) -> None:
    path, stop = tmp_path / "m.lock", threading.Event()

    with locked(path, timeout=0, stop=stop):
        stop.set()
        with pytest.raises(DownloadStopped), locked(path, timeout=60, stop=stop):
            pass


def test_a_lock_on_a_file_that_is_gone_is_none(tmp_path: Path) -> None:
    path, never = tmp_path / "m.lock", threading.Event()

    with locked(path, timeout=0, stop=never):
        path.unlink()
        with locked(path, timeout=0, stop=never):
            assert path.exists()
            with pytest.raises(DownloadError), locked(path, timeout=0, stop=never):
                pass


# Rules without a network


@pytest.mark.parametrize(
    ("headers", "validator"),
    [
        ({"etag": '"a"'}, '"a"'),
        ({"etag": 'W/"a"', **DATES}, None),
        (DATES, DATES["last-modified"]),
        ({"last-modified": DATES["last-modified"]}, None),
        ({**DATES, "date": DATES["last-modified"]}, None),
        ({**DATES, "date": "yesterday"}, None),
        ({**DATES, "last-modified": "Mon, 02 Nov 2026 10:00:00"}, None),
        ({}, None),
    ],
)
def test_what_tells_two_versions_apart(headers: dict[str, str], validator: str | None) -> None:
    assert version_of(headers, size=7) == Version(
        etag=headers.get("etag"),
        last_modified=headers.get("last-modified"),
        validator=validator,
        size=7,
    )


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("bytes 5-9/10", (5, 10)),
        ("bytes 5-9/*", (5, None)),
        ("bytes */10", None),
        ("items 5-9/10", None),
        ("bytes 5-9", None),
        ("", None),
    ],
)
def test_content_ranges(text: str, meaning: tuple[int, int | None] | None) -> None:
    assert content_range({"content-range": text}) == meaning


@pytest.mark.parametrize(
    ("headers", "fits"),
    [
        ({"content-range": "bytes 5-9/10"}, True),
        ({"content-range": "bytes 5-9/10", "etag": '"a"'}, True),
        ({"content-range": "bytes 5-9/10", "etag": '"b"'}, False),
        ({"content-range": "bytes 5-9/10", "last-modified": "now"}, False),
        ({"content-range": "bytes 5-10/11"}, False),
        ({"content-range": "bytes 4-9/10"}, False),
        ({"content-range": "bytes 5-9/*"}, True),
        ({}, False),
    ],
)
def test_which_bytes_go_on(headers: dict[str, str], fits: bool) -> None:
    before = Version(etag='"a"', last_modified="then", validator='"a"', size=10)

    assert goes_on(headers, offset=5, version=before) == fits


@pytest.mark.parametrize(
    ("before", "after", "forbidden"),
    [
        ("https://a/", "http://a/", True),
        ("https://a/", "https://b/", False),
        ("http://a/", "https://a/", False),
        ("http://a/", "http://a/", False),
    ],
)
def test_which_redirects_are_downgrades(before: str, after: str, forbidden: bool) -> None:
    assert is_downgrade(httpx.URL(before), httpx.URL(after)) == forbidden


def test_progress_is_told_now_and_then_only() -> None:
    told: list[Download | None] = []
    reporter = Reporter(told.append)

    for current in range(1000):
        reporter.report("m", current, None)

    assert told[0] == Download("m", 0, None)
    assert len(told) < 1000
