"""The Serve application: ``serve run deploy.app:build``.

Each replica owns its buffer and all its connections. It listens for agents itself, since frames
through Serve's proxy would take 40 times as long.
"""

import asyncio
import logging
import os
import ssl
import time
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from starlette.types import ASGIApp

from balancer.app import create_app
from balancer.balancer import Balancer
from balancer.desired_state import BalancerDesiredState
from balancer.keys import Keys, Role
from balancer.limits import Limits
from balancer.link import AgentListener
from balancer.state_store import open_store
from balancer.stored_state import StoredState
from balancer.wishes import Wishes
from deploy.access import check_reach, open_keys
from deploy.beats import Beats
from deploy.flow import HeldBack
from deploy.logs import set_up
from deploy.machine import address, resolve
from deploy.model import parse_model
from deploy.settings import NODE, BalancerSettings, SupervisorSettings
from deploy.tls import own_certificate, server_context
from deploy.version import code_version

if TYPE_CHECKING:
    from deploy.traces import Traces

log = logging.getLogger(__name__)

LONGEST_GENERATION = 600.0
"""Seconds that a replica which is being replaced may go on with the streams it has."""

HELD_BACK = 2.0
"""Seconds until Serve's question after our health is answered."""


SETTLING = 5.0
"""Seconds that agents may take to link again when the process before this one has died."""

AT_ONCE = 10_000
"""Requests that are over as soon as they have come, refusals above all."""


@serve.deployment(
    num_replicas=1,
    graceful_shutdown_timeout_s=LONGEST_GENERATION,
    # Asked again as soon as it has answered: see `check_health`.
    health_check_period_s=0.1,
    health_check_timeout_s=HELD_BACK + 3.0,
    ray_actor_options={"num_cpus": 0},
    logging_config={"enable_access_log": False},
)
@serve.ingress()
class BalancerReplica:
    async def __init__(self, settings: BalancerSettings, declared: int) -> None:
        """``declared``: when the settings were, in milliseconds since 1970."""
        set_up(settings.log_format)
        self._has_been_asked = False
        host = agent_host(settings.agent_host)
        self._keys = open_keys(settings.keys, os.environ)
        check_reach(
            self._keys,
            client_host=await client_host(),
            agent_host=host,
            insecure=settings.insecure,
        )
        self._balancer = Balancer(
            buffer_capacity=settings.buffer_size,
            patience=settings.buffer_timeout,
            limits=settings.limits,
            settling=SETTLING,
        )
        store = open_store(settings.state)
        first = first_state(settings, declared)
        kept = store.load()
        self._balancer.want(first if kept is None else kept.merged(first))
        self._wishes = Wishes(self._balancer, store)
        self._traces = open_traces(settings.traces)
        self._balancer.records.observer = self._traces
        self._origins = settings.origins
        self._listener = AgentListener(self._balancer)
        port = await self._listener.start(
            host, settings.agent_port, keys=self._keys, tls=_tls(settings)
        )
        replica = serve.get_replica_context()
        self._beats = Beats(
            self._balancer,
            self._wishes,
            balancer_id=replica.replica_id.unique_id,
            address=address("ws" if settings.tls_cert is None else "wss", reachable(host), port),
            is_alone=replica.world_size == 1,
            settings=supervisor_settings(settings, self._keys),
            declared=declared,
        )
        await self._beats.beat()
        self._beating = asyncio.create_task(self._beats.run())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        app = create_app(self._balancer, self._wishes, origins=self._origins, keys=self._keys)
        return HeldBack(app if self._traces is None else self._traces.noting(app))

    async def check_health(self) -> None:
        """Held back: Serve learns at once that an actor has died if a question to it is open, and
        otherwise only when it asks the next one. So few questions are enough.
        """
        if self._beating.done():
            self._beating.result()  # it never ends by itself: a fault of ours, so begin anew
        if self._has_been_asked:
            await asyncio.sleep(HELD_BACK)
        self._has_been_asked = True  # the first is asked before it may serve

    async def drain(self) -> None:
        """Take nothing new, and return when all that runs is over."""
        await self._balancer.drain()

    async def shut_down(self) -> None:
        """End every stream with a message now, instead of letting it run to its end."""
        self._balancer.close()

    async def __del__(self) -> None:
        # Serve awaits this, after the requests that it knows of have ended.
        self._balancer.close()
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await self._listener.stop()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)


def open_traces(address: str | None) -> "Traces | None":
    if address is None:
        return None
    from deploy.traces import Traces  # its libraries are not needed otherwise

    return Traces(address)


def supervisor_settings(settings: BalancerSettings, keys: Keys) -> SupervisorSettings:
    return SupervisorSettings(
        code=code_version(),
        engine=settings.engine,
        key_file=None
        if settings.keys is None or Role.AGENT in keys.missing
        else str(settings.keys),
        tls_pin_text=None if settings.tls_cert is None else own_certificate(settings.tls_cert),
        log_format=settings.log_format,
    )


def agent_host(host: str) -> str:
    """To listen on; ``node`` is this node's own address. Raises ``AddressError`` if it is none."""
    if host == NODE:
        return ray.util.get_node_ip_address()
    resolve(host)
    return host


def reachable(host: str) -> str:
    """An address that agents can dial, of one that is listened on. Raises ``AddressError``."""
    is_any = any(each.is_unspecified for each in resolve(host))
    return ray.util.get_node_ip_address() if is_any else host


async def client_host() -> str | None:
    """Where Serve's proxies listen for clients; None: nowhere. No settings of ours say it, and what is
    not known (Serve has no public way to ask) is taken for an address that everybody reaches.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        return ""  # it may listen on all addresses, whatever was said
    try:
        controller: Any = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        return (await controller.get_http_config.remote()).host
    except (RayError, ValueError, AttributeError) as error:
        log.warning("Serve does not say where it listens: %s", error)
        return ""


def _tls(settings: BalancerSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return server_context(settings.tls_cert, settings.tls_key)


def first_state(settings: BalancerSettings, declared: int) -> StoredState:
    """Before an operator has said anything."""
    state = BalancerDesiredState.defaults()
    if settings.model is not None:
        state = state.model_copy(update={"model": parse_model(settings.model)})
    return StoredState(balancer_desired_state=state, fleets=settings.fleets, declared=declared)


def build(settings: BalancerSettings) -> Application:
    replica: Any = BalancerReplica  # Ray types its decorators as plain callables
    now = int(time.time() * 1000)
    return replica.options(max_ongoing_requests=most_ongoing(settings.limits)).bind(settings, now)


def most_ongoing(limits: Limits) -> int:
    """More than the balancer lets in: the buffer is ours, Serve must never hold requests back."""
    return limits.open_requests + limits.open_sockets + limits.observers + AT_ONCE
