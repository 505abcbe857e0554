import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer, cut_after, page, stall_after, status

from agent.cached_files import locked
from agent.model_files import (
    ModelFileError,
    ModelFiles,
    ModelFileStopped,
    check_model,
    default_cache,
    part_names,
    safe_filename,
)
from common.errors import ModelError
from common.models import AgentIssue, Download, IssueKind, LocalModel, UrlModel

MODEL = b"GGUF" + bytes(range(256)) * 2000
OTHER = b"GGUF" + bytes(reversed(range(256))) * 2000
PATH = "/models/m.gguf"
PARTS = [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with FileServer() as server:
        server.publish(PATH, MODEL)
        yield server


class Find:
    """What these tests do again and again."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.stop = threading.Event()
        self.reports: list[Download | None] = []

    def __call__(self, reference: LocalModel | UrlModel, *, lock_timeout: float = 60.0) -> Path:
        files = ModelFiles(
            cache=self.cache, lock_timeout=lock_timeout, retry_delays=(0.0, 0.0), read_timeout=60
        )
        try:
            return files.find(reference, progress=self.reports.append, stop=self.stop)
        finally:
            assert self.reports[-1] is None

    def fails(self, reference: LocalModel | UrlModel, **known: Any) -> tuple[AgentIssue, bool]:
        """And how: the issue, and whether it is final."""
        with pytest.raises(ModelFileError) as caught:
            self(reference, **known)
        return caught.value.issue, caught.value.is_final


@pytest.fixture
def find(tmp_path: Path) -> Find:
    return Find(tmp_path / "cache")


# Local files


def test_a_local_file_is_where_it_is(tmp_path: Path, find: Find) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)

    assert find(LocalModel(str(path))) == path
    assert find.reports == [None]


@pytest.mark.parametrize("name", ["nope.gguf", "no/folder/m.gguf", "zero\0byte"])
def test_a_local_file_that_is_missing_is_named(tmp_path: Path, find: Find, name: str) -> None:
    path = str(tmp_path / name)

    issue, is_final = find.fails(LocalModel(path))

    assert (issue.kind, issue.model_path) == (IssueKind.MODEL_FILE_DOES_NOT_EXIST, path)
    assert "does not exist" in issue.detail
    assert not is_final  # it may be put there


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 not a model"])
def test_a_local_file_of_another_kind_cannot_be_loaded(
    tmp_path: Path, find: Find, content: bytes
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    issue, _ = find.fails(LocalModel(str(path)))

    assert issue == AgentIssue(
        IssueKind.MODEL_CANNOT_BE_LOADED, str(path), f"{path} is not a GGUF file"
    )


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    for path in (tmp_path, pipe):
        with pytest.raises(ModelError, match="is not a file"):
            check_model(path)


def test_a_name_that_is_too_long_is_told(tmp_path: Path, find: Find) -> None:
    issue, _ = find.fails(LocalModel(str(tmp_path / ("m" * 300))))

    assert issue.kind is IssueKind.MODEL_CANNOT_BE_LOADED
    assert "name too long" in issue.detail


def test_a_local_model_in_parts_begins_with_the_first(tmp_path: Path, find: Find) -> None:
    for name in PARTS:
        (tmp_path / name).write_bytes(MODEL)

    assert find(LocalModel(str(tmp_path / PARTS[1]))) == tmp_path / PARTS[0]

    (tmp_path / PARTS[2]).unlink()
    issue, _ = find.fails(LocalModel(str(tmp_path / PARTS[0])))
    assert issue.kind is IssueKind.MODEL_FILE_DOES_NOT_EXIST
    assert PARTS[2] in issue.detail


# From a URL


def test_a_model_is_fetched_once(server: FileServer, find: Find) -> None:
    url = server.url(PATH)

    path = find(UrlModel(url))

    folder = find.cache / "downloaded-models" / hashlib.sha256(url.encode()).hexdigest()
    assert path == folder / "m.gguf"
    assert path.read_bytes() == MODEL
    assert find.reports[-2:] == [Download("m.gguf", len(MODEL), len(MODEL)), None]
    assert find(UrlModel(url)) == path
    assert len(server.requests) == 1
    assert sorted(file.name for file in folder.iterdir()) == [
        "m.gguf",
        "m.gguf.json",
        "m.gguf.lock",
    ]


def test_a_cut_download_goes_on_in_the_next_run(server: FileServer, find: Find) -> None:
    server.plan(PATH, cut_after(1000), cut_after(0), cut_after(0))

    issue, is_final = find.fails(UrlModel(server.url(PATH)))

    assert (issue.kind, is_final) == (IssueKind.DOWNLOAD_INTERRUPTED, False)
    assert issue.model_path == server.url(PATH)
    assert find(UrlModel(server.url(PATH))).read_bytes() == MODEL
    assert server.ranges(PATH)[-1] == "bytes=1000-"


def test_two_urls_are_two_files(server: FileServer, find: Find) -> None:
    server.publish("/others/m.gguf", OTHER)

    assert find(UrlModel(server.url(PATH))).read_bytes() == MODEL
    assert find(UrlModel(server.url("/others/m.gguf"))).read_bytes() == OTHER


@pytest.mark.parametrize("damage", [b"", MODEL[:-1], b"\0" * len(MODEL), None])
def test_a_damaged_file_is_fetched_again(
    server: FileServer, find: Find, damage: bytes | None
) -> None:
    path = find(UrlModel(server.url(PATH)))
    if damage is None:
        path.with_name("m.gguf.json").unlink()
    else:
        path.write_bytes(damage)

    assert find(UrlModel(server.url(PATH))) == path
    assert path.read_bytes() == MODEL
    assert len(server.requests) == 2


def test_a_sum_is_looked_at_also_later(server: FileServer, find: Find) -> None:
    url, right = server.url(PATH), hashlib.sha256(MODEL).hexdigest()
    path = find(UrlModel(url))
    assert find(UrlModel(url, right.upper())) == path
    assert len(server.requests) == 1
    server.publish(PATH, OTHER, etag='"two"')

    find(UrlModel(url, hashlib.sha256(OTHER).hexdigest()))

    assert path.read_bytes() == OTHER
    issue, is_final = find.fails(UrlModel(url, right))
    assert (issue.kind, is_final) == (IssueKind.MODEL_CACHE_IS_CORRUPTED, True)


def test_a_model_in_parts_is_fetched_whole(server: FileServer, find: Find) -> None:
    for number, name in enumerate(PARTS):
        server.publish(f"/models/{name}", MODEL[: 1000 + number])
    url = server.url(f"/models/{PARTS[1]}?key=1")

    path = find(UrlModel(url, hashlib.sha256(MODEL[:1001]).hexdigest()))

    assert path.name == PARTS[0]
    assert {request.query for request in server.requests} == {"key=1"}
    assert [len((path.parent / name).read_bytes()) for name in PARTS] == [1000, 1001, 1002]
    assert [
        report.filename for report in find.reports if report and report.current == report.total
    ] == PARTS


def test_a_part_that_is_missing_is_an_issue(server: FileServer, find: Find) -> None:
    server.publish(f"/models/{PARTS[0]}", MODEL)

    issue, is_final = find.fails(UrlModel(server.url(f"/models/{PARTS[0]}")))

    assert (issue.kind, is_final) == (IssueKind.MODEL_DOES_NOT_EXIST_AT_URL, True)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "m.gguf",
        "ftp://host/m.gguf",
        "file:///m.gguf",
        "http://",
        "http:///m.gguf",
        "http://host:99999/m.gguf",
        "http://host:port/m.gguf",
        "http://[::1/m.gguf",
        "http://host/\x00",
    ],
)
def test_a_url_that_is_none_is_malformed(find: Find, url: str) -> None:
    issue, is_final = find.fails(UrlModel(url))

    assert (issue.kind, is_final) == (IssueKind.DOWNLOAD_URL_IS_MALFORMED, True)
    assert not find.cache.exists()


def test_a_sum_that_is_none_is_refused_before_anything_is_fetched(
    server: FileServer, find: Find
) -> None:
    issue, is_final = find.fails(UrlModel(server.url(PATH), "abc"))

    assert (issue.kind, is_final) == (IssueKind.DOWNLOAD_URL_IS_MALFORMED, True)
    assert server.requests == []


def test_secrets_of_a_url_are_used_but_not_shown(server: FileServer, find: Find) -> None:
    url = server.url(PATH).replace("//", "//user:password@") + "?key=hidden#part"
    server.plan(PATH, status(403))

    issue, _ = find.fails(UrlModel(url))

    assert issue.model_path == server.url(PATH)
    assert "password" not in repr(issue)
    assert "hidden" not in repr(issue)
    assert server.requests[0].headers["authorization"].startswith("Basic ")


def test_a_web_page_is_not_kept(server: FileServer, find: Find) -> None:
    server.plan(PATH, page)

    issue, is_final = find.fails(UrlModel(server.url(PATH)))

    assert (issue.kind, is_final) == (IssueKind.MODEL_CANNOT_BE_LOADED, True)
    assert "web page" in issue.detail
    assert find(UrlModel(server.url(PATH))).read_bytes() == MODEL


# The cache


@pytest.mark.parametrize("where", ["", "downloaded-models"])
def test_a_cache_that_cannot_be_written_is_an_issue(
    server: FileServer, find: Find, where: str
) -> None:
    in_the_way = find.cache / where
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("a file in the way")

    issue, is_final = find.fails(UrlModel(server.url(PATH)))

    assert (issue.kind, is_final) == (IssueKind.CACHE_DIRECTORY_IS_NOT_WRITABLE, False)
    assert str(in_the_way) in issue.detail


def test_two_threads_share_one_download(server: FileServer, tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()
    server.plan(PATH, stall_after(1000, until=end, begun=begun))
    finds = [Find(tmp_path), Find(tmp_path)]

    with ThreadPoolExecutor() as pool:
        first = pool.submit(finds[0], UrlModel(server.url(PATH)))
        assert begun.wait(60)
        second = pool.submit(finds[1], UrlModel(server.url(PATH)))
        end.set()

        assert first.result(60) == second.result(60)
    assert first.result().read_bytes() == MODEL
    assert server.ranges(PATH) == [None, "bytes=1000-"]
    assert finds[1].reports == [None]


def test_a_file_that_is_there_needs_no_lock(server: FileServer, find: Find) -> None:
    path = find(UrlModel(server.url(PATH)))

    with locked(path.with_name("m.gguf.lock"), timeout=0, stop=find.stop):
        assert find(UrlModel(server.url(PATH)), lock_timeout=0) == path


def test_who_waits_too_long_for_another_is_told(server: FileServer, tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()
    server.plan(PATH, stall_after(1000, until=end, begun=begun))

    with ThreadPoolExecutor() as pool:
        first = pool.submit(Find(tmp_path), UrlModel(server.url(PATH)))
        assert begun.wait(60)
        issue, is_final = Find(tmp_path).fails(UrlModel(server.url(PATH)), lock_timeout=0.1)
        end.set()

    assert (issue.kind, is_final) == (IssueKind.CACHE_CANNOT_ACQUIRE_LOCK, False)
    assert first.result().read_bytes() == MODEL


def test_a_download_can_be_stopped_and_goes_on_later(server: FileServer, find: Find) -> None:
    end = threading.Event()
    server.plan(PATH, stall_after(1000, until=end, begun=find.stop))

    with pytest.raises(ModelFileStopped):
        find(UrlModel(server.url(PATH)))

    end.set()
    find.stop.clear()
    assert find(UrlModel(server.url(PATH))).read_bytes() == MODEL


CHILD = """
import sys, threading
from pathlib import Path
from agent.model_files import ModelFiles
from common.models import UrlModel

files = ModelFiles(cache=Path(sys.argv[1]), lock_timeout=60, read_timeout=60)
path = files.find(UrlModel(sys.argv[2]), progress=lambda _: None, stop=threading.Event())
print(path)
"""


def child(cache: Path, url: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(cache), url],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_a_killed_process_left_is_resumed(
    server: FileServer, find: Find, tmp_path: Path
) -> None:
    begun, end = threading.Event(), threading.Event()
    half = len(MODEL) // 2
    server.plan(PATH, stall_after(half, until=end, begun=begun))
    process = child(find.cache, server.url(PATH))
    try:
        assert begun.wait(60)
        partial = next(iter(find.cache.glob("downloaded-models/*"))) / "m.gguf.partial"
        while not partial.exists() or partial.stat().st_size < half // 2:
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        end.set()
    size = partial.stat().st_size

    assert find(UrlModel(server.url(PATH)), lock_timeout=0).read_bytes() == MODEL
    assert server.ranges(PATH) == [None, f"bytes={size}-"]


def test_two_processes_share_one_download(server: FileServer, find: Find) -> None:
    begun, end = threading.Event(), threading.Event()
    server.plan(PATH, stall_after(1000, until=end, begun=begun))
    first = child(find.cache, server.url(PATH))
    assert begun.wait(60)
    second = child(find.cache, server.url(PATH))
    end.set()

    paths = [process.communicate(timeout=60)[0].strip() for process in (first, second)]

    assert paths[0] == paths[1]
    assert Path(paths[0]).read_bytes() == MODEL
    assert server.ranges(PATH) == [None, "bytes=1000-"]


# Names


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("m.gguf", "m.gguf"),
        ("my%20model%2Fm.gguf", "my_model_m.gguf"),
        ("..%2F..%2Fetc%2Fpasswd", "_.._etc_passwd"),
        ("%00%1b[31m.gguf", "___31m.gguf"),
        (".hidden", "hidden"),
        ("", "model.gguf"),
        ("..", "model.gguf"),
        ("m" * 300 + ".gguf", "m" * 195 + ".gguf"),
        ("%C3%A9" * 150 + "-00001-of-00002.gguf", "é" * 90 + "-00001-of-00002.gguf"),
    ],
)
def test_file_names_mean_nothing_else(name: str, safe: str) -> None:
    assert safe_filename(name) == safe


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("m-00001-of-00001.gguf", ["m-00001-of-00001.gguf"]),
        ("m-00003-of-00002.gguf", ["m-00003-of-00002.gguf"]),
        ("m-00000-of-00002.gguf", ["m-00000-of-00002.gguf"]),
        ("m-1-of-2.gguf", ["m-1-of-2.gguf"]),
        ("m-00001-of-00002.bin", ["m-00001-of-00002.bin"]),
        ("m.gguf", ["m.gguf"]),
    ],
)
def test_which_files_a_model_is_in(name: str, names: list[str]) -> None:
    assert part_names(name) == names


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"HEADRACE_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"HEADRACE_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/headrace"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/headrace"),
        ({"HOME": "/h"}, "/h/.cache/headrace"),
    ],
)
def test_where_files_are_kept(environment: dict[str, str], path: str) -> None:
    assert default_cache(environment) == Path(path)
