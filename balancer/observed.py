"""The balancer as observers measure it: for the metrics at each scrape, and for the charts."""

from typing import TYPE_CHECKING

from balancer.agent_states import state_of
from balancer.gauges import AgentGauges, Gauges, LimitGauge
from balancer.history import Load
from balancer.limits import Limit

if TYPE_CHECKING:
    from balancer.balancer import Balancer


def load(balancer: "Balancer") -> Load:
    agents = balancer.agents
    return Load(
        buffered=balancer.buffered,
        running=balancer.running,
        slots=sum(agent.status.slots_total for agent in agents),
        slots_busy=sum(agent.slots_busy for agent in agents),
        agents=len(agents),
    )


def gauges(balancer: "Balancer") -> Gauges:
    return Gauges(
        balancer.buffered,
        [
            AgentGauges(
                agent.name,
                agent.status.slots_total,
                agent.slots_bound,
                agent.status.figures,
                agent.step_age,
                state_of(agent.status),
            )
            for agent in balancer.agents
        ],
        abandoned=balancer.abandoned,
        limits=[
            LimitGauge(limit, _most(balancer, limit), _used(balancer, limit)) for limit in Limit
        ],
    )


def _most(balancer: "Balancer", limit: Limit) -> int | None:
    match limit:
        case Limit.BUFFERED_REQUESTS:
            return balancer.buffer_capacity
        case Limit.PROMPT_TOKENS:
            return balancer.desired_state.inference_parameters.context_size
        case _:
            return balancer.limits.most(limit)


def _used(balancer: "Balancer", limit: Limit) -> int | None:
    """None: it is not a sum."""
    match limit:
        case Limit.BUFFERED_REQUESTS:
            return balancer.buffered
        case Limit.BUFFERED_BYTES:
            return balancer.buffered_bytes
        case Limit.CONSULTATIONS:
            return balancer.consulted
        case _:
            return balancer.tally.used(limit)
