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
from deploy.supervisor import NAME, Supervisor

log = logging.getLogger(__name__)

BEAT_INTERVAL = 0.5

ANSWER_TIMEOUT = 5.0
"""Seconds; a supervisor that is started again takes about one."""

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
    ) -> None:
        """``address``: where agents dial in. ``is_alone``: no other balancer is meant to be."""
        self._balancer = balancer
        self._wishes = wishes
        self._id = balancer_id
        self._address = address
        self._is_alone = is_alone
        self._settings = settings
        self._supervisor: Any = None
        self._known = ""
        """The digest of the state that the supervisor is known to have."""
        self._refused = ""
        """What it has said last and could not be followed."""

    async def run(self) -> None:
        """Until cancelled; then it says that it was the last one."""
        changes = self._balancer.demand_changes
        try:
            await self._end_an_older_one()
            while True:
                count = changes.count
                if self._supervisor is not None or self._is_needed():
                    await self._beat()
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_INTERVAL):
                        await changes.after(count)
        finally:
            if self._supervisor is not None:
                self._supervisor.beat.remote(self._encoded(ends=True))

    def _is_needed(self) -> bool:
        return bool(self._balancer.fleets) or not self._is_alone

    async def _end_an_older_one(self) -> None:
        """Serve starts balancers of the newest version only, so one of another version, or with other
        settings, is older. Its agents stay, and are found by the next one.
        """
        with suppress(ValueError, RayError, TimeoutError):
            supervisor: Any = await asyncio.to_thread(ray.get_actor, NAME, NAMESPACE)
            async with asyncio.timeout(ANSWER_TIMEOUT):
                settings: str = await supervisor.settings.remote()
            if settings == repr(self._settings):
                self._supervisor = supervisor
                return
            log.info("the supervisor has %s, this balancer %s", settings, self._settings)
            ray.kill(supervisor)
            self._supervisor = await asyncio.to_thread(self._make)

    def _make(self) -> Any:
        """Or find the one that another balancer has made."""
        actor: Any = Supervisor
        return actor.options(
            name=NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, resources=HEAD
        ).remote(self._settings)

    async def _beat(self) -> None:
        try:
            if self._supervisor is None:
                self._supervisor = await asyncio.to_thread(self._make)
            async with asyncio.timeout(ANSWER_TIMEOUT):
                answer = _answers.decode(await self._supervisor.beat.remote(self._encoded()))
        except (RayError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            log.warning("the supervisor does not answer: %s", str(error).partition("\n")[0])
            self._supervisor = None
            self._known = ""
            return
        self._known = answer.digest
        if answer.state is not None:
            await self._follow(answer.state)
        self._balancer.supervised(answer.fleets, leads=answer.leads)

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
