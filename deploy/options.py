"""The options of the commands: what they are called, what they mean, and which values are refused.

Everything here raises ``typer.BadParameter``, which names the option.
"""

import ipaddress
import math
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from agent.model_files import check_model as check_file
from balancer.desired_state import LocalModel, referred
from balancer.fleets import Fleet
from balancer.keys import Keys, KeysError, Role
from balancer.limits import LARGEST_BODY, Limits
from balancer.state_store import StateError, open_store
from common.errors import ModelError
from common.messages import LONGEST_NAME
from common.models import CacheType, EngineChoices, FlashAttention, KvLayout
from deploy.access import AccessError, check_reach, find_keys, own_key
from deploy.bench import Api
from deploy.fleet_file import FleetFileError, read_fleets
from deploy.logs import FILE_VARIABLE, VARIABLE, LogFormat
from deploy.model import parse_model
from deploy.settings import AgentSettings, EngineKind
from deploy.tls import TlsError, client_context, server_context

AS_DESIRED = "Default: as the desired state says."
MODEL_HELP = "A GGUF file: its path, or its address (https://huggingface.co/... or any other)."

DEFAULTS = Limits()

BufferBytes = Annotated[
    int,
    typer.Option("--buffer-bytes", min=1, help="That the waiting requests have together."),
]
BodyBytes = Annotated[
    int,
    typer.Option(
        "--max-body-bytes",
        min=1,
        max=LARGEST_BODY,
        help="Of one request or websocket message, with its images.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        help="That one answer may ask for. Default: as many as the context holds.",
    ),
]
OpenRequests = Annotated[
    int,
    typer.Option("--max-open-requests", min=1, help="HTTP requests that are served at once."),
]
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
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        min=0,
        max=3600,
        help="Seconds that running requests may go on after Ctrl-C.",
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
KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        help="A file of keys, a line each: ROLE KEY. Clients then show one for inference "
        "(Authorization: Bearer KEY), operators one for management, agents one for agent; a role "
        "without a key is open. See headrace keys. Default: the text in HEADRACE_KEYS, if any.",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        help="Serve clients and agents over TLS: a PEM file with the certificate and those that lead "
        "to its authority. It must name the address that they use (subjectAltName: for an IP "
        "address an entry of type IP).",
    ),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", help="The certificate's key, without a password.")
]
TlsAuthorities = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="Over TLS: a PEM file with the authorities to trust, or with the balancer's own "
        "certificate; its name is looked at in any case. Default: those that the system trusts.",
    ),
]
AgentKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="A file with a key, or the balancer's keys file: its first key for agent is shown. "
        "Default: HEADRACE_AGENT_KEY.",
    ),
]
ManagementKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="A file with a key, or the balancer's keys file: its first key for management is "
        "shown. Default: HEADRACE_MANAGEMENT_KEY.",
    ),
]
InferenceKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="A file with a key, or a keys file of headrace: its first key for inference is shown. "
        "Default: HEADRACE_INFERENCE_KEY or OPENAI_API_KEY. With a key, 'auto' means 'openai'.",
    ),
]

Logs = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar=VARIABLE,
        help="'json': an object in each line of the log, with what the line is about as fields.",
    ),
]

LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log-file",
        envvar=FILE_VARIABLE,
        help="Add all lines of the log to this file, too. Default: they go when this command ends.",
    ),
]


def check_log_file(file: Path) -> Path:
    """Absolute, and lines can be added to it. Raises ``typer.BadParameter``."""
    try:
        with file.open("a"):
            return file.absolute()
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="'--log-file'") from error


TracesAddress = Annotated[
    str | None,
    typer.Option(
        "--traces",
        help="Send a trace of each request to this collector of OpenTelemetry, over OTLP/HTTP: "
        "http://127.0.0.1:4318/v1/traces. Default: none are made.",
    ),
]


def parse_api(name: str) -> Api | None:
    """None: find out."""
    try:
        return None if name == "auto" else Api(name)
    except ValueError as error:
        raise typer.BadParameter(f"{name!r} is none of auto, {', '.join(Api)}") from error


def finite(value: float | None) -> float | None:
    """Typer's bounds let ``nan`` through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to measure with")
    return value


def agent_settings(
    balancers: Sequence[str],
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
    key_file: Path | None = None,
    tls_ca: Path | None = None,
    tls_pin: Path | None = None,
    log_format: LogFormat = LogFormat.PLAIN,
) -> AgentSettings:
    if kv_cells is not None and kv_layout is not KvLayout.UNIFIED:
        raise typer.BadParameter(
            "the separate layout has its own number of cells", param_hint="'--kv-cells'"
        )
    return AgentSettings(
        balancers=tuple(balancers),
        name=name,
        labels=labels,
        engine=engine,
        choices=choices,
        pinned=None if pinned is None else referred(parse_model(pinned)),
        kv_layout=kv_layout,
        kv_cells=kv_cells,
        cache_tokens=cache_tokens,
        longest_gap=longest_gap,
        key_file=_absolute(key_file),
        tls_ca=_absolute(tls_ca),
        tls_pin=_absolute(tls_pin),
        log_format=log_format,
    )


def _absolute(file: Path | None) -> str | None:
    """For another process, whose folder may be another."""
    return None if file is None else str(file.absolute())


def engine_choices(
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
        tensor_split=None if tensor_split is None else parse_split(tensor_split),
        flash_attention=flash_attention,
        k_cache_dtype=k_cache_dtype,
        v_cache_dtype=v_cache_dtype,
    )


def parse_split(text: str) -> tuple[float, ...]:
    try:
        parts = tuple(float(part) for part in text.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(math.isfinite(part) and part >= 0 for part in parts) or not any(parts):
        raise typer.BadParameter(
            f"{text!r} is not a part for each GPU, such as 3,1", param_hint="'--tensor-split'"
        )
    return parts


def check_model(text: str) -> str:
    """Is it a model's address, or a file that looks like a model?"""
    try:
        model = parse_model(text)
        if isinstance(model, LocalModel):
            check_file(Path(model.path))
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint="'--model'") from error
    return text if "://" in text else str(Path(text).resolve())


def check_state(url: str) -> None:
    try:
        open_store(url).load()
    except StateError as error:
        raise typer.BadParameter(str(error), param_hint="'--state'") from error


def check_origin(origin: str) -> str:
    parts = urlsplit(origin)
    if parts.scheme not in {"http", "https"} or origin != f"{parts.scheme}://{parts.netloc}":
        raise typer.BadParameter(
            f"{origin!r} is not like https://chat.example", param_hint="'--allow-origin'"
        )
    return origin


def check_keys(file: Path | None) -> str | None:
    """The text of the file, or of the environment."""
    try:
        return find_keys(file, os.environ)
    except KeysError as error:
        raise typer.BadParameter(str(error), param_hint="'--keys'") from error


def check_own_key(role: Role, file: Path | None) -> str | None:
    """What to show to the balancer; None: nothing."""
    try:
        return own_key(role, file, os.environ)
    except KeysError as error:
        raise typer.BadParameter(str(error), param_hint="'--key-file'") from error


def check_inference_key(file: Path | None) -> str | None:
    """As ``check_own_key``, or as OpenAI's own client finds it."""
    key = check_own_key(Role.INFERENCE, file) or os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("it is no key", param_hint="OPENAI_API_KEY")
    return key or None


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    if (certificate is None) != (key is None):
        missing = "--tls-cert" if certificate is None else "--tls-key"
        raise typer.BadParameter("the two go together", param_hint=f"'{missing}'")
    if certificate is not None and key is not None:
        try:
            server_context(certificate, key)
        except TlsError as error:
            raise typer.BadParameter(str(error), param_hint="'--tls-cert'") from error


def check_authorities(file: Path | None) -> ssl.SSLContext:
    """By which somebody who dials knows the balancer."""
    try:
        return client_context(file)
    except TlsError as error:
        raise typer.BadParameter(str(error), param_hint="'--tls-ca'") from error


def check_fleets(path: Path) -> dict[str, Fleet]:
    try:
        return read_fleets(path.read_text())
    except (OSError, UnicodeDecodeError, FleetFileError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise typer.BadParameter(f"{path}: {cause}", param_hint="'--fleets'") from error


OF_FIXED_AGENTS = {
    "slots",
    "context",
    "threads",
    "kv_layout",
    "kv_cells",
    "cache_tokens",
    "longest_gap",
    "n_gpu_layers",
    "main_gpu",
    "tensor_split",
    "flash_attention",
    "k_cache_dtype",
    "v_cache_dtype",
}
"""Parameters of ``up`` that mean its own agents, and not those of fleets."""


def check_no_agents(command: typer.Context) -> None:
    """All agents are those of fleets: nothing may be said of others."""
    for option in command.command.params:
        source = command.get_parameter_source(option.name or "")
        if option.name in OF_FIXED_AGENTS and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                "it is for agents that are always there, see --agents; those of fleets are as the "
                "file says",
                param_hint=f"'{option.opts[0]}'",
            )


def check_name(name: str, option: str) -> str:
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise typer.BadParameter(
            f"at most {LONGEST_NAME} printable characters", param_hint=f"'{option}'"
        )
    return name


def check_balancer(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"ws", "wss"} and parts.port != 0 and not parts.fragment
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        good, host = False, b""
    if not (good and host):
        raise typer.BadParameter(
            f"{url!r} is not ws://HOST:PORT or wss://HOST:PORT", param_hint="'--balancer'"
        )


def check_address(url: str, option: str = "ADDRESS", example: str = "http://HOST:PORT") -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and parts.port != 0
        good = good and not (parts.query or parts.fragment)
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        good, host = False, b""
    if not (good and host):
        raise typer.BadParameter(f"{url!r} is not {example}", param_hint=f"'{option}'")


def check_host(host: str, keys: Keys, *, insecure: bool) -> None:
    try:
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise typer.BadParameter(f"{host!r} is no IP address", param_hint="'--host'") from error
    try:
        check_reach(keys, client_host=host, agent_host=host, insecure=insecure)
    except AccessError as error:
        raise typer.BadParameter(f"{error}: --keys, --insecure", param_hint="'--host'") from error
