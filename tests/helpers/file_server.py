"""A server of files that does what it is told: cut, stall, lie, refuse, redirect.

    with FileServer() as server:
        server.publish("/m.gguf", MODEL)
        server.plan("/m.gguf", cut_after(1000))   # for the first request; then it behaves
        ... server.url("/m.gguf") ...
        assert server.ranges("/m.gguf") == [None, "bytes=1000-"]

It also speaks what the library ``huggingface_hub`` asks of the Hub (``publish_in_hub``).
"""

import hashlib
import re
import ssl
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, TypeAlias


@dataclass(frozen=True)
class File:
    content: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    """With lower-case names."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"  # pyright: ignore[reportIncompatibleVariableOverride]

    def answer(
        self, status: int, headers: dict[str, str], body: bytes = b"", *, length: int | None = None
    ) -> None:
        """``length``: what is announced, if not the truth."""
        if "date" in headers:
            self.send_response_only(status)
        else:
            self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if length is not None and length > len(body):
            self.close_connection = True

    def do_GET(self) -> None:
        self.server.owner.handle(self)

    do_HEAD = do_GET  # noqa: N815 - the library's way to name methods

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: "FileServer"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what many tests are about."""


Answer: TypeAlias = Callable[[Handler, File], None]


def _range(handler: Handler) -> int | None:
    found = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("range", ""))
    return int(found[1]) if found else None


def well(handler: Handler, file: File) -> None:
    """As it should be: ``Range`` and ``If-Range`` are heeded."""
    start = _range(handler)
    condition = handler.headers.get("if-range")
    if start is None or (condition and condition not in file.headers.values()):
        handler.answer(200, file.headers, file.content)
        return
    size = len(file.content)
    if start >= size:
        handler.answer(416, {"content-range": f"bytes */{size}"})
        return
    headers = {**file.headers, "content-range": f"bytes {start}-{size - 1}/{size}"}
    handler.answer(206, headers, file.content[start:])


def cut_after(count: int, *, then: Callable[[], object] = lambda: None) -> Answer:
    """The connection ends so many bytes behind the first one that was asked for."""

    def answer(handler: Handler, file: File) -> None:
        start = _range(handler) or 0
        size = len(file.content)
        headers = dict(file.headers)
        if start:
            headers["content-range"] = f"bytes {start}-{size - 1}/{size}"
        handler.answer(
            206 if start else 200,
            headers,
            file.content[start : start + count],
            length=size - start,
        )
        handler.wfile.flush()
        then()

    return answer


def stall_after(count: int, *, until: threading.Event, begun: threading.Event) -> Answer:
    """So many bytes, then nothing until the event is set."""

    def then() -> None:
        begun.set()
        until.wait(60)

    return cut_after(count, then=then)


def silent(*, until: threading.Event, begun: threading.Event | None = None) -> Answer:
    """The request is read, and that is all until the event is set."""

    def answer(handler: Handler, file: File) -> None:
        if begun is not None:
            begun.set()
        until.wait(60)
        handler.close_connection = True

    return answer


def ignore_range(handler: Handler, file: File) -> None:
    handler.answer(200, file.headers, file.content)


def ignore_if_range(handler: Handler, file: File) -> None:
    start, size = _range(handler) or 0, len(file.content)
    headers = {**file.headers, "content-range": f"bytes {start}-{size - 1}/{size}"}
    handler.answer(206, headers, file.content[start:])


def another_range(handler: Handler, file: File) -> None:
    """Asked for the rest, it sends the beginning."""
    size = len(file.content)
    headers = {**file.headers, "content-range": f"bytes 0-{size - 1}/{size}"}
    handler.answer(206, headers, file.content)


def pieces_of(count: int) -> Answer:
    """It never sends more at once, as it may."""

    def answer(handler: Handler, file: File) -> None:
        start, size = _range(handler) or 0, len(file.content)
        piece = file.content[start : start + count]
        content_range = f"bytes {start}-{start + len(piece) - 1}/{size}"
        handler.answer(206, {**file.headers, "content-range": content_range}, piece)

    return answer


def too_much(handler: Handler, file: File) -> None:
    """More bytes follow than there are."""
    start, size = _range(handler) or 0, len(file.content)
    headers = {**file.headers, "content-range": f"bytes {start}-{size - 1}/{size}"}
    handler.answer(206, headers, file.content[start:] + b"!")


def status(code: int, headers: dict[str, str] | None = None) -> Answer:
    return lambda handler, file: handler.answer(code, headers or {}, b"no")


def page(handler: Handler, file: File) -> None:
    handler.answer(200, {"content-type": "text/html; charset=utf-8"}, b"<html>log in</html>")


def redirect(location: str) -> Answer:
    return lambda handler, file: handler.answer(302, {"location": location})


def announce(length: int) -> Answer:
    return lambda handler, file: handler.answer(200, file.headers, file.content, length=length)


def hang_up(handler: Handler, file: File) -> None:
    handler.close_connection = True


def compressed(handler: Handler, file: File) -> None:
    handler.answer(200, {"content-encoding": "gzip"}, file.content)


def chunked(handler: Handler, file: File) -> None:
    """Nobody is told how long it will be, but the end can be seen."""
    handler.send_response(200)
    handler.send_header("etag", file.headers["etag"])
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(file.content), file.content))


def endless(handler: Handler, file: File) -> None:
    """The end of the connection is the end of the file."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(file.content)
    handler.close_connection = True


@dataclass
class FileServer:
    certificate: Path | None = None
    """Of the TLS that it speaks, with its key; None: it speaks plain HTTP."""
    token: str | None = None
    """What the Hub wants to see."""
    requests: list[Request] = field(default_factory=list[Request])

    def __post_init__(self) -> None:
        self._files: dict[str, File] = {}
        self._plans: dict[str, deque[Answer]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.owner = self
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def url(self, path: str, *, host: str = "127.0.0.1") -> str:
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}{path}"

    def publish(
        self,
        path: str,
        content: bytes,
        *,
        etag: str | None = '"one"',
        headers: dict[str, str] | None = None,
    ) -> None:
        tag = {} if etag is None else {"etag": etag}
        self._files[path] = File(content, {**tag, **(headers or {})})

    def plan(self, path: str, *answers: Answer) -> None:
        """For the next requests, one each; from then on all goes well."""
        self._plans[path].extend(answers)

    def always(self, path: str, answer: Answer) -> None:
        self._plans[path] = _Endless([answer])

    def publish_in_hub(
        self, repo_id: str, filename: str, content: bytes, *, revision: str, commit: str
    ) -> str:
        """As the Hub has it: the answer on the file names commit, tag and size, and its content is
        on a server of another name. Returns the path there.
        """
        sum_ = hashlib.sha256(content).hexdigest()
        elsewhere = f"/elsewhere/{sum_}"
        self.publish(elsewhere, content, etag=f'"{sum_}"')
        headers = {
            "location": self.url(elsewhere, host="localhost"),
            "x-repo-commit": commit,
            "x-linked-etag": f'"{sum_}"',
            "x-linked-size": str(len(content)),
        }
        for name in (revision, commit):
            path = f"/{repo_id}/resolve/{name}/{filename}"
            self._files[path] = File(b"", {"hub": "", **headers})
        return elsewhere

    def seen(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path == path]

    def ranges(self, path: str) -> list[str | None]:
        """What each request for the file asked for; None: all of it."""
        return [request.headers.get("range") for request in self.seen(path)]

    def handle(self, handler: Handler) -> None:
        path, _, query = handler.path.partition("?")
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._lock:
            self.requests.append(Request(handler.command, path, query, headers))
            plan = self._plans[path]
            answer = plan.popleft() if plan else None
        file = self._files.get(path)
        if answer is not None:
            answer(handler, file or File(b"", {}))
        elif file is None:
            self._missing(handler, path)
        elif "hub" not in file.headers:
            well(handler, file)
        elif self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            handler.answer(401, {"x-error-code": "GatedRepo", "x-error-message": "gated"})
        else:
            handler.answer(302, {k: v for k, v in file.headers.items() if k != "hub"})

    def _missing(self, handler: Handler, path: str) -> None:
        headers: dict[str, str] = {}
        if found := re.fullmatch(r"/(.*)/resolve/([^/]*)/(.*)", path):
            repo, revision, _ = found.groups()
            if not any(known.startswith(f"/{repo}/resolve/") for known in self._files):
                headers["x-error-code"] = "RepoNotFound"
            elif not any(known.startswith(f"/{repo}/resolve/{revision}/") for known in self._files):
                headers["x-error-code"] = "RevisionNotFound"
            else:
                headers["x-error-code"] = "EntryNotFound"
        handler.answer(404, headers)


class _Endless(deque[Answer]):
    """The same one again and again."""

    def popleft(self) -> Answer:
        return self[0]


CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg11YRc9sRIV3HnBOI
Qg1OnjuJDGPcfWb/SQ4yY0p97cehRANCAATM45VPERl4Qojvi9UGQdbL6fko+KiO
v7bvpmEqpNMZrKDaLE/dKjJuci7C0AIGOq+5M+UaYnUsbspHBY3tHPne
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmDCCAT6gAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMDAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABMzjlU8RGXhCiO+L
1QZB1svp+Sj4qI6/tu+mYSqk0xmsoNosT90qMm5yLsLQAgY6r7kz5RpidSxuykcF
je0c+d6jfzB9MBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAPBgNVHRMBAf8E
BTADAQH/MA4GA1UdDwEB/wQEAwIChDAdBgNVHQ4EFgQUorZwMoEU4zObgd1334N+
eDabpZ4wHwYDVR0jBBgwFoAUorZwMoEU4zObgd1334N+eDabpZ4wCgYIKoZIzj0E
AwIDSAAwRQIhAPvIFZSV2t9PgdGDZux7bMWVr4f44pADO0ctPF7dYdidAiAMw8U6
FLohjqKqZgBGSTsUbUWcm5XJ4gqNWEQbZfPkRg==
-----END CERTIFICATE-----
"""
"""For 127.0.0.1 and localhost, signed by itself. Its key protects nothing."""
