"""Agents die, links fail, clients are rude, and nothing is lost. Longer, and with other seeds, by hand:
``python -m integration_tests.chaos --seed N --faults 500``.
"""

from rich.console import Console

from integration_tests.chaos.ledger import Outcome
from integration_tests.chaos.plan import OF_AGENTS
from integration_tests.chaos.report import show
from integration_tests.chaos.run import Settings, run

SEED = 20261128
SECONDS = 60.0


def test_nothing_is_lost_while_agents_die_and_links_fail() -> None:
    report = run(Settings(seed=SEED, kinds=OF_AGENTS, seconds=SECONDS))
    show(report, Console(width=160))

    assert report.violations == []
    complete = [r for r in report.ledger.records if r.ended_as(Outcome.COMPLETE)]
    assert len(report.ledger.struck) > 10
    assert len(complete) > 30
    assert any(record.moves for record in complete), "no request went on at another agent"
