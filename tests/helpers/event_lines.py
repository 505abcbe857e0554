"""The status stream, read as an observer does."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx


class Observer:
    """Knows what it was told."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.last_id = ""
        self.events: list[str] = []
        """Their names."""
        self.state: dict[str, dict[str, Any]] = {}

    async def read(self) -> None:
        """The next event."""
        name = ""
        async with asyncio.timeout(10):
            async for line in self._lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    self.last_id = value
                elif field == "event":
                    name = value
                elif field == "data":
                    self._take(name, json.loads(value))
                    return
        raise AssertionError("the stream has ended")

    async def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        """Read on until this is true of what it knows."""
        while not (self.state and condition(self.state)):
            await self.read()

    def _take(self, name: str, told: dict[str, dict[str, Any]]) -> None:
        self.events.append(name)
        if name == "snapshot":
            self.state = {}
        for section, entries in told.items():
            known = self.state.setdefault(section, {})
            for key, value in entries.items():
                if value is None:
                    known.pop(key, None)
                else:
                    known[key] = value


@asynccontextmanager
async def observing(client: httpx.AsyncClient, last_id: str = "") -> AsyncGenerator[Observer]:
    headers = {"last-event-id": last_id} if last_id else {}
    async with client.stream("GET", "/api/v1/events", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield Observer(response)
