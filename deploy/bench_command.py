"""``headrace bench``: its options."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.bench import STANDARD_OUTPUT, Access, Api, Asking, BenchSettings, run_bench
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
from deploy.options import (
    InferenceKeyFile,
    TlsAuthorities,
    check_address,
    check_authorities,
    check_inference_key,
    finite,
    parse_api,
)
from deploy.settings import CLIENT_PORT


def bench(
    context: typer.Context,
    address: Annotated[
        str, typer.Argument(help="http://HOST:PORT of this or of any OpenAI-compatible server.")
    ] = f"http://127.0.0.1:{CLIENT_PORT}",
    api: Annotated[
        Api | None,
        typer.Option(
            "--api",
            parser=parse_api,
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
            callback=finite,
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
            "--temperature", min=0, callback=finite, help="0: always the likeliest token."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of prompts and arrivals.")] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.01, callback=finite, help="Seconds for each request as a whole."
        ),
    ] = 120.0,
    ttft_target: Annotated[
        float | None,
        typer.Option(
            "--ttft-target",
            min=0,
            callback=finite,
            help="For goodput: seconds until the first token, at most.",
        ),
    ] = None,
    gap_target: Annotated[
        float | None,
        typer.Option(
            "--gap-target",
            min=0,
            callback=finite,
            help="For goodput: seconds of any gap, at most.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write all that was measured to this file; to standard output if it is -.",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw it: a .png or .svg file.")
    ] = None,
    key_file: InferenceKeyFile = None,
    tls_ca: TlsAuthorities = None,
) -> None:
    """Measure a server: how many tokens a second, and how long its clients wait."""
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("it cannot go with --concurrency", param_hint="'--rate'")
    check_address(address)
    access = Access(
        check_inference_key(key_file), None if tls_ca is None else check_authorities(tls_ca)
    )
    for option, file in (("--json", json_file), ("--picture", picture)):
        if file is None or (option == "--json" and file == STANDARD_OUTPUT):
            continue
        if file.is_dir() or not file.absolute().parent.is_dir():
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
    for name in ("json_file", "picture", "key_file", "tls_ca"):
        del told[name]
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
        access=access,
        json_file=json_file,
        picture_file=picture,
        told=told,
    )
    # What is read by a program has nothing else beside it.
    shows = Console(stderr=True) if json_file == STANDARD_OUTPUT else Console()
    raise typer.Exit(run_bench(settings, shows))
