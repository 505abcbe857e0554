"""What one connection to the clients' port may cost before any of our code is asked.

uvicorn, which Serve's proxy runs, waits for ever for a request that does not come, collects its
headers without end, and takes connections until the process has no descriptors left. Serve passes
none of its settings on, so its protocol is put in the place of uvicorn's own: see ``bound_uvicorn``.
"""

import asyncio
import logging
import resource
from typing import cast

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

log = logging.getLogger(__name__)

MOST_HEAD_BYTES = 128 * 2**10
"""Of a request's head that has not ended yet; one that has ended is judged by the balancer."""

HEAD_TIMEOUT = 30.0
"""Seconds from the connection, or the first byte of a further request, to the end of its head."""

MOST_CONNECTIONS = 8192

OTHER_DESCRIPTORS = 1024
"""Of the process, that are no clients' connections."""

TOO_LARGE = "431 Request Header Fields Too Large", "the headers are too large"
TOO_SLOW = "408 Request Timeout", "the request's headers did not come in time"
TOO_MANY = "503 Service Unavailable", "too many open connections: try again later"


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - OTHER_DESCRIPTORS))


class BoundedProtocol(HttpToolsProtocol):
    most_connections = most_connections()
    head_timeout = HEAD_TIMEOUT

    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            self._refuse(TOO_MANY)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_has_come()
        if self._answers:
            self._refuse_pipelining()
        else:
            super().on_headers_complete()

    def _refuse_pipelining(self) -> None:
        """With a second request waiting uvicorn would read no further, and never learn that the client
        of the first one has left. No client that is in use sends one before its answer is over.
        """
        log.info("%s: a request before the answer to the last one was over", self.client)
        self._refused = True
        self.transport.abort()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(self.head_timeout, self._too_slow)

    def _too_slow(self) -> None:
        if self._answers:  # it may be us who read no further, until that answer is over
            self._timer = self.loop.call_later(self.head_timeout, self._too_slow)
        else:
            self._refuse(TOO_SLOW)

    @property
    def _answers(self) -> bool:
        """Is an answer under way?"""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # there is none before a request
        return cycle is not None and not cycle.response_complete

    def _head_has_come(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, why: tuple[str, str]) -> None:
        """Answer, if no answer is under way, and close the connection."""
        self._refused = True
        self._head_has_come()
        status, message = why
        log.info("%s: %s", self.client, message)
        if not self._answers:
            body = f"{message}\n"
            head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            retry = "retry-after: 5\r\n" if why is TOO_MANY else ""
            head += f"{retry}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write((head + body).encode())
        self.transport.close()


def bound_uvicorn() -> None:
    """From now on servers of this process that leave the choice of the protocol to uvicorn have this
    one.
    """
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedProtocol.__name__}"
