import asyncio

import pytest
from ray.exceptions import ActorDiedError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.flow import FLOW, LEFT, MOST_UNREAD, TAKEN, HeldBack, size


class Proxy:
    """Serve's, and the client behind it."""

    def __init__(self, *, tells: bool = True, kind: str = "http") -> None:
        headers = [(FLOW.encode(), b"1")] if tells else []
        self.scope: Scope = {"type": kind, "headers": headers}
        self.messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.seen: list[Message] = []
        self.arrived = asyncio.Event()

    async def receive(self) -> Message:
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Message) -> None:
        self.seen.append(message)
        self.arrived.set()

    async def run(self, app: ASGIApp) -> None:
        await HeldBack(app, window=100)(self.scope, self.receive, self.send)

    async def until(self, count: int) -> None:
        while len(self.seen) < count:
            self.arrived.clear()
            await self.arrived.wait()
        for _ in range(10):  # would more come, it would be now
            await asyncio.sleep(0)


async def endless(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    while True:
        await send({"type": "http.response.body", "body": bytes(60), "more_body": True})
        await asyncio.sleep(0)


async def test_a_stream_goes_on_only_as_far_as_its_client_takes_it() -> None:
    proxy = Proxy()
    running = asyncio.create_task(proxy.run(endless))

    await proxy.until(3)
    assert len(proxy.seen) == 3  # the window is full

    proxy.messages.put_nowait({"type": TAKEN, "bytes": 60})
    await proxy.until(4)
    assert len(proxy.seen) == 4
    running.cancel()


async def test_the_answer_is_marked_as_the_balancers() -> None:
    proxy = Proxy()
    running = asyncio.create_task(proxy.run(endless))
    await proxy.until(1)

    assert proxy.seen[0]["headers"] == [(FLOW.encode(), b"1")]
    running.cancel()


async def test_nothing_is_held_back_where_nobody_tells() -> None:
    proxy = Proxy(tells=False)
    running = asyncio.create_task(proxy.run(endless))

    await proxy.until(20)

    assert "headers" not in proxy.seen[0]
    running.cancel()


async def test_the_application_sees_only_what_comes_from_the_client() -> None:
    proxy = Proxy(kind="websocket")
    received: list[Message] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        while not received or received[-1]["type"] != "websocket.disconnect":
            received.append(await receive())
        received.append(await receive())

    for message in (
        {"type": "websocket.connect"},
        {"type": TAKEN, "bytes": 1},
        {"type": "websocket.receive", "text": "hello"},
        {"type": "websocket.disconnect", "code": 1000},
    ):
        proxy.messages.put_nowait(message)
    await proxy.run(app)

    kinds = [message["type"] for message in received]
    assert kinds == [
        "websocket.connect",
        "websocket.receive",
        "websocket.disconnect",
        "websocket.disconnect",  # again and again, as ASGI has it
    ]


@pytest.mark.parametrize("kind", ["http.disconnect", LEFT])
async def test_a_client_that_leaves_ends_the_waiting(kind: str) -> None:
    proxy = Proxy()
    running = asyncio.create_task(proxy.run(endless))
    await proxy.until(3)

    proxy.messages.put_nowait({"type": kind})

    await proxy.until(20)
    running.cancel()


async def test_a_client_that_has_left_is_gone_for_the_application() -> None:
    proxy = Proxy()
    received: list[Message] = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        received.append(await receive())

    proxy.messages.put_nowait({"type": LEFT})
    await proxy.run(app)

    assert received[0]["type"] == "http.disconnect"


async def test_a_proxy_that_dies_is_a_client_that_left() -> None:
    for kind in ("http", "websocket"):
        proxy = Proxy(kind=kind)
        received: list[Message] = []

        async def app(
            _scope: Scope, receive: Receive, _send: Send, received: list[Message] = received
        ) -> None:
            received.append(await receive())

        proxy.messages.put_nowait(ActorDiedError())
        await proxy.run(app)

        assert received[0]["type"] == f"{kind}.disconnect"


def test_what_a_message_weighs() -> None:
    assert size({"type": "http.response.start"}) == 0
    assert size({"type": "http.response.body", "body": b"four"}) == 4
    assert size({"type": "websocket.send", "text": "four"}) == 4
    assert size({"type": "websocket.send", "bytes": b"four", "text": None}) == 4


async def test_a_client_that_sends_without_end_what_is_not_read_is_given_up() -> None:
    proxy = Proxy(kind="websocket")
    seen: list[str] = []
    message = {"type": "websocket.receive", "text": "x" * (MOST_UNREAD // 4)}
    for _ in range(6):
        proxy.messages.put_nowait(message)

    async def late_reader(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        for _ in range(20):  # meanwhile all of it comes
            await asyncio.sleep(0)
        while not seen or seen[-1] != "websocket.disconnect":
            seen.append((await receive())["type"])

    await proxy.run(late_reader)

    assert seen == [*["websocket.receive"] * 4, "websocket.disconnect"]
