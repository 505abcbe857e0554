"""Which requests count for which fleet. Most of it is tested where it acts, in ``test_fleet_routes``."""

from balancer.fleet_beats import FleetView
from balancer.fleet_demand import FleetDemand
from balancer.fleet_plan import FleetReport
from balancer.fleets import Fleet
from common.models import LocalModel, NoModel

ONE, TWO = (
    Fleet.model_validate({"model": {"LocalToAgent": f"/models/{name}.gguf"}})
    for name in ("one", "two")
)


def test_a_request_counts_for_the_first_fleet_that_could_serve_it() -> None:
    demand = FleetDemand()
    demand.want({"b": ONE, "a": TWO, "c": ONE}, NoModel())

    counted = demand.waiting({"one": 3, "two.gguf": 2, None: 5, "three": 7})

    assert counted == {"a": 2 + 5, "b": 3, "c": 0}


def test_a_fleet_with_the_desired_model_is_asked_for_by_its_name() -> None:
    demand = FleetDemand()
    demand.want({"main": Fleet()}, LocalModel("/m/small.gguf"))

    assert demand.waiting({"small": 1}) == {"main": 1}


def test_all_that_a_fleet_without_agents_could_serve_is_waited_for() -> None:
    demand = FleetDemand()
    demand.want({"a": ONE, "b": TWO}, NoModel())

    assert demand.expected(served={"a"}) == {"two", "two.gguf"}
    assert demand.expected(served={"b"}) == {"one", "one.gguf", None}
    assert demand.expected(served={"a", "b"}) == frozenset()


def test_without_fleets_nothing_is_waited_for() -> None:
    assert FleetDemand().expected(served=()) == frozenset()


def test_nobody_waits_for_one_more_where_a_drained_agent_is_all_that_may_be() -> None:
    """It is ready, and serves nobody: ``served`` does not name its fleet."""
    demand = FleetDemand()
    demand.want({"a": ONE.model_copy(update={"max": 1})}, NoModel())

    def expected(ready: int) -> frozenset[str | None]:
        report = FleetReport(wanted=1, seen=ready, ready=ready, starting=0, draining=0)
        demand.supervised({"a": FleetView(report=report)})
        return demand.expected(served=())

    assert expected(0) == {"one", "one.gguf", None}
    assert expected(1) == frozenset()
