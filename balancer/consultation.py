"""Asking an agent for what only takes its model's vocabulary and template, on behalf of a client."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request

from balancer.balancer import Balancer, new_id
from balancer.exchange import Told
from balancer.http import unless_gone
from balancer.native_requests import encode_request
from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages import Detokenize, Tokenize

CONSULTATION_TIMEOUT = 30.0
"""Seconds for an agent to answer."""


async def consult(
    balancer: Balancer,
    request: Request,
    frame: Callable[[RequestId], Tokenize | Detokenize],
    model: str | None,
) -> Told:
    """Its answer, which may be ``Failed``. ``request``: whose body has been read. Raises
    ``RequestError``, and ``ClientDisconnect`` if the client goes away meanwhile.
    """
    request_id = new_id()
    exchange = balancer.consult(request_id, encode_request(frame(request_id)), model)
    try:
        async with asyncio.timeout(CONSULTATION_TIMEOUT):
            return await unless_gone(request, anext(exchange))
    except TimeoutError:
        raise RequestError(
            ErrorCode.DEADLINE_EXCEEDED, "the agent did not answer in time"
        ) from None
    finally:
        balancer.cancel(request_id)
