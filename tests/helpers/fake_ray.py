"""A stand-in for Ray: named actors in this very process, which can be lost, started again and refused.

It does what Ray does with calls of ``ray`` and with actor handles: a call is answered by the actor, or
fails with Ray's own errors when the actor is dead or being restarted.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest
import ray as untyped_ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

ray: Any = untyped_ray

Make = Callable[..., Any]

_process = contextvars.ContextVar["FakeActor"]("_process")
"""The actor that this code runs in, if it does in any."""


async def until(condition: Callable[[], bool]) -> None:
    """Let what runs in this loop go on until this is true."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, **options)
    context: contextvars.Context = options.get("context") or contextvars.copy_context()
    actor = context.get(_process)
    if actor is not None:
        actor.tasks.add(task)
        task.add_done_callback(actor.tasks.discard)
    return task


class _Method:
    def __init__(self, actor: "FakeActor", name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return self._actor.call(self._name, arguments)


class FakeActor:
    """Also its own handle."""

    def __init__(self, ray: "FakeRay", make: Make, arguments: tuple[Any, ...], **options: Any):
        self.options = options
        self.arguments = arguments
        self.instance: Any = None
        self.is_dead = False
        self.is_silent = False
        """It takes calls and answers none."""
        self.has_room = asyncio.Event()
        """Until then it waits for a node."""
        self._ray = ray
        self._make = make
        self._calls: set[asyncio.Future[Any]] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        """All that runs in its process."""

    def __getattr__(self, name: str) -> _Method:
        if self.instance is not None and not hasattr(self.instance, name):
            raise AttributeError(name)
        return _Method(self, name)

    def call(self, name: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.is_dead:
            answer.set_exception(ActorDiedError())
            return answer
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        context = self._context()
        self.tasks.add(asyncio.create_task(self._answer(answer, name, arguments), context=context))
        return answer

    async def _answer(
        self, answer: asyncio.Future[Any], name: str, arguments: tuple[Any, ...]
    ) -> None:
        await self.has_room.wait()
        if self.is_silent:
            await asyncio.Event().wait()
        try:
            result = await getattr(self.instance, name)(*arguments)
        except Exception as error:  # Ray hands it to whoever has called
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(result)

    @property
    def has_calls(self) -> bool:
        """Are there any that are not answered yet?"""
        return bool(self._calls)

    def place(self) -> None:
        """A node has room for it."""
        self.instance = self._context().run(self._make, *self.arguments)
        self.has_room.set()

    def restart(self) -> None:
        """Its process is lost, and another one started."""
        self.is_silent = False
        self._end_process(ActorUnavailableError("the actor is restarting", None))
        self.place()

    def die(self) -> None:
        """For good."""
        self.is_dead = True
        self._end_process(ActorDiedError())

    def _end_process(self, error: Exception) -> None:
        for task in tuple(self.tasks):
            task.cancel()
        for answer in tuple(self._calls):
            if not answer.done():
                answer.set_exception(error)

    def _context(self) -> contextvars.Context:
        context = contextvars.copy_context()
        context.run(_process.set, self)
        return context


class FakeClass:
    """A class of actors: ``options(...).remote(...)``."""

    def __init__(self, ray: "FakeRay", make: Make, options: dict[str, Any] | None = None) -> None:
        self._ray = ray
        self._make = make
        self._options = options or {}

    def options(self, **options: Any) -> "FakeClass":
        return FakeClass(self._ray, self._make, options)

    def remote(self, *arguments: Any) -> FakeActor:
        name: str = self._options["name"]
        there = self._ray.actors.get(name)
        if there is not None and not there.is_dead:
            if self._options.get("get_if_exists"):
                return there
            raise ValueError(f"the name {name} is taken")
        actor = FakeActor(self._ray, self._make, arguments, **self._options)
        self._ray.actors[name] = actor
        if self._ray.has_room:
            self._ray.loop.call_soon_threadsafe(actor.place)
        return actor


class FakeRay:
    """Must be made inside a running asyncio loop, which its actors live in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.actors: dict[str, FakeActor] = {}
        """By name, also the dead until another takes their name."""
        self.has_room = True
        """Is there a node for what is started?"""
        self.kill_fails = False
        self.looks = 0
        """For an actor by its name."""
        self.draining: set[str] = set()
        """Nodes that are to go."""
        self.loop.set_task_factory(_make_task)
        monkeypatch.setattr(ray, "get_actor", self._get_actor)
        monkeypatch.setattr(ray, "kill", self._kill)
        monkeypatch.setattr(ray, "nodes", list[Any])
        monkeypatch.setattr(ray, "get_runtime_context", lambda: self)
        monkeypatch.setattr(ray.util, "list_named_actors", self._list_named_actors)

    @property
    def names(self) -> set[str]:
        """Of the living."""
        return {name for name, actor in self.actors.items() if not actor.is_dead}

    @property
    def current_actor(self) -> FakeActor:
        """Of the code that asks."""
        return _process.get()

    def get_draining_nodes(self) -> dict[str, int]:
        return dict.fromkeys(self.draining, 0)

    def end(self) -> None:
        """All actors."""
        for actor in self.actors.values():
            actor.die()

    def add(self, make: Make, *arguments: Any, **options: Any) -> FakeActor:
        """One that somebody has started before."""
        actor = FakeActor(self, make, arguments, **options)
        self.actors[options["name"]] = actor
        actor.place()
        return actor

    def _get_actor(self, name: str, namespace: str | None = None) -> FakeActor:
        self.looks += 1
        actor = self.actors.get(name)
        if actor is None or actor.is_dead or actor.options.get("namespace") != namespace:
            raise ValueError(f"there is no actor {name}")
        return actor

    def _kill(self, actor: FakeActor, *, no_restart: bool = True) -> None:
        if self.kill_fails:
            raise RuntimeError("Ray cannot be reached")
        end = actor.die if no_restart else actor.restart
        if threading.get_ident() == self._thread:
            end()
        else:
            self.loop.call_soon_threadsafe(end)

    def _list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, Any]]:
        assert all_namespaces
        return [
            {"name": name, "namespace": self.actors[name].options.get("namespace")}
            for name in sorted(self.names)
        ]
