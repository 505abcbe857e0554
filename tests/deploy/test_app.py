"""What a balancer is told to listen on, and who is reached by it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import ray as untyped_ray
from certificates import make_certificate

from balancer.keys import OPEN, read_keys
from deploy.access import AccessError, check_reach
from deploy.machine import AddressError
from deploy.settings import BalancerSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve warns of itself
    from deploy.app import agent_host, client_host, reachable, supervisor_settings

ray: Any = untyped_ray
NODE_ADDRESS = "192.0.2.7"


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: NODE_ADDRESS)


def test_agents_are_listened_for_where_it_was_said_or_at_the_nodes_own_address() -> None:
    assert agent_host("node") == NODE_ADDRESS
    assert agent_host("127.0.0.1") == "127.0.0.1"
    assert agent_host("localhost") == "localhost"


def test_a_host_that_nobody_knows_is_refused_by_its_name() -> None:
    with pytest.raises(AddressError, match="'no host' is no address, nor a name of one"):
        agent_host("no host")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_who_listens_on_all_addresses_is_dialled_at_the_nodes_own(host: str) -> None:
    assert reachable(host) == NODE_ADDRESS


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.9", "localhost"])
def test_who_listens_on_one_address_is_dialled_there(host: str) -> None:
    assert reachable(host) == host


class Controller:
    """Serve's, which says where its proxies listen."""

    def __init__(self, host: str | None) -> None:
        self.host = host

    @property
    def get_http_config(self) -> Any:
        return self

    async def remote(self) -> "Controller":
        return self


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Controller:
    controller = Controller("127.0.0.1")

    def get_actor(*_: Any, **__: Any) -> Controller:
        return controller

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    return controller


async def test_keys_are_wanted_if_haproxy_may_listen_on_all_addresses(
    serve: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await client_host() == "127.0.0.1"
    check_reach(OPEN, client_host="127.0.0.1", agent_host="127.0.0.1")

    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")

    with pytest.raises(AccessError, match="no key for inference, management"):
        check_reach(OPEN, client_host=await client_host(), agent_host="127.0.0.1")


async def test_keys_are_wanted_if_serve_does_not_say_where_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("there is no such actor")

    monkeypatch.setattr(ray, "get_actor", fail)
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)

    assert await client_host() == ""


async def test_no_keys_are_wanted_of_clients_if_serve_listens_nowhere(serve: Controller) -> None:
    serve.host = None

    check_reach(OPEN, client_host=await client_host(), agent_host="127.0.0.1")


def test_agents_of_fleets_are_told_the_certificate_and_where_their_key_is(tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "own")
    settings = BalancerSettings(tls_cert=own.certificate, tls_key=own.key, keys=Path("/keys"))

    told = supervisor_settings(settings, read_keys("agent key-of-some-agents"))

    assert told.tls_pin_text is not None
    assert own.certificate.read_text().startswith(told.tls_pin_text)
    assert told.key_file == "/keys"
    assert supervisor_settings(BalancerSettings(), OPEN).tls_pin_text is None
