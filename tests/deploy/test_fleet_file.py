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
    ],
)
def test_what_is_wrong_is_named(text: str, reason: str) -> None:
    with pytest.raises(FleetFileError) as raised:
        read_fleets(text)

    assert reason in str(raised.value)
