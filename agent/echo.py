"""An engine without a model, for tests and demonstrations: it says the prompt back, then ends.

Its tokens are the bytes of UTF-8, so that it also shows how characters are put together again.
No I/O here.
"""

from collections.abc import Mapping, Sequence

from agent.engine import Chunk
from common.ids import SequenceId, TokenId
from common.messages import Sampling

END = TokenId(256)

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class ByteVocabulary:
    beginning: TokenId | None = None
    longest_piece = 1
    special_texts: Mapping[str, str] = {"bos_token": "", "eos_token": "", "nl_token": "\n"}

    def tokenize(self, text: str) -> list[TokenId]:
        return [TokenId(byte) for byte in text.encode()]

    def piece(self, token: TokenId) -> bytes:
        return b"" if token == END else bytes([token])

    def is_end(self, token: TokenId) -> bool:
        return token == END


class EchoEngine:
    def __init__(self, *, slots: int, context: int) -> None:
        self.vocabulary = ByteVocabulary()
        self.chat_template: str | None = CHAT_TEMPLATE
        self.slots = slots
        self.context = context
        self.batch_size = 512
        self._prompts: dict[SequenceId, Sequence[TokenId]] = {}
        self._fed: dict[SequenceId, int] = {}

    def start(
        self, sequence_id: SequenceId, prompt: Sequence[TokenId], sampling: Sampling, /
    ) -> None:
        assert sequence_id not in self._prompts, "the sequence was not forgotten"
        self._prompts[sequence_id] = prompt
        self._fed[sequence_id] = 0

    def decode(self, chunks: Sequence[Chunk], /) -> Mapping[SequenceId, TokenId]:
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.batch_size
        sampled: dict[SequenceId, TokenId] = {}
        for chunk in chunks:
            assert chunk.position == self._fed[chunk.sequence_id], "positions must not skip"
            self._fed[chunk.sequence_id] += len(chunk.tokens)
            if chunk.wants_token:
                prompt = self._prompts[chunk.sequence_id]
                said = self._fed[chunk.sequence_id] - len(prompt)
                sampled[chunk.sequence_id] = prompt[said] if said < len(prompt) else END
        return sampled

    def forget(self, sequence_id: SequenceId, /) -> None:
        self._prompts.pop(sequence_id, None)
        self._fed.pop(sequence_id, None)

    def close(self) -> None:
        self._prompts.clear()
