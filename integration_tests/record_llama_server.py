"""Writes down how llama.cpp's server answers the requests of ``helpers/openai_requests.py``.

Run by hand, when the requests or llama.cpp change:

    python integration_tests/record_llama_server.py --llama-server PATH

``test_llama_server.py`` compares the answers with this product's.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from helpers.openai_requests import (
    BATCH,
    CONTEXT,
    QUESTIONS,
    SLOTS,
    TEMPLATE,
    Answer,
    Question,
    Setup,
    ask,
)
from helpers.product import free_port

from deploy.model import default_model

RECORD = Path(__file__).parent / "llama_server.json"

START_TIMEOUT = 120.0
STOP_TIMEOUT = 30.0
POLL_INTERVAL = 0.1


@contextmanager
def running(server: str, *options: str) -> Generator[httpx.Client]:
    """A client of a ``llama-server`` with the default model, which is stopped at the end."""
    port = free_port()
    model = default_model()
    command = [server, "-m", str(model), "--alias", model.stem, "--host", "127.0.0.1"]
    command += ["--port", str(port), "-c", str(CONTEXT), "-np", str(SLOTS), "--kv-unified"]
    command += ["-b", str(BATCH), "-ub", str(BATCH), "-t", "1", "--no-webui", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # It closes connections that have carried a stream, without a word.
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=60,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client:
            wait_until_ready(client, process)
            yield client
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT)


def wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with status {process.returncode}")
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_INTERVAL)
    raise SystemExit("llama-server was not ready in time")


def commit(server: str) -> str:
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"\((?:build \d+, commit )?([0-9a-f]{7,40})\)", done.stdout + done.stderr)
    if found is None:
        raise SystemExit("llama-server does not tell its commit")
    return found[1]


def shortened(value: Any) -> Any:
    """Four decimal places are enough to tell whether a vector is the same."""
    match value:
        case float():
            return round(value, 4)
        case list():
            return [shortened(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {key: shortened(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def record(client: httpx.Client, question: Question) -> tuple[str, Answer]:
    print(question.name, file=sys.stderr)  # noqa: T201
    return question.name, ask(client, question, question.theirs or question.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", required=True, metavar="PATH")
    server = parser.parse_args().llama_server
    answers: dict[str, Answer] = {}
    with TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        options = {
            Setup.PLAIN: (),
            Setup.TOOLS: ("--chat-template-file", str(template)),
            Setup.EMBEDDINGS: ("--embeddings", "--pooling", "mean"),
        }
        for setup in Setup:
            with running(server, *options[setup]) as client:
                answers.update(record(client, each) for each in QUESTIONS if each.setup is setup)
    # One line for each answer, so that a change of one of them is seen as that.
    lines = [
        f"{json.dumps(name)}: {json.dumps(shortened(asdict(answer)), ensure_ascii=False)}"
        for name, answer in answers.items()
    ]
    facts = {"llama.cpp": commit(server), "model": default_model().name}
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    body = ",\n".join(lines)
    RECORD.write_text(f'{{\n{head}"answers": {{\n{body}\n}}\n}}\n')


if __name__ == "__main__":
    main()
