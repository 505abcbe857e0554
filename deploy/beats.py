"""A balancer's beats to the supervisor of the fleets, which it makes if there is none and one is needed."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

import msgspec
import ray
from pydantic import ValidationError
from ray.exceptions import RayError

from balancer.balancer import Balancer
from balancer.fleet_beats import Answer, Beat
from balancer.state_store import StateError
from balancer.stored_state import StoredState
from balancer.wishes import Wishes
from deploy.members import NAMESPACE
from deploy.settings import SupervisorSettings
from deploy.succession import Claim, Succession
from deploy.supervisor import NAME, Supervisor

log = logging.getLogger(__name__)

BEAT_INTERVAL = 0.5

ANSWER_TIMEOUT = 5.0
"""Seconds; a supervisor that is started again takes about one."""

HANGS = 20.0
"""Seconds without an answer after which Ray is told to start the supervisor anew: it keeps nothing."""

LOOK_INTERVAL = 5.0
"""Seconds between two looks for a supervisor of a balancer that needs none: another one may have come
that does, and Serve does not tell those that run already.
"""

HEAD = {"node:__internal_head__": 0.001}
"""As Serve's own controller: where the cluster's own state is, too."""

_answers = msgspec.json.Decoder(Answer)


class Beats:
    def __init__(
        self,
        balancer: Balancer,
        wishes: Wishes,
        *,
        balancer_id: str,
        address: str,
        is_alone: bool,
        settings: SupervisorSettings,
        declared: int,
    ) -> None:
        """``address``: where agents dial in. ``is_alone``: no other balancer is meant to be, as far as is
        known when this one is started. ``declared``: when the settings were, in milliseconds since 1970.
        """
        self._balancer = balancer
        self._wishes = wishes
        self._id = balancer_id
        self._address = address
        self._is_alone = is_alone
        self._settings = settings
        self._succession = Succession(Claim(declared, repr(settings)))
        self._loop = asyncio.get_running_loop()
        self._supervisor: Any = None
        self._has_met_one = False
        self._asked: float | None = None
        """Since when it has been asked in vain."""
        self._next_look = self._loop.time()
        self._told: set[str] = set()
        """Of what has been in the way since it answered last."""
        self._known = ""
        """The digest of the state that the supervisor is known to have."""
        self._refused = ""
        """What it has said last and could not be followed."""

    async def run(self) -> None:
        """Until cancelled; then it says that it was the last one."""
        changes = self._balancer.demand_changes
        try:
            while True:
                count = changes.count
                if self._is_needed() or self._loop.time() >= self._next_look:
                    self._next_look = self._loop.time() + LOOK_INTERVAL
                    await self.beat()
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_INTERVAL):
                        await changes.after(count)
        finally:
            if self._supervisor is not None:
                self._supervisor.beat.remote(self._encoded(ends=True))

    def _is_needed(self) -> bool:
        balancer = self._balancer
        has_fleets = bool(balancer.fleets or balancer.fleet_agents)
        return has_fleets or not self._is_alone or self._has_met_one

    async def _find(self) -> Any:
        """The one to follow; None: there is none yet. Raises what Ray does."""
        supervisor = await asyncio.to_thread(_named)
        if supervisor is None:
            if not self._is_needed() or not self._succession.may_make(now=self._loop.time()):
                return None
            log.info("there is no supervisor: one is made")
            supervisor = await asyncio.to_thread(self._make)
        self._has_met_one = True
        async with asyncio.timeout(ANSWER_TIMEOUT):
            claim = Claim.parse(await supervisor.settings.remote())
        if self._succession.follows(claim):
            return supervisor
        log.info("the supervisor is an older balancer's, and is ended: %s", claim)
        try:
            await self._exchange(supervisor)  # it may be the only one who knows what was put
        finally:
            ray.kill(supervisor)  # its agents stay, and are found by the next one
            self._known = ""
        return None

    def _make(self) -> Any:
        """Or find the one that another balancer has made."""
        actor: Any = Supervisor
        return actor.options(
            name=NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, resources=HEAD
        ).remote(self._settings, self._succession.own.declared)

    async def beat(self) -> None:
        """Once, also before ``run``: what other balancers were told holds from the beginning."""
        since = self._asked = self._loop.time() if self._asked is None else self._asked
        try:
            if self._supervisor is None:
                self._supervisor = await self._find()
            if self._supervisor is None:
                if self._is_needed():
                    self._balancer.unsupervised(since=since, leads=self._is_alone)
                else:
                    self._asked = None
                return
            answer = await self._exchange(self._supervisor)
        except (RayError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            self._warn(error)
            self._balancer.unsupervised(since=since, leads=self._is_alone)
            self._supervisor = None
            self._known = ""
            if isinstance(error, TimeoutError) and self._loop.time() - since >= HANGS:
                self._asked = None  # it has as long again
                await asyncio.to_thread(_restart)
            return
        self._answered()
        self._balancer.supervised(answer.fleets, leads=answer.leads)

    async def _exchange(self, supervisor: Any) -> Answer:
        """What operators want. Raises what Ray and msgspec do, and ``TimeoutError``."""
        async with asyncio.timeout(ANSWER_TIMEOUT):
            answer = _answers.decode(await supervisor.beat.remote(self._encoded()))
        self._known = answer.digest
        if answer.state is not None:
            await self._follow(answer.state)
        return answer

    def _warn(self, error: Exception) -> None:
        """Of each trouble once: it is met twice a second."""
        text = f"{type(error).__name__}: {error}"
        if text not in self._told:
            self._told.add(text)
            log.warning("the supervisor does not answer", exc_info=error)

    def _answered(self) -> None:
        if self._told:
            log.info("the supervisor answers again")
        self._told.clear()
        self._asked = None

    def _encoded(self, *, ends: bool = False) -> bytes:
        stored = self._balancer.stored
        digest = stored.digest
        beat = Beat(
            balancer_id=self._id,
            address=self._address,
            digest=digest,
            state=None if digest == self._known else stored.model_dump_json(by_alias=True),
            waiting=self._balancer.waiting,
            agents=tuple(self._balancer.fleet_agents),
            ends=ends,
        )
        return msgspec.json.encode(beat)

    async def _follow(self, text: str) -> None:
        try:
            await self._wishes.follow(StoredState.model_validate_json(text))
        except (ValidationError, StateError) as error:
            if text != self._refused:  # else it would be said with each beat
                log.warning("what another balancer was told cannot be followed: %s", error)
            self._refused = text


def _restart() -> None:
    with suppress(RayError):
        if (supervisor := _named()) is not None:
            log.warning("the supervisor hangs: it is started anew")
            ray.kill(supervisor, no_restart=False)


def _named() -> Any:
    try:
        return ray.get_actor(NAME, NAMESPACE)
    except ValueError:
        return None
