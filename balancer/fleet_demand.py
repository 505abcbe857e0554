"""Which requests count for which fleet, and for whom agents are on their way. No I/O here; ``now`` is an
argument.
"""

from collections.abc import Collection, Mapping

from balancer.fleet_beats import FleetView
from balancer.fleets import Fleet, model_names, waiting_by_fleet
from common.models import ModelReference, NoModel


class FleetDemand:
    """As one balancer knows it, from the operator and the supervisor."""

    def __init__(self) -> None:
        self._fleets: Mapping[str, Fleet] = {}
        self._desired: ModelReference = NoModel()
        self._silent_since: float | None = None
        self.views: Mapping[str, FleetView] = {}
        """As the supervisor sees them; those that it does not know yet are not among them."""

    def want(self, fleets: Mapping[str, Fleet], desired: ModelReference) -> None:
        """``desired``: the model of the desired state."""
        self._fleets, self._desired = fleets, desired

    def supervised(self, views: Mapping[str, FleetView]) -> bool:
        """What the supervisor says. Is any of it new?"""
        is_new = views != self.views or self._silent_since is not None
        self.views, self._silent_since = views, None
        return is_new

    def unsupervised(self, *, since: float) -> bool:
        """The supervisor does not answer. Is that new?"""
        is_new = self._silent_since is None
        if is_new:
            self._silent_since = since
        return is_new

    def silence(self, *, now: float) -> float | None:
        """Seconds that the supervisor has not answered, so that what it said may not hold any more;
        None: it does answer, or was never asked.
        """
        return None if self._silent_since is None else now - self._silent_since

    @property
    def models(self) -> dict[str, frozenset[str]]:
        """The names of the model of each fleet."""
        return model_names(self._fleets, self._desired)

    def waiting(self, waiting: Mapping[str | None, int]) -> dict[str, int]:
        """By fleet. ``waiting``: by the model that they ask for; None: any will do."""
        return {**dict.fromkeys(self._fleets, 0), **waiting_by_fleet(waiting, self._able)}

    def expected(self, served: Collection[str | None]) -> frozenset[str | None]:
        """The models for which there will be an agent more; None: so there will for those who ask for
        none. ``served``: the fleets that have agents.
        """
        able = self._able
        coming = [
            fleet
            for fleet in able
            if not self._is_stuck(fleet) and (fleet not in served or self._is_starting(fleet))
        ]
        names: set[str | None] = {name for fleet in coming for name in able[fleet]}
        if coming and coming[0] == next(iter(able)):
            names.add(None)
        return frozenset(names)

    def reason(self, model: str | None) -> str | None:
        """What keeps the fleet from growing for which a request for this model counts, in words."""
        for fleet, models in self._able.items():
            if model is None or model in models:
                view = self.views.get(fleet)
                reason = None if view is None else view.report.reason
                return None if reason is None else f"the fleet {fleet}: {reason}"
        return None

    @property
    def _able(self) -> dict[str, frozenset[str]]:
        """The models of fleets that may have agents. Who asks for no model counts for the first of them:
        by name, but those that are stuck come last.
        """
        models = self.models
        able = [fleet for fleet in models if self._fleets[fleet].max > 0]
        return {name: models[name] for name in sorted(able, key=lambda n: (self._is_stuck(n), n))}

    def _is_starting(self, fleet: str) -> bool:
        view = self.views.get(fleet)
        return view is not None and view.report.starting > 0

    def _is_stuck(self, fleet: str) -> bool:
        view = self.views.get(fleet)
        return view is not None and view.report.is_stuck
