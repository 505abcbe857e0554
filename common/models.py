"""Models in the words of both sides: which one, how it is run, and what can be wrong with it."""

import enum
from typing import Annotated, Any, TypeAlias, assert_never

import msgspec
from msgspec.structs import asdict

from common.frame import Frame


class NoModel(Frame, frozen=True):
    """Nothing is to be loaded."""


class LocalModel(Frame, frozen=True):
    """A file on the agent's machine."""

    path: str


class HuggingFaceModel(Frame, frozen=True):
    repo_id: str
    filename: str
    revision: str


class UrlModel(Frame, frozen=True):
    url: str
    sha256: str | None = None
    """Lower-case hexadecimal digits; None: only the size is checked."""


ModelReference: TypeAlias = NoModel | LocalModel | HuggingFaceModel | UrlModel


def names(reference: ModelReference) -> frozenset[str]:
    """What clients may call the model by: its file's name, with and without its ending, and where
    there is one its repository's.
    """
    match reference:
        case NoModel():
            return frozenset()
        case LocalModel(path):
            told = [path.replace("\\", "/")]
        case UrlModel(url):
            told = [url.partition("?")[0].partition("#")[0]]
        case HuggingFaceModel(repo_id, filename):
            told = [filename, repo_id]
        case _:
            assert_never(reference)
    file_name = told[0].rpartition("/")[2]
    return frozenset([*told[1:], file_name, file_name.removesuffix(".gguf")])


class Download(msgspec.Struct, frozen=True):
    """A file that is being fetched. In bytes."""

    filename: str
    current: int
    total: int | None
    """None: the server does not tell."""


class IssueKind(enum.StrEnum):
    """What keeps an agent from serving what it should; named as in the published wire format."""

    CACHE_CANNOT_ACQUIRE_LOCK = "CacheCannotAcquireLock"
    CACHE_DIRECTORY_IS_NOT_WRITABLE = "CacheDirectoryIsNotWritable"
    CACHE_STORAGE_IS_FULL = "CacheStorageIsFull"
    CHAT_TEMPLATE_DOES_NOT_COMPILE = "ChatTemplateDoesNotCompile"
    DOWNLOAD_INTERRUPTED = "DownloadInterrupted"
    DOWNLOAD_SERVER_DENIED_ACCESS = "DownloadServerDeniedAccess"
    DOWNLOAD_SERVER_ERRORED = "DownloadServerErrored"
    DOWNLOAD_SERVER_IS_UNREACHABLE = "DownloadServerIsUnreachable"
    DOWNLOAD_SERVER_REJECTED_REQUEST = "DownloadServerRejectedRequest"
    DOWNLOAD_URL_IS_MALFORMED = "DownloadUrlIsMalformed"
    HUGGING_FACE_CANNOT_ACQUIRE_LOCK = "HuggingFaceCannotAcquireLock"
    HUGGING_FACE_MODEL_DOES_NOT_EXIST = "HuggingFaceModelDoesNotExist"
    HUGGING_FACE_PERMISSIONS = "HuggingFacePermissions"
    MODEL_CACHE_IS_CORRUPTED = "ModelCacheIsCorrupted"
    MODEL_CANNOT_BE_LOADED = "ModelCannotBeLoaded"
    MODEL_DOES_NOT_EXIST_AT_URL = "ModelDoesNotExistAtUrl"
    MODEL_FILE_DOES_NOT_EXIST = "ModelFileDoesNotExist"
    MULTIMODAL_PROJECTION_CANNOT_BE_LOADED = "MultimodalProjectionCannotBeLoaded"
    SLOT_CANNOT_START = "SlotCannotStart"
    UNABLE_TO_FIND_CHAT_TEMPLATE = "UnableToFindChatTemplate"


class AgentIssue(msgspec.Struct, frozen=True):
    kind: IssueKind
    model_path: str
    """The file, or the reference as an operator would write it."""
    detail: str = ""
    """What happened, in words."""
    lock_path: str = ""
    """Of ``HUGGING_FACE_CANNOT_ACQUIRE_LOCK``."""
    template: str = ""
    """Of ``CHAT_TEMPLATE_DOES_NOT_COMPILE``."""


class CacheType(enum.StrEnum):
    """Of keys or values in the KV cache; the names are those of the published wire format."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    IQ4_NL = "IQ4_NL"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"


class FlashAttention(enum.StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class KvLayout(enum.StrEnum):
    """How the KV cache is cut up."""

    UNIFIED = "unified"
    """All sequences share all cells: prefixes are shared without a copy."""
    SEPARATE = "separate"
    """Each sequence has its own ``context`` cells: what is shared is copied, and memory is needed
    for every sequence; attention never looks at other sequences' cells.
    """


class Phase(enum.StrEnum):
    """What an agent of a fleet does until it serves, and then."""

    NODE = "node"
    """It waits for a node with room for it."""
    PROCESS = "process"
    """Its process starts, and dials the balancer."""
    DOWNLOAD = "download"
    """Its model's files are found, fetched and checked."""
    LOAD = "load"
    WARM_UP = "warm_up"
    READY = "ready"
    DRAINING = "draining"
    """It was asked to go, and finishes what runs."""


class EngineChoices(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is run. None: as somebody else says, in the end the engine itself."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    context_size: int | None = None
    """Tokens that one request can have, prompt and answer; 0: as many as the model knows."""
    n_batch: int | None = None
    """Tokens in one embedding batch, in one document and in one piece of an image, at most."""
    n_gpu_layers: int | None = None
    """0: none, -1: all."""
    threads: int | None = None
    tensor_split: tuple[float, ...] | None = None
    """The part of the model that each GPU gets."""
    main_gpu: int | None = None
    flash_attention: FlashAttention | None = None
    k_cache_dtype: CacheType | None = None
    v_cache_dtype: CacheType | None = None

    @classmethod
    def merged(cls, *choices: "EngineChoices") -> "EngineChoices":
        """Of each, what the first one says that says something."""
        said: dict[str, Any] = {}
        for each in reversed(choices):
            said |= {name: value for name, value in asdict(each).items() if value is not None}
        return cls(**said)


class AgentDesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent is to run."""

    model: ModelReference = NoModel()
    multimodal_projection: ModelReference = NoModel()
    chat_template: str | None = None
    """In place of the model's own."""
    embeddings_only: bool = False
    """Then a model without a chat template is nothing to complain about."""
    choices: EngineChoices = EngineChoices()
    """For all agents; what an agent was told when it was started goes before them."""
    overrides: EngineChoices = EngineChoices()
    """For this agent; they go before all others."""


class Application(enum.StrEnum):
    """How far an agent is with its desired state; the names are those of the published format."""

    FRESH = "Fresh"
    APPLIED = "Applied"
    RETRYING = "AttemptedAndRetrying"
    STUCK = "Stuck"
    """It will not be tried again before something changes."""
