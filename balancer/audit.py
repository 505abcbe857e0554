"""Who has changed what: one line in the log for each act of an operator."""

import hashlib
import logging

from starlette.requests import Request

from balancer.keys import Role, given_key

log = logging.getLogger("headrace.audit")


def audit(request: Request, action: str, **what: object) -> None:
    """To be called when it is done. ``what``: to whom or to what, such as ``agent_id``; nothing that
    is secret.
    """
    pairs: dict[str, object] = {
        "action": action,
        **what,
        "from": "unknown" if request.client is None else request.client.host,
        "role": Role.MANAGEMENT,
    }
    key = given_key(
        authorization=request.headers.get("authorization"),
        api_key=request.headers.get("x-api-key"),
    )
    if key is not None:
        pairs["key"] = fingerprint(key)
    template = " ".join(f"{name}=%s" for name in pairs)
    log.info(template, *pairs.values())  # the names are ours


def fingerprint(key: str) -> str:
    """Tells keys apart, and does not tell them."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()[:8]
