"""How the next token is chosen: llama.cpp's own samplers, shown only the tokens that can win.

llama.cpp copies the whole vocabulary into an array of candidates for each token and sorts in it.
Here numpy finds first which tokens can come out at all: those that a penalty changes, and the
likeliest of the others. The chain of samplers gets these alone and picks the same token.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from agent.constraint import Allowed, ConstraintCompiler, Matcher
from agent.engine import Guidance
from agent.llama_candidates import (
    Candidates,
    Ids,
    Row,
    largest_and,
    largest_of,
    likeliest_of,
    likely_and,
    lower_bound,
)
from agent.llama_chain import Chain, check_sampling, is_attachable, refuse
from agent.llama_library import LlamaVocabulary, lib
from common.errors import ErrorCode, RequestError
from common.ids import TokenId
from common.messages import Logprobs, Sampling, TokenLogprob


class LlamaSamplers:
    """Makes the samplers of a loaded model, which must outlive them."""

    def __init__(
        self, model_handle: Any, vocabulary: LlamaVocabulary, *, context: int, attach: bool = False
    ) -> None:
        """``context``: tokens of one sequence at most. ``attach``: make samplers for llama.cpp to
        apply itself, as a part of its computation, where it has all that they need.
        """
        self._attach = attach
        self._vocab: Any = lib.llama_model_get_vocab(model_handle)
        self._vocabulary = vocabulary
        self._context = context
        self._ends = vocabulary.ends()
        self._suppressed = vocabulary.suppressed()
        self._candidates = Candidates(vocabulary.size)
        self._constraints = ConstraintCompiler(
            vocabulary.pieces,
            tokenize=vocabulary.tokenize,
            ends=self._ends,
            control=vocabulary.control(),
        )

    def make(
        self,
        prompt: Sequence[TokenId],
        sampling: Sampling,
        constraint: Guidance | None,
        logprobs: int | None,
        resumed: Sequence[TokenId] = (),
    ) -> "LlamaSampler":
        """A sampler for one request; may be called on any thread, and may take a while.

        ``resumed``: how the answer begins. What follows has the same distribution as if it had been
        drawn here; only Mirostat begins anew to find its way.

        Raises ``RequestError``: ``INVALID_REQUEST`` for what llama.cpp would not survive or would
        cut off in silence, ``INVALID_GRAMMAR``, ``INVALID_SCHEMA`` or ``INVALID_TOOL_SCHEMA`` with the cause.
        """
        check_sampling(sampling, self._vocabulary.size)
        if logprobs is not None and logprobs < 0:
            refuse("logprobs must not be negative")
        matcher = self._matcher(constraint)
        if resumed:
            sampling = _go_on_drawing(sampling, len(resumed))
        if matcher is not None:
            for token in resumed:
                matcher.accept(token)
        bias = self._bias(sampling)
        attached = self._attach and matcher is None and logprobs is None and is_attachable(sampling)
        return LlamaSampler(
            Chain(
                self._vocab,
                sampling,
                size=self._vocabulary.size,
                context=self._context,
                bias=bias if attached else {},
            ),
            [*prompt, *resumed],
            bias=bias,
            attached=attached,
            matcher=matcher,
            logprobs=logprobs,
            vocabulary=self._vocabulary,
            ends=self._ends,
            candidates=self._candidates,
        )

    def _bias(self, sampling: Sampling) -> dict[TokenId, float]:
        bias: dict[TokenId, float] = {}
        for token, value in sampling.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        never = (*self._suppressed, *(self._ends if sampling.ignore_eos else ()))
        return bias | dict.fromkeys(never, -math.inf)

    def _matcher(self, constraint: Guidance | None) -> Matcher | None:
        if constraint is None:
            return None
        if not self._ends:
            raise RequestError(
                ErrorCode.NOT_SUPPORTED,
                "the model has no token that could end a constrained answer",
            )
        return self._constraints.compile(constraint)


def _go_on_drawing(sampling: Sampling, drawn: int) -> Sampling:
    """With a seed of its own, else the random numbers of the first tokens would come again."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + drawn)


class LlamaSampler:
    """Chooses the tokens of one request. It remembers those it chose, and the end of the prompt.

    Used by one thread at a time, and all samplers of one model by the same one: they share their
    working memory.
    """

    def __init__(
        self,
        chain: Chain,
        prompt: Sequence[TokenId],
        *,
        bias: dict[TokenId, float],
        attached: bool,
        matcher: Matcher | None,
        logprobs: int | None,
        vocabulary: LlamaVocabulary,
        ends: Sequence[TokenId],
        candidates: Candidates,
    ) -> None:
        self.chain: Any = chain.handle
        self._close = chain.close
        self._plan = chain
        self._biased: Ids = np.fromiter(bias, dtype=np.intp)
        self._bias = np.fromiter(bias.values(), dtype=np.float32)
        self._forbids = bool(np.isneginf(self._bias).any())
        self._matcher = matcher
        self._logprobs = logprobs
        self.tells_logprobs = logprobs is not None
        """Has the request asked for ``logprobs``?"""
        self._vocabulary = vocabulary
        self._ends = ends
        self._candidates = candidates
        self._penalised = _Recent(chain.memory)
        self.attached = attached
        """llama.cpp applies the chain itself (``llama_set_sampler``, ``llama_sampler_sample``):
        ``sample`` is not to be called, and the chain must be detached before this object goes.
        """
        if chain.memory:
            for token in prompt[-chain.memory :]:
                if 0 <= token < vocabulary.size:
                    self._remember(token)

    def sample(self, logits: Row) -> TokenId:
        """Choose the next token. The row is as before afterwards.

        Raises ``RequestError``: ``GRAMMAR_REJECTED`` if the constraint leaves nothing to choose,
        ``DECODE_FAILED`` if the logits are no numbers.
        """
        if not self._biased.size:
            return self._sample(logits)
        plain = logits[self._biased]
        logits[self._biased] = plain + self._bias
        try:
            return self._sample(logits)
        finally:
            logits[self._biased] = plain

    def _sample(self, logits: Row) -> TokenId:
        token = self._draw(logits, sparse=self._forbids)
        if token is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "logit_bias forbids all tokens")
        matcher = self._matcher
        if matcher is not None:
            if not matcher.allows(token):
                token = self._draw_allowed(logits, matcher.allowed())
            matcher.accept(token)
        if self._plan.memory:
            self._remember(token)
        return token

    def logprobs(self, logits: Row, token: TokenId) -> Logprobs:
        """What the model itself thought of the token, and of the likeliest ones."""
        count = min(self._logprobs or 0, logits.size)
        largest = largest_of(logits)
        total = largest + math.log(float(np.exp(logits - largest).sum(dtype=np.float64)))
        top: Ids = np.empty(0, dtype=np.intp)
        if count:
            found = np.flatnonzero(logits >= lower_bound(logits, count))
            top = found[np.argsort(-logits[found], kind="stable")][:count]

        def tell(token: TokenId) -> TokenLogprob:
            piece = self._vocabulary.piece(token)
            return TokenLogprob(token, float(logits[token]) - total, piece)

        return Logprobs(tell(token), tuple(tell(TokenId(int(t))) for t in top))

    def close(self) -> None:
        """Free the chain now. Happens by itself when the object goes."""
        self._close()
        self.chain = None

    def _remember(self, token: TokenId) -> None:
        lib.llama_sampler_accept(self.chain, token)
        self._penalised.add(token)

    def _draw_allowed(self, logits: Row, allowed: Allowed) -> TokenId:
        """Draw again, from what the constraint allows: as llama.cpp does it, so a new random number."""
        ends = [token for token in self._ends if allowed[token]]
        if ends and np.count_nonzero(allowed) == len(ends):
            # Nothing can follow, so the answer ends, even if it was not to end (``ignore_eos``).
            return max(ends, key=lambda token: logits[token])
        token = self._draw(np.where(allowed, logits, np.float32(-np.inf)), sparse=True)
        if token is None or not allowed[token]:
            raise RequestError(
                ErrorCode.GRAMMAR_REJECTED,
                "no token that the grammar allows can follow"
                if not allowed.any()
                else "logit_bias forbids all tokens that the grammar allows here",
            )
        return token

    def _draw(self, logits: Row, *, sparse: bool) -> TokenId | None:
        """One token; None if all logits are minus infinity.

        ``sparse``: there may be such logits, and they are to be left out.
        """
        plan, penalised = self._plan, self._penalised.tokens
        if plan.greedy:
            likeliest = likeliest_of(logits, penalised)
            if not penalised.size:
                return likeliest if logits[likeliest] > -np.inf else None
            found = np.append(penalised, likeliest)
            found.sort()  # of equals, the first one wins
        elif plan.largest_only:
            found = largest_and(logits, penalised, count=plan.largest_only)
        elif plan.least_ratio:
            found = likely_and(logits, penalised, least=plan.least_ratio)
        elif sparse:
            found = np.flatnonzero(logits > -np.inf)
            largest_of(logits)
        else:
            largest_of(logits)
            return self._candidates.pick_from_all(self.chain, logits)
        values = logits[found]
        if sparse:
            possible = values > -np.inf
            found, values = found[possible], values[possible]
        if not found.size:
            return None
        largest_of(values)
        return self._candidates.pick(self.chain, found, values)


class _Recent:
    """The distinct tokens among the latest ones; for a while also some that are not any more."""

    def __init__(self, length: int) -> None:
        self._latest = deque[TokenId](maxlen=length)
        self._known: set[TokenId] = set()
        self._array: Ids = np.empty(64, dtype=np.intp)
        self._clean_at = 0
        self.tokens = self._array[:0]

    def add(self, token: TokenId) -> None:
        self._latest.append(token)
        if token in self._known:
            return
        if len(self._known) >= self._clean_at:
            self._known = set(self._latest)
            self._clean_at = 2 * len(self._known) + 256
            self._array = np.empty(self._clean_at + 1, dtype=np.intp)
            self._array[: len(self._known)] = list(self._known)
        else:
            self._array[len(self._known)] = token
            self._known.add(token)
        self.tokens = self._array[: len(self._known)]
