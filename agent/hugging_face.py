"""A file from the Hugging Face Hub, in its own cache, beside what other programs put there.

The library ``huggingface_hub`` knows where things are, who asks, and which commit a revision is.
The file itself comes by ``agent.download``: the library's own download cannot be stopped, waits
for locks without an end and begins anew each time (seen in 2.4.0). The layout of the cache is a
published one: ``refs/REVISION`` holds a commit, ``snapshots/COMMIT/FILENAME`` points to
``blobs/ETAG``, and the entity tag of a large file is its sha256.

The library is imported when it is first needed: that takes a third of a second.
"""

import logging
import os
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agent.cached_files import DownloadError, call_on_a_thread, locked, publish
from agent.download import Patience, Reporter, Source, TransientError, fetch, refusal
from common.models import IssueKind

log = logging.getLogger(__name__)

COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
ETAG = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class _Metadata:
    commit: str
    etag: str
    size: int | None
    url: str
    headers: Mapping[str, str]
    """With the token, for the Hub only: it is not sent on to where the Hub redirects."""


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """Where, as whom, and where to; each None: as the library's environment says (HF_ENDPOINT,
    HF_TOKEN or who has logged in, HF_HUB_CACHE or HF_HOME).
    """

    endpoint: str | None = None
    token: str | None = None
    cache: Path | None = None

    def find(
        self,
        repo_id: str,
        filename: str,
        *,
        revision: str,
        magic: bytes,
        patience: Patience,
        reporter: Reporter,
        stop: threading.Event,
    ) -> tuple[Path, str]:
        """The file and the commit it is of.

        1. A commit never changes: if the file of this one is in the cache, nobody is asked.
        2. Else the Hub says which commit the revision is now.
        3. If it cannot be asked, the commit that it was when last asked has to do.
        """
        _check_names(repo_id, filename, revision)
        if COMMIT.fullmatch(revision):
            cached = self._cached(repo_id, filename, revision, magic)
            if cached is not None:
                return cached  # 1
        try:
            metadata = call_on_a_thread(  # 2
                lambda: self._ask(repo_id, filename, revision, patience=patience), stop=stop
            )
        except TransientError as error:
            cached = self._cached(repo_id, filename, revision, magic)
            if cached is None:
                raise
            log.warning("%s: %s; using what is in the cache", repo_id, error.detail)
            return cached  # 3
        source = Source(
            url=metadata.url,
            filename=PurePosixPath(filename).name,
            magic=magic,
            headers=metadata.headers,
            size=metadata.size,
            sha256=metadata.etag if SHA256.fullmatch(metadata.etag) else None,
        )
        path = self._have(
            source,
            metadata,
            repo_id=repo_id,
            filename=filename,
            patience=patience,
            reporter=reporter,
            stop=stop,
        )
        if revision != metadata.commit:
            with suppress(OSError):  # a cache that cannot be written may still be read
                _write_reference(self._folder(repo_id) / "refs" / revision, metadata.commit)
        return path, metadata.commit

    def _root(self) -> Path:
        if self.cache is not None:
            return self.cache
        _prepare()
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE)

    def _folder(self, repo_id: str) -> Path:
        return self._root() / _folder_name(repo_id)

    def _cached(
        self, repo_id: str, filename: str, revision: str, magic: bytes
    ) -> tuple[Path, str] | None:
        folder = self._folder(repo_id)
        commit = revision
        with suppress(OSError):
            commit = (folder / "refs" / revision).read_text().strip()
        path = folder / "snapshots" / commit / filename
        if not COMMIT.fullmatch(commit) or not _is_whole(path, size=None, magic=magic):
            return None
        return path, commit

    def _ask(self, repo_id: str, filename: str, revision: str, *, patience: Patience) -> _Metadata:
        _prepare()
        from huggingface_hub import (
            get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]
            hf_hub_url,
        )
        from huggingface_hub.utils import (
            build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
        )

        with _hub_errors():
            metadata = get_hf_file_metadata(
                hf_hub_url(repo_id, filename, revision=revision, endpoint=self.endpoint),
                token=self.token,
                timeout=patience.read,
                endpoint=self.endpoint,
            )
            commit, etag = metadata.commit_hash, metadata.etag
            # Both become names of files.
            if commit is None or etag is None or not COMMIT.fullmatch(commit):
                raise TransientError(
                    IssueKind.DOWNLOAD_SERVER_ERRORED,
                    "the server does not answer as the Hugging Face Hub does",
                )
            if not ETAG.fullmatch(etag):
                raise TransientError(
                    IssueKind.DOWNLOAD_SERVER_ERRORED, f"a strange entity tag: {etag!r}"
                )
            return _Metadata(
                commit=commit,
                etag=etag,
                size=metadata.size,
                # Of the commit, not the revision, which may move in between.
                url=hf_hub_url(repo_id, filename, revision=commit, endpoint=self.endpoint),
                headers=build_hf_headers(token=self.token, library_name="headrace"),
            )

    def _have(
        self,
        source: Source,
        metadata: _Metadata,
        *,
        repo_id: str,
        filename: str,
        patience: Patience,
        reporter: Reporter,
        stop: threading.Event,
    ) -> Path:
        """From the cache, or into it."""
        folder = self._folder(repo_id)
        blob = folder / "blobs" / metadata.etag
        pointer = folder / "snapshots" / metadata.commit / filename
        if _is_whole(pointer, size=source.size, magic=source.magic):
            return pointer
        lock = self._root() / ".locks" / _folder_name(repo_id) / f"{metadata.etag}.lock"
        for path in (lock, blob, pointer):
            path.parent.mkdir(parents=True, exist_ok=True)
        with _lock_errors(), locked(lock, timeout=patience.lock, stop=stop):
            if not _is_whole(blob, size=source.size, magic=source.magic):
                partial = blob.with_name(f"{blob.name}.incomplete")
                with _download_errors():
                    fetch(source, partial, patience=patience, reporter=reporter, stop=stop)
                publish(partial, blob)
            _point(pointer, blob)
        return pointer


def _prepare() -> None:
    """The library reads its environment once, when it is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def _folder_name(repo_id: str) -> str:
    return "--".join(["models", *repo_id.split("/")])


def _is_whole(path: Path, *, size: int | None, magic: bytes) -> bool:
    if not path.is_file() or size not in (None, path.stat().st_size):
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _point(pointer: Path, blob: Path) -> None:
    """Relative, so that the cache may be moved."""
    draft = pointer.with_name(f".{pointer.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(blob, pointer.parent))
    draft.replace(pointer)


def _write_reference(path: Path, commit: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(commit)
    draft.replace(path)


def _check_names(repo_id: str, filename: str, revision: str) -> None:
    """They become parts of paths. Raises ``DownloadError``."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo_id, re.ASCII):
        raise _does_not_exist(f"{repo_id!r} is not the name of a repository")
    for what, name in (("repository", repo_id), ("file", filename), ("revision", revision)):
        if "\0" in name or "\\" in name or {"", ".", ".."} & set(name.split("/")):
            raise _does_not_exist(f"{name!r} is not the name of a {what}")


def _does_not_exist(detail: str) -> DownloadError:
    return DownloadError(IssueKind.HUGGING_FACE_MODEL_DOES_NOT_EXIST, detail, is_final=True)


@contextmanager
def _hub_errors() -> Generator[None]:
    """Turns what the library raises into issues."""
    import httpx2
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        OIDCError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise _does_not_exist(str(error)) from error
    except OfflineModeIsEnabled as error:
        detail = "HF_HUB_OFFLINE is set, and the file is not in the cache"
        raise TransientError(IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, detail) from error
    except (GatedRepoError, OIDCError) as error:
        raise DownloadError(
            IssueKind.HUGGING_FACE_PERMISSIONS, _first_line(error), is_final=True
        ) from error
    except RepositoryNotFoundError as error:
        # The Hub does not tell strangers what exists.
        detail = "there is no such repository, or it is private and the token does not open it"
        raise _does_not_exist(detail) from error
    except RevisionNotFoundError as error:
        raise _does_not_exist("the repository has no such revision") from error
    except RemoteEntryNotFoundError as error:
        raise _does_not_exist("the repository has no such file in this revision") from error
    except HfHubHTTPError as error:
        with _download_errors():
            response = error.response
            raise refusal(response.status_code, host=response.request.url.host) from error
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        detail = f"the address of the Hugging Face Hub (HF_ENDPOINT): {error}"
        raise DownloadError(IssueKind.DOWNLOAD_URL_IS_MALFORMED, detail, is_final=True) from error
    except (httpx2.ConnectError, httpx2.TimeoutException, httpx2.ProxyError) as error:
        detail = str(error) or "the Hugging Face Hub does not answer"
        raise TransientError(IssueKind.DOWNLOAD_SERVER_IS_UNREACHABLE, detail) from error
    except httpx2.HTTPError as error:
        raise TransientError(IssueKind.DOWNLOAD_INTERRUPTED, f"{error}") from error


def _first_line(error: Exception) -> str:
    return " ".join(line for line in str(error).splitlines() if line.strip())[:500]


@contextmanager
def _download_errors() -> Generator[None]:
    """The wire format names two issues after the Hub."""
    try:
        yield
    except DownloadError as error:
        match error.kind:
            case IssueKind.MODEL_DOES_NOT_EXIST_AT_URL:
                raise _does_not_exist(error.detail) from error
            case IssueKind.DOWNLOAD_SERVER_DENIED_ACCESS:
                raise DownloadError(
                    IssueKind.HUGGING_FACE_PERMISSIONS, error.detail, is_final=True
                ) from error
            case _:
                raise


@contextmanager
def _lock_errors() -> Generator[None]:
    try:
        yield
    except DownloadError as error:
        if error.kind is not IssueKind.CACHE_CANNOT_ACQUIRE_LOCK:
            raise
        raise DownloadError(
            IssueKind.HUGGING_FACE_CANNOT_ACQUIRE_LOCK,
            error.detail,
            is_final=False,
            lock_path=error.lock_path,
        ) from error
