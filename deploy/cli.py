"""The command ``headrace``. Bad values get one clear line and exit status 2.

Modules that take long to import (Ray, llama.cpp) are imported by the command that needs them.
"""

import asyncio
import os
import socket
import sys
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from balancer.keys import OPEN, Role, first_key, read_keys
from balancer.limits import Limits
from common.errors import HeadraceError
from common.models import KvLayout
from deploy.access import KEYS, fresh_keys, is_secret, keep_secret
from deploy.bench_command import bench
from deploy.keeper import become_keeper
from deploy.logs import FILE_VARIABLE, LogFormat
from deploy.machine import address
from deploy.model import default_model
from deploy.operating import (
    cancel,
    chat,
    drain,
    explain,
    scale,
    status,
    swap,
    top,
    undrain,
)
from deploy.options import (
    DEFAULTS,
    MODEL_HELP,
    AgentKeyFile,
    BodyBytes,
    BufferBytes,
    CacheTokens,
    Cells,
    Context,
    DrainTimeout,
    Engine,
    Flash,
    GpuLayers,
    KeysFile,
    KeyType,
    Labels,
    Layout,
    LogFile,
    Logs,
    LongestGap,
    MainGpu,
    MaxTokens,
    OpenRequests,
    Slots,
    TensorSplit,
    Threads,
    TlsAuthorities,
    TlsCertificate,
    TlsKey,
    TracesAddress,
    ValueType,
    agent_settings,
    check_address,
    check_authorities,
    check_balancer,
    check_certificate,
    check_fleets,
    check_host,
    check_keys,
    check_log_file,
    check_model,
    check_name,
    check_no_agents,
    check_origin,
    check_own_key,
    check_state,
    engine_choices,
)
from deploy.session import run_apart
from deploy.settings import (
    AGENT_PORT,
    CLIENT_PORT,
    BalancerSettings,
    EngineKind,
    to_line,
)
from deploy.show_nodes import AsJson, ClusterFile, Here, Wait, show_nodes
from deploy.terminal import one_line

OWN_BALANCER = f"ws://127.0.0.1:{AGENT_PORT}"

app = typer.Typer(
    help="A distributed load balancer for LLM inference.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = Console()


@app.command()
def up(
    command: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=MODEL_HELP + " Default: the small model that comes with it. "
            "What was PUT, and is kept in --state, goes before it.",
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            help="Where the desired state is kept: file:///PATH, or memory://, which forgets it "
            "if the balancer's process dies. Default: a file of its own, until this command ends.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin", help="Of a web page that may use it (CORS); may be repeated."
        ),
    ] = None,
    keys: KeysFile = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    agents: Annotated[
        int | None,
        typer.Option(
            "--agents", min=0, max=64, help="How many agents. Default: 1, or 0 with --fleets."
        ),
    ] = None,
    fleets: Annotated[
        Path | None,
        typer.Option(
            "--fleets",
            help="A YAML file of agents that come and go as they are needed. "
            "What was PUT, and is kept in --state, goes before it.",
        ),
    ] = None,
    slots: Slots = 4,
    context: Context = None,
    threads: Threads = None,
    kv_layout: Layout = KvLayout.UNIFIED,
    kv_cells: Cells = None,
    cache_tokens: CacheTokens = None,
    longest_gap: LongestGap = 0.15,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="The clients' port.")
    ] = CLIENT_PORT,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    agent_port: Annotated[
        int, typer.Option("--agent-port", min=1, max=65535, help="Where agents dial in.")
    ] = AGENT_PORT,
    buffer_size: Annotated[
        int, typer.Option("--buffer-size", min=0, help="Requests that may wait for a slot.")
    ] = 128,
    buffer_timeout: Annotated[
        float, typer.Option("--buffer-timeout", min=0.01, help="Seconds that each may wait.")
    ] = 10.0,
    buffer_bytes: BufferBytes = DEFAULTS.buffered_bytes,
    max_body_bytes: BodyBytes = DEFAULTS.body_bytes,
    max_tokens: MaxTokens = None,
    max_open_requests: OpenRequests = DEFAULTS.open_requests,
    drain_timeout: DrainTimeout = 30.0,
    n_gpu_layers: GpuLayers = None,
    main_gpu: MainGpu = None,
    tensor_split: TensorSplit = None,
    flash_attention: Flash = None,
    k_cache_dtype: KeyType = None,
    v_cache_dtype: ValueType = None,
    engine: Engine = EngineKind.LLAMA,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Allow a --host that others can reach without keys."),
    ] = False,
    log_format: Logs = LogFormat.PLAIN,
    log_file: LogFile = None,
    traces: TracesAddress = None,
) -> None:
    """Start everything on this machine: Ray, the balancer and agents."""
    if port == agent_port:
        raise typer.BadParameter("it must differ from --port", param_hint="'--agent-port'")
    keys_text = check_keys(keys)
    served_keys = OPEN if keys_text is None else read_keys(keys_text)
    check_host(host, served_keys, insecure=insecure)
    check_certificate(tls_cert, tls_key)
    if keys is not None and not is_secret(keys):
        _say(f"others on this machine can read {keys}: chmod 600 {keys}")
    if log_file is not None:
        os.environ[FILE_VARIABLE] = str(check_log_file(log_file))  # for all that is started here
    if traces is not None:
        check_address(traces, "--traces", "http://HOST:PORT/v1/traces")
    if engine is EngineKind.LLAMA:
        model = check_model(str(default_model()) if model is None else model)
    if state is not None:
        check_state(state)
    own_fleets = {} if fleets is None else check_fleets(fleets)
    if agents is None:
        agents = 0 if own_fleets else 1
    if own_fleets and not agents:
        check_no_agents(command)
    names = [f"agent-{n + 1}" for n in range(agents)]
    choices = engine_choices(
        slots=slots,
        context=context,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        main_gpu=main_gpu,
        tensor_split=tensor_split,
        flash_attention=flash_attention,
        k_cache_dtype=k_cache_dtype,
        v_cache_dtype=v_cache_dtype,
    )
    settings = [
        agent_settings(
            [address("ws" if tls_cert is None else "wss", host, agent_port)],
            name=name,
            choices=choices,
            kv_layout=kv_layout,
            kv_cells=kv_cells,
            cache_tokens=cache_tokens,
            longest_gap=longest_gap,
            engine=engine,
            tls_pin=tls_cert,
            log_format=log_format,
        )
        for name in names
    ]
    from deploy.up import UpSettings
    from deploy.up import up as run

    balancer = BalancerSettings(
        agent_host=host,
        agent_port=agent_port,
        buffer_size=buffer_size,
        buffer_timeout=buffer_timeout,
        limits=Limits(
            buffered_bytes=buffer_bytes,
            body_bytes=max_body_bytes,
            max_tokens=max_tokens,
            open_requests=max_open_requests,
        ),
        model=model,
        fleets=own_fleets,
        engine=engine,
        origins=tuple(check_origin(origin) for origin in allow_origin or ()),
        insecure=insecure,
        tls_cert=None if tls_cert is None else tls_cert.absolute(),
        tls_key=None if tls_key is None else tls_key.absolute(),
        log_format=log_format,
        traces=traces,
    )

    def work(folder: str) -> int:
        kept: dict[str, Any] = {
            "state": f"file://{folder}/state.json" if state is None else state,
            "keys": None if keys is None else keys.absolute(),
        }
        if keys is None and keys_text is not None:
            # Ray's processes may not have our environment, and this file is for us alone.
            kept["keys"] = Path(folder) / "keys"
            keep_secret(kept["keys"], keys_text)
        os.environ.pop(KEYS, None)
        key_file = None if Role.AGENT in served_keys.missing else str(kept["keys"])
        everything = UpSettings(
            host=host,
            port=port,
            agents=tuple(replace(each, key_file=key_file) for each in settings),
            drain_timeout=drain_timeout,
            balancer=balancer.model_copy(update=kept),
        )
        try:
            asyncio.run(run(everything, folder, console))
        except HeadraceError as error:
            _say(str(error))
            return 1
        return 0

    raise typer.Exit(run_apart(work, drain_timeout=drain_timeout))


@app.command()
def agent(
    balancer: Annotated[
        list[str] | None,
        typer.Option(
            "--balancer",
            help="Where to dial in: ws://HOST:PORT, or over TLS wss://HOST:PORT; may be repeated. "
            f"Default: {OWN_BALANCER}.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help=MODEL_HELP + " Default: what the balancer wants, also when it changes."
        ),
    ] = None,
    slots: Slots = 4,
    label: Labels = None,
    name: Annotated[
        str, typer.Option("--name", help="Shown to clients and operators. Default: the host's.")
    ] = "",
    context: Context = None,
    threads: Threads = None,
    kv_layout: Layout = KvLayout.UNIFIED,
    kv_cells: Cells = None,
    cache_tokens: CacheTokens = None,
    longest_gap: LongestGap = 0.15,
    drain_timeout: DrainTimeout = 120.0,
    n_gpu_layers: GpuLayers = None,
    main_gpu: MainGpu = None,
    tensor_split: TensorSplit = None,
    flash_attention: Flash = None,
    k_cache_dtype: KeyType = None,
    v_cache_dtype: ValueType = None,
    engine: Engine = EngineKind.LLAMA,
    key_file: AgentKeyFile = None,
    tls_ca: TlsAuthorities = None,
    log_format: Logs = LogFormat.PLAIN,
) -> None:
    """Join a balancer with an agent, without Ray. Ctrl-C drains it."""
    balancers = balancer or [OWN_BALANCER]
    for each in balancers:
        check_balancer(each)
    check_own_key(Role.AGENT, key_file)
    if tls_ca is not None:
        check_authorities(tls_ca)
    settings = agent_settings(
        balancers,
        name=check_name(name or socket.gethostname(), "--name"),
        labels=tuple(check_name(each, "--label") for each in label or ()),
        pinned=None if model is None else check_model(model),
        choices=engine_choices(
            slots=slots,
            context=context,
            threads=threads,
            n_gpu_layers=n_gpu_layers,
            main_gpu=main_gpu,
            tensor_split=tensor_split,
            flash_attention=flash_attention,
            k_cache_dtype=k_cache_dtype,
            v_cache_dtype=v_cache_dtype,
        ),
        kv_layout=kv_layout,
        kv_cells=kv_cells,
        cache_tokens=cache_tokens,
        longest_gap=longest_gap,
        engine=engine,
        key_file=key_file,
        tls_ca=tls_ca,
        log_format=log_format,
    )
    become_keeper(to_line(settings), drain_timeout=drain_timeout)


@app.command()
def keys(
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write them to this new file, for its owner alone."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Make new keys, one for each role: the file that up takes with --keys."""
    if json and output is not None:
        raise typer.BadParameter("the file is none of JSON", param_hint="'--json'")
    if output is None:
        text = fresh_keys()
        if json:
            text = f"{dumps({role: first_key(text, role) for role in Role})}\n"
        sys.stdout.write(text)
        return
    try:
        keep_secret(output, fresh_keys())
    except OSError as error:
        raise typer.BadParameter(f"{output}: {error.strerror}", param_hint="'--output'") from error


@app.command()
def nodes(
    cluster: ClusterFile = None,
    here: Here = False,
    wait: Wait = 0.0,
    json: AsJson = False,
) -> None:
    """After ray up: which nodes have joined, and why the others have not. Status 1: some have not."""
    raise typer.Exit(show_nodes(cluster, here=here, wait=wait, as_json=json, console=console))


for command in (status, top, explain, drain, undrain, cancel, swap, scale, chat, bench):
    app.command()(command)


def main() -> NoReturn:
    """The entry point: an error is one line on standard error, never a traceback of ours."""
    try:
        # The status of a command that raises typer.Exit comes back as the result.
        sys.exit(app(standalone_mode=False) or 0)
    except typer.exceptions.TyperException as error:
        _say(error.format_message() if hasattr(error, "format_message") else str(error))
        sys.exit(2)
    except HeadraceError as error:
        _say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(error: str) -> None:
    print(f"headrace: {one_line(error)}", file=sys.stderr)  # noqa: T201
