"""The base of all that travels between balancer and agents."""

import msgspec


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Frame(msgspec.Struct, frozen=True, tag_field="type", tag=_snake_case):
    """Base of all that is written to an agent link."""
