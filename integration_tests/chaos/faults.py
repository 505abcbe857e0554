"""Carries out faults, and waits until what they struck is as it was."""

import asyncio
import signal
from collections.abc import Iterable, Set
from time import monotonic

from integration_tests.chaos.cluster import (
    BACK_TIMEOUT,
    CONTROLLER,
    PROXY,
    REPLICA,
    ChaosAgent,
    Cluster,
    lives,
    send,
)
from integration_tests.chaos.ledger import Ledger, Struck
from integration_tests.chaos.network import Direction
from integration_tests.chaos.plan import OF_BALANCER, Fault, Kind

LATEST = 0.2
"""Seconds, of a link that is delayed."""

REVIVE_PAUSE = 0.2

GO_TIMEOUT = 15.0
"""Seconds that an agent may take to go when it has been told to twice."""

PROCESSES = {
    Kind.KILL_REPLICA: REPLICA,
    Kind.KILL_PROXY: PROXY,
    Kind.KILL_CONTROLLER: CONTROLLER,
}


class Faults:
    def __init__(self, cluster: Cluster, ledger: Ledger) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._busy: set[str] = set()
        """What is being struck."""
        self.violations: list[str] = []

    @property
    def count(self) -> int:
        """Of faults that strike or have struck."""
        return len(self._busy) + len(self._ledger.struck)

    async def strike(self, plan: Iterable[Fault]) -> None:
        """One after the other, though their consequences may overlap, until the plan ends. Where
        all that could be struck is struck already a fault is left out.
        """
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(fault.wait)
                agent = None if fault.agent is None else self._free_agent(fault.agent)
                target = fault.kind if agent is None else agent.name
                if (agent is None) == (fault.kind in OF_BALANCER) and target not in self._busy:
                    self._busy.add(target)
                    group.create_task(self._strike(fault, agent, target))

    async def _strike(self, fault: Fault, agent: ChaosAgent | None, target: str) -> None:
        began = monotonic()
        try:
            if agent is None:
                await self._strike_balancer(fault.kind)
            else:
                await self._strike_agent(agent, fault)
        finally:
            self._busy.discard(target)
            name = None if agent is None else agent.name
            self._ledger.struck.append(Struck(fault.kind, name, began, monotonic()))

    def _free_agent(self, number: int) -> ChaosAgent | None:
        """That one, or the next one that is well."""
        agents = self._cluster.agents
        for agent in agents[number:] + agents[:number]:
            if agent.name not in self._busy and self._cluster.serves(agent.name):
                return agent
        return None

    async def _strike_agent(self, agent: ChaosAgent, fault: Fault) -> None:
        before = self._cluster.ids(agent.name)
        pid = agent.pid
        match fault.kind:
            case Kind.KILL:
                send(pid, signal.SIGKILL)
                await self._back(agent, fault.kind, before)
            case Kind.KILL_KEEPER:
                send(agent.command.process.pid, signal.SIGKILL)
                await self._back(agent, fault.kind, before)
                if lives(pid):
                    self.violations.append(f"{agent.name} outlived its keeper")
            case Kind.DRAIN:
                await self._tell_to_go(agent, fault)
                await self._back(agent, fault.kind, before)
            case Kind.STOP:
                await self._stop(agent, pid, fault)
            case Kind.PAUSE:
                send(pid, signal.SIGSTOP)
                await asyncio.sleep(fault.lasts)
                send(pid, signal.SIGCONT)
                if agent.pid != pid:
                    self.violations.append(
                        f"{agent.name} was stopped for {fault.lasts:.1f} s, and killed for it"
                    )
            case Kind.CUT:
                with agent.passage.closed():
                    await asyncio.sleep(fault.lasts)
                await self._back(agent, fault.kind)
            case Kind.FREEZE_UP | Kind.FREEZE_DOWN:
                up = fault.kind is Kind.FREEZE_UP
                with agent.passage.held(Direction.UP if up else Direction.DOWN):
                    await asyncio.sleep(fault.lasts)
                await self._back(agent, fault.kind)
            case Kind.DELAY:
                with agent.passage.late(LATEST):
                    await asyncio.sleep(fault.lasts)
            case Kind.KILL_REPLICA | Kind.KILL_PROXY | Kind.KILL_CONTROLLER:
                raise AssertionError("no agent's fault")

    async def _tell_to_go(self, agent: ChaosAgent, fault: Fault) -> None:
        """The first time it ends what it has; the second time it goes at once."""
        process = agent.command.process
        for seconds in (fault.lasts, GO_TIMEOUT):
            send(process.pid, signal.SIGTERM)
            end = monotonic() + seconds
            while monotonic() < end:
                if process.poll() is not None:
                    if process.returncode != 0:
                        self.violations.append(f"{agent.name} went with {process.returncode}")
                    return
                await asyncio.sleep(REVIVE_PAUSE)
        self.violations.append(f"{agent.name} did not go when it was told to twice")
        send(process.pid, signal.SIGKILL)

    async def _stop(self, agent: ChaosAgent, pid: int, fault: Fault) -> None:
        """Its keeper has to kill it and to start another one."""
        before = self._cluster.ids(agent.name)
        has_keeper = agent.has_keeper
        send(pid, signal.SIGSTOP)
        end = monotonic() + fault.lasts
        while monotonic() < end and agent.pid == pid:  # noqa: ASYNC110, nobody tells
            await asyncio.sleep(REVIVE_PAUSE)
        if agent.pid != pid:
            await self._back(agent, fault.kind, before)
            return
        if has_keeper:
            self.violations.append(f"{agent.name} was not killed although stopped")
        send(pid, signal.SIGCONT)
        await self._back(agent, fault.kind)

    async def _back(self, agent: ChaosAgent, kind: Kind, gone: Set[str] = frozenset()) -> None:
        """Wait until it serves again, as none of those that have ``gone``."""
        cluster = self._cluster

        def is_back() -> bool:
            agent.revive()
            return cluster.serves(agent.name) and not cluster.ids(agent.name) & gone

        end = monotonic() + BACK_TIMEOUT
        while not is_back():
            if monotonic() > end:
                self.violations.append(f"{agent.name} did not come back ({kind})")
                return
            await cluster.until(is_back, REVIVE_PAUSE)

    async def _strike_balancer(self, kind: Kind) -> None:
        words = PROCESSES[kind]
        for pid in (killed := self._cluster.find(words)):
            send(pid, signal.SIGKILL)
        end = monotonic() + BACK_TIMEOUT
        while not (set(self._cluster.find(words)) - set(killed) and self._all_serve()):
            if monotonic() > end:
                self.violations.append(f"not as before after: {kind}")
                return
            await asyncio.sleep(REVIVE_PAUSE)

    def _all_serve(self) -> bool:
        """All agents that are not struck just now."""
        return all(
            self._cluster.serves(agent.name)
            for agent in self._cluster.agents
            if agent.name not in self._busy
        )
