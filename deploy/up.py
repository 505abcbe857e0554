"""``headrace up``: everything on this machine, started in order and stopped in order.

Ray (if none runs here) -> the Serve application -> agents -> wait for a slot -> say how to use it
-> wait for a signal -> stop what was started here, and nothing else.
"""

import asyncio
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import warnings
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from balancer.keys import Keys, Role, first_key, read_keys
from common.errors import HeadraceError
from common.models import IssueKind
from deploy.access import OWN_KEY, find_keys, open_keys
from deploy.load_bars import LoadBars, load_row
from deploy.logs import FILE_VARIABLE, VARIABLE, LogFormat, set_up
from deploy.machine import address, is_loopback, stop_signals, why_not_listen
from deploy.overview import Agent, StatusView
from deploy.session import STOP_TIMEOUT
from deploy.settings import AgentSettings, BalancerSettings
from deploy.terminal import one_line
from deploy.tls import pinned_context

log = logging.getLogger(__name__)

APPLICATION = "headrace"

READY_TIMEOUT = 600.0
"""Seconds that agents may take to load their model."""

GOOD_BYE_TIMEOUT = 5.0
"""Seconds for the last messages to clients."""

FLEETS_TIMEOUT = 5.0
"""Seconds for the supervisor to end all agents of fleets; what it leaves is ended without it."""

UNNOTICED = 0.5
"""Seconds of waiting that need no explanation."""

WATCH_INTERVAL = 2.0

POLL_INTERVAL = 0.1

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's minimum, more or less: tokens travel over our own sockets, never through its store."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts its workers at niceness 15, with which an agent loses every contest for a core.
    "RAY_worker_niceness": "0",
    # One loop for Serve's code and ours, and gRPC between proxy and replica: about half the
    # latency of the defaults, measured without HAProxy.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.proxy:middlewares",
    # By default Serve looks ten times a second for something to do, which is a third of what an
    # idle Ray takes of the CPU; and each time a core is taken, llama.cpp's threads stand still.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    # A dead proxy is noticed by the third question in a row, and each takes two of those looks.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.3",
    # A replica that does not answer is killed: it would not stop in order.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}


class StartError(HeadraceError):
    """It could not be started; the text says what the user can do."""


@dataclass(frozen=True, slots=True)
class UpSettings:
    host: str
    port: int
    agents: tuple[AgentSettings, ...]
    balancer: BalancerSettings
    drain_timeout: float
    """Seconds that what runs may go on when it is asked to stop."""

    @property
    def address(self) -> str:
        """Where a client on this machine reaches the balancer."""
        scheme = "http" if self.balancer.tls_cert is None else "https"
        return address(scheme, self.host, self.port)

    @property
    def agent_address(self) -> str:
        """Where an agent on this machine reaches it."""
        scheme = "ws" if self.balancer.tls_cert is None else "wss"
        return address(scheme, self.host, self.balancer.agent_port)


def curl_line(address: str, *, certificate: Path | None = None, wants_key: bool = False) -> str:
    """``certificate``: of the balancer, if it speaks TLS. A key is read from the environment."""
    body = {
        "conversation_history": [{"role": "user", "content": "Why is the sky blue?"}],
        "add_generation_prompt": True,
        "enable_thinking": False,
        "max_tokens": 100,
    }
    route = f"{address}/api/v1/continue_from_conversation_history"
    words = ["curl -N"]
    if certificate is not None:
        words.append(f"--cacert {shlex.quote(str(certificate))}")
    words.append(f"{route} -H 'content-type: application/json'")
    if wants_key:
        words.append(f'-H "authorization: Bearer ${OWN_KEY[Role.INFERENCE]}"')
    words.append(f"-d '{json.dumps(body)}'")
    return " ".join(words)


async def up(settings: UpSettings, folder: str, console: Console) -> None:
    """Start, serve until SIGTERM, stop. ``folder`` is for Ray's files. Raises ``StartError``."""
    for port in (settings.port, settings.balancer.agent_port):
        reason = why_not_listen(settings.host, port)
        if reason is not None:
            raise StartError(f"cannot listen on {settings.host}, port {port}: {reason}")
    set_up(settings.balancer.log_format, logging.WARNING)
    signals = _Signals(console)
    signals.listen()
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(_start(settings, folder, stack, signals, console))
        stopping = asyncio.create_task(signals.stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        elif starting.exception() is None:
            await stopping
        console.print("stopping ...")
        # Whatever hangs then is ended, and its parent tidies up.
        signal.alarm(int(settings.drain_timeout + STOP_TIMEOUT))
    if not starting.cancelled():
        starting.result()


class _Signals:
    """The first one means: stop; the second: now."""

    def __init__(self, console: Console) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        self._console = console

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        if self.now.is_set():
            self._console.print("stopping already; it takes a few seconds")
        if self.stop.is_set():
            self.now.set()
        self.stop.set()


async def _start(
    settings: UpSettings,
    folder: str,
    stack: AsyncExitStack,
    signals: _Signals,
    console: Console,
) -> None:
    console.print("starting Ray ...")
    owned = await stack.enter_async_context(_ray(folder, settings.balancer.log_format))
    signals.listen()  # again, for Ray has put a handler of its own before ours
    console.print("starting the balancer ...")
    balancer = await stack.enter_async_context(_application(settings, ray_is_ours=owned))
    if settings.agents:
        console.print("loading the model ...")
    actors = await stack.enter_async_context(_agents(settings.agents))
    linked = await _wait_for_slots(settings, actors, console)
    watching = asyncio.create_task(_report_losses(settings.agents, actors, console))
    stack.callback(watching.cancel)
    stack.push_async_callback(_drain, balancer, settings.drain_timeout, signals, console)
    logs = os.environ.get(FILE_VARIABLE)
    if logs is None and owned:
        logs = f"{folder}/session_latest/logs/worker-*.err, until it ends (or --log-file)"
    greeting = _greeting(settings, linked, await _fleets(settings), logs)
    console.print(greeting, soft_wrap=True, highlight=False, markup=False)


async def _to_the_end(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call on a thread. If cancelled, wait for its end first: what is half started cannot be
    stopped.
    """
    call = asyncio.create_task(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})
        raise


def _greeting(
    settings: UpSettings,
    agents: list[Agent],
    fleets: dict[str, dict[str, Any]],
    logs: str | None,
) -> str:
    """``logs``: where they are; None: where the Ray that runs here keeps them."""
    keys = open_keys(settings.balancer.keys, {})
    certificate = settings.balancer.tls_cert
    lines = [f"headrace is ready at {settings.address}"]
    slots = sum(agent.slots for agent in agents)
    if slots:
        models = dict.fromkeys(one_line(Path(agent.model_path or "").name) for agent in agents)
        lines.append(f"  model   {', '.join(models)}")
        lines.append(f"  slots   {slots}, on {len(agents)} agent(s)")
    elif settings.agents:
        lines.append("  no model is wanted yet; requests wait for one")
    elif not fleets:
        lines.append("  no agents yet; requests wait for one")
    for name, fleet in fleets.items():
        lines.append(
            f"  fleet   {name}, {fleet['min']} to {fleet['max']} agent(s) with {fleet['slots']} slots"
        )
    lines.append(f"  openai  {settings.address}/v1")
    lines.append(f"  panel   {settings.address}/panel")
    if logs is not None:
        lines.append(f"  log     {logs}")
    lines.append(f"  join    {_join_line(settings, keys)}")
    if not is_loopback(settings.host) and certificate is None:
        lines.append("  keys and prompts can be read on their way: --tls-cert and --tls-key")
    wants_key = Role.INFERENCE not in keys.missing
    if wants_key:
        lines += ["", f"With an inference key in {OWN_KEY[Role.INFERENCE]}, try it:", ""]
    else:
        lines += ["", "Try it:", ""]
    lines.append(curl_line(settings.address, certificate=certificate, wants_key=wants_key))
    lines += ["", "Ctrl-C stops it."]
    return "\n".join(lines)


def _join_line(settings: UpSettings, keys: Keys) -> str:
    line = f"headrace agent --balancer {settings.agent_address}"
    if settings.balancer.tls_cert is not None:
        line += f" --tls-ca {shlex.quote(str(settings.balancer.tls_cert))}"
    if Role.AGENT not in keys.missing:
        line += " --key-file FILE"
    return line


@asynccontextmanager
async def _ray(folder: str, log_format: LogFormat) -> AsyncGenerator[bool]:
    """The Ray that runs on this machine, or else (True) one of our own for as long as we need it.

    Whoever can talk to Ray can run any code. So ours asks for a token that only our processes
    know, and listens on the loopback interface (but for two ports with metrics, and Serve's between
    replicas, which asks for the token too). Its files are in ``folder``.
    """
    os.environ[VARIABLE] = log_format  # for Serve's proxy, which is given no settings of ours
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {
        "namespace": APPLICATION,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    running = running_ray()
    if running is not None:
        options["address"] = running
        # Its processes do not inherit from us. (Their niceness cannot be set from here.)
        log_file = {name: os.environ[name] for name in (FILE_VARIABLE,) if name in os.environ}
        variables = {**RAY_ENVIRONMENT, VARIABLE: log_format, **log_file}
        options["runtime_env"] = {"env_vars": variables}
    else:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Read by Ray on every system, whatever its name says: the address of this node is loopback.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        options |= {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": folder,
        }
    import ray  # reads the environment when it is imported
    from ray.exceptions import RayError

    warnings.filterwarnings("ignore", module="ray")
    try:
        try:
            await _to_the_end(ray.init, **options)
        except (RayError, RuntimeError, OSError, ValueError) as error:
            raise StartError(f"no Ray: {' '.join(str(error).split())}") from error
        yield running is None
    finally:
        await asyncio.to_thread(ray.shutdown)


def running_ray() -> str | None:
    """The address of the Ray to use: what ``RAY_ADDRESS`` says, or the one that ``ray start`` has
    started on this machine, if it answers. None: start one of our own. Raises ``StartError``.

    Found as ``ray.init()`` finds it, but before Ray is imported: what it reads from its
    environment then (the token) differs between that Ray and one of our own.
    """
    told = os.environ.get("RAY_ADDRESS")
    if told and told != "auto":
        if told != "local" and not _answers(told):
            raise StartError(f"RAY_ADDRESS is {told}, and no Ray answers there")
        return None if told == "local" else told
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    try:
        address = (folder / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return address if _answers(address) else None


def _answers(address: str) -> bool:
    """``HOST:PORT``. Asked first, because Ray tries for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return False
    return True


@asynccontextmanager
async def _application(settings: UpSettings, *, ray_is_ours: bool) -> AsyncGenerator[Any]:
    """The handle of the balancer."""
    from ray import serve
    from ray.exceptions import RayError

    from deploy.app import build

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if await asyncio.to_thread(_serve_runs):
        raise StartError("Ray Serve is in use already on the Ray that runs on this machine")
    http_options: dict[str, Any] = {"host": settings.host, "port": settings.port}
    if settings.balancer.tls_cert is not None:
        http_options["ssl_certfile"] = str(settings.balancer.tls_cert)
        http_options["ssl_keyfile"] = str(settings.balancer.tls_key)
    application = build(settings.balancer)
    try:
        try:
            await _to_the_end(serve.start, proxy_location="HeadOnly", http_options=http_options)
            handle = await _to_the_end(serve.run, application, name=APPLICATION, route_prefix="/")
        except (RayError, RuntimeError, OSError, ValueError) as error:
            reason = await asyncio.to_thread(_why_not_deployed) or error
            raise StartError(f"the balancer did not start: {reason}") from error
        try:
            yield handle
        finally:
            await _tell_clients(handle)
    finally:
        if not ray_is_ours:  # else it ends with Ray, and quicker
            await asyncio.to_thread(serve.shutdown)
            await end_fleets()


async def _drain(balancer: Any, timeout: float, signals: _Signals, console: Console) -> None:  # noqa: ASYNC109
    """Until what runs is over, or a second signal comes."""
    draining = asyncio.ensure_future(_drained(balancer))
    now = asyncio.create_task(signals.now.wait())
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait({draining, now}, timeout=UNNOTICED, return_when=first)
    if not done:
        console.print(
            f"what runs is finished first, for up to {timeout:g} s; once more to stop now"
        )
        await asyncio.wait({draining, now}, timeout=timeout, return_when=first)
    for task in (draining, now):
        task.cancel()
    await asyncio.gather(draining, now, return_exceptions=True)


async def _drained(balancer: Any) -> None:
    from ray.exceptions import RayError

    try:
        await balancer.drain.remote()
    except (RayError, RuntimeError, OSError) as error:
        log.warning("the balancer could not be drained: %s", error)


async def _tell_clients(handle: Any) -> None:
    """Let the balancer end its streams with a message. If it cannot, they end without one."""
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(GOOD_BYE_TIMEOUT):
            await handle.shut_down.remote()
    except (RayError, RuntimeError, OSError, TimeoutError) as error:
        log.warning("the balancer did not take leave of its clients: %s", error)


async def end_fleets() -> None:
    """Their agents would outlive us, and so would those that an earlier supervisor has left."""
    import ray
    from ray.exceptions import RayError

    from deploy.members import NAMESPACE, kill_all
    from deploy.supervisor import NAME, reserve

    try:
        supervisor: Any = await asyncio.to_thread(ray.get_actor, NAME, NAMESPACE)
    except ValueError:  # there were no fleets, or nobody keeps them
        pass
    else:
        try:
            async with asyncio.timeout(FLEETS_TIMEOUT):
                await supervisor.shut_down.remote()
        except (RayError, TimeoutError) as error:
            log.warning("the supervisor does not end its agents: %r", error)
            reserve(())
        ray.kill(supervisor)
    killed = await asyncio.to_thread(kill_all)
    if killed:
        log.warning("agents that nobody has ended are killed: %s", ", ".join(killed))


def _why_not_deployed() -> str | None:
    """The last line of what Serve says, which is a traceback. None: it says nothing."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        application = serve.status().applications.get(APPLICATION)
    except (RayError, RuntimeError):
        return None
    told = [each.message for each in application.deployments.values()] if application else []
    return next(reversed("\n".join(told).strip().splitlines()), None)


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


@asynccontextmanager
async def _agents(agents: tuple[AgentSettings, ...]) -> AsyncGenerator[list[Any]]:
    import ray

    from deploy.actor import AgentActor

    actor_class: Any = AgentActor
    actors = [actor_class.options(name=settings.name).remote(settings) for settings in agents]
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


async def _wait_for_slots(settings: UpSettings, actors: list[Any], console: Console) -> list[Agent]:
    """Until every agent has its slots, or no model is wanted; return what the agents say. Raises
    ``StartError`` if one cannot have them.

    Time counts only while no model file comes in: that takes as long as it takes.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + READY_TIMEOUT
    fetched: dict[str, int] = {}
    async with _open_client(settings) as client:
        with LoadBars(console) as bars:
            while loop.time() < end:
                for actor in actors:
                    problem = await _problem(actor)
                    if problem is not None:
                        raise StartError(f"an agent could not start: {problem}")
                told = await _ask(client, "/api/v1/overview")
                if told is not None and len(told["agents"]) >= len(actors):
                    view = StatusView.of(told)
                    linked = list(view.agents.values())
                    if view.model.desired is None or all(agent.slots for agent in linked):
                        return linked
                    _refuse_if_stuck(linked)
                    rows = [load_row(agent) for agent in linked]
                    bars.show(rows)
                    now = {row.key: row.current for row in rows if row.is_download}
                    if now != fetched:
                        end = loop.time() + READY_TIMEOUT
                    fetched = now
                await asyncio.sleep(POLL_INTERVAL)
    raise StartError(f"no agent had a slot ready after {READY_TIMEOUT:g} s")


async def _fleets(settings: UpSettings) -> dict[str, dict[str, Any]]:
    """Those that hold: some of the file may have been changed or deleted since, and that was kept."""
    async with _open_client(settings) as client:
        told = await _ask(client, "/api/v1/fleets")
    return {} if told is None else {name: each["fleet"] for name, each in told["fleets"].items()}


def _open_client(settings: UpSettings) -> httpx.AsyncClient:
    """For our own questions to the balancer."""
    text = find_keys(settings.balancer.keys, {})
    headers: dict[str, str] = {}
    if text is not None and Role.MANAGEMENT not in read_keys(text).missing:
        headers["authorization"] = f"Bearer {first_key(text, Role.MANAGEMENT)}"
    certificate = settings.balancer.tls_cert
    verify = True if certificate is None else pinned_context(certificate)
    return httpx.AsyncClient(
        base_url=settings.address, headers=headers, verify=verify, trust_env=False
    )


async def _ask(client: httpx.AsyncClient, route: str) -> dict[str, Any] | None:
    """None while no answer can be had, or Serve's proxy does not know the application yet."""
    try:
        response = await client.get(route)
    except httpx.HTTPError:
        return None
    return response.json() if response.is_success else None


def _refuse_if_stuck(agents: list[Agent]) -> None:
    """Raises ``StartError`` if an agent will not serve, or found the model to be none."""
    for agent in agents:
        if agent.application == "Stuck" or any(
            issue.kind == IssueKind.MODEL_CANNOT_BE_LOADED for issue in agent.issues
        ):
            reasons = "; ".join(f"{issue.kind}: {issue.detail}" for issue in agent.issues)
            raise StartError(f"an agent could not start: {reasons or 'no reason given'}")


async def _report_losses(
    agents: tuple[AgentSettings, ...], actors: list[Any], console: Console
) -> None:
    """One line for each agent that has gone for good."""
    running = dict(zip((agent.name for agent in agents), actors, strict=True))
    while running:
        await asyncio.sleep(WATCH_INTERVAL)
        for name, actor in tuple(running.items()):
            problem = await _problem(actor)
            if problem is not None:
                console.print(Text(one_line(f"{name} has gone: {problem}")), soft_wrap=True)
                del running[name]


async def _problem(actor: Any) -> str | None:
    """Why the agent does not serve and will not; None while it does, or while Ray restarts it."""
    from ray.exceptions import ActorUnavailableError, RayError

    from deploy.members import first_line

    try:
        return await actor.problem.remote()
    except ActorUnavailableError:
        return None
    except RayError as error:
        return f"its process died again and again: {first_line(error)}"
