"""Fleets in a file."""

import pytest

from balancer.desired_state import LocalModel
from deploy.fleet_file import FleetFileError, read_fleets

FILE = """
qwen:
  model: /models/qwen.gguf
  slots: 8
  resources: {cpus: 4, gpus: 1, labels: {pool: gpu}}
  min: 0
  max: 3
  idle_time: 600
main: {}
"""


def test_a_model_is_written_as_on_the_command_line() -> None:
    fleets = read_fleets(FILE)

    assert list(fleets) == ["qwen", "main"]
    assert fleets["qwen"].model == LocalModel(LocalToAgent="/models/qwen.gguf")
    assert fleets["qwen"].resources.labels == {"pool": "gpu"}
    assert fleets["main"].model is None


def test_they_may_stand_under_a_key_of_their_own() -> None:
    assert read_fleets("fleets: {a: {max: 2}}")["a"].max == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "mapping"),
        ("[1]", "mapping"),
        ("a: {", "YAML"),
        ("a: 1", "a"),
        ("a: {maximum: 3}", "a.maximum"),
        ("A: {}", "A"),
        ("a: {min: 3}", "min (3) is more than max (1)"),
        ("a: {model: 'ftp://host/x'}", "a.model"),
        ("a: {resources: {cpus: -1}}", "a.resources.cpus"),
        ("a: 2026-13-13", "YAML"),
        ("a: {model: models/x.gguf}", "a.model: 'models/x.gguf' is no absolute path"),
        ("a: {model: ~/x.gguf}", "a.model: '~/x.gguf' is no absolute path"),
        ("a: {model: {LocalToAgent: x.gguf}}", "a.model: 'x.gguf' is no absolute path"),
        ("a: {}\nb: {}\na: {}", "line 3: 'a' is there already, in line 1"),
        ("fleets:\n  a:\n    max: 1\n    max: 2", "line 4: 'max' is there already, in line 3"),
        ("a: {resources: [{cpus: 1, cpus: 2}]}", "line 1: 'cpus'"),
    ],
)
def test_what_is_wrong_is_named(text: str, reason: str) -> None:
    with pytest.raises(FleetFileError) as raised:
        read_fleets(text)

    assert reason in str(raised.value)
    assert "request" not in str(raised.value)
    assert "body" not in str(raised.value)


def test_keys_may_be_repeated_where_one_takes_over_another() -> None:
    fleets = read_fleets("a: &a {max: 2, slots: 3}\nb: {<<: *a, max: 5}\nc: *a")

    assert [(each.max, each.slots) for each in fleets.values()] == [(2, 3), (5, 3), (2, 3)]
