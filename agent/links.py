"""The agent's links: one to each balancer, dialled and let go as the balancers come and go.

A balancer that refuses this agent may think better of it, as when its keys are changed a moment
later: it is tried again now and then, or when it is named again. When all have refused the agent, or
one takes it for dead, it fails.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Iterator
from typing import Protocol

from agent.link import NO_CREDENTIALS, Credentials, Handler, Link, LinkRefusedError

log = logging.getLogger(__name__)

GOOD_BYE_TIMEOUT = 2.0
"""Seconds for the last frames of a link that is closed."""

REFUSED_FOR = 30.0
"""Seconds until a balancer that refused this agent is tried again, or up to half as long again."""


class Owner(Handler, Protocol):
    def failed(self, error: BaseException, /) -> None:
        """The agent cannot go on."""
        ...


class Links:
    def __init__(
        self, addresses: Iterable[str], owner: Owner, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        """They are dialled with ``start``."""
        self._credentials = credentials
        self._addresses = tuple(dict.fromkeys(addresses))
        self._owner = owner
        self._links: dict[str, Link] = {}
        """Those that are wanted, by address."""
        self._tasks: dict[asyncio.Task[None], Link] = {}
        """Of the links that are wanted, and of those that take leave."""
        self._refused: dict[str, asyncio.TimerHandle] = {}
        """Who will be tried again."""
        self._chance = random.Random()
        self._runs = False

    def __iter__(self) -> Iterator[Link]:
        """Those that are wanted, whether they are made just now or not."""
        return iter(tuple(self._links.values()))

    @property
    def is_linked(self) -> bool:
        """Is there one that is made?"""
        return any(link.is_linked for link in self)

    def start(self) -> None:
        self._runs = True
        self.dial(self._addresses)

    def dial(self, addresses: Iterable[str]) -> None:
        """From now on keep links to these and to no others. Those that are there already are not
        touched; those that have refused this agent are tried once more.
        """
        self._addresses = tuple(dict.fromkeys(addresses))
        if not self._runs:
            return
        for address in self._links.keys() - set(self._addresses):
            log.info("the balancer at %s is not wanted any more", address)
            self._let_go(self._links.pop(address))
        for address in self._addresses:
            self._dial(address)

    async def close(self) -> None:
        """Close all of them; returns when they are, within seconds."""
        self._runs = False
        for timer in self._refused.values():
            timer.cancel()
        links, self._links = self._links, {}
        for link in links.values():
            self._let_go(link)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _dial(self, address: str) -> None:
        if address in self._links or address not in self._addresses:
            return
        if (timer := self._refused.pop(address, None)) is not None:
            timer.cancel()
        link = self._links[address] = Link(address, self._owner, self._credentials)
        task = asyncio.create_task(link.run())
        self._tasks[task] = link
        task.add_done_callback(self._ended)

    def _let_go(self, link: Link) -> None:
        link.close()
        (task,) = (task for task, each in self._tasks.items() if each is link)
        if link.is_linked:
            asyncio.get_running_loop().call_later(GOOD_BYE_TIMEOUT, task.cancel)
        else:
            task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        link = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is None or self._links.get(link.address) is not link:
            return
        del self._links[link.address]
        if not isinstance(error, LinkRefusedError):
            # Also if only one balancer gives it up: the verdict rests on what the agent says of its
            # own model, or fails to say, and the others will come to it too. What runs for them goes
            # on elsewhere, and is sooner over than here.
            self._owner.failed(error)
            return
        log.warning("the balancer at %s refuses this agent: %s", link.address, error)
        if not self._links:
            self._owner.failed(error)
            return
        delay = REFUSED_FOR * self._chance.uniform(1.0, 1.5)
        again = asyncio.get_running_loop().call_later(delay, self._dial, link.address)
        self._refused[link.address] = again
