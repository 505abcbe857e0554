"""The frames of the agent link.

One union a direction, in MessagePack. A frame is a frozen value whose ``type`` tag is the class's
name in snake case. The agent dials, says ``Join``, and then sends a ``Step`` for each pass of its
model, a ``Status`` for each change of its slots, a ``Described`` for each change of its model, and ``Noted``
when its scheduler decides about a request; the balancer sends ``Generate``, ``Embed``, ``Tokenize``,
``Detokenize`` and ``Cancel``, of models ``SetState`` and ``Swap``, and ``Drain`` and ``Undrain``.

Every ``Generate`` and every ``Embed`` is answered by exactly one of ``Finished``, ``Failed`` or
``Busy``, unless the link is lost first. Before it come any number of ``TokenGenerated`` and
``ToolCallsEnded``, or of ``Embedded``, ``DocumentTooLong`` and ``DocumentFailed``. After ``Busy``, or
when the link is lost, another agent goes on where this one stopped: what came with one ``Step`` has
been told to the client, and all else has never been.

``SetState`` may come at any time. The agent gets ready for it beside its work, and if it must let go
of a model that serves, says ``awaits_turn`` in its status. ``Swap`` gives it the turn: it drains,
loads, and then says the turn's number in ``turn_taken``, whether it had use for it or not.
"""

import enum
import struct
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from common.errors import ErrorCode
from common.frame import Frame
from common.ids import AgentId, RequestId, TokenId
from common.models import AgentDesiredState, AgentIssue, Application, Download, Phase

PROTOCOL = 8
"""Raised when a change to the frames would be misread by the other side."""

REFUSED = 4000
"""The close code with which a balancer says that dialling again is useless."""

GIVEN_UP = 4001
"""The close code with which a balancer says that the agent has come to a stop: its process should end."""

PING_INTERVAL = 2.0
PING_TIMEOUT = 5.0
"""Seconds without an answer after which either side gives the link up."""

MAX_FRAME_BYTES = 64 * 2**20
"""Numbers in JSON may become twice as long in MessagePack: well above twice the largest body."""


class ToolCall(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str
    """JSON text if ``is_json``, else what the model wrote instead."""
    is_json: bool = True


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    name: str | None = None
    """Of whoever speaks, among several of one role."""
    reasoning: str | None = None
    """What the model thought before it said this."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What the model called when it said this."""
    tool_call_id: str | None = None
    """The call that this is the result of."""


IMAGE_MARKER = "<__media__>"


class CallsTold(enum.StrEnum):
    """How a client learns of the calls that a model writes."""

    RAW = "raw"
    """As text of class ``TOOL_CALL``."""
    CHECKED = "checked"
    """Also parsed and checked against the tools' schemas, when a section ends: ``ToolCallsEnded``."""
    STREAMED = "streamed"
    """As ``ToolCallDelta`` while they are written, in place of their text: not checked, and what
    cannot be read as a call is content.
    """


class Conversation(Frame, frozen=True):
    """A prompt that the model's own chat template will render."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    enable_thinking: bool = False
    calls_told: CallsTold = CallsTold.RAW
    must_call: tuple[str, ...] = ()
    """The answer must be calls of these tools; empty: it may be text, too."""
    constrains_content: bool = False
    """A constraint is for the content: reasoning may come before it, and calls in its place. False: it
    is for all that the model writes.
    """
    parallel_calls: bool = True
    """False: one call at most."""
    template_arguments: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Further variables for the chat template, such as ``reasoning_effort``."""
    images: tuple[bytes, ...] = ()
    """Files, as the client sent them, in the order of their markers in the messages."""
    image_marker: str = IMAGE_MARKER
    """Stands in the messages where an image is, and nowhere else."""
    longest_image_side: int = 1024
    """In pixels; what is larger is scaled down."""


class RawPrompt(Frame, frozen=True):
    """A prompt that is fed as it stands, after a beginning-of-sequence token if the model has one."""

    text: str
    is_plain: bool = False
    """So is the answer told: reasoning and tool calls are not set apart in it."""


class TokenPrompt(Frame, frozen=True):
    """A prompt that is fed as it stands, token by token. The answer is told as it stands, too."""

    tokens: tuple[TokenId, ...]


Prompt: TypeAlias = Conversation | RawPrompt | TokenPrompt


class Gbnf(Frame, frozen=True):
    """The answer must follow this grammar, in llama.cpp's notation."""

    grammar: str
    root: str = "root"


class JsonSchema(Frame, frozen=True):
    """The answer must be JSON that follows this schema."""

    schema: str
    """As JSON text."""


Constraint: TypeAlias = Gbnf | JsonSchema


class Mirostat(enum.IntEnum):
    OFF = 0
    V1 = 1
    V2 = 2


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen.

    The defaults of what the published wire format knows are its own; everything else is off, and
    where it needs further values they are llama.cpp's (``common/common.h``).
    """

    temperature: float = 0.8
    """0 or less: always the likeliest token."""
    top_k: int = 80
    top_p: float = 0.8
    min_p: float = 0.05
    penalty_repeat: float = 1.1
    penalty_frequency: float = 0.0
    penalty_presence: float = 0.8
    penalty_last_n: int = -1
    """How many of the latest tokens are penalised; -1: as many as the context holds, 0: none."""
    seed: int | None = None
    """None: a new one for each request."""
    typical_p: float = 1.0
    """1: off."""
    dry_multiplier: float = 0.0
    """0: off. DRY penalises tokens that would go on with a repetition."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """-1: as many as the context holds."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    """0: off. XTC leaves out the likeliest tokens, now and then."""
    xtc_threshold: float = 0.1
    mirostat: Mirostat = Mirostat.OFF
    """Not off: it takes the place of all that cuts or penalises candidates, as in llama.cpp."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    """Added to the tokens' logits before all else; minus infinity forbids a token."""
    ignore_eos: bool = False
    """True: go on until ``max_tokens`` or a stop text."""


class Generate(Frame, frozen=True, kw_only=True):
    request_id: RequestId
    prompt: Prompt
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    """Texts that end the stream and are not shown."""
    constraint: Constraint | None = None
    """See also ``Conversation.constrains_content``."""
    logprobs: int | None = None
    """How many alternatives to tell with each token's log probability; None: do not tell it."""
    cache_salt: str = ""
    """Cached prompts are shared only between requests of the same salt (one for each tenant)."""
    cache_prompt: bool = True
    """Begin with what is cached of the prompt. Then its cells lie elsewhere and are summed up in
    another order, so that the same seed may give another text.
    """
    resumed: tuple[TokenId, ...] = ()
    """How the answer begins, as another agent has told already: it goes on behind them. They count
    as generated, and are not told again.
    """


class Pooling(enum.StrEnum):
    """What becomes of a document's tokens' vectors; the names are those of the published wire format."""

    UNSPECIFIED = "Unspecified"
    """As the model says."""
    NONE = "None"
    """All of them, in the order of the tokens."""
    MEAN = "Mean"
    CLS = "Cls"
    """The first one."""
    LAST = "Last"
    RANK = "Rank"
    """Not a vector but scores, from the classification head that some models have."""


class Unchanged(Frame, frozen=True):
    """Vectors as the model gives them."""


class L2(Frame, frozen=True):
    """Divided by the Euclidean norm; a vector of zeros stays one."""


class RmsNorm(Frame, frozen=True):
    """Divided by sqrt(mean of squares + ``epsilon``)."""

    epsilon: Annotated[float, msgspec.Meta(ge=0)]


Normalization: TypeAlias = Unchanged | L2 | RmsNorm


class Document(msgspec.Struct, frozen=True):
    document_id: str
    """The client's own name for it."""
    text: str
    tokens: tuple[TokenId, ...] | None = None
    """In place of the text."""


class Embed(Frame, frozen=True, kw_only=True):
    request_id: RequestId
    documents: tuple[Document, ...]
    pooling: Pooling
    normalization: Normalization = Unchanged()


class Tokenize(Frame, frozen=True, kw_only=True):
    """Answered by ``Tokenized`` or ``Failed``. Like ``Detokenize`` it needs no slot."""

    request_id: RequestId
    prompt: Conversation | RawPrompt
    adds_beginning: bool
    """To a raw prompt: the token that every prompt must start with, if the model has one."""
    template: str | None = None
    """A conversation is rendered with this one; None: with the one that is in use."""


class Detokenize(Frame, frozen=True):
    """Answered by ``Detokenized`` or ``Failed``."""

    request_id: RequestId
    tokens: tuple[TokenId, ...]


class Cancel(Frame, frozen=True):
    """Nobody reads this request any more: end it within one pass. Unknown ids are ignored."""

    request_id: RequestId


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """The model ended its turn, or a stop text appeared."""
    LENGTH = "length"
    """``max_tokens`` or the context limit was reached."""
    CANCELLED = "cancelled"


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
LONGEST_NAME = 128


class Usage(msgspec.Struct, frozen=True):
    """Counted in tokens; each generated one belongs to one class."""

    prompt_tokens: Count = 0
    cached_prompt_tokens: Count = 0
    content_tokens: Count = 0
    reasoning_tokens: Count = 0
    tool_call_tokens: Count = 0
    undeterminable_tokens: Count = 0
    input_image_tokens: Count = 0
    """Those of the prompt that stand for images."""


class TokenLogprob(msgspec.Struct, frozen=True):
    token: TokenId
    logprob: float
    """Natural logarithm, under the model's own distribution: before any sampling parameter."""
    piece: bytes


class Logprobs(msgspec.Struct, frozen=True):
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The likeliest ones, likeliest first; the chosen one need not be among them."""


class TokenClass(enum.StrEnum):
    """What a part of an answer is for."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    UNDETERMINABLE = "undeterminable"
    """The model's template asks for a format that is not known here."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of an answer, without the marks that set its class apart."""

    token_class: TokenClass
    text: str


class ToolCallsParsed(Frame, frozen=True):
    calls: tuple[ToolCall, ...]


class ToolCallsUnreadable(Frame, frozen=True):
    """The format is known, but what the model wrote does not follow it."""

    message: str


class ToolCallsInvalid(Frame, frozen=True):
    """The calls name tools that were not offered, or their arguments break the tools' schemas."""

    errors: tuple[str, ...]


class ToolCallFormatUnknown(Frame, frozen=True):
    text: str
    """All that could be a tool call, as the model wrote it."""
    message: str


ToolCallResult: TypeAlias = (
    ToolCallsParsed | ToolCallsUnreadable | ToolCallsInvalid | ToolCallFormatUnknown
)


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of a call that is being written."""

    index: Count
    """Of the call in the answer."""
    arguments: str = ""
    """The next part of their JSON text, or of what the model wrote instead."""
    call_id: str | None = None
    """This and the name are told first, and once."""
    name: str | None = None


class TokenGenerated(Frame, frozen=True):
    request_id: RequestId
    token: Annotated[TokenId, msgspec.Meta(ge=0, le=2**31 - 1)]
    segments: tuple[Segment, ...]
    """What can be shown now: whole characters only; none while they are incomplete or could become
    a stop text or a mark.
    """
    logprobs: Logprobs | None = None
    calls: tuple[ToolCallDelta, ...] = ()


class ToolCallsEnded(Frame, frozen=True):
    """A section with tool calls is over; the answer may go on."""

    request_id: RequestId
    result: ToolCallResult


class Embedded(Frame, frozen=True):
    """One document's vector; with ``Pooling.NONE`` one for each of its tokens."""

    request_id: RequestId
    document_id: str
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    values: bytes
    """Vector after vector, 32-bit floats, little endian."""
    tokens: Count = 0
    """In the document."""

    def __post_init__(self) -> None:
        if not self.values or len(self.values) % (4 * self.dimensions):
            raise ValueError("values are not whole vectors")

    @property
    def vectors(self) -> list[list[float]]:
        return [list(row) for row in struct.iter_unpack(f"<{self.dimensions}f", self.values)]


class DocumentTooLong(Frame, frozen=True):
    """One document is refused, the request goes on with the others."""

    request_id: RequestId
    document_id: str
    tokens: Count
    """At least: a text that is far too long is not tokenized to the end."""
    limit: Count


class DocumentFailed(Frame, frozen=True):
    """One document cannot be embedded, the request goes on with the others."""

    request_id: RequestId
    document_id: str
    message: str


class Finished(Frame, frozen=True):
    request_id: RequestId
    reason: FinishReason
    usage: Usage
    segments: tuple[Segment, ...] = ()
    """What was held back and turned out to be ordinary text."""
    calls: tuple[ToolCallDelta, ...] = ()


class Failed(Frame, frozen=True):
    request_id: RequestId
    code: ErrorCode
    message: str
    figures: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Those of the message; see ``RequestError``."""


class Tokenized(Frame, frozen=True):
    request_id: RequestId
    tokens: tuple[TokenId, ...]
    pieces: tuple[bytes, ...]
    """Of each token, control tokens by their names."""
    context: Count
    """How many tokens a prompt and its answer may have together."""


class Detokenized(Frame, frozen=True):
    request_id: RequestId
    text: str


class Busy(Frame, frozen=True):
    """No slot is free, or the agent must let go of what runs: bind the request elsewhere, to go on
    from what it has told of it.
    """

    request_id: RequestId


class Note(enum.StrEnum):
    """What a scheduler has decided."""

    ADMITTED = "admitted"
    """It has cells: its prompt is fed from now on, or after a pause what it had."""
    WAITS_FOR_PREFIX = "waits_for_prefix"
    """Another prompt with the same beginning is being fed."""
    WAITS_FOR_CELLS = "waits_for_cells"
    PAUSED = "paused"
    """It gave up its cells for an older request."""
    DECODE_FAILED = "decode_failed"
    """So did a pass that it took part in: it is fed again, alone."""


LONGEST_WHY = 200


class Noted(Frame, frozen=True):
    """For operators who ask what became of a request; its client is not told."""

    request_id: RequestId
    note: Note
    why: Annotated[str, msgspec.Meta(max_length=LONGEST_WHY)]
    """In words."""
    tokens: Count = 0
    """Of its prompt, if it was admitted."""
    cached: Count = 0
    """Those of them that need not be fed."""


LastEvent: TypeAlias = Finished | Failed | Busy | Tokenized | Detokenized
"""Each request has exactly one, unless the link is lost."""

Event: TypeAlias = (
    TokenGenerated | ToolCallsEnded | Embedded | DocumentTooLong | DocumentFailed | LastEvent
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent's scheduler does. Counts are since the model was loaded."""

    cells_total: Count = 0
    """KV cells; each holds one token, for all the sequences that begin with the same ones."""
    cells_running: Count = 0
    cells_cached: Count = 0
    """Held by finished requests only: they can be had for the asking."""
    prompt_tokens_fed: int = 0
    prompt_tokens_cached: int = 0
    """Not fed, since another sequence held them already."""
    pauses: int = 0
    """Requests that gave up their cells for an older one, to be fed again later."""
    waiting: Count = 0
    """Requests that hold a slot and wait for cells, or for a prefix that is being fed."""
    prefill_rate: float | None = None
    """Tokens a second of passes that only fed prompts; None: there were none."""
    decode_rate: float | None = None
    """Tokens a second of all streams together; None: nothing has been generated yet."""
    concurrency: float | None = None
    """Streams that generate in one pass, on average."""
    step_seconds: float | None = None
    """That a pass took of late, on average; None: there was none."""
    step_tokens: float | None = None
    """That were fed in a pass of late, on average: those of prompts, and one for each stream."""

    @property
    def cells_free(self) -> int:
        return self.cells_total - self.cells_running - self.cells_cached


class Status(Frame, frozen=True, kw_only=True):
    """What an agent is and does. Sent on change; one with an older ``version`` is ignored."""

    version: int
    slots_desired: Count
    slots_total: Count
    """0 until the model is loaded."""
    slots_processing: Count
    slots_elsewhere: Count = 0
    """Those that requests from other links have, or are being offered."""
    draining: bool = False
    """No new requests, please; those that run will be finished."""
    leaving: bool = False
    """It was asked to go, and will."""
    held: bool = False
    """An operator drained it: it stays, and takes nothing new until that is taken back."""
    swapping: bool = False
    """It will serve again as soon as it has another model, or this one anew."""
    awaits_turn: bool = False
    turn_taken: int = 0
    """The newest turn that came over this link and is over."""
    application: Application = Application.FRESH
    applied: int = 0
    """The number of the state that is served; 0: none, or a model that is not the others'."""
    model_path: str | None = None
    model_names: tuple[str, ...] = ()
    """What clients may call the model by; see ``names``."""
    uses_chat_template_override: bool = False
    output_format: str = ""
    """How the model's reasoning and tool calls are told apart."""
    download: Download | None = None
    issues: tuple[AgentIssue, ...] = ()
    figures: Figures = Figures()
    step_age: float | None = None
    """Seconds since the pass that runs now began or got on; None: nothing is to be done."""
    step_limit: float | None = None
    """What ``step_age`` may be at most, unless the agent hangs."""
    fingerprint: str = ""
    """Agents that have the same one can go on with each other's answers; empty: nobody can."""
    phase: Phase = Phase.PROCESS
    phases: dict[Phase, float] = msgspec.field(default_factory=dict[Phase, float])
    """Of its start, those that are over, in seconds."""


class Join(Frame, frozen=True, kw_only=True):
    """The first frame of a link."""

    protocol: int
    agent_id: Annotated[AgentId, msgspec.Meta(min_length=1, max_length=128)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)] | None
    status: Status
    labels: tuple[str, ...] = ()
    fleet: str | None = None
    """Whose it is; None: it was started by hand."""


class Step(Frame, frozen=True):
    """All that one pass of the model brought forth, for every request that took part."""

    events: tuple[Event, ...]


class Described(Frame, frozen=True):
    """The model that an agent has loaded. Sent after ``Join`` and on change."""

    metadata: dict[str, str] | None
    """Of the model's file; None: there is no model."""
    chat_template_override: str | None
    context: Count = 0
    """How many tokens a prompt and its answer may have together; 0: there is no model."""


class SetState(Frame, frozen=True):
    number: int
    """Of this wish, the same from every balancer, and greater the newer it is; told back once it is
    applied.
    """
    state: AgentDesiredState


class Swap(Frame, frozen=True):
    turn: int


class Drain(Frame, frozen=True):
    """Take nothing new, and let what runs come to its end; stay."""


class Undrain(Frame, frozen=True):
    """Take requests again."""


ToAgent: TypeAlias = (
    Generate | Embed | Tokenize | Detokenize | Cancel | SetState | Swap | Drain | Undrain
)
ToBalancer: TypeAlias = Join | Status | Described | Step | Noted

encode = msgspec.msgpack.encode
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_to_balancer = msgspec.msgpack.Decoder(ToBalancer)


def decode_to_agent(data: bytes | str) -> ToAgent:
    """Raises ``msgspec.MsgspecError`` if it is no frame for an agent."""
    return _decode(_to_agent, data)


def decode_to_balancer(data: bytes | str) -> ToBalancer:
    """Raises ``msgspec.MsgspecError`` if it is no frame for the balancer."""
    return _decode(_to_balancer, data)


FrameT = TypeVar("FrameT")


def _decode(decoder: msgspec.msgpack.Decoder[FrameT], data: bytes | str) -> FrameT:
    if isinstance(data, str):
        raise msgspec.DecodeError("frames are binary messages")
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec does not map these itself
        raise msgspec.DecodeError(str(error)) from error
