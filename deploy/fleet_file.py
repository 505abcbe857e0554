"""Fleets in a YAML file, as an operator writes them: models as on the command line, but that no path is
relative, since agents look for it, in whatever folder they were started.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from balancer.desired_state import LocalModel
from balancer.fleets import Fleet, Fleets
from balancer.native_requests import complaints
from common.errors import HeadraceError, ModelError
from deploy.model import parse_model

_fleets = TypeAdapter[dict[str, Fleet]](Fleets)


class FleetFileError(HeadraceError):
    """Its text says where and why."""


def read_fleets(text: str) -> dict[str, Fleet]:
    """A mapping of names to fleets, or one that has it under ``fleets``. Raises ``FleetFileError``."""
    try:
        _refuse_twins(yaml.compose(text, yaml.SafeLoader))
        told = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # as for the 13th month
        raise FleetFileError(f"it is no YAML: {' '.join(str(error).split())}") from error
    if isinstance(told, dict) and set(told) == {"fleets"}:
        told = told["fleets"]
    if not isinstance(told, dict) or not told:
        raise FleetFileError("it is no mapping of names to fleets")
    told = {name: _with_model(name, fleet) for name, fleet in told.items()}
    try:
        fleets = _fleets.validate_python(told)
    except ValidationError as error:
        raise FleetFileError(complaints(error, whole="fleets")) from error
    for name, fleet in fleets.items():
        if isinstance(fleet.model, LocalModel):
            _check_path(name, fleet.model.path)
    return fleets


def _refuse_twins(node: yaml.Node | None) -> None:
    """YAML takes the last of equal keys, and says nothing."""
    todo, done = [node], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in done:
            continue
        done.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                todo.append(value)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise FleetFileError(
                        f"line {line}: {key.value!r} is there already, in line {lines[name]}"
                    )
                lines[name] = line


def _check_path(name: object, path: str) -> None:
    if not Path(path).is_absolute():
        raise FleetFileError(f"{name}.model: {path!r} is no absolute path on the agents' machines")


def _with_model(name: object, fleet: Any) -> Any:
    if not isinstance(fleet, dict) or not isinstance(fleet.get("model"), str):
        return fleet
    if fleet["model"] == "None":
        return fleet
    if "://" not in fleet["model"]:
        _check_path(name, fleet["model"])
    try:
        model = parse_model(fleet["model"])
    except ModelError as error:
        raise FleetFileError(f"{name}.model: {error}") from error
    told = model if isinstance(model, str) else model.model_dump(by_alias=True)
    return {**fleet, "model": told}
