"""The command ``headrace`` as a process: to its end, or on a terminal of its own."""

import asyncio
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

COMMAND = [sys.executable, "-c", "from deploy.cli import main; main()"]

PATIENCE = 120.0
"""Seconds: on a machine that is busy with other tests a process takes long to start."""


@dataclass(frozen=True, slots=True)
class Done:
    status: int
    output: str
    errors: str


async def headrace(
    *arguments: str, given: str | None = None, environment: Mapping[str, str] | None = None
) -> Done:
    """``given``: on its standard input."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            output, errors = await process.communicate(None if given is None else given.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Done(process.returncode, output.decode(), errors.decode())


class Terminal:
    """What a process with a terminal writes, and what is typed there."""

    def __init__(self, process: asyncio.subprocess.Process, number: int) -> None:
        self.process = process
        self.written = ""
        self._number = number
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(number, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._number, 65536)
        except OSError:  # Linux says so when the other end is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._number)
        self.written += data.decode(errors="replace")
        self._more.set()

    def type(self, text: str) -> None:
        os.write(self._number, text.encode())

    async def shows(self, text: str, *, times: int = 1) -> None:
        """Until it has written this so often since the start, or since ``forget``."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self.written.count(text) < times:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError as error:
            raise AssertionError(f"no {text!r} in {self.written!r}") from error

    def forget(self) -> None:
        self.written = ""

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    @property
    def echoes(self) -> bool:
        """Is what is typed shown, as a shell wants it?"""
        return bool(termios.tcgetattr(self._number)[3] & termios.ECHO)


@asynccontextmanager
async def on_terminal(
    *arguments: str, width: int = 120, height: int = 40
) -> AsyncGenerator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        # Ctrl-C reaches who has the terminal as its own.
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "from deploy.cli import main; main()",
        *arguments,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    terminal = Terminal(process, ours)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(theirs)
        os.close(ours)
