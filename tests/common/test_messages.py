import msgspec
import pytest

from common import messages as m
from common import models
from common.errors import STATUS, ErrorCode
from common.ids import AgentId, RequestId, TokenId

R = RequestId("r")
STATUS_FRAME = m.Status(
    version=3,
    slots_desired=4,
    slots_total=4,
    slots_processing=1,
    application=models.Application.STUCK,
    download=models.Download("a.gguf", 1, None),
    issues=(
        models.AgentIssue(models.IssueKind.DOWNLOAD_INTERRUPTED, "https://host/a.gguf", "why"),
    ),
)

TO_BALANCER = [
    m.Join(protocol=m.PROTOCOL, agent_id=AgentId("a"), name=None, status=STATUS_FRAME),
    STATUS_FRAME,
    m.Described({"general.name": "x"}, None),
    m.Step(
        (
            m.TokenGenerated(R, TokenId(7), (m.Segment(m.TokenClass.REASONING, "é"),)),
            m.Finished(
                R, m.FinishReason.STOP, m.Usage(3, 0, 1), (m.Segment(m.TokenClass.CONTENT, "x"),)
            ),
            m.ToolCallsEnded(R, m.ToolCallsParsed((m.ToolCall("1", "f", "{}"),))),
            m.ToolCallsEnded(R, m.ToolCallsUnreadable("why")),
            m.ToolCallsEnded(R, m.ToolCallsInvalid(("why",))),
            m.ToolCallsEnded(R, m.ToolCallFormatUnknown("text", "why")),
            m.Failed(R, ErrorCode.DECODE_FAILED, "why"),
            m.Failed(R, ErrorCode.IMAGE_EXCEEDS_BATCH_SIZE, "why", {"n_batch": 1}),
            m.Embedded(R, "d", 2, bytes(16)),
            m.DocumentTooLong(R, "d", 9, 8),
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
    m.Generate(
        request_id=R,
        prompt=m.Conversation(
            (m.ChatMessage("user", "#"),),
            images=(b"\xff\x00", b""),
            image_marker="#",
            longest_image_side=9,
        ),
        max_tokens=9,
    ),
    m.Embed(
        request_id=R,
        documents=(m.Document("d", "é"),),
        pooling=m.Pooling.LAST,
        normalization=m.RmsNorm(1e-6),
    ),
    m.Cancel(R),
    m.SetState(
        7,
        models.AgentDesiredState(
            model=models.HuggingFaceModel("owner/repo", "a.gguf", "main"),
            multimodal_projection=models.UrlModel("https://host/b.gguf", "ab" * 32),
            chat_template="{{ x }}",
            choices=models.EngineChoices(context_size=0, k_cache_dtype=models.CacheType.Q8_0),
            overrides=models.EngineChoices(tensor_split=(1.0, 2.0)),
        ),
    ),
    m.Swap(3),
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


def test_vectors_are_32_bit_floats_little_endian() -> None:
    values = bytes.fromhex("0000803f 00000040 0000c0bf 00000000")

    assert m.Embedded(R, "d", 2, values).vectors == [[1, 2], [-1.5, 0]]


@pytest.mark.parametrize("size", [0, 4, 12])
def test_half_a_vector_is_refused(size: int) -> None:
    event = {"type": "embedded", "request_id": "r", "document_id": "d", "dimensions": 2}
    step = {"type": "step", "events": [{**event, "values": bytes(size)}]}

    with pytest.raises(msgspec.MsgspecError, match="whole vectors"):
        m.decode_to_balancer(m.encode(step))


def test_every_error_has_a_status() -> None:
    assert STATUS.keys() == set(ErrorCode)


@pytest.mark.parametrize(
    ("reference", "names"),
    [
        (models.NoModel(), set[str]()),
        (models.LocalModel("/models/qwen.gguf"), {"qwen", "qwen.gguf"}),
        (models.LocalModel("C:\\models\\qwen.gguf"), {"qwen", "qwen.gguf"}),
        (models.UrlModel("https://host/a/qwen.gguf?key=1"), {"qwen", "qwen.gguf"}),
        (
            models.HuggingFaceModel("owner/repo", "sub/qwen.gguf", "main"),
            {"qwen", "qwen.gguf", "owner/repo"},
        ),
    ],
)
def test_a_model_has_the_names_that_clients_know(
    reference: models.ModelReference, names: set[str]
) -> None:
    assert models.names(reference) == names


def test_what_is_said_first_goes_before_the_rest() -> None:
    merged = models.EngineChoices.merged(
        models.EngineChoices(threads=1),
        models.EngineChoices(threads=2, slots=3),
        models.EngineChoices(slots=4),
    )

    assert merged == models.EngineChoices(threads=1, slots=3)
