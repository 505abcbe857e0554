"""The balancer's end of the agent links: a listener of its own, beside the clients' address.

Agents dial in, say ``Join``, and stay. A link that is silent for some seconds is lost. One writer
task owns each socket.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from http import HTTPStatus

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from balancer.balancer import Balancer
from balancer.keys import OPEN, Keys, Role, given_key
from balancer.limits import MOST_LINK_FRAMES, Limit, LimitError
from common.errors import STATUS, RequestError
from common.ids import AgentId
from common.messages import (
    GIVEN_UP,
    MAX_FRAME_BYTES,
    PING_INTERVAL,
    PING_TIMEOUT,
    PROTOCOL,
    REFUSED,
    Described,
    Join,
    Noted,
    Status,
    Step,
    decode_to_balancer,
)

log = logging.getLogger(__name__)

JOIN_TIMEOUT = 5.0
"""Seconds that a new link may take to say who it is."""

GOOD_BYE_TIMEOUT = 1.0

LONGEST_REASON = 100
"""Characters; a close frame holds 123 bytes."""


class AgentListener:
    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._keys = OPEN
        self._server: Server | None = None
        self._current: dict[AgentId, ServerConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(
        self, host: str, port: int, *, keys: Keys = OPEN, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen; return the port (``port`` 0: any that is free). ``tls``: None: without.

        Raises ``OSError``.
        """
        self._keys = keys
        self._server = await serve(
            self._serve,
            host,
            port,
            ssl=tls,
            origins=[None],  # agents are no web pages
            process_request=self._let_in,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=JOIN_TIMEOUT,
            close_timeout=1.0,
            ping_interval=PING_INTERVAL,
            ping_timeout=PING_TIMEOUT,
        )
        return next(iter(self._server.sockets)).getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close(code=CloseCode.GOING_AWAY, reason="the balancer is shutting down")
            await self._server.wait_closed()

    async def _serve(self, socket: ServerConnection) -> None:
        tally = self._balancer.tally
        try:
            tally.acquire(Limit.AGENTS)
        except LimitError as error:
            self._refused(socket, error)
            await socket.close(CloseCode.TRY_AGAIN_LATER, error.message)
            return
        try:
            await self._serve_frames(socket)
        except* ConnectionClosed:
            pass
        except* (TimeoutError, msgspec.MsgspecError) as group:
            log.warning("agent link from %s: %s", socket.remote_address, group.exceptions)
            await socket.close(CloseCode.UNSUPPORTED_DATA, "unreadable frame")
        finally:
            tally.release(Limit.AGENTS)

    def _let_in(self, socket: ServerConnection, request: Request) -> Response | None:
        """Asked before there is a link: an agent waits longer each time that it gets none."""
        try:
            authorizations = request.headers.get_all("Authorization")
            authorization = authorizations[0] if authorizations else None
            self._keys.check(given_key(authorization=authorization), Role.AGENT)
            self._balancer.tally.check(Limit.AGENTS)
        except RequestError as error:
            self._refused(socket, error)
            return socket.respond(HTTPStatus(STATUS[error.code]), f"{error.message}\n")
        return None

    def _refused(self, socket: ServerConnection, error: RequestError) -> None:
        log.warning("agent link from %s: %s", socket.remote_address, error)
        self._balancer.records.refused(error)

    async def _serve_frames(self, socket: ServerConnection) -> None:
        async with asyncio.timeout(JOIN_TIMEOUT):
            join = decode_to_balancer(await socket.recv())
        if not isinstance(join, Join):
            await socket.close(CloseCode.PROTOCOL_ERROR, "a link begins with a Join")
            return
        if join.protocol != PROTOCOL:
            await socket.close(REFUSED, f"this balancer speaks protocol {PROTOCOL}")
            return
        agent_id = join.agent_id
        outbox: asyncio.Queue[bytes] = asyncio.Queue(MOST_LINK_FRAMES)

        def send(frame: bytes) -> None:
            try:
                outbox.put_nowait(frame)
            except asyncio.QueueFull:
                log.warning("agent_id=%s does not read its link", agent_id)
                self._balancer.metrics.reach(Limit.LINK_FRAMES)
                socket.transport.abort()

        def drop(reason: str) -> None:
            del self._current[agent_id]
            closing = asyncio.create_task(_give_up(socket, reason))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

        self._balancer.join(join, send, drop)
        self._current[agent_id] = socket
        reason = "its link was closed"
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(_write(socket, outbox))
                await self._read(socket, agent_id)
                writer.cancel()
        except* ConnectionClosed as group:
            reason = _loss(group.exceptions[0])
        except* msgspec.MsgspecError:
            reason = "it sent what cannot be read"
            raise
        finally:
            # A newer link of the same agent has taken its place in the balancer already.
            if self._current.get(agent_id) is socket:
                del self._current[agent_id]
                self._balancer.leave(agent_id, reason)

    async def _read(self, socket: ServerConnection, agent_id: AgentId) -> None:
        async for data in socket:
            frame = decode_to_balancer(data)
            current = self._current.get(agent_id)
            if current is None:
                return  # given up: what it says is of no interest any more
            if current is not socket:
                await socket.close(REFUSED, "this agent has a newer link")
                return
            match frame:
                case Step(events):
                    self._balancer.happened(agent_id, events)
                case Noted():
                    self._balancer.noted(agent_id, frame)
                case Status():
                    self._balancer.report(agent_id, frame)
                case Described():
                    self._balancer.described(agent_id, frame)
                case Join():
                    await socket.close(CloseCode.PROTOCOL_ERROR, "a link is joined once")
                    return


def _loss(closed: BaseException) -> str:
    """For operators: how a link ended that was not ended in order."""
    assert isinstance(closed, ConnectionClosed)
    if closed.rcvd is not None:
        told = f"it closed its link with {closed.rcvd.code}"
        return f"{told}: {closed.rcvd.reason}" if closed.rcvd.reason else told
    if closed.sent is not None and closed.sent.code == CloseCode.INTERNAL_ERROR:
        return f"it did not answer a ping for {PING_TIMEOUT:.0f} s"
    return "its connection was lost"


async def _give_up(socket: ServerConnection, reason: str) -> None:
    """It may not read any more, and then it is not told."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GOOD_BYE_TIMEOUT):
            await socket.close(GIVEN_UP, reason[:LONGEST_REASON])
    socket.transport.abort()


async def _write(socket: ServerConnection, outbox: asyncio.Queue[bytes]) -> None:
    while True:
        await socket.send(await outbox.get())
