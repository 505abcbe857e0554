"""How commands talk to a balancer: where it is, what is shown to it, and its errors in one line."""

import inspect
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

import httpx
import typer

from balancer.keys import Role
from common.errors import HeadraceError
from deploy.access import OWN_KEY
from deploy.machine import address
from deploy.options import (
    InferenceKeyFile,
    ManagementKeyFile,
    TlsAuthorities,
    check_authorities,
    check_inference_key,
    check_own_key,
)
from deploy.settings import CLIENT_PORT
from deploy.terminal import one_line

LONGEST_REASON = 200
"""Characters of a refusal that are shown."""

ATTEMPTS = 4
"""To change the desired state, while others do it at the same moment."""

LOOK_INTERVAL = 0.1

TIMEOUT = 5.0
"""Seconds for an answer."""

P = ParamSpec("P")
T = TypeVar("T")


class RefusedError(HeadraceError):
    """The balancer has answered, with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Place:
    """Of a balancer, and how one is let in."""

    url: str
    """``http://HOST:PORT``, or ``https``."""
    key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    role: Role = Role.MANAGEMENT
    """What the key is for."""

    @property
    def options(self) -> dict[str, Any]:
        """Of an HTTP client."""
        headers = {"accept-encoding": "identity"}  # what packs a stream may hold it back
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        return {
            "base_url": self.url,
            "headers": headers,
            "verify": self.tls or True,
            "trust_env": False,
        }

    def refusal(self, status: int, text: str) -> RefusedError:
        reason = one_line(text)[:LONGEST_REASON]
        if status in {401, 403}:
            reason += f" (--key-file or {OWN_KEY[self.role]})"
        if status in {400, 404, 409, 410} and reason:
            return RefusedError(status, reason)
        return RefusedError(status, f"{self.url}: HTTP {status}: {reason}")

    def silence(self, error: Exception) -> HeadraceError:
        return HeadraceError(f"no answer from a balancer at {self.url}: {error or repr(error)}")


class Management(AbstractAsyncContextManager["Management"]):
    """The management routes. What is asked raises ``HeadraceError``, ``RefusedError`` if the balancer has
    answered.
    """

    def __init__(self, place: Place, *, timeout: float = TIMEOUT) -> None:
        self.place = place
        self.client = httpx.AsyncClient(**place.options, timeout=timeout)

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON; None if it has no content."""
        response = await self._ask(method, path, body)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise self.place.silence(error) from error

    async def _ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        try:
            response = await self.client.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise self.place.silence(error) from error
        if not response.is_success:
            raise self.place.refusal(response.status_code, response.text)
        return response

    async def overview(self) -> dict[str, Any]:
        return await self.ask("GET", "/api/v1/overview")

    async def change_desired_state(
        self, change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> tuple[dict[str, Any], int]:
        """Put what ``change`` makes of it; return what it was, and the number of the wish that it is now.
        Nobody's change is undone: if there was one meanwhile it is read and changed again.
        """
        path = "/api/v1/balancer_desired_state"
        for left in reversed(range(ATTEMPTS)):
            read = await self._ask("GET", path)
            state = read.json()
            seen = {"if-match": read.headers.get("etag", "*")}
            try:
                put = await self._ask("PUT", path, change(state), headers=seen)
            except RefusedError as error:
                if error.status != HTTPStatus.CONFLICT or not left:
                    raise
            else:
                return state, int(put.headers["etag"].strip('"'))
        raise AssertionError("the last attempt is the last word")

    async def drain(self, agent_id: str) -> None:
        await self.ask("POST", f"/api/v1/agent/{quote(agent_id, safe='')}/drain")

    async def undrain(self, agent_id: str) -> None:
        await self.ask("POST", f"/api/v1/agent/{quote(agent_id, safe='')}/undrain")

    async def fleet(self, name: str) -> dict[str, Any]:
        return await self.ask("GET", f"/api/v1/fleets/{quote(name, safe='')}")

    async def change_fleet(self, name: str, changes: dict[str, Any]) -> None:
        await self.ask("PATCH", f"/api/v1/fleets/{quote(name, safe='')}", changes)

    async def request(self, request_id: str) -> dict[str, Any]:
        return await self.ask("GET", f"/api/v1/requests/{quote(request_id, safe='')}")

    async def cancel(self, request_id: str) -> None:
        await self.ask("DELETE", f"/api/v1/requests/{quote(request_id, safe='')}")


# What all commands that talk to a balancer have in common

Host = Annotated[str, typer.Option("--host", help="Where the balancer is.")]
Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Its clients' port.")]
Tls = Annotated[bool, typer.Option("--tls", help="Ask over TLS; so does --tls-ca.")]


def asks_balancer(
    command: Callable[Concatenate[Place, P], int | None],
) -> Callable[..., None]:
    """A command that has the options that say where the balancer is, and is given its place. What it
    returns is the exit status; None: 0.
    """
    return _with_place(command, Role.MANAGEMENT, ManagementKeyFile)


def asks_for_tokens(
    command: Callable[Concatenate[Place, P], int | None],
) -> Callable[..., None]:
    """As ``asks_balancer``, with the key of a client."""
    return _with_place(command, Role.INFERENCE, InferenceKeyFile)


def _with_place(
    command: Callable[Concatenate[Place, P], int | None], role: Role, key_option: Any
) -> Callable[..., None]:
    def wrapped(
        *,
        host: Host = "127.0.0.1",
        port: Port = CLIENT_PORT,
        key_file: Path | None = None,
        tls: Tls = False,
        tls_ca: TlsAuthorities = None,
        **told: Any,
    ) -> None:
        place = place_of(role, host=host, port=port, key_file=key_file, tls=tls, tls_ca=tls_ca)
        raise typer.Exit(command(place, **told) or 0)  # pyright: ignore[reportCallIssue]

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    *shared, _ = inspect.signature(wrapped, eval_str=True).parameters.values()
    shared = [
        each.replace(annotation=key_option) if each.name == "key_file" else each for each in shared
    ]
    # Typer reads the signature, and takes parameters by name.
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared)]
    result: Any = wraps(command)(wrapped)
    result.__signature__ = inspect.Signature(named)
    return result


def place_of(
    role: Role, *, host: str, port: int, key_file: Path | None, tls: bool, tls_ca: Path | None
) -> Place:
    check = check_inference_key if role is Role.INFERENCE else _check_management_key
    over_tls = tls or tls_ca is not None
    return Place(
        address("https" if over_tls else "http", host, port),
        check(key_file),
        check_authorities(tls_ca) if over_tls else None,
        role,
    )


def _check_management_key(file: Path | None) -> str | None:
    return check_own_key(Role.MANAGEMENT, file)
