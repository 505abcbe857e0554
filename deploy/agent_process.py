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
from collections.abc import Callable
from contextlib import suppress
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
    beating = asyncio.create_task(_beat(agent, pipe))
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
        beating.cancel()
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


def _listen(loop: asyncio.AbstractEventLoop, obey: Callable[[Command], None]) -> NoReturn:
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(obey, _commands.decode(line))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


if __name__ == "__main__":
    main()
