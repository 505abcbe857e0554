"""Runs an agent in a process of its own, and starts it again when it has died or hangs.

The agent's process sends beats over a pipe. Its standard input brings the settings, then commands,
and its end tells that the keeper is gone. What to make of silence and of ends is decided in
``deploy.keeping``. Little is imported here: a keeper lives as long as its agent and takes memory.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

import msgspec

from common.errors import HeadraceError
from deploy.keeping import Beat, Command, Dial, Drain, Over, Report, Restarts, Silence, Stop
from deploy.logs import LogFormat, printable, set_up
from deploy.machine import stop_signals

AGENT = "deploy.agent_process"
KEEPER = "deploy.keeper"

log = logging.getLogger(KEEPER)  # also where this is the main module

GRACE = 10.0
"""Seconds beyond that until a process that should have ended is killed."""

LINGER = 5.0
"""Seconds until a process that was killed and is still there (it waits for a driver) is left behind."""

TICK = 1.0


_reports: "msgspec.json.Decoder[Report]" = msgspec.json.Decoder(Report)


class _OfLog(msgspec.Struct):
    """What concerns the keeper of its agent's settings."""

    log_format: LogFormat = LogFormat.PLAIN


class AgentError(HeadraceError):
    """The agent has ended and is not started again; the text says why."""


class Keeper:
    def __init__(
        self, settings: bytes, *, process_group: int | None = None, module: str = AGENT
    ) -> None:
        """``settings``: one line of JSON, an object. ``process_group``: as ``subprocess.Popen`` takes it; 0: the
        agent has one of its own, so that a terminal's Ctrl-C reaches the keeper only.

        Linux ends the agent with the thread that started it: ``run`` must be awaited on one that
        lives as long as the agent is wanted.
        """
        # Without -P a folder that happens to be called like a package of ours would be taken for it.
        self._arguments = [sys.executable, "-P", "-m", module]
        self._settings = settings
        self._addresses: tuple[str, ...] | None = None
        """Of the balancers; None: as the settings say."""
        self._group = process_group
        self._restarts = Restarts()
        self._silence = Silence()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: asyncio.StreamReader | None = None
        self._over: Over | None = None
        """What the present process has said last."""
        self._asked = asyncio.Event()
        """To end."""
        self._limit: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Of the agent's process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Until the agent ends in order, or because it was asked to.

        Raises ``AgentError`` if it ends with an error and is not to be started again.
        """
        try:
            while not self._asked.is_set():
                status = await self._live()
                if status == 0 or self._asked.is_set():
                    return
                over, self._over = self._over, None
                reason = _told(status) if over is None else over.reason
                if over is not None and over.is_final:
                    raise AgentError(reason)
                delay = self._restarts.ended()
                if delay is None:
                    raise AgentError(f"it ended again and again, at last: {reason}")
                log.warning("the agent ended: %s; it is started again in %g s", reason, delay)
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._asked.wait()
        finally:
            if self._limit is not None:
                self._limit.cancel()

    def dial(self, addresses: Iterable[str]) -> None:
        """Have the agent keep links to these balancers and to no others, also when its process is
        started again.
        """
        before, self._addresses = self._addresses, tuple(addresses)
        if self._process is not None and self._addresses != before:
            self._send(msgspec.json.encode(Dial(self._addresses)))

    def drain(self, seconds: float) -> None:
        """Have the agent take nothing new and finish what runs; ``run`` returns soon after
        ``seconds`` at the latest.
        """
        self._end(Drain(seconds), within=seconds + GRACE)

    def stop(self) -> None:
        """Have the agent end now; ``run`` returns within seconds."""
        self._end(Stop(), within=GRACE)

    # One process

    async def _live(self) -> int | None:
        """A whole life; returns its status as ``subprocess`` has it, None if it could not be started
        or cannot be killed.
        """
        self._silence = Silence()
        reading, writing = os.pipe()
        try:
            process = self._process = self._start(writing)
        except OSError as error:
            os.close(reading)
            self._over = Over(f"it could not be started: {error}", is_final=False)
            return None
        finally:
            os.close(writing)
        self._output = asyncio.StreamReader()
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._send(self._present_settings)
        protocol = asyncio.StreamReaderProtocol(self._output)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, os.fdopen(reading, "rb")
        )
        try:
            async with asyncio.TaskGroup() as group:
                ticks = group.create_task(self._count())
                await self._listen(self._output)
                ticks.cancel()
            return await asyncio.to_thread(_wait, process)
        finally:
            transport.close()
            self._kill()
            assert process.stdin is not None
            process.stdin.close()
            self._process = None

    @property
    def _present_settings(self) -> bytes:
        if self._addresses is None:
            return self._settings
        settings = msgspec.json.decode(self._settings, type=dict[str, msgspec.Raw])
        balancers = msgspec.Raw(msgspec.json.encode(self._addresses))
        return msgspec.json.encode({**settings, "balancers": balancers})

    def _start(self, pipe: int) -> "subprocess.Popen[bytes]":
        """On the thread that calls: see the class."""
        return subprocess.Popen(
            [*self._arguments, str(pipe), str(os.getpid())],
            bufsize=0,
            stdin=subprocess.PIPE,
            pass_fds=[pipe],
            process_group=self._group,
        )

    async def _listen(self, output: asyncio.StreamReader) -> None:
        """Until the pipe ends, which it does with the process."""
        async for line in output:
            with suppress(msgspec.DecodeError):
                match _reports.decode(line):
                    case Beat() as beat:
                        self._silence.beat(beat)
                        self._restarts.beat(beat)
                    case Over() as over:
                        self._over = over

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if self._silence.tick():
                self._over = Over("it gave no sign of life", is_final=False)
                log.error("the agent gives no sign of life and is killed")
                self._kill()
                return

    def _end(self, command: Command, *, within: float) -> None:
        self._asked.set()
        if self._limit is not None:
            self._limit.cancel()
        self._limit = asyncio.get_running_loop().call_later(within, self._kill)
        if self._process is None:
            return  # none is started any more
        if self._silence.has_spoken:
            self._send(msgspec.json.encode(command))
        else:
            self._kill()  # it could not listen yet, and has nothing to finish

    def _send(self, line: bytes) -> None:
        """Few and short: the pipe has room for them, unless the process reads none for very long."""
        assert self._process is not None
        assert self._process.stdin is not None
        line += b"\n"
        with suppress(BrokenPipeError):
            if self._process.stdin.write(line) != len(line):
                self._over = Over("it does not read what it is told", is_final=False)
                log.error("the agent does not read what it is told and is killed")
                self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._output is not None:
            self._process.kill()
            asyncio.get_running_loop().call_later(LINGER, self._output.feed_eof)


def _wait(process: "subprocess.Popen[bytes]") -> int | None:
    """The status of a process whose pipe has ended, so that it ends too, or should."""
    for _ in range(2):
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LINGER)
        process.kill()
    return None


def _told(status: int | None) -> str:
    if status is None:
        return "it could not be killed"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"its status was {status}"


async def keep(settings: bytes, say: Callable[[str], None], *, drain_timeout: float) -> None:
    """Until SIGINT or SIGTERM: the first one drains, for ``drain_timeout`` seconds at most, the second
    one ends it now.

    Raises ``AgentError``.
    """
    keeper = Keeper(settings, process_group=0)
    asked = False

    def asked_to_stop() -> None:
        nonlocal asked
        if asked:
            keeper.stop()
            return
        asked = True
        keeper.drain(drain_timeout)
        say("draining: what runs is finished first; once more to stop now")

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, asked_to_stop)
    try:
        await keeper.run()
    finally:
        ignore_stop_signals(loop)


def ignore_stop_signals(loop: asyncio.AbstractEventLoop) -> None:
    """It ends already: one more of them must not make that look as if it had been killed. (The end of a
    loop gives them back their default, which is that.)
    """
    numbers = stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def become_keeper(settings: bytes, *, drain_timeout: float) -> NoReturn:
    """This process forgets all that it has imported, which a keeper would hold for nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [settings.decode(), str(drain_timeout)]
    os.execv(sys.executable, [sys.executable, "-P", "-m", KEEPER, *arguments])


def main() -> None:
    """The arguments are those of ``become_keeper``."""
    settings, drain_timeout = sys.argv[1:]
    set_up(msgspec.json.decode(settings, type=_OfLog).log_format)
    try:
        asyncio.run(keep(settings.encode(), _say, drain_timeout=float(drain_timeout)))
    except HeadraceError as error:
        sys.exit(f"headrace: {printable(str(error))}")
    except KeyboardInterrupt:
        sys.exit(130)


def _say(text: str) -> None:
    with suppress(OSError):  # nobody may be left to read it
        print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
