"""Asking a balancer: the key, TLS, and one line for whatever goes wrong."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import typer
from certificates import Signed, make_certificate
from commands import headrace
from played import Play, want
from serving import serving
from typer.testing import CliRunner

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.desired_state import LocalModel
from balancer.keys import Keys, Role
from balancer.stored_state import DESIRED_STATE
from common.errors import HeadraceError
from deploy.management import ATTEMPTS, Management, Place, RefusedError, asks_balancer
from deploy.tls import client_context

KEY, OTHER_KEY = "key-of-an-operator", "key-of-some-agents"


@pytest.fixture
def certificate(tmp_path: Path) -> Signed:
    return make_certificate(tmp_path, "own")


@pytest.fixture
async def locked(balancer: Balancer, certificate: Signed) -> AsyncGenerator[str]:
    """A balancer that wants a key, over TLS."""
    app = create_app(balancer, keys=Keys([(Role.MANAGEMENT, KEY), (Role.AGENT, OTHER_KEY)]))
    async with serving(app, certificate) as port:
        yield f"https://127.0.0.1:{port}"
        balancer.close()


async def test_a_balancer_that_wants_a_key_over_tls_is_shown_one(
    locked: str, certificate: Signed, play: Play
) -> None:
    play("one", slots=2)
    place = Place(locked, KEY, client_context(certificate.certificate))

    async with Management(place) as balancer:
        overview = await balancer.overview()

    assert overview["agents"]["id-of-one"]["slots"] == 2
    assert KEY not in repr(place)


async def test_so_is_it_by_a_command(
    locked: str, certificate: Signed, play: Play, tmp_path: Path
) -> None:
    play("one")
    file = tmp_path / "key"
    file.write_text(f"management {KEY}\n")
    port = locked.rpartition(":")[2]
    trust = ("--tls-ca", str(certificate.certificate))

    with_file = await headrace("drain", "one", "--port", port, *trust, "--key-file", str(file))
    with_variable = await headrace(
        "undrain", "one", "--port", port, *trust, environment={"HEADRACE_MANAGEMENT_KEY": KEY}
    )

    assert (with_file.status, with_file.errors) == (0, "")
    assert (with_variable.status, with_variable.errors) == (0, "")


@pytest.mark.parametrize(("key", "status"), [(None, 401), (OTHER_KEY, 403)])
async def test_it_says_which_key_is_wanted(
    locked: str, certificate: Signed, key: str | None, status: int
) -> None:
    place = Place(locked, key, client_context(certificate.certificate))

    async with Management(place) as balancer:
        with pytest.raises(RefusedError, match="--key-file or HEADRACE_MANAGEMENT_KEY") as caught:
            await balancer.overview()

    assert (caught.value.status, f"HTTP {status}" in str(caught.value)) == (status, True)
    assert "\n" not in str(caught.value)


async def test_what_is_refused_is_said_as_the_balancer_says_it(address: str) -> None:
    async with Management(Place(f"http://{address}")) as balancer:
        with pytest.raises(RefusedError, match=r"^there is no such fleet$"):
            await balancer.fleet("no?fleet")


async def test_a_refusal_cannot_steer_the_terminal() -> None:
    refusal = Place("http://host").refusal(404, "no \x1b[2Jsuch\nmodel")

    assert str(refusal) == "no \ufffd[2Jsuch model"


def put_meanwhile(balancer: Balancer, **parameters: Any) -> None:
    """As another operator does it."""
    want(balancer, **parameters)
    stored = balancer.stored
    balancer.want(stored.put(DESIRED_STATE, at=stored.wish_number + 1))


async def test_what_somebody_else_has_put_meanwhile_is_not_undone(
    address: str, balancer: Balancer
) -> None:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(state["inference_parameters"]["temperature"])
        if len(seen) == 1:
            put_meanwhile(balancer, temperature=0.25)
        return {**state, "model": {"LocalToAgent": "/new.gguf"}}

    seen: list[float] = []
    async with Management(Place(f"http://{address}")) as management:
        before, _ = await management.change_desired_state(change)

    assert seen[1:] == [0.25]
    assert before["inference_parameters"]["temperature"] == 0.25
    state = balancer.desired_state
    assert state.model == LocalModel(LocalToAgent="/new.gguf")
    assert state.inference_parameters.temperature == 0.25


async def test_if_somebody_puts_again_and_again_that_is_an_error(
    address: str, balancer: Balancer
) -> None:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        seen.append(state)
        put_meanwhile(balancer, top_k=len(seen))
        return state

    seen: list[Any] = []
    async with Management(Place(f"http://{address}")) as management:
        with pytest.raises(RefusedError) as caught:
            await management.change_desired_state(change)

    assert (caught.value.status, len(seen)) == (409, ATTEMPTS)


async def test_an_address_without_a_balancer_is_an_error() -> None:
    async with Management(Place("http://127.0.0.1:1")) as balancer:
        with pytest.raises(HeadraceError, match=r"no answer from a balancer at http://127.0.0.1:1"):
            await balancer.overview()


def test_a_command_is_given_the_place_and_its_own_options() -> None:
    given: list[tuple[Place, str, int]] = []

    @asks_balancer
    def command(place: Place, name: str, count: int = 1) -> int:
        """Its words."""
        given.append((place, name, count))
        return 3

    app = typer.Typer()
    app.command()(command)

    result = CliRunner().invoke(app, ["--port", "5", "--host", "::1", "--count", "2", "word"])
    told = CliRunner().invoke(app, ["--help"]).output

    assert result.exit_code == 3
    assert given == [(Place("http://[::1]:5"), "word", 2)]
    assert "Its words." in told
    assert all(option in told for option in ("--count", "--key-file", "--tls-ca"))
