"""Clients that come, read, cancel and vanish at random leave nothing behind."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from exposition import total
from product import Up
from websockets.asyncio.client import connect

REQUESTS = 200
AT_ONCE = 12
SEED = 20261127
ROUTE = "/api/v1/continue_from_raw_prompt"

Outcome = str


class Clients:
    """Each method is one client with one manner; it returns how it ended."""

    def __init__(self, up: Up, http: httpx.AsyncClient, chance: random.Random) -> None:
        self._up = up
        self._http = http
        self._chance = chance

    @property
    def manners(self) -> list[Callable[[], Awaitable[Outcome]]]:
        return [
            self.reads_to_the_end,
            self.leaves_in_the_middle,
            self.leaves_at_once,
            self.asks_twice_on_a_socket_and_cancels_one,
            self.closes_its_socket,
        ]

    def body(self) -> dict[str, Any]:
        words = " ".join(self._chance.choices(["river", "mill", "wheel", "water"], k=8))
        return {"raw_prompt": words, "max_tokens": self._chance.randint(1, 20)}

    async def reads_to_the_end(self) -> Outcome:
        async with self._http.stream("POST", ROUTE, json=self.body()) as response:
            lines = [json.loads(line) async for line in response.aiter_lines()]
        return one_end(lines)

    async def leaves_in_the_middle(self) -> Outcome:
        async with self._http.stream("POST", ROUTE, json=self.body()) as response:
            await anext(response.aiter_lines())
        return "left"

    async def leaves_at_once(self) -> Outcome:
        task = asyncio.create_task(self.reads_to_the_end())
        await asyncio.sleep(self._chance.random() / 50)  # anywhere on its way
        task.cancel()
        await asyncio.wait({task})
        return "left"

    async def asks_twice_on_a_socket_and_cancels_one(self) -> Outcome:
        async with connect(self._socket, proxy=None) as socket:
            for request_id in ("kept", "cancelled"):
                await self._ask(socket, request_id)
            await socket.send('{"Notification": {"StopRespondingTo": "cancelled"}}')
            kept: list[dict[str, Any]] = []
            while not (kept and is_end(kept[-1])):
                message = json.loads(await socket.recv())
                if next(iter(message.values()))["request_id"] == "kept":
                    kept.append(message)
        return one_end(kept)

    async def closes_its_socket(self) -> Outcome:
        async with connect(self._socket, proxy=None) as socket:
            await self._ask(socket, "a")
            await self._ask(socket, "b")
            await socket.recv()
        return "left"

    @property
    def _socket(self) -> str:
        return self._up.address.replace("http", "ws") + "/api/v1/inference_socket"

    async def _ask(self, socket: Any, request_id: str) -> None:
        request = {"ContinueFromRawPrompt": self.body()}
        await socket.send(json.dumps({"Request": {"id": request_id, "request": request}}))


def is_end(message: dict[str, Any]) -> bool:
    return "Error" in message or "Done" in message["Response"]["response"]["GeneratedToken"]


def one_end(messages: list[dict[str, Any]]) -> Outcome:
    """Exactly one last message, and it is the last."""
    assert [is_end(message) for message in messages] == [False] * (len(messages) - 1) + [True]
    return "error" if "Error" in messages[-1] else "done"


def outcomes_counted(metrics: str) -> int:
    return int(total(metrics, "headrace_requests_total"))


async def crowd(up: Up) -> list[Outcome]:
    chance = random.Random(SEED)
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=up.address, timeout=60, trust_env=False) as http:
        clients = Clients(up, http, chance)

        async def one() -> Outcome:
            async with room:
                return await chance.choice(clients.manners)()

        return await asyncio.gather(*(one() for _ in range(REQUESTS)))


def test_nothing_leaks_after_a_crowd_of_random_clients(up: Up) -> None:
    before = outcomes_counted(up.client.get("/metrics").text)

    outcomes = asyncio.run(crowd(up))

    assert len(outcomes) == REQUESTS
    assert outcomes.count("done") > REQUESTS / 5
    assert outcomes.count("error") == 0
    up.until(lambda agents: all(agent["slots_processing"] == 0 for agent in agents))
    up.until_buffered(0)
    metrics = up.client.get("/metrics").text
    assert outcomes_counted(metrics) - before >= REQUESTS - outcomes.count("left")
    # And it serves on as before.
    after = [
        up.client.post(
            "/api/v1/continue_from_raw_prompt", json={"raw_prompt": "a", "max_tokens": 2}
        )
        for _ in range(4)
    ]
    assert all("Done" in response.text.splitlines()[-1] for response in after)
