"""A supervisor that a test can run without Ray: its class as it was before Ray made actors of it."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_ray import FakeClass, FakeRay
from played_members import played_class

from deploy import beats, members, supervisor
from deploy.supervisor import Supervisor

Reserved = list[dict[str, Any]]


def supervisor_class() -> Callable[..., Any]:
    actor_class: Any = Supervisor
    return actor_class.__ray_metadata__.modified_class


def put_on(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Reserved:
    """Supervisors and agents are actors of this Ray. Returns what is asked of its autoscaler."""
    reserved: Reserved = []
    monkeypatch.setattr(members, "AgentActor", played_class(ray))
    monkeypatch.setattr(members, "ray_state", ray)
    monkeypatch.setattr(beats, "Supervisor", FakeClass(ray, supervisor_class()))

    def reserve(**asked: Any) -> None:
        reserved.append(asked)

    monkeypatch.setattr(supervisor, "request_resources", reserve)
    return reserved
