"""The command ``headrace``. Bad values get one clear line and exit status 2.

Modules that take long to import (Ray, llama.cpp) are imported by the command that needs them.
"""

import asyncio
import ipaddress
import logging
import math
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent.engine import KvLayout
from agent.model_files import check_model
from balancer.desired_state import LocalModel, referred
from balancer.state_store import StateError, open_store
from common.errors import HeadraceError, ModelError
from common.messages import LONGEST_NAME, CacheType, EngineChoices, FlashAttention
from deploy.bench import Api, Asking, BenchSettings, run_bench
from deploy.bench_report import (
    BenchError,
    Closed,
    Plan,
    Target,
    make_prompts,
    make_warm_up,
    picture_format,
    poisson,
)
from deploy.machine import address
from deploy.model import default_model, parse_model
from deploy.session import run_apart
from deploy.settings import (
    AGENT_PORT,
    CLIENT_PORT,
    LOG_FORMAT,
    AgentSettings,
    BalancerSettings,
    EngineKind,
)

app = typer.Typer(
    help="A distributed load balancer for LLM inference.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()

AS_DESIRED = "Default: as the desired state says."
MODEL_HELP = "A GGUF file: its path, or its address (https://huggingface.co/... or any other)."

Labels = Annotated[
    list[str] | None,
    typer.Option("--label", help="What overrides may call this agent by; may be repeated."),
]
GpuLayers = Annotated[
    int | None,
    typer.Option("--n-gpu-layers", min=-1, help="Layers on GPUs; -1: all. " + AS_DESIRED),
]
MainGpu = Annotated[int | None, typer.Option("--main-gpu", min=0, max=255, help=AS_DESIRED)]
TensorSplit = Annotated[
    str | None,
    typer.Option("--tensor-split", help="The part of each GPU: 3,1. " + AS_DESIRED),
]
Flash = Annotated[FlashAttention | None, typer.Option("--flash-attention", help=AS_DESIRED)]
KeyType = Annotated[CacheType | None, typer.Option("--k-cache-dtype", help=AS_DESIRED)]
ValueType = Annotated[CacheType | None, typer.Option("--v-cache-dtype", help=AS_DESIRED)]
Slots = Annotated[
    int, typer.Option("--slots", min=1, max=256, help="Requests that one agent runs at once.")
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=16,
        help="Tokens of one request at most, prompt and answer, and never more than the model was "
        "trained for. " + AS_DESIRED,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, help="Threads of one agent. Default: cores - 1."),
]
Engine = Annotated[
    EngineKind,
    typer.Option("--engine", help="'echo' needs no model: it says the prompt back."),
]

Layout = Annotated[
    KvLayout,
    typer.Option(
        "--kv-layout",
        help="'unified': all sequences share all KV cells and equal beginnings without a copy; "
        "'separate': each has its own, and memory is needed for all of them.",
    ),
]
Cells = Annotated[
    int | None,
    typer.Option(
        "--kv-cells",
        min=16,
        help="Tokens that all requests of one agent hold together (unified layout). When they run "
        "short the youngest wait. Default: as many as one request can have.",
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        "--cache-tokens",
        min=0,
        help="Tokens of finished requests that are kept for prompts that begin alike. "
        "Default: as many as the context.",
    ),
]
LongestGap = Annotated[
    float,
    typer.Option(
        "--longest-gap",
        min=0.01,
        max=60,
        help="Seconds between two tokens of a stream while prompts are read, if it can be had.",
    ),
]


@app.command()
def up(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=MODEL_HELP + " Default: the small model that comes with it. "
            "What is kept in --state goes before it.",
        ),
    ] = None,
    state: Annotated[
        str,
        typer.Option("--state", help="Where the desired state is kept: memory:// or file:///PATH."),
    ] = "memory://",
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin", help="Of a web page that may use it (CORS); may be repeated."
        ),
    ] = None,
    agents: Annotated[int, typer.Option("--agents", min=0, max=64, help="How many agents.")] = 1,
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
    n_gpu_layers: GpuLayers = None,
    main_gpu: MainGpu = None,
    tensor_split: TensorSplit = None,
    flash_attention: Flash = None,
    k_cache_dtype: KeyType = None,
    v_cache_dtype: ValueType = None,
    engine: Engine = EngineKind.LLAMA,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow a --host that others can reach.")
    ] = False,
) -> None:
    """Start everything on this machine: Ray, the balancer and agents."""
    if port == agent_port:
        raise typer.BadParameter("it must differ from --port", param_hint="'--agent-port'")
    _check_host(host, insecure=insecure)
    if engine is EngineKind.LLAMA:
        model = _check_model(str(default_model()) if model is None else model)
    _check_state(state)
    names = [f"agent-{n + 1}" for n in range(agents)]
    choices = _choices(
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
        _agent_settings(
            address("ws", host, agent_port),
            name=name,
            choices=choices,
            kv_layout=kv_layout,
            kv_cells=kv_cells,
            cache_tokens=cache_tokens,
            longest_gap=longest_gap,
            engine=engine,
        )
        for name in names
    ]
    from deploy.up import UpSettings
    from deploy.up import up as run

    everything = UpSettings(
        host=host,
        port=port,
        agents=tuple(settings),
        balancer=BalancerSettings(
            agent_host=host,
            agent_port=agent_port,
            buffer_size=buffer_size,
            buffer_timeout=buffer_timeout,
            state=state,
            model=model,
            origins=tuple(_check_origin(origin) for origin in allow_origin or ()),
        ),
    )

    def work(folder: str) -> int:
        try:
            asyncio.run(run(everything, folder, console))
        except HeadraceError as error:
            _say(str(error))
            return 1
        return 0

    raise typer.Exit(run_apart(work))


@app.command()
def agent(
    balancer: Annotated[
        str, typer.Option("--balancer", help="Where to dial in: ws://HOST:PORT.")
    ] = f"ws://127.0.0.1:{AGENT_PORT}",
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
    n_gpu_layers: GpuLayers = None,
    main_gpu: MainGpu = None,
    tensor_split: TensorSplit = None,
    flash_attention: Flash = None,
    k_cache_dtype: KeyType = None,
    v_cache_dtype: ValueType = None,
    engine: Engine = EngineKind.LLAMA,
) -> None:
    """Join a balancer with an agent in this process, without Ray. Ctrl-C drains it."""
    _check_balancer(balancer)
    settings = _agent_settings(
        balancer,
        name=_check_name(name or socket.gethostname(), "--name"),
        labels=tuple(_check_name(each, "--label") for each in label or ()),
        pinned=None if model is None else _check_model(model),
        choices=_choices(
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
    )
    from deploy.agents import serve

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    asyncio.run(serve(settings, console.print))


@app.command()
def status(
    host: Annotated[str, typer.Option("--host", help="Where the balancer is.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Its clients' port.")
    ] = CLIENT_PORT,
) -> None:
    """Show agents, slots and buffer."""
    url = address("http", host, port)
    try:
        with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as client:
            agents = client.get("/api/v1/agents").raise_for_status().json()["agents"]
            buffered = client.get("/api/v1/buffered_requests").raise_for_status().json()
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise HeadraceError(f"no answer from a balancer at {url}: {error}") from error
    table = Table("agent", "model", "slots", "busy", "state")
    for row in agents:
        table.add_row(
            escape(row["name"] or row["id"]),
            escape(Path(row["model_path"] or "").name),
            str(row["slots_total"]),
            str(row["slots_processing"]),
            _state(row),
        )
    console.print(table)
    console.print(f"buffered requests: {buffered['buffered_requests_current']}")


def _parse_api(name: str) -> Api | None:
    """None: find out."""
    try:
        return None if name == "auto" else Api(name)
    except ValueError as error:
        raise typer.BadParameter(f"{name!r} is none of auto, {', '.join(Api)}") from error


def _finite(value: float | None) -> float | None:
    """Typer's bounds let ``nan`` through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to measure with")
    return value


@app.command()
def bench(
    context: typer.Context,
    address: Annotated[
        str, typer.Argument(help="http://HOST:PORT of this or of any OpenAI-compatible server.")
    ] = f"http://127.0.0.1:{CLIENT_PORT}",
    api: Annotated[
        Api | None,
        typer.Option(
            "--api",
            parser=_parse_api,
            metavar=f"[auto|{'|'.join(Api)}]",
            help="What to speak; 'openai' is chat. Default: auto, which asks the address.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Its name there. Default: the first one.")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many count.")] = 100,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=0, help="Requests before those, not counted.")
    ] = 1,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=1,
            help="So many clients, each sends its next request when its last is over. Default: 4.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=0.001,
            callback=_finite,
            help="Instead: requests a second that come independently.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Of each request's own, about.")
    ] = 100,
    shared_prefix_tokens: Annotated[
        int,
        typer.Option("--shared-prefix-tokens", min=0, help="The same before all of them, about."),
    ] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of each answer.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Let no answer end before --max-tokens.")
    ] = False,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0, callback=_finite, help="0: always the likeliest token."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts and arrivals.")] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.01, callback=_finite, help="Seconds for each request as a whole."
        ),
    ] = 120.0,
    ttft_target: Annotated[
        float | None,
        typer.Option(
            "--ttft-target",
            min=0,
            callback=_finite,
            help="For goodput: seconds until the first token, at most.",
        ),
    ] = None,
    gap_target: Annotated[
        float | None,
        typer.Option(
            "--gap-target",
            min=0,
            callback=_finite,
            help="For goodput: seconds of any gap, at most.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all that was measured to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw it: a .png or .svg file.")
    ] = None,
) -> None:
    """Measure a server: how many tokens a second, and how long its clients wait."""
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("it cannot go with --concurrency", param_hint="'--rate'")
    _check_address(address)
    for option, file in (("--json", json_file), ("--picture", picture)):
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise typer.BadParameter(f"{file} cannot be a file", param_hint=f"'{option}'")
    if picture is not None:
        try:
            picture_format(picture.name)  # a run of minutes must not be lost by it
        except BenchError as error:
            raise typer.BadParameter(str(error), param_hint="'--picture'") from error
    arrivals = (
        Closed(concurrency or 4) if rate is None else poisson(seed, requests=requests, rate=rate)
    )
    told = {**context.params}
    if isinstance(arrivals, Closed):
        told["concurrency"] = arrivals.clients
    del told["json_file"], told["picture"]
    settings = BenchSettings(
        address=address,
        api=api,
        model=model,
        asking=Asking(
            max_tokens=max_tokens,
            timeout=timeout,
            temperature=temperature,
            ignore_eos=ignore_eos,
        ),
        plan=Plan(
            prompts=make_prompts(
                seed,
                requests=requests,
                tokens=prompt_tokens,
                shared_tokens=shared_prefix_tokens,
            ),
            arrivals=arrivals,
            warm_up=make_warm_up(seed, requests=warm_up, tokens=prompt_tokens),
        ),
        target=Target(first=ttft_target, gap=gap_target),
        json_file=json_file,
        picture_file=picture,
        told=told,
    )
    raise typer.Exit(run_bench(settings, console))


def _state(agent: dict[str, Any]) -> str:
    issues = ", ".join(name for issue in agent["issues"] for name in issue)
    if issues:
        return issues
    if agent["slots_total"]:
        return "ready"
    return "draining" if agent["state_application_status"] == "Applied" else "loading"


def _agent_settings(
    balancer: str,
    *,
    name: str,
    labels: tuple[str, ...] = (),
    pinned: str | None = None,
    choices: EngineChoices,
    kv_layout: KvLayout,
    kv_cells: int | None,
    cache_tokens: int | None,
    longest_gap: float,
    engine: EngineKind,
) -> AgentSettings:
    if kv_cells is not None and kv_layout is not KvLayout.UNIFIED:
        raise typer.BadParameter(
            "the separate layout has its own number of cells", param_hint="'--kv-cells'"
        )
    return AgentSettings(
        balancer=balancer,
        name=name,
        labels=labels,
        engine=engine,
        choices=choices,
        pinned=None if pinned is None else referred(parse_model(pinned)),
        kv_layout=kv_layout,
        kv_cells=kv_cells,
        cache_tokens=cache_tokens,
        longest_gap=longest_gap,
    )


def _choices(
    *,
    slots: int,
    context: int | None,
    threads: int | None,
    n_gpu_layers: int | None,
    main_gpu: int | None,
    tensor_split: str | None,
    flash_attention: FlashAttention | None,
    k_cache_dtype: CacheType | None,
    v_cache_dtype: CacheType | None,
) -> EngineChoices:
    return EngineChoices(
        slots=slots,
        context_size=context,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        main_gpu=main_gpu,
        tensor_split=None if tensor_split is None else _parse_split(tensor_split),
        flash_attention=flash_attention,
        k_cache_dtype=k_cache_dtype,
        v_cache_dtype=v_cache_dtype,
    )


def _parse_split(text: str) -> tuple[float, ...]:
    try:
        parts = tuple(float(part) for part in text.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(math.isfinite(part) and part >= 0 for part in parts) or not any(parts):
        raise typer.BadParameter(
            f"{text!r} is not a part for each GPU, such as 3,1", param_hint="'--tensor-split'"
        )
    return parts


def _check_model(text: str) -> str:
    """Is it a model's address, or a file that looks like a model?"""
    try:
        model = parse_model(text)
        if isinstance(model, LocalModel):
            check_model(Path(model.path))
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint="'--model'") from error
    return text if "://" in text else str(Path(text).resolve())


def _check_state(url: str) -> None:
    try:
        open_store(url).load()
    except StateError as error:
        raise typer.BadParameter(str(error), param_hint="'--state'") from error


def _check_origin(origin: str) -> str:
    parts = urlsplit(origin)
    if parts.scheme not in {"http", "https"} or origin != f"{parts.scheme}://{parts.netloc}":
        raise typer.BadParameter(
            f"{origin!r} is not like https://chat.example", param_hint="'--allow-origin'"
        )
    return origin


def _check_name(name: str, option: str) -> str:
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise typer.BadParameter(
            f"at most {LONGEST_NAME} printable characters", param_hint=f"'{option}'"
        )
    return name


def _check_balancer(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"ws", "wss"} and parts.port != 0 and not parts.fragment
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        good, host = False, b""
    if not (good and host):
        raise typer.BadParameter(f"{url!r} is not ws://HOST:PORT", param_hint="'--balancer'")


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and parts.port != 0
        good = good and not (parts.query or parts.fragment)
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        good, host = False, b""
    if not (good and host):
        raise typer.BadParameter(f"{url!r} is not http://HOST:PORT", param_hint="'ADDRESS'")


def _check_host(host: str, *, insecure: bool) -> None:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise typer.BadParameter(f"{host!r} is no IP address", param_hint="'--host'") from error
    if not (address.is_loopback or insecure):
        raise typer.BadParameter(
            f"whoever reaches {host} could use the models, since there are no keys yet; "
            "say --insecure if that is meant",
            param_hint="'--host'",
        )


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
    print(f"headrace: {error}", file=sys.stderr)  # noqa: T201
