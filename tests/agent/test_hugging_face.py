import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from file_server import FileServer, cut_after, page, silent, stall_after, status

from agent.hugging_face import HuggingFace
from agent.model_files import ModelFileError, ModelFiles, ModelFileStopped
from common.models import AgentIssue, Download, HuggingFaceModel, IssueKind

MODEL = b"GGUF" + bytes(range(256)) * 2000
OTHER = b"GGUF" + bytes(reversed(range(256))) * 2000
REPO = "someone/some-model"
ONE, TWO = "1" * 40, "2" * 40
MAIN = HuggingFaceModel(REPO, "m.gguf", "main")
OLD = HuggingFaceModel(REPO, "m.gguf", ONE)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with FileServer() as server:
        yield server


@pytest.fixture
def content(server: FileServer) -> str:
    """Publishes the model; the path of its content."""
    return server.publish_in_hub(REPO, "m.gguf", MODEL, revision="main", commit=ONE)


class Find:
    """What these tests do again and again."""

    def __init__(self, server: FileServer, cache: Path) -> None:
        self.cache = cache
        self.endpoint = server.url("")
        self.token: str | None = "no token"
        self.stop = threading.Event()
        self.reports: list[Download | None] = []

    def __call__(self, reference: HuggingFaceModel = MAIN, *, lock_timeout: float = 60.0) -> Path:
        hub = HuggingFace(endpoint=self.endpoint, token=self.token, cache=self.cache)
        files = ModelFiles(
            cache=self.cache / "unused",
            hugging_face=hub,
            lock_timeout=lock_timeout,
            retry_delays=(0.0, 0.0),
            read_timeout=60,
        )
        try:
            return files.find(reference, progress=self.reports.append, stop=self.stop)
        finally:
            assert self.reports[-1] is None

    def fails(
        self, reference: HuggingFaceModel = MAIN, *, lock_timeout: float = 60.0
    ) -> tuple[IssueKind, bool]:
        return self.issue(reference, lock_timeout=lock_timeout)[0].kind, self.is_final

    def issue(
        self, reference: HuggingFaceModel = MAIN, *, lock_timeout: float = 60.0
    ) -> tuple[AgentIssue, str]:
        with pytest.raises(ModelFileError) as caught:
            self(reference, lock_timeout=lock_timeout)
        self.is_final = caught.value.is_final
        return caught.value.issue, caught.value.issue.detail

    def go_offline(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            self.endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"


@pytest.fixture
def find(server: FileServer, tmp_path: Path) -> Find:
    return Find(server, tmp_path / "hub")


def test_a_model_is_put_where_other_programs_look_for_it(content: str, find: Find) -> None:
    path = find()

    folder = find.cache / "models--someone--some-model"
    assert path == folder / "snapshots" / ONE / "m.gguf"
    assert path.read_bytes() == MODEL
    assert path.readlink() == Path("../../blobs") / hashlib.sha256(MODEL).hexdigest()
    assert (folder / "refs" / "main").read_text() == ONE
    assert find.reports[-2:] == [Download("m.gguf", len(MODEL), len(MODEL)), None]
    assert [file.name for file in (folder / "blobs").iterdir()] == [path.resolve().name]


def test_the_library_finds_what_we_put_there(content: str, find: Find) -> None:
    from huggingface_hub import try_to_load_from_cache

    path = find()

    assert try_to_load_from_cache(REPO, "m.gguf", cache_dir=find.cache) == str(path)


def test_another_revision_is_another_file(server: FileServer, content: str, find: Find) -> None:
    server.publish_in_hub(REPO, "m.gguf", OTHER, revision="v2", commit=TWO)
    assert find().read_bytes() == MODEL

    assert find(HuggingFaceModel(REPO, "m.gguf", "v2")).read_bytes() == OTHER
    assert find().read_bytes() == MODEL


def test_a_revision_that_moves_is_followed(server: FileServer, content: str, find: Find) -> None:
    find()
    server.publish_in_hub(REPO, "m.gguf", OTHER, revision="main", commit=TWO)

    assert find().read_bytes() == OTHER
    assert find(OLD).read_bytes() == MODEL


def test_the_same_content_is_fetched_once(server: FileServer, content: str, find: Find) -> None:
    find()
    server.publish_in_hub(REPO, "m.gguf", MODEL, revision="main", commit=TWO)

    path = find()

    assert path.parent.name == TWO
    assert path.read_bytes() == MODEL
    assert len(server.seen(content)) == 1


def test_a_commit_that_is_cached_needs_nobody(server: FileServer, content: str, find: Find) -> None:
    path = find(OLD)
    count = len(server.requests)

    assert find(OLD) == path
    assert len(server.requests) == count


def test_offline_the_last_known_commit_has_to_do(content: str, find: Find) -> None:
    path = find()
    find.go_offline()

    assert find() == path
    kind = find.fails(HuggingFaceModel(REPO, "m.gguf", "v2"))
    assert kind == (IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, False)


def test_a_damaged_file_is_fetched_again(server: FileServer, content: str, find: Find) -> None:
    path = find(OLD)
    path.resolve().write_bytes(b"\0" * len(MODEL))

    assert find(OLD) == path
    assert path.read_bytes() == MODEL


def test_content_that_is_not_what_the_hub_promised_is_given_up(
    server: FileServer, content: str, find: Find
) -> None:
    server.publish(content, OTHER)

    assert find.fails() == (IssueKind.MODEL_CACHE_IS_CORRUPTED, True)
    assert len(server.seen(content)) == 2


def test_a_cut_download_is_resumed(server: FileServer, content: str, find: Find) -> None:
    server.plan(content, cut_after(1000))

    assert find().read_bytes() == MODEL
    assert server.ranges(content) == [None, "bytes=1000-"]


def test_a_download_that_is_given_up_goes_on_later(
    server: FileServer, content: str, find: Find
) -> None:
    server.plan(content, cut_after(1000), cut_after(0), cut_after(0))

    assert find.fails() == (IssueKind.DOWNLOAD_INTERRUPTED, False)
    assert find().read_bytes() == MODEL
    assert server.ranges(content)[-1] == "bytes=1000-"


def test_a_stalled_download_can_be_stopped(server: FileServer, content: str, find: Find) -> None:
    end = threading.Event()
    server.plan(content, stall_after(1000, until=end, begun=find.stop))

    with pytest.raises(ModelFileStopped):
        find()

    end.set()
    find.stop.clear()
    assert find().read_bytes() == MODEL


def test_a_hub_that_does_not_answer_can_be_left(server: FileServer, find: Find) -> None:
    end = threading.Event()
    server.always(f"/{REPO}/resolve/main/m.gguf", silent(until=end, begun=find.stop))

    with pytest.raises(ModelFileStopped):
        find()

    end.set()


def test_a_model_in_parts_is_of_one_commit(server: FileServer, find: Find) -> None:
    names = ["q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"]
    server.publish_in_hub(REPO, names[0], MODEL, revision="main", commit=ONE)
    server.publish_in_hub(REPO, names[1], OTHER, revision="main", commit=ONE)
    server.always(f"/{REPO}/resolve/main/{names[1]}", status(500))

    path = find(HuggingFaceModel(REPO, names[1], "main"))

    assert path.parent.parent.name == ONE
    assert path.read_bytes() == MODEL
    assert path.with_name("m-00002-of-00002.gguf").read_bytes() == OTHER


def test_the_token_is_shown_to_the_hub_only(server: FileServer, content: str, find: Find) -> None:
    server.token = find.token = "hf_secret"

    assert find().read_bytes() == MODEL
    assert {
        (request.path == content, request.headers.get("authorization"))
        for request in server.requests
    } == {(False, "Bearer hf_secret"), (True, None)}


def test_without_the_right_token_it_is_a_matter_of_permissions(
    server: FileServer, content: str, find: Find
) -> None:
    server.token = "hf_secret"

    issue, detail = find.issue()

    assert issue.kind is IssueKind.HUGGING_FACE_PERMISSIONS
    assert issue.model_path == "https://huggingface.co/someone/some-model/blob/main/m.gguf"
    assert "gated" in detail
    assert "secret" not in detail
    assert find.is_final


@pytest.mark.parametrize(
    ("code", "kind", "is_final"),
    [
        (401, IssueKind.HUGGING_FACE_PERMISSIONS, True),
        (403, IssueKind.HUGGING_FACE_PERMISSIONS, True),
        (404, IssueKind.HUGGING_FACE_MODEL_DOES_NOT_EXIST, True),
        (400, IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, True),
        (429, IssueKind.DOWNLOAD_SERVER_REJECTED_REQUEST, False),
        (500, IssueKind.DOWNLOAD_SERVER_ERRORED, False),
    ],
)
@pytest.mark.parametrize("of_content", [False, True])
def test_each_status_has_its_issue(
    server: FileServer,
    content: str,
    find: Find,
    *,
    of_content: bool,
    code: int,
    kind: IssueKind,
    is_final: bool,
) -> None:
    server.always(content if of_content else f"/{REPO}/resolve/main/m.gguf", status(code))

    assert find.fails() == (kind, is_final)


@pytest.mark.parametrize(
    ("reference", "what"),
    [
        (HuggingFaceModel("someone/other", "m.gguf", "main"), "repository"),
        (HuggingFaceModel(REPO, "m.gguf", "v3"), "revision"),
        (HuggingFaceModel(REPO, "n.gguf", "main"), "file"),
        (HuggingFaceModel("no such/name", "m.gguf", "main"), "repository"),
        (HuggingFaceModel("a/b/c", "m.gguf", "main"), "repository"),
        (HuggingFaceModel("some--one/m", "m.gguf", "main"), "repo_id"),
        (HuggingFaceModel("", "m.gguf", "main"), "repository"),
        (HuggingFaceModel("../..", "m.gguf", "main"), "repository"),
        (HuggingFaceModel(REPO, "../../m.gguf", "main"), "file"),
        (HuggingFaceModel(REPO, "/etc/m.gguf", "main"), "file"),
        (HuggingFaceModel(REPO, "", "main"), "file"),
        (HuggingFaceModel(REPO, "m.gguf", "../main"), "revision"),
        (HuggingFaceModel(REPO, "m.gguf", ""), "revision"),
    ],
)
def test_what_does_not_exist_is_told_apart(
    content: str, find: Find, reference: HuggingFaceModel, what: str
) -> None:
    issue, detail = find.issue(reference)

    assert (issue.kind, find.is_final) == (IssueKind.HUGGING_FACE_MODEL_DOES_NOT_EXIST, True)
    assert what in detail


def test_a_server_that_is_no_hub_is_noticed(server: FileServer, find: Find) -> None:
    server.always(f"/{REPO}/resolve/main/m.gguf", page)

    assert find.fails() == (IssueKind.DOWNLOAD_SERVER_ERRORED, False)


@pytest.mark.parametrize(
    ("commit", "etag"), [(ONE, '"../../x"'), (ONE, '".."'), (ONE, '"a/b"'), ("../x", '"a"')]
)
def test_names_from_the_hub_are_not_trusted(
    server: FileServer, content: str, find: Find, commit: str, etag: str
) -> None:
    location = {"location": server.url(content, host="localhost")}
    headers = {**location, "x-repo-commit": commit, "x-linked-etag": etag}
    server.always(f"/{REPO}/resolve/main/m.gguf", status(302, headers))

    assert find.fails() == (IssueKind.DOWNLOAD_SERVER_ERRORED, False)


def test_what_is_no_model_is_refused(server: FileServer, find: Find) -> None:
    server.publish_in_hub(REPO, "config.json", b'{"a": 1}', revision="main", commit=ONE)

    kind = find.fails(HuggingFaceModel(REPO, "config.json", "main"))

    assert kind == (IssueKind.MODEL_CANNOT_BE_LOADED, True)


def test_a_lock_that_another_program_holds_is_named(content: str, find: Find) -> None:
    find()
    lock = next(iter(find.cache.glob(".locks/*/*.lock")))
    next(iter(find.cache.glob("*/blobs/*"))).unlink()

    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        issue, _ = find.issue(lock_timeout=0.1)

    assert issue.kind is IssueKind.HUGGING_FACE_CANNOT_ACQUIRE_LOCK
    assert issue.lock_path == str(lock)
    assert not find.is_final


def test_a_cache_that_cannot_be_written_is_an_issue(content: str, find: Find) -> None:
    find.cache.write_text("a file in the way")

    assert find.fails() == (IssueKind.CACHE_DIRECTORY_IS_NOT_WRITABLE, False)


@pytest.mark.parametrize("endpoint", ["hub.example", "ftp://hub.example"])
def test_an_endpoint_that_is_none_is_malformed(find: Find, endpoint: str) -> None:
    find.endpoint = endpoint

    assert find.fails() == (IssueKind.DOWNLOAD_URL_IS_MALFORMED, True)


CHILD = """
import sys, threading
from pathlib import Path
from agent.model_files import ModelFileError, ModelFiles
from common.models import HuggingFaceModel

files = ModelFiles(cache=Path("unused"))
assert "huggingface_hub" not in sys.modules
model = HuggingFaceModel(*sys.argv[1:4])
try:
    print(files.find(model, progress=lambda _: None, stop=threading.Event()))
except ModelFileError as error:
    print(error.issue.kind, error.issue.detail)
"""


def run(tmp_path: Path, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", CHILD, REPO, "m.gguf", "main"],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "NO_PROXY": "127.0.0.1,localhost",
            "AI_AGENT": "anything",
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def test_the_librarys_environment_is_heeded_and_nothing_is_told(
    server: FileServer, content: str, tmp_path: Path
) -> None:
    server.token = "hf_secret"
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.url("")}

    path = run(tmp_path, HF_TOKEN="hf_secret", **home)

    assert Path(path).is_relative_to(tmp_path / "home" / "hub")
    assert Path(path).read_bytes() == MODEL
    assert {request.path for request in server.requests} == {
        f"/{REPO}/resolve/main/m.gguf",
        f"/{REPO}/resolve/{ONE}/m.gguf",
        content,
    }
    assert not any("agent/" in request.headers["user-agent"] for request in server.requests)
    assert run(tmp_path, HF_HUB_OFFLINE="1", **home) == path
    assert run(tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty")) == (
        "DownloadServerIsUnreachable HF_HUB_OFFLINE is set, and the file is not in the cache"
    )
