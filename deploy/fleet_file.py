"""Fleets in a YAML file, as an operator writes them: models as on the command line."""

from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from balancer.fleets import Fleet, Fleets
from balancer.native_requests import describe
from common.errors import HeadraceError, ModelError
from deploy.model import parse_model

_fleets = TypeAdapter[dict[str, Fleet]](Fleets)


class FleetFileError(HeadraceError):
    """Its text says where and why."""


def read_fleets(text: str) -> dict[str, Fleet]:
    """A mapping of names to fleets, or one that has it under ``fleets``. Raises ``FleetFileError``."""
    try:
        told = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FleetFileError(f"it is no YAML: {' '.join(str(error).split())}") from error
    if isinstance(told, dict) and set(told) == {"fleets"}:
        told = told["fleets"]
    if not isinstance(told, dict) or not told:
        raise FleetFileError("it is no mapping of names to fleets")
    return check_fleets({name: _with_model(name, fleet) for name, fleet in told.items()})


def check_fleets(told: dict[Any, Any]) -> dict[str, Fleet]:
    """Raises ``FleetFileError``."""
    try:
        return _fleets.validate_python(told)
    except ValidationError as error:
        raise FleetFileError(describe(error)) from error


def _with_model(name: object, fleet: Any) -> Any:
    if not isinstance(fleet, dict) or not isinstance(fleet.get("model"), str):
        return fleet
    if fleet["model"] == "None":
        return fleet
    try:
        model = parse_model(fleet["model"])
    except ModelError as error:
        raise FleetFileError(f"{name}.model: {error}") from error
    told = model if isinstance(model, str) else model.model_dump(by_alias=True)
    return {**fleet, "model": told}
