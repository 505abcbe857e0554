"""Engines that do what a test needs."""

import threading
from collections.abc import Callable, Sequence

from agent.echo import ByteVocabulary, EchoEngine
from agent.engine import Chunk, Decoded, Engine, ImageRun, MixedPrompt, Picture
from agent.swap import Setup
from common.errors import DecodeError
from common.ids import TokenId
from common.models import Download, HuggingFaceModel, LocalModel, UrlModel
from common.references import describe


class HeldEngine(EchoEngine):
    """Decodes only when the test lets it: ``allow(passes)``, or for good with ``open()``."""

    def __init__(self, *, slots: int = 2, context: int = 256) -> None:
        super().__init__(slots=slots, context=context)
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self.is_used = threading.Event()
        """A pass has begun."""
        self.failures = 0
        """How many of the next decodes fail."""

    def allow(self, passes: int = 1) -> None:
        self._allowed.release(passes)

    def open(self) -> None:
        self._is_open = True
        self._allowed.release()

    def decode(self, chunks: Sequence[Chunk], /) -> Decoded:
        self.is_used.set()
        if not self._is_open:
            self._allowed.acquire()
        if self.failures > 0:
            self.failures -= 1
            raise DecodeError("told to fail")
        return super().decode(chunks)


class OneModel:
    """The files and models of an agent that has this engine and no other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(
        self,
        reference: LocalModel | HuggingFaceModel | UrlModel,
        /,
        *,
        progress: Callable[[Download | None], None],
        stop: threading.Event,
    ) -> str:
        return describe(reference)

    def check(self, setup: Setup, /) -> None:
        pass

    def load(self, setup: Setup, warms_up: Callable[[], None], /) -> Engine:
        return self._engine


class HeldVision:
    """Every image is one of four tokens, and is encoded only when the test lets it."""

    longest_run = 4

    def __init__(self) -> None:
        self.is_used = threading.Event()
        self.may_go_on = threading.Event()
        self.encoded = 0

    def read(
        self,
        texts: Sequence[str],
        pictures: Sequence[Picture],
        *,
        proceed: Callable[[int], None],
    ) -> MixedPrompt:
        count = sum(map(len, texts)) + 4 * len(pictures)
        tokens: list[TokenId] = []
        runs: list[ImageRun] = []
        for n, text in enumerate(texts):
            tokens += ByteVocabulary().tokenize(text)
            if n < len(pictures):
                proceed(count)
                self.is_used.set()
                self.may_go_on.wait()
                self.encoded += 1
                runs.append(ImageRun(len(tokens), 4, pictures[n]))
                tokens += (TokenId(-1 - at) for at in range(4))
        return MixedPrompt(tokens, tuple(runs))


class HeldVocabulary(ByteVocabulary):
    """Tokenizes only when the test lets it."""

    def __init__(self) -> None:
        self.is_used = threading.Event()
        self.may_go_on = threading.Event()
        self.texts: list[str] = []

    def tokenize(self, text: str) -> list[TokenId]:
        self.texts.append(text)
        self.is_used.set()
        self.may_go_on.wait()
        return super().tokenize(text)
