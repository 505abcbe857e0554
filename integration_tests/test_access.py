"""Keys and TLS of the running product: one run, which wants a key of everybody."""

import asyncio
import contextlib
import json
import re
import ssl
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import httpx
import httpx2
import openai
import pytest
from certificates import Signed, make_certificate
from product import Command, Up, start_up
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from balancer.keys import Role, first_key
from deploy.access import fresh_keys, keep_secret
from deploy.tls import client_context

PROMPT = "a prompt that nobody else may read"
NOBODYS = "a-key-that-is-nobodys"


@dataclass(frozen=True, slots=True)
class Locked:
    up: Up
    keys: dict[Role, str]
    file: Path
    signed: Signed
    tls: ssl.SSLContext

    def client(self, role: Role) -> httpx.Client:
        return self.up.open_client(self.keys[role])

    @property
    def secrets(self) -> list[bytes]:
        return [text.encode() for text in (*self.keys.values(), NOBODYS, PROMPT)]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Generator[Locked]:
    folder = tmp_path_factory.mktemp("locked")
    signed = make_certificate(folder, "own")
    file, text = folder / "keys", fresh_keys()
    keep_secret(file, text)
    keys = {role: first_key(text, role) for role in Role}
    tls = client_context(signed.certificate)
    with start_up(
        *("--engine", "echo", "--keys", str(file), "--log-format", "json"),
        *("--tls-cert", str(signed.certificate), "--tls-key", str(signed.key)),
        key=keys[Role.MANAGEMENT],
        tls=tls,
    ) as up:
        yield Locked(up, keys, file, signed, tls)


def test_each_route_is_for_its_role(locked: Locked) -> None:
    routes = {"/health": set(Role), "/metrics": {Role.MANAGEMENT}}
    routes |= {"/api/v1/agents": {Role.MANAGEMENT}, "/v1/models": {Role.INFERENCE}}
    with locked.up.open_client(None) as client:
        for route, roles in routes.items():
            is_free = roles == set(Role)
            stranger = client.get(route, headers={"x-api-key": NOBODYS})
            assert client.get(route).status_code == (200 if is_free else 401)
            assert stranger.status_code == (200 if is_free else 401)
            for role, key in locked.keys.items():
                expected = 200 if role in roles else 403
                bearer = client.get(route, headers={"authorization": f"Bearer {key}"})
                assert bearer.status_code == expected, (route, role)
                assert client.get(route, headers={"x-api-key": key}).status_code == expected


async def test_a_socket_that_is_refused_is_told_so_through_serves_proxy(locked: Locked) -> None:
    url = f"wss://127.0.0.1:{locked.up.port}/api/v1/inference_socket"
    statuses: list[int] = []
    for key in (NOBODYS, locked.keys[Role.MANAGEMENT]):
        with pytest.raises(InvalidStatus) as caught:
            await connect(url, ssl=locked.tls, proxy=None, additional_headers={"x-api-key": key})
        statuses.append(caught.value.response.status_code)

    assert statuses == [401, 403]
    right = {"x-api-key": locked.keys[Role.INFERENCE]}
    async with connect(url, ssl=locked.tls, proxy=None, additional_headers=right):
        pass


def test_openais_client_works_with_its_key_alone(locked: Locked) -> None:
    address = f"{locked.up.address}/v1"
    with httpx2.Client(verify=locked.tls, trust_env=False) as transport:

        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=address, api_key=key, http_client=transport)

        answer = client(locked.keys[Role.INFERENCE]).completions.create(
            model="echo", prompt=PROMPT, max_tokens=5
        )
        assert answer.choices[0].text
        with pytest.raises(openai.AuthenticationError):
            client(NOBODYS).models.list()
        with pytest.raises(openai.PermissionDeniedError):
            client(locked.keys[Role.AGENT]).models.list()


def test_the_printed_curl_line_works(locked: Locked) -> None:
    (line,) = (line for line in locked.up.command.lines if line.startswith("curl "))

    done = subprocess.run(
        ["bash", "-c", line],
        env={"HEADRACE_INFERENCE_KEY": locked.keys[Role.INFERENCE], "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert '"Response"' in done.stdout


def test_status_shows_its_key(locked: Locked) -> None:
    certificate = str(locked.signed.certificate)
    arguments = ("status", "--port", str(locked.up.port), "--tls-ca", certificate)
    with_key = Command(*arguments, "--key-file", str(locked.file))
    without = Command(*arguments)

    assert (with_key.ended(), without.ended()) == (0, 1)
    assert any("agent-1" in line for line in with_key.lines)
    assert "a key for management is needed" in without.lines[-1]


def dial(locked: Locked, name: str, key: str | None) -> Command:
    """An agent by hand, with its key in the environment."""
    environment = {} if key is None else {"HEADRACE_AGENT_KEY": key}
    options = ("--balancer", locked.up.balancer, "--tls-ca", str(locked.signed.certificate))
    return Command("agent", *options, "--name", name, "--engine", "echo", environment=environment)


def test_an_agent_with_its_key_joins(locked: Locked) -> None:
    command = dial(locked, "by-hand", locked.keys[Role.AGENT])
    try:
        locked.up.until(lambda agents: any(agent["name"] == "by-hand" for agent in agents))
    finally:
        command.stop()
        command.kill_the_rest()


@pytest.mark.parametrize("role", [None, Role.INFERENCE])
def test_one_without_it_ends_and_says_what_is_missing(locked: Locked, role: Role | None) -> None:
    command = dial(locked, "stranger", None if role is None else locked.keys[role])

    try:
        assert command.ended() == 1
    finally:
        command.kill_the_rest()
    expected = "HEADRACE_AGENT_KEY or --key-file" if role is None else "one for agents?"
    assert command.lines[-1].startswith("headrace: ")
    assert expected in command.lines[-1]


async def test_neither_port_speaks_without_tls_or_an_old_one(locked: Locked) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.load_verify_locations(locked.signed.certificate)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    for port in (locked.up.port, locked.up.agent_port):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=old)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert b"HTTP/" not in await reader.read()
        writer.close()


def read_files(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path): path.read_bytes() for path in paths}


async def test_no_key_and_no_prompt_is_in_a_log_or_a_command_line(locked: Locked) -> None:
    inference = {"authorization": f"Bearer {locked.keys[Role.INFERENCE]}"}
    with pytest.raises(InvalidStatus):
        await connect(locked.up.balancer, ssl=locked.tls, proxy=None, additional_headers=inference)
    with locked.client(Role.INFERENCE) as client:
        body = {"raw_prompt": PROMPT, "max_tokens": 5}
        client.post("/api/v1/continue_from_raw_prompt", json=body).raise_for_status()
        client.post("/api/v1/continue_from_raw_prompt", json={**body, "max_tokens": PROMPT})

    command_lines = " ".join(locked.up.command.processes())
    (folder,) = set(re.findall(r"/tmp/headrace-\w+", command_lines))
    texts = read_files(folder)
    texts["command lines"] = command_lines.encode()
    texts["output"] = "\n".join(locked.up.command.lines).encode()
    assert any(b"this key is not one for agent" in text for text in texts.values())
    logged = [
        json.loads(line)
        for name, text in texts.items()
        if re.search(r"/worker-[^/]*\.err$", name)
        for line in text.splitlines()
        if line.startswith(b'{"time"')
    ]
    dispatched = [line for line in logged if line["message"].endswith("dispatched")]
    assert all(line["request_id"] and line["agent_id"] for line in dispatched)
    assert dispatched
    assert [name for name, text in texts.items() if any(s in text for s in locked.secrets)] == []
