"""``headrace top``: the status stream as a live view in the terminal, or line by line as JSON."""

import asyncio
import json
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from contextlib import aclosing, contextmanager, suppress

from rich.console import Console
from rich.live import Live

from deploy.machine import stop_signals
from deploy.management import Management, Place
from deploy.overview import StatusEvent, StatusView
from deploy.status_stream import Lost, follow
from deploy.terminal import one_line
from deploy.top_view import Window, top_view

SHORTEST_FRAME, LONGEST_FRAME = 0.2, 1.0
"""Seconds that one picture stays: no matter how much happens, and so that ages grow."""

EVERYTHING = 100_000
"""Lines, where they may be as many as there are."""

QUIT = frozenset(b"qQ\x1b")


async def print_once(place: Place, console: Console, *, as_json: bool) -> None:
    """One picture, however long."""
    async with Management(place) as balancer:
        overview = await balancer.overview()
    if as_json:
        _print_json(StatusEvent("", "snapshot", overview))
        return
    window = Window(console.width, EVERYTHING)
    picture = top_view(StatusView.of(overview), window, url=place.url, now=time.time())
    console.print(picture, width=window.width)


async def print_events(place: Place) -> None:
    """One line of JSON for each event, until Ctrl-C."""
    async with Management(place) as balancer, aclosing(follow(balancer)) as events:
        async for event in events:
            if isinstance(event, StatusEvent):
                _print_json(event)
            else:
                reason = one_line(event.reason)
                print(f"headrace: no connection: {reason}", file=sys.stderr)  # noqa: T201


def _print_json(event: StatusEvent) -> None:
    told = {"id": event.id, "event": event.kind, "data": event.data}
    print(json.dumps(told, ensure_ascii=True), flush=True)  # noqa: T201


async def show_live(place: Place, console: Console) -> None:
    """Until ``q`` or Ctrl-C. Raises ``HeadraceError``."""
    async with Management(place) as balancer:
        top = _Top(balancer, console)
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, top.end)
        loop.add_signal_handler(signal.SIGWINCH, top.changed.set)
        await top.run()


class _Top:
    def __init__(self, balancer: Management, console: Console) -> None:
        self.changed = asyncio.Event()
        self._balancer = balancer
        self._console = console
        self._view = StatusView()
        self._lost: str | None = None
        self._over = asyncio.Event()

    def end(self) -> None:
        self._over.set()

    async def run(self) -> None:
        following = asyncio.create_task(self._follow())
        over = asyncio.create_task(self._over.wait())
        first = asyncio.create_task(self.changed.wait())  # it may refuse: nothing is painted before
        painting: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({following, over, first}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and not following.done():
                with _keys(self._pressed):
                    painting = asyncio.create_task(self._paint())
                    await asyncio.wait(
                        {following, over, painting}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not painting.done():
                        painting.cancel()  # which gives the screen back
                    await asyncio.gather(painting, return_exceptions=True)
        finally:
            for task in (following, over, first):
                if not task.done():
                    task.cancel()
            await asyncio.gather(following, over, first, return_exceptions=True)
        for task in (following, painting):
            if task is not None and not task.cancelled():
                task.result()

    def _pressed(self, keys: bytes) -> None:
        if QUIT.intersection(keys[:1]) and len(keys) == 1:  # else it is an arrow or the like
            self.end()

    async def _follow(self) -> None:
        async with aclosing(follow(self._balancer)) as events:
            async for event in events:
                match event:
                    case Lost(reason):
                        self._lost = reason
                    case StatusEvent():
                        self._lost = None
                        self._view.apply(event)
                self.changed.set()

    async def _paint(self) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                self.changed.clear()
                window = Window(*self._console.size)
                url = self._balancer.place.url
                picture = top_view(self._view, window, url=url, now=time.time(), lost=self._lost)
                live.update(picture, refresh=True)
                await asyncio.sleep(SHORTEST_FRAME)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LONGEST_FRAME - SHORTEST_FRAME):
                        await self.changed.wait()


@contextmanager
def _keys(pressed: Callable[[bytes], None]) -> Generator[None]:
    """Each key as it is pressed, not shown. Nothing where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    loop = asyncio.get_running_loop()

    def read() -> None:
        keys = os.read(number, 64)
        if not keys:  # the terminal has gone
            loop.remove_reader(number)
        pressed(keys)

    tty.setcbreak(number)
    loop.add_reader(number, read)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
