"""Ray's own checks of what operators write for it, some of which are private to it.

Imported before anything that imports ``ray.serve``, which warns of itself.
"""

import copy
import types
import warnings
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.serve.schema import ServeDeploySchema

    from deploy.app import BalancerReplica, build

    DEPLOYMENT: Any = BalancerReplica
    IMPORT_PATH = f"{build.__module__}:{build.__name__}"


def check_cluster(config: dict[str, Any]) -> dict[str, Any]:
    """As ``ray up`` does before it does anything else. Return it as Ray has filled it in."""
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def check_serve(config: dict[str, Any]) -> None:
    """As ``serve deploy`` does, which ignores what it does not know; here it is an error."""
    ServeDeploySchema.model_validate(config)
    unknown = list(unknown_keys(config, ServeDeploySchema))
    assert not unknown, f"Serve does not know {unknown}"


def unknown_keys(value: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Where no model of pydantic is expected, anything may be."""
    models = list(models_in(expected))
    inside: Any = value
    if isinstance(value, list):
        for each in inside:
            yield from unknown_keys(each, expected, path)
    elif isinstance(value, dict) and models:
        fields = {name: field for model in models for name, field in model.model_fields.items()}
        for key, inner in inside.items():
            if key not in fields:
                yield f"{path}{key}"
            else:
                yield from unknown_keys(inner, fields[key].annotation, f"{path}{key}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in {Union, types.UnionType, list}:
        for each in get_args(annotation):
            yield from models_in(each)
