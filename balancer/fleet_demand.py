"""Which requests count for which fleet, and for whom agents are on their way. No I/O here; ``now`` is an
argument.
"""

from collections.abc import Collection, Mapping

from balancer.fleet_beats import FleetView
from balancer.fleet_plan import FleetReport
from balancer.fleets import Fleet, model_names
from common.models import ModelReference, NoModel

NO_REPORT = FleetReport(wanted=0, seen=0, ready=0, starting=0, draining=0)
"""Of a fleet that the supervisor does not know yet."""


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
        counted, able = dict.fromkeys(self._fleets, 0), self._able
        for model, count in waiting.items():
            if (fleet := _first(able, model)) is not None:
                counted[fleet] += count
        return counted

    def expected(self, served: Collection[str | None]) -> frozenset[str | None]:
        """Who asks for one of these models counts for a fleet that will have an agent more; None: who asks
        for none. ``served``: the fleets that have agents.
        """
        able = self._able
        coming = {
            fleet
            for fleet in able
            if not (report := self._report(fleet)).is_stuck
            and (
                report.starting > 0
                # Who was drained by an operator is ready, and serves nobody.
                or (fleet not in served and report.ready < self._fleets[fleet].max)
            )
        }
        asked: set[str | None] = {None, *(name for models in able.values() for name in models)}
        return frozenset(model for model in asked if _first(able, model) in coming)

    def reason(self, model: str | None) -> str | None:
        """What keeps the fleet from growing for which a request for this model counts, in words."""
        fleet = _first(self._able, model)
        reason = None if fleet is None else self._report(fleet).reason
        return None if reason is None else f"the fleet {fleet}: {reason}"

    @property
    def _able(self) -> dict[str, frozenset[str]]:
        """The models of fleets that may have agents. What several could serve counts for the first of
        them, so that only one grows for it: by name, but those come later that cannot have one more, or
        not soon.
        """
        models = self.models
        able = [fleet for fleet in models if self._fleets[fleet].max > 0]
        return {name: models[name] for name in sorted(able, key=self._rank)}

    def _rank(self, fleet: str) -> tuple[bool, bool, bool, str]:
        report = self._report(fleet)
        is_full = report.ready >= self._fleets[fleet].max
        return report.is_stuck, is_full, report.lacks_node, fleet

    def _report(self, fleet: str) -> FleetReport:
        view = self.views.get(fleet)
        return NO_REPORT if view is None else view.report


def _first(able: Mapping[str, frozenset[str]], model: str | None) -> str | None:
    """The fleet for which a request for this model counts."""
    return next((fleet for fleet, models in able.items() if model is None or model in models), None)
