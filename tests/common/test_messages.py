import msgspec
import pytest

from common import messages as m
from common.errors import STATUS, ErrorCode
from common.ids import AgentId, RequestId, TokenId

R = RequestId("r")
STATUS_FRAME = m.Status(version=3, slots_desired=4, slots_total=4, slots_processing=1)

TO_BALANCER = [
    m.Join(protocol=m.PROTOCOL, agent_id=AgentId("a"), name=None, status=STATUS_FRAME),
    STATUS_FRAME,
    m.Step(
        (
            m.TokenGenerated(R, TokenId(7), "é"),
            m.Finished(R, m.FinishReason.STOP, m.Usage(3, 0, 1), "x"),
            m.Failed(R, ErrorCode.DECODE_FAILED, "why"),
            m.Busy(R),
        )
    ),
]
TO_AGENT = [
    m.Generate(request_id=R, prompt=m.RawPrompt("Hi"), max_tokens=1, stop=("\n",)),
    m.Generate(
        request_id=R,
        prompt=m.Conversation((m.ChatMessage("user", "Hi"),), tools=({"type": "function"},)),
        max_tokens=9,
        sampling=m.Sampling(temperature=0.0, seed=1),
    ),
    m.Cancel(R),
]


@pytest.mark.parametrize("frame", TO_BALANCER, ids=lambda frame: type(frame).__name__)
def test_a_frame_survives_the_way_to_the_balancer(frame: m.ToBalancer) -> None:
    assert m.decode_to_balancer(m.encode(frame)) == frame


@pytest.mark.parametrize("frame", TO_AGENT, ids=lambda frame: type(frame).__name__)
def test_a_frame_survives_the_way_to_the_agent(frame: m.ToAgent) -> None:
    assert m.decode_to_agent(m.encode(frame)) == frame


def test_the_tag_names_the_class() -> None:
    assert msgspec.msgpack.decode(m.encode(m.Cancel(R)))["type"] == "cancel"


@pytest.mark.parametrize("data", ["text", b"", b"\xc1", m.encode(m.Cancel(R))])
def test_what_is_no_frame_for_the_balancer_is_refused(data: bytes | str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        m.decode_to_balancer(data)


def test_every_error_has_a_status() -> None:
    assert STATUS.keys() == set(ErrorCode)
