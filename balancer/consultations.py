"""What agents are asked that takes no slot, and who waits for it: texts to be made tokens, and back."""

from typing import TypeAlias

from balancer.exchange import Exchange, Told
from balancer.limits import MOST_CONSULTATIONS, Limit, LimitError
from balancer.linked_agents import LinkedAgent
from common.errors import ErrorCode
from common.ids import AgentId, RequestId
from common.messages import Cancel, Detokenized, Event, Failed, Tokenized, encode

Answer: TypeAlias = Tokenized | Detokenized | Failed


class Consultations:
    def __init__(self) -> None:
        self._open: dict[RequestId, tuple[LinkedAgent, Exchange]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._open

    def begin(self, request_id: RequestId, frame: bytes, agent: LinkedAgent) -> Exchange:
        """``frame``: an encoded ``Tokenize`` or ``Detokenize``. Raises ``LimitError``."""
        if len(self._open) >= MOST_CONSULTATIONS:
            raise LimitError(
                Limit.CONSULTATIONS,
                ErrorCode.BUFFER_FULL,
                "too many texts are being tokenized already",
            )
        exchange = Exchange()
        self._open[request_id] = (agent, exchange)
        agent.send(frame)
        return exchange

    def happened(self, agent_id: AgentId, event: Event) -> None:
        """An agent says this of one that is open; only the one that was asked is believed."""
        agent, _ = self._open[event.request_id]
        if agent.agent_id == agent_id and isinstance(event, Answer):
            self._answer(event)

    def cancel(self, request_id: RequestId) -> None:
        """Nobody waits for it any longer; nothing if it is over, or none."""
        if asked := self._open.pop(request_id, None):
            asked[0].send(encode(Cancel(request_id)))

    def leave(self, agent_id: AgentId) -> None:
        """The agent is lost."""
        for request_id, (asked, _) in tuple(self._open.items()):
            if asked.agent_id == agent_id:
                self._answer(Failed(request_id, ErrorCode.AGENT_LOST, "the agent was lost"))

    def end(self, code: ErrorCode, message: str) -> None:
        """All that are open."""
        for request_id in tuple(self._open):
            self._answer(Failed(request_id, code, message))

    def _answer(self, event: Answer) -> None:
        _, exchange = self._open.pop(event.request_id)
        exchange.put(Told(None, event))
