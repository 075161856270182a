"""One sample as the engine sees it: its tokens, how many of them are in the KV cache, and where.

Invariants:
- `tokens` is prompt and response so far; keys and values of the first `kv_length` of them are in the cache;
- a sequence decodes when only its last token is missing from the cache; it prefills while more are missing;
- uniform number i of a sample is a function of (seed, i) alone, i being the index of the response token it draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from april.engines.embedded.kv_cache import Resident
from april.rollout.engine import Chunk
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory import Sample

_BLOCK = 64
_WORDS_PER_COUNTER = 4


def uniforms(seed: int, start: int = 0) -> Iterator[float]:
    """Uniform numbers in [0, 1) number `start`, `start` + 1, ... of the stream that `seed` names.

    Philox-4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the counter is the index, so the
    stream can be entered anywhere.
    """
    counter, skip = divmod(start, _WORDS_PER_COUNTER)
    generator = np.random.Generator(np.random.Philox(key=seed & (2**128 - 1), counter=counter))
    generator.random(skip)
    while True:
        yield from generator.random(_BLOCK).tolist()


@dataclass(slots=True, eq=False)
class Sequence(Resident):
    """A sample that is waiting, running or parked.

    Args:
        limit: prompt and response tokens at which the response is truncated.
        kv_epoch: the engine's count of weight updates when its first keys and values were computed.
        leader: sequence with the same prompt that is being prefilled, and whose keys and values this one waits for.
        pending: log-probabilities of the last tokens, which were not handed out yet.
        ahead: uniform numbers of the next tokens, which were looked at and not used yet.
        draft: tokens that the next pass verifies.
        replay: prompt and response under older weights, which are drafts as long as the response is the same; then
            empty.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    limit: int
    stop: frozenset[int]
    uniforms: Iterator[float]
    kv_epoch: int = -1
    leader: Sequence | None = None
    pending: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    ahead: list[float] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    replay: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, sample: Sample, tokens: list[int], limit: int, stop: frozenset[int]) -> Sequence:
        return cls(
            sample.id,
            sample.prompt_ids,
            tokens,
            sample.sampling,
            sample.seed,
            limit,
            stop,
            uniforms(sample.seed, len(tokens) - len(sample.prompt_ids)),
            replay=[*sample.prompt_ids, *sample.draft] if sample.follows_draft else [],
        )

    def resume(self, other: Sequence) -> None:
        """Become `other`, keeping the keys and values of the tokens that both begin with."""
        shared = min(self.kv_length, len(other.tokens) - 1)
        if self.tokens != other.tokens:
            shared = next((i for i in range(shared) if self.tokens[i] != other.tokens[i]), shared)
        self.kv_length = shared
        self.prompt, self.tokens, self.limit = other.prompt, other.tokens, other.limit
        self.sampling, self.stop = other.sampling, other.stop
        self.seed, self.uniforms, self.ahead = other.seed, other.uniforms, other.ahead
        self.draft, self.replay = [], other.replay
        self.finish = None

    def lose_cache(self) -> None:
        """Forget keys and values, and the row, of a cache that is given up as a whole."""
        self.kv_length, self.tier, self.row = 0, None, -1
        self.leader, self.draft = None, []

    @property
    def longest(self) -> int:
        """Tokens that a row has to hold for the next passes."""
        return max(len(self.tokens), min(len(self.replay), self.limit - 1))

    @property
    def missing(self) -> int:
        """Tokens whose keys and values are not in the cache; the forward pass that computes the last one samples."""
        return len(self.tokens) - self.kv_length

    @property
    def room(self) -> int:
        """Tokens behind the next one that the row has room for."""
        assert self.tier is not None
        return self.tier.length - self.kv_length - 1

    @property
    def left(self) -> int:
        """Tokens behind the next one that the budget allows."""
        return self.limit - len(self.tokens) - 1

    def number(self) -> float:
        """The uniform number that the next token is drawn with, where nothing is drafted."""
        return self.ahead.pop(0) if self.ahead else next(self.uniforms)

    def numbers(self) -> list[float]:
        """The uniform numbers that the next token and the drafted ones behind it are drawn with."""
        while len(self.ahead) <= len(self.draft):
            self.ahead.append(next(self.uniforms))
        return self.ahead[: len(self.draft) + 1]

    def append(self, token: int, logprob: float) -> None:
        """Append what was drawn at the next position, and finish if that ends the response."""
        length = self.kv_length = len(self.tokens)
        self.tokens.append(token)
        self.pending.append(logprob)
        if token in self.stop:
            self.finish = FinishReason.STOP
        elif length + 1 == self.limit:
            self.finish = FinishReason.LENGTH

    def verify(self, drawn: Iterable[tuple[int, float]]) -> None:
        """Append the tokens drawn at the next position and at the drafted ones, up to the first that differs from the
        draft or ends the response."""
        count = 0
        for token, logprob in drawn:
            self.append(token, logprob)
            count += 1
            if self.finish is not None or (count <= len(self.draft) and token != self.draft[count - 1]):
                break
        end = len(self.tokens)
        if self.replay and (end >= len(self.replay) or self.tokens[end - count :] != self.replay[end - count : end]):
            self.replay = []
        del self.ahead[:count]
        self.draft = []

    def take(self, version: int) -> Chunk:
        """What was sampled since the last time."""
        logprobs, self.pending = self.pending, []
        return Chunk(self.id, self.tokens[-len(logprobs) :], logprobs, version, self.finish)
