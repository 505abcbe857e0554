"""The dashboard, the rules and the table of metrics speak of what is really there."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from loaded import metrics_after_load
from prometheus_client.parser import text_string_to_metric_families
from promql import spoken

from balancer.agent_states import AgentState
from balancer.limits import Limit
from balancer.records import CANCELLED
from balancer.terms import Route
from common.errors import ErrorCode
from common.messages import FinishReason

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"

OF_PROMETHEUS = {"job", "instance"}
"""Labels that it gives to all series of a scrape."""

ROW = re.compile(r"^\| `(headrace_\w+)` \| (\w+) \|([\w, ]*)\|", re.MULTILINE)

VALUES = {
    "outcome": {*ErrorCode, *FinishReason, CANCELLED},
    "reason": {*ErrorCode, "agent_lost", "busy", "given_back"},
    "limit": set(Limit),
    "route": set(Route),
    "state": {*AgentState, "free", "cached", "running"},
    "source": {"fed", "cached"},
}
"""Those of labels that have a few only."""


@dataclass(frozen=True)
class Documented:
    type: str
    labels: frozenset[str]


@pytest.fixture(scope="module")
def text() -> str:
    return asyncio.run(metrics_after_load())


def documented() -> dict[str, Documented]:
    table = (FOLDER / "README.md").read_text()
    return {
        name: Documented(type_, frozenset(filter(None, labels.strip().split(", "))))
        for name, type_, labels in ROW.findall(table)
    }


def load(name: str) -> Any:
    text = (FOLDER / name).read_text()
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in load("grafana.json")["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yaml")["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "5m")
    for rule in rules():
        yield rule["expr"]


def test_every_documented_metric_is_there_after_a_load_and_no_other(text: str) -> None:
    there: dict[str, tuple[str, set[str] | None]] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        there[name] = (family.type, labels if family.samples else None)

    table = documented()

    assert there.keys() == table.keys()
    for name, (type_, labels) in there.items():
        told = table[name]
        assert type_ == told.type, name
        assert labels is None or labels == told.labels, name
    absent = {name for name, (_, labels) in there.items() if labels is None}
    assert absent <= {"headrace_step_age_seconds"}


@pytest.mark.parametrize("expression", [*expressions()])
def test_an_expression_speaks_of_what_is_there(expression: str) -> None:
    table = documented()
    said = spoken(expression)

    known: set[str] = set(OF_PROMETHEUS)
    assert said.metrics
    for name, matchers in said.metrics.items():
        if name == "up":
            continue
        family = re.sub("_(bucket|count|sum)$", "", name)
        is_part = family != name
        assert family in table, name
        assert is_part == (table[family].type == "histogram"), name
        labels = {*table[family].labels, *(["le"] if is_part else [])}
        assert matchers.keys() <= labels | OF_PROMETHEUS, name
        for label, pattern in matchers.items():
            if label in VALUES and "$" not in pattern:
                assert set(pattern.split("|")) <= VALUES[label], (name, label)
        known |= labels
    assert said.groups <= known


def test_every_metric_is_looked_at_by_the_dashboard() -> None:
    shown = {
        re.sub("_(bucket|count|sum)$", "", name)
        for panel in panels()
        for target in panel["targets"]
        for name in spoken(target["expr"].replace("$__rate_interval", "5m")).metrics
    }

    assert shown == documented().keys()


def test_the_dashboard_can_be_imported_and_its_panels_do_not_overlap() -> None:
    board = load("grafana.json")
    ids = [panel["id"] for panel in board["panels"]]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells

    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) - {"__rate_interval"}
    assert used == variables
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())


def test_each_rule_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]

    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        said = spoken(rule["expr"])
        kept = said.groups or {
            label
            for name in said.metrics
            for label in (documented()[name].labels if name != "up" else set[str]())
        }
        assert used <= kept | {"instance"}, rule["alert"]


def test_the_example_scrapes_the_default_address_with_a_key_that_stands_elsewhere() -> None:
    config = load("prometheus.yaml")
    (job,) = config["scrape_configs"]

    assert job["job_name"] == "headrace"
    assert job["authorization"].keys() == {"credentials_file"}
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8061"]}]
    assert [(FOLDER / name).exists() for name in config["rule_files"]] == [True]


promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus is not installed"
)


def run(*arguments: str) -> None:
    told = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


@promtool
def test_promtool_takes_the_rules_and_the_example_and_its_tests_pass() -> None:
    run("check", "rules", "alerts.yaml")
    run("check", "config", "--syntax-only", "prometheus.yaml")
    run("test", "rules", "alerts_test.yaml")


@promtool
def test_promtool_takes_the_dashboards_expressions(tmp_path: Path) -> None:
    recorded = [{"record": f"r{n}", "expr": each} for n, each in enumerate(expressions())]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}))

    run("check", "rules", str(file))


@pytest.mark.parametrize(
    "wrong", ["headrace_a{b}", "what(headrace_a)", "headrace_a &", 'headrace_a{b="c"']
)
def test_what_is_no_expression_is_not_understood(wrong: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        spoken(wrong)


def test_an_expression_is_taken_apart() -> None:
    said = spoken('sum by (a, le) (rate(x_total{b="c",d=~"e|f"}[5m])) / on (g) y > 0.5')

    assert said.metrics == {"x_total": {"b": "c", "d": "e|f"}, "y": {}}
    assert said.groups == {"a", "le", "g"}
