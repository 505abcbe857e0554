"""The routes by which operators act, and ask why: agents drained and undrained, requests looked at and
ended, templates tried. What changes the desired state or a fleet stands in their own modules.
"""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from balancer.audit import audit
from balancer.balancer import Balancer
from balancer.consultation import consult
from balancer.http import json_answer, read_body
from balancer.native_requests import ContinueFromConversationHistory, parse
from balancer.overview import Overview
from common.errors import ErrorCode, RequestError
from common.ids import AgentId, RequestId
from common.messages import Conversation, Failed, Tokenize, Tokenized

MOST_LISTED = 1000
"""Requests in a list: of those that wait or run, and of those that are over."""

LONGEST_TEMPLATE = 2**20
"""Characters; those of models have some ten thousand."""


class Operating:
    def __init__(self, balancer: Balancer, overview: Overview) -> None:
        self._balancer = balancer
        self._overview = overview

    async def drain(self, request: Request) -> Response:
        agent_id = AgentId(request.path_params["agent_id"])
        self._balancer.drain_agent(agent_id)
        audit(request, "drain", agent_id=agent_id)
        return Response(status_code=204)

    async def undrain(self, request: Request) -> Response:
        agent_id = AgentId(request.path_params["agent_id"])
        self._balancer.undrain_agent(agent_id)
        audit(request, "undrain", agent_id=agent_id)
        return Response(status_code=204)

    async def requests(self, _request: Request) -> Response:
        told = self._overview.requests(open_ones=MOST_LISTED, over=MOST_LISTED)
        return json_answer({"requests": told})

    async def request(self, request: Request) -> Response:
        told = self._overview.request(request.path_params["request_id"])
        if told is None:
            raise RequestError(
                ErrorCode.REQUEST_NOT_FOUND, "there is no such request, or it is forgotten"
            )
        return json_answer(told)

    async def end_request(self, request: Request) -> Response:
        record = self._balancer.records.journal.find(request.path_params["request_id"])
        if record is None:
            raise RequestError(ErrorCode.REQUEST_NOT_FOUND, "there is no such request")
        self._balancer.end_request(record.request_id)
        audit(request, "cancel", request_id=record.request_id)
        return Response(status_code=204)

    async def preview(self, request: Request) -> Response:
        """A conversation as a model would be given it."""
        asked = parse(Preview, await read_body(request))
        prompt = asked.prompt(longest_image_side=1)
        assert isinstance(prompt, Conversation)

        def frame(request_id: RequestId) -> Tokenize:
            return Tokenize(
                request_id=request_id, prompt=prompt, adds_beginning=False, template=asked.template
            )

        event = (await consult(self._balancer, request, frame, asked.model)).event
        if isinstance(event, Failed):
            raise RequestError(event.code, event.message)
        assert isinstance(event, Tokenized)
        return json_answer({"text": b"".join(event.pieces).decode(errors="replace")})


class Preview(ContinueFromConversationHistory):
    """What a request of a conversation may say; of that, what makes its prompt counts."""

    max_tokens: int = 1
    add_generation_prompt: bool = True
    enable_thinking: bool = False
    template: Annotated[str, Field(max_length=LONGEST_TEMPLATE)] | None = None
    """None: the one that is in use."""
