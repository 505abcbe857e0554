"""From what a model is called to its file on this machine, or an issue that says why there is none.

Files from a URL are kept in a folder of their own, named by the URL's sum, and asked for only once.
Those from Hugging Face stand in its own cache (``agent.hugging_face``).
"""

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import assert_never
from urllib.parse import unquote

import httpx
import msgspec

from agent.cached_files import (
    DownloadError,
    DownloadStopped,
    cache_errors,
    file_sha256,
    locked,
    publish,
    write_record,
)
from agent.download import (
    CONNECT_TIMEOUT,
    LOCK_TIMEOUT,
    READ_TIMEOUT,
    RETRY_DELAYS,
    Patience,
    Reporter,
    Source,
    fetch,
)
from agent.hugging_face import HuggingFace
from common.errors import HeadraceError, ModelError
from common.models import AgentIssue, Download, HuggingFaceModel, IssueKind, LocalModel, UrlModel
from common.references import describe

log = logging.getLogger(__name__)

MAGIC = b"GGUF"

LONGEST_FILENAME = 200
"""In bytes; what we append must fit into the usual 255."""

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)
"""How llama.cpp names the parts of a model (``llama_split_path``)."""


class ModelFileError(HeadraceError):
    """There is no file that could be loaded."""

    def __init__(self, issue: AgentIssue, *, is_final: bool) -> None:
        super().__init__(f"{issue.model_path}: {issue.detail}")
        self.issue = issue
        self.is_final = is_final
        """The same again would end the same way: wait until the reference changes."""


class ModelFileStopped(HeadraceError):  # noqa: N818 - not an error, but asked for
    """Nobody wants the file any more. What has come of it is kept."""


class ModelFiles:
    """May be used by several threads, and beside other processes with the same cache."""

    def __init__(
        self,
        *,
        cache: Path,
        hugging_face: HuggingFace | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
        lock_timeout: float = LOCK_TIMEOUT,
        retry_delays: tuple[float, ...] = RETRY_DELAYS,
    ) -> None:
        """``read_timeout``: seconds without a single byte; ``lock_timeout``: while another process
        fetches the same; ``retry_delays``: before each further try that gets no further.
        """
        self._cache = cache
        self._hugging_face = hugging_face or HuggingFace()
        self._patience = Patience(
            connect=connect_timeout,
            read=read_timeout,
            lock=lock_timeout,
            retry_delays=retry_delays,
        )

    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> Path:
        """The file, or the first one of a model in parts. Blocks as long as it takes.

        ``progress`` is called on this thread: about four times a second while a file comes, and in
        the end with None. Raises ``ModelFileError``, and ``ModelFileStopped`` within a second after
        ``stop`` is set.
        """
        reporter = Reporter(progress)
        try:
            with cache_errors():
                match reference:
                    case LocalModel(path):
                        return _find_local(Path(path))
                    case HuggingFaceModel():
                        return self._find_in_hub(reference, reporter=reporter, stop=stop)
                    case UrlModel():
                        return self._find_at_url(reference, reporter=reporter, stop=stop)
                    case _:
                        assert_never(reference)
        except DownloadStopped as stopped:
            raise ModelFileStopped(f"{describe(reference)}: stopped") from stopped
        except DownloadError as error:
            issue = AgentIssue(
                error.kind,
                describe(reference),
                error.detail,
                error.lock_path if error.kind is IssueKind.HUGGING_FACE_CANNOT_ACQUIRE_LOCK else "",
            )
            raise ModelFileError(issue, is_final=error.is_final) from error
        finally:
            progress(None)

    def _find_in_hub(
        self, reference: HuggingFaceModel, *, reporter: Reporter, stop: threading.Event
    ) -> Path:
        revision = reference.revision
        paths: list[Path] = []
        for filename in part_names(reference.filename):
            path, revision = self._hugging_face.find(
                reference.repo_id,
                filename,
                revision=revision,  # from the second part on the commit: all are of the same one
                magic=MAGIC,
                patience=self._patience,
                reporter=reporter,
                stop=stop,
            )
            paths.append(path)
        return paths[0]

    def _find_at_url(
        self, reference: UrlModel, *, reporter: Reporter, stop: threading.Event
    ) -> Path:
        url = _parse(reference.url)
        sha256 = reference.sha256 and reference.sha256.lower()
        if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
            raise _malformed(f"not a sha256: {reference.sha256!r}")
        folder = (
            self._cache / "downloaded-models" / hashlib.sha256(reference.url.encode()).hexdigest()
        )
        path, _, query = url.raw_path.decode("ascii").partition("?")
        head, slash, name = path.rpartition("/")
        found: list[Path] = []
        for part in part_names(name):
            source = Source(
                url=str(
                    url.copy_with(
                        raw_path=f"{head}{slash}{part}{'?' if query else ''}{query}".encode(),
                        fragment=None,
                    )
                ),
                filename=safe_filename(part),
                magic=MAGIC,
                headers={"user-agent": "headrace"},
                sha256=sha256 if part == name else None,
            )
            found.append(self._have(source, folder, reporter=reporter, stop=stop))
        return found[0]

    def _have(
        self, source: Source, folder: Path, *, reporter: Reporter, stop: threading.Event
    ) -> Path:
        """From the cache, or into it."""
        destination = folder / source.filename
        # First without the lock: so also a cache can be used that cannot be written.
        if _is_whole(destination, sha256=source.sha256, stop=stop):
            return destination
        folder.mkdir(parents=True, exist_ok=True)
        lock = _beside(destination, ".lock")
        with locked(lock, timeout=self._patience.lock, stop=stop):
            if _is_whole(destination, sha256=source.sha256, stop=stop):
                return destination
            if destination.exists():
                log.warning("%s is not what was stored there; fetching it again", destination)
            partial = _beside(destination, ".partial")
            fetch(source, partial, patience=self._patience, reporter=reporter, stop=stop)
            # Before the file has its place: a file without a record would be fetched again.
            record = _Record(size=partial.stat().st_size, sha256=source.sha256)
            write_record(_beside(destination, ".json"), record)
            publish(partial, destination)
        return destination


class _Record(msgspec.Struct, frozen=True):
    """What was stored."""

    size: int
    sha256: str | None
    """None: nobody asked."""


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _is_whole(path: Path, *, sha256: str | None, stop: threading.Event) -> bool:
    """Is it still the file that was stored there?"""
    try:
        record = msgspec.json.decode(_beside(path, ".json").read_bytes(), type=_Record)
        if path.stat().st_size != record.size:
            return False
        check_model(path)
    except (OSError, msgspec.DecodeError, ModelError):
        return False
    if sha256 is None or sha256 == record.sha256:
        return True
    if file_sha256(path, stop=stop) != sha256:
        return False
    with suppress(OSError):  # the next time it need not be read
        write_record(_beside(path, ".json"), _Record(size=record.size, sha256=sha256))
    return True


def check_model(path: Path) -> None:
    """Is it a file that looks like a model? Raises ``ModelError`` with the reason why not."""
    try:
        if not S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path} is not a file")  # and to open a pipe could take for ever
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    if magic != MAGIC:
        raise ModelError(f"{path} is not a GGUF file")


def _find_local(path: Path) -> Path:
    parts = [path.with_name(name) for name in part_names(path.name)] if path.name else [path]
    for part in parts:
        # Nothing of this is final: files come and go, and this one may still be on its way.
        if not _exists(part):
            detail = f"{part} does not exist"
            raise DownloadError(IssueKind.MODEL_FILE_DOES_NOT_EXIST, detail, is_final=False)
        try:
            check_model(part)
        except ModelError as error:
            raise DownloadError(
                IssueKind.MODEL_CANNOT_BE_LOADED, str(error), is_final=False
            ) from error
    return parts[0]


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a zero byte is a ValueError
        return False
    except OSError:
        return True  # whoever opens it is told what is wrong
    return True


def part_names(filename: str) -> list[str]:
    """All files of the model that this one belongs to: llama.cpp wants the first, and finds the
    others in the same folder. Mostly that is this one alone.
    """
    found = PART.fullmatch(filename)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [filename]
    return [
        f"{found['stem']}-{number:05d}-of-{found['count']}.gguf"
        for number in range(1, int(found["count"]) + 1)
    ]


def safe_filename(name: str) -> str:
    """From the end of a URL's path: a name that means nothing to a file system or a terminal."""
    name = re.sub(r"[^\w.+=@-]", "_", unquote(name)).lstrip(".")
    encoded = name.encode()
    if len(encoded) > LONGEST_FILENAME:  # the end says which kind and which part it is
        name = encoded[-LONGEST_FILENAME:].decode(errors="ignore").lstrip(".")
    return name or "model.gguf"


def _parse(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise _malformed(str(error)) from error
    if url.scheme not in ("http", "https"):
        raise _malformed("only http and https are understood")
    if not url.host:
        raise _malformed("it names no server")
    if url.port is not None and not 0 < url.port < 65536:
        raise _malformed(f"there is no port {url.port}")
    return url


def _malformed(detail: str) -> DownloadError:
    return DownloadError(IssueKind.DOWNLOAD_URL_IS_MALFORMED, detail, is_final=True)


def default_cache(environment: Mapping[str, str]) -> Path:
    """Where files from URLs are kept, if nobody says otherwise."""
    if chosen := environment.get("HEADRACE_CACHE_DIR"):
        return Path(chosen)
    shared = environment.get("XDG_CACHE_HOME", "")
    if Path(shared).is_absolute():  # others must be ignored, says the XDG specification
        return Path(shared) / "headrace"
    home = environment.get("HOME")
    return (Path(home) if home else Path.home()) / ".cache" / "headrace"
