"""The commands of those who run a balancer: what it does, and what it is to do."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import aclosing
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from balancer.desired_state import BalancerDesiredState, DesiredModel, referred
from balancer.keys import Role
from common.errors import HeadraceError, ModelError
from common.models import NoModel
from common.references import describe
from deploy.explain import explain as explained
from deploy.load_bars import LoadBars
from deploy.management import Management, Place, asks_balancer, asks_for_tokens, place_of
from deploy.model import parse_model
from deploy.options import finite
from deploy.overview import Agent, StatusView
from deploy.settings import CLIENT_PORT
from deploy.status import show_status
from deploy.status_stream import views
from deploy.swap import Outcome, Swap
from deploy.terminal import WIDE, one_line

IS_WIDE = not sys.stdout.isatty() and "COLUMNS" not in os.environ
"""Where nobody looks at a window, nothing is cut."""

console = Console(width=WIDE if IS_WIDE else None)

INTERRUPTED = 130
"""The exit status after Ctrl-C."""

HEARD = 10.0
"""Seconds that an agent may take to say that it is drained."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, on one line.")]


# Completion of names

COMPLETION_TIMEOUT = 0.5
"""Seconds that somebody who presses Tab may wait."""


def _complete_agent(context: typer.Context, incomplete: str) -> list[str]:
    return _known((agent.title for agent in _view(context).agents.values()), incomplete)


def _complete_fleet(context: typer.Context, incomplete: str) -> list[str]:
    return _known(_view(context).fleets, incomplete)


def _known(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


def _view(context: typer.Context) -> StatusView:
    """Of the balancer that the options name which have been typed; nothing is in it if none answers at
    once.
    """
    typed = context.params

    async def ask() -> StatusView:
        place = place_of(
            Role.MANAGEMENT,
            host=typed.get("host") or "127.0.0.1",
            port=typed.get("port") or CLIENT_PORT,
            key_file=typed.get("key_file"),
            tls=bool(typed.get("tls")),
            tls_ca=typed.get("tls_ca"),
        )
        async with asyncio.timeout(COMPLETION_TIMEOUT), Management(place) as balancer:
            return StatusView.of(await balancer.overview())

    try:
        return asyncio.run(ask())
    except (HeadraceError, TimeoutError, typer.BadParameter):
        return StatusView()


AgentName = Annotated[
    str,
    typer.Argument(metavar="AGENT", help="Its name or its id.", autocompletion=_complete_agent),
]
AllOfThem = Annotated[bool, typer.Option("--all", help="All agents of this name.")]
FleetName = Annotated[str, typer.Argument(metavar="FLEET", autocompletion=_complete_fleet)]
RequestName = Annotated[
    str,
    typer.Argument(
        metavar="REQUEST_ID", help="As top shows it, of an answer, or what its client calls it."
    ),
]


# To see


@asks_balancer
def status(place: Place, json: AsJson = False) -> None:
    """Show agents, fleets, requests and buffer."""

    async def ask() -> dict[str, Any]:
        async with Management(place) as balancer:
            return await balancer.overview()

    told = asyncio.run(ask())
    if json:
        _print_json(told)
    else:
        show_status(StatusView.of(told), console)


@asks_balancer
def top(
    place: Place,
    once: Annotated[bool, typer.Option("--once", help="Print one picture.")] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the status stream: a line of JSON for each event."),
    ] = False,
) -> None:
    """Watch agents, fleets and requests. q ends it; where the output is no terminal, it is one picture."""
    from deploy.top import print_events, print_once, show_live

    if once or not (json or console.is_terminal):
        asyncio.run(print_once(place, console, as_json=json))
    elif json:
        asyncio.run(print_events(place))
    else:
        asyncio.run(show_live(place, console))


@asks_balancer
def explain(place: Place, request_id: RequestName, json: AsJson = False) -> None:
    """Tell what was decided for a request, when and why: it waits or runs, or was over lately."""

    async def ask() -> dict[str, Any]:
        async with Management(place) as balancer:
            return await balancer.request(request_id)

    told = asyncio.run(ask())
    if json:
        _print_json(told)
    else:
        console.print(explained(told))


# To ask


@asks_for_tokens
def chat(
    place: Place,
    question: Annotated[
        str | None,
        typer.Argument(help="Ask only this. Default: standard input, or a talk on a terminal."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Its name. Default: any that is served.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told at first.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Of each answer.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", min=0, callback=finite, help="0: always the likeliest token."
        ),
    ] = None,
    think: Annotated[bool, typer.Option("--think", help="Let it think first, if it can.")] = False,
    json: AsJson = False,
) -> None:
    """Talk with a served model, or ask it one question."""
    from deploy.chat import ChatSettings, answer_once, converse

    settings = ChatSettings(
        place=place,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        think=think,
    )
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.buffer.read().decode(errors="replace").strip()
    if question is not None:
        answer_once(settings, question, console, as_json=json)
    elif json:
        raise typer.BadParameter("it needs a question", param_hint="'--json'")
    else:
        converse(settings, console)


# To act


@asks_balancer
def drain(
    place: Place,
    agent: AgentName,
    every: AllOfThem = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until nothing runs there any more.")
    ] = False,
    json: AsJson = False,
) -> int:
    """Give an agent nothing new; what runs there is finished. It stays, and its model too."""

    async def act() -> list[Agent]:
        async with Management(place) as balancer:
            agents = await _agents(balancer, agent, every=every)
            for each in agents:
                await balancer.drain(each.id)
                if not json:
                    _say(f"{each.title} gets nothing new")
            if wait:
                await _idle(balancer, {each.id for each in agents}, quiet=json)
            return agents

    try:
        agents = asyncio.run(act())
    except KeyboardInterrupt:
        _complain("not waited for any longer; undrain lets it take requests again")
        return INTERRUPTED
    if json:
        _print_json({"drained": _named(agents), "idle": wait})
    return 0


@asks_balancer
def undrain(place: Place, agent: AgentName, every: AllOfThem = False, json: AsJson = False) -> None:
    """Let an agent take requests again."""

    async def act() -> list[Agent]:
        async with Management(place) as balancer:
            agents = await _agents(balancer, agent, every=every)
            for each in agents:
                await balancer.undrain(each.id)
            return agents

    agents = asyncio.run(act())
    if json:
        _print_json({"undrained": _named(agents)})
    for each in agents if not json else ():
        _say(f"{each.title} takes requests again")


@asks_balancer
def cancel(place: Place, request_id: RequestName, json: AsJson = False) -> None:
    """End a request that waits or runs. Its client is told that an operator did it."""

    async def act() -> None:
        async with Management(place) as balancer:
            await balancer.cancel(request_id)

    asyncio.run(act())
    if json:
        _print_json({"cancelled": request_id})
    else:
        _say(f"{request_id} is cancelled")


@asks_balancer
def scale(
    place: Place,
    fleet: FleetName,
    least: Annotated[
        int | None, typer.Option("--min", min=0, help="Agents that are there if nobody asks.")
    ] = None,
    most: Annotated[int | None, typer.Option("--max", min=0, help="Agents at most.")] = None,
    json: AsJson = False,
) -> None:
    """Change how many agents a fleet may have."""
    changes = {key: value for key, value in (("min", least), ("max", most)) if value is not None}
    if not changes:
        raise typer.BadParameter("give it, or --max", param_hint="'--min'")

    async def act() -> dict[str, Any]:
        async with Management(place) as balancer:
            await balancer.change_fleet(fleet, changes)
            return await balancer.fleet(fleet)

    told = asyncio.run(act())
    limits = {key: told["fleet"][key] for key in ("min", "max")}
    if json:
        _print_json({"fleet": fleet, **limits})
    else:
        _say(f"{fleet}: {limits['min']} to {limits['max']} agent(s)")


@asks_balancer
def swap(
    place: Place,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file: its path on the agents' machines, or its address "
            "(https://huggingface.co/... or any other). None: no model.",
        ),
    ],
    projector: Annotated[
        str | None,
        typer.Option("--projector", help="For images: a file that goes with the model."),
    ] = None,
    keep_template: Annotated[
        bool,
        typer.Option("--keep-template", help="Go on with the chat template of the desired state."),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until all agents serve it, or one cannot.")
    ] = True,
    json: AsJson = False,
) -> int:
    """Change the model that all agents are to serve, one after another; no request is lost by it."""
    wanted = _reference(model, "MODEL")
    images = "None" if projector is None else _reference(projector, "'--projector'")
    try:
        outcome = asyncio.run(
            _swap(place, wanted, images, keep_template=keep_template, wait=wait, quiet=json)
        )
    except KeyboardInterrupt:
        _complain("the agents go on changing their model; headrace status shows how far they are")
        return INTERRUPTED
    if json:
        serving, problem = (None, None) if outcome is None else (outcome.serving, outcome.problem)
        _print_json({"model": _told(wanted), "serving": serving, "problem": problem})
    if outcome is None:
        return 0
    if outcome.problem is not None:
        _complain(outcome.problem)
        return 1
    if not json:
        _say(
            f"{outcome.serving} agent(s) serve it"
            if outcome.serving
            else "no agent follows the desired state now; those that come will serve it"
        )
    return 0


async def _swap(
    place: Place,
    model: DesiredModel,
    projector: DesiredModel,
    *,
    keep_template: bool,
    wait: bool,
    quiet: bool,
) -> Outcome | None:
    """None: it was not waited for."""
    told = {"model": _told(model), "multimodal_projection": _told(projector)}

    def loses_template(state: dict[str, Any]) -> bool:
        is_other = state["model"] != told["model"]
        return state["use_chat_template_override"] and is_other and not keep_template

    def change(state: dict[str, Any]) -> dict[str, Any]:
        template = {"use_chat_template_override": False} if loses_template(state) else {}
        return {**state, **told, **template}

    async with Management(place) as balancer:
        before = StatusView.of(await balancer.overview())
        state, wish = await balancer.change_desired_state(change)
        if not quiet and projector == "None" != state["multimodal_projection"]:
            _say("there is no projector any more: it belonged to the other model")
        if not quiet and loses_template(state):
            _say(
                "the chat template is the model's own again: the other one belonged to the other "
                "model (--keep-template keeps it)"
            )
        if not wait:
            return None
        following = Swap(referred(model), wish, before.agents, now=time.monotonic())
        bars = LoadBars(Console(quiet=True) if quiet else console)
        async with aclosing(views(balancer, lost=_lost)) as seen:
            with bars:
                async for view in seen:
                    now = time.monotonic()
                    bars.show(following.rows(view, now=now))
                    outcome = following.outcome(view, now=now)
                    if outcome is not None and outcome.problem is not None and not quiet:
                        _complain(f"it stays what is desired; before it was {_written(state)}")
                    if outcome is not None:
                        return outcome
    raise AssertionError("the stream has no end")


def _written(state: dict[str, Any]) -> str:
    """Its model, as swap takes it."""
    reference = BalancerDesiredState.model_validate(state).model_reference
    return "None" if isinstance(reference, NoModel) else describe(reference)


def _reference(text: str, option: str) -> DesiredModel:
    if text == "None":
        return text
    try:
        return parse_model(text)
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _told(model: DesiredModel) -> Any:
    """On the wire."""
    return model if model == "None" else model.model_dump(mode="json", by_alias=True)


async def _agents(balancer: Management, name: str, *, every: bool) -> list[Agent]:
    """Raises ``HeadraceError`` if it is not clear which are meant."""
    agents = StatusView.of(await balancer.overview()).agents
    if name in agents:
        return [agents[name]]
    found = [agent for agent in agents.values() if agent.name == name]
    if not found:
        there = ", ".join(sorted(agent.title for agent in agents.values()))
        raise HeadraceError(f"there is no agent {name!r}; there are: {there or 'none'}")
    if len(found) > 1 and not every:
        ids = ", ".join(sorted(agent.id for agent in found))
        raise HeadraceError(f"{len(found)} agents are called {name!r}: {ids}; say --all, or an id")
    return found


async def _idle(balancer: Management, agents: set[str], *, quiet: bool) -> None:
    """Until nothing runs on these agents, or they have gone. Raises ``HeadraceError`` if one does not say
    that it is drained.
    """
    said: dict[str, str] = {}
    end = time.monotonic() + HEARD

    def lost(reason: str) -> None:
        nonlocal end
        end = time.monotonic() + HEARD  # what agents say cannot be known now
        _lost(reason)

    async with aclosing(views(balancer, lost=lost)) as seen:
        async for view in seen:
            there = [view.agents[each] for each in agents if each in view.agents]
            deaf = [each.title for each in there if not each.held]
            if deaf and time.monotonic() >= end:
                raise HeadraceError(
                    f"{', '.join(sorted(deaf))}: not drained {HEARD:g} s after it was asked: "
                    "it does not answer, or somebody has undrained it"
                )
            waits = {each.id: _why_busy(each) for each in there if each.slots_busy or not each.held}
            for each in there if not quiet else ():
                if each.id in waits and waits[each.id] != said.get(each.id):
                    _say(f"{each.title}: {waits[each.id]}")
            said = waits
            if not waits:
                break
    if not quiet:
        _say("nothing runs there any more")


def _why_busy(agent: Agent) -> str:
    if agent.slots_busy:
        return f"{agent.slots_busy} request(s) run"
    return "has not said yet that it takes nothing new"


def _lost(reason: str) -> None:
    _complain(f"no connection to the balancer: {reason}; trying again")


def _named(agents: Iterable[Agent]) -> list[dict[str, Any]]:
    return [{"id": agent.id, "name": agent.name} for agent in agents]


def _print_json(value: Any) -> None:
    print(json.dumps(value))  # noqa: T201


def _say(text: str) -> None:
    console.print(Text(one_line(text)), soft_wrap=True)


def _complain(text: str) -> None:
    print(f"headrace: {one_line(text)}", file=sys.stderr)  # noqa: T201
