"""An agent's process: started, watched and ended by ``deploy.keeper``.

It ends with its keeper, however that ends: on Linux the kernel sees to it, even if the process is
stopped or hangs; elsewhere a thread does, which reads standard input.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import NoReturn

import msgspec

from agent.service import Agent, StalledError
from common.errors import HeadraceError
from common.faults import fault
from deploy.agents import make_agent
from deploy.keeping import Beat, Command, Dial, Drain, Over, Report, Stop
from deploy.logs import set_up
from deploy.machine import stop_signals
from deploy.settings import AgentSettings, from_line

log = logging.getLogger("deploy.agent_process")  # also where this is the main module

BEAT_INTERVAL = 1.0
"""Seconds at most; there is one for each change too, so that the keeper's patience fits at once."""

SHOW_INTERVAL = 0.25

SIGNALLED_DRAIN = 120.0
"""Seconds for what runs if this very process is told to end, and not its keeper."""

MOST_CHARACTERS = 1000
"""Of a reason, so that it is written in one piece."""

PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""

_commands = msgspec.json.Decoder(Command)


class Pipe:
    """To the keeper. If it does not read, what it is told is lost: it must hold nobody up."""

    def __init__(self, number: int) -> None:
        os.set_inheritable(number, False)
        os.set_blocking(number, False)
        self._number = number

    def tell(self, report: Report) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._number, msgspec.json.encode(report) + b"\n")


def main(make: Callable[[AgentSettings], Agent] = make_agent) -> NoReturn:
    """The arguments are the number of the pipe to the keeper, and the keeper's process ID."""
    number, keeper_id = map(int, sys.argv[1:])
    _die_with(keeper_id)
    settings = from_line(sys.stdin.buffer.readline())
    set_up(settings.log_format)
    asyncio.run(_live(settings, make, Pipe(number)))
    raise AssertionError("it ends inside")


def _die_with(keeper_id: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_id:  # it has gone already
        os._exit(1)


async def _live(
    settings: AgentSettings, make: Callable[[AgentSettings], Agent], pipe: Pipe
) -> None:
    """Ends the process."""
    try:
        agent = make(settings)
    except HeadraceError as error:
        pipe.tell(Over(str(error)[:MOST_CHARACTERS], is_final=True))
        os._exit(1)
    loop = asyncio.get_running_loop()
    drains: set[asyncio.Task[None]] = set()

    def obey(command: Command) -> None:
        match command:
            case Dial(addresses):
                agent.dial(addresses)
            case Drain(seconds):
                drains.add(asyncio.create_task(agent.drain(seconds)))
            case Stop():
                agent.stop()

    for signal_number in stop_signals():
        # However often: a manager may signal keeper and agent alike, and that is no second time.
        loop.add_signal_handler(signal_number, obey, Drain(SIGNALLED_DRAIN))
    threading.Thread(target=_listen, args=[loop, obey], daemon=True).start()
    tasks = [asyncio.create_task(_beat(agent, pipe))]
    if sys.stderr.isatty():
        tasks.append(asyncio.create_task(_show(agent, settings.name or "agent")))
    status = 1
    try:
        await agent.run()
        status = 0
    except HeadraceError as error:
        pipe.tell(Over(str(error)[:MOST_CHARACTERS], is_final=True))
    except StalledError as error:
        pipe.tell(Over(str(error), is_final=False))
    except Exception as error:
        log.error("fault=%s the agent broke down", fault(error))  # noqa: TRY400
        pipe.tell(Over(fault(error)[:MOST_CHARACTERS], is_final=False))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # bars are taken away
        logging.shutdown()
        with suppress(OSError):  # nobody may be left to read it
            sys.stdout.flush()
        os._exit(status)  # a thread that hangs must not hold it up


async def _beat(agent: Agent, pipe: Pipe) -> None:
    while True:
        if agent.is_healthy:
            pipe.tell(Beat(serves=agent.serves))
        agent.has_changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_INTERVAL):
                await agent.has_changed.wait()


async def _show(agent: Agent, name: str) -> None:
    """On a terminal: how far its model is."""
    # Elsewhere this takes no memory.
    from rich.console import Console

    from deploy import overview
    from deploy.load_bars import LoadBars, load_row

    console = Console(stderr=True)
    while True:
        if agent.loads or agent.download is not None:
            with LoadBars(console) as bars, _log_above():
                while agent.loads or agent.download is not None:
                    file = agent.download
                    download = None
                    if file is not None:
                        download = overview.Download(file.filename, file.current, file.total)
                    told = overview.Agent(id=name, state="loading", download=download)
                    bars.show([load_row(told)])
                    await asyncio.sleep(SHOW_INTERVAL)
        await asyncio.sleep(SHOW_INTERVAL)


@contextmanager
def _log_above() -> Generator[None]:
    """While bars are shown they take the place of standard error, and lines come above them."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    before = [(handler, handler.stream) for handler in handlers]
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in before:
            handler.setStream(stream)


def _listen(loop: asyncio.AbstractEventLoop, obey: Callable[[Command], None]) -> NoReturn:
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(obey, _commands.decode(line))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


if __name__ == "__main__":
    main()
