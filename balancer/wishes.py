"""Changes of what the operator wants: kept first, then told to the agents, one after another."""

import asyncio
import time
from collections.abc import Callable

from balancer.balancer import Balancer
from balancer.state_store import MemoryStore, StateStore
from balancer.stored_state import StoredState


class Wishes:
    def __init__(self, balancer: Balancer, store: StateStore | None = None) -> None:
        """``store``: where they are kept; None: nowhere."""
        self._balancer = balancer
        self._store = store or MemoryStore()
        self._storing = asyncio.Lock()

    async def put(self, part: str, change: Callable[[StoredState], StoredState]) -> None:
        """``part``: of a ``StoredState``, which ``change`` changes, and nothing else. Raises
        ``StateError``, and what ``change`` does; then all is as it was before.
        """
        # To its end, whatever becomes of the client: what is stored is applied.
        await asyncio.shield(asyncio.ensure_future(self._put(part, change)))

    async def _put(self, part: str, change: Callable[[StoredState], StoredState]) -> None:
        async with self._storing:
            before = self._balancer.stored
            # Of two balancers that were told something, the later one is to be followed.
            now = max(before.latest + 1, int(time.time() * 1000))
            await self._want(change(before).put(part, at=now))

    async def follow(self, stored: StoredState) -> None:
        """Another balancer was told something. Raises ``StateError``."""
        async with self._storing:
            before = self._balancer.stored
            merged = before.merged(stored)
            if merged != before:
                await self._want(merged)

    async def _want(self, stored: StoredState) -> None:
        """Stored first, so that what agents are told is never forgotten."""
        await asyncio.to_thread(self._store.save, stored)
        self._balancer.want(stored)
