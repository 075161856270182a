"""A sample inside the engine: its tokens, how many of them are in the KV cache, and its state.

Invariants:
- `tokens` is prompt and response so far; keys and values of the first `kv_length` of them are in the cache;
- a running sequence decodes when only its last token is missing from the cache; it prefills while more are missing;
- `BatchScheduler` makes every transition between states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from april.engines.embedded.length_bucket import RowOwner
from april.engines.embedded.route_log import SequenceRoutes
from april.engines.embedded.uniforms import UniformStream
from april.rollout.engine import Chunk
from april.rollout.sampling import FinishReason, SamplingParams
from april.rollout.trajectory.features import Feature, alike
from april.rollout.trajectory.sample import Sample


class State(Enum):
    WAITING = "waiting"
    """In the queue. A sequence that was paused before may still have its row."""
    RUNNING = "running"
    """Part of the batch: prefilling, decoding, or waiting for the prompt of its `prefix_owner`."""
    PAUSED = "paused"
    """Interrupted, or between two turns of an episode. It keeps its row until another sequence needs the memory."""
    FINISHED = "finished"
    """The response has ended, and the last tokens are handed out by the next `poll`."""


@dataclass(slots=True, eq=False)
class Sequence(RowOwner):
    """A sample that the engine works on or may continue.

    Args:
        limit: prompt and response tokens at which the response is truncated.
        stop_token_ids: tokens that end the response.
        kv_epoch: number of weight updates before its first keys and values were computed.
        prefix_owner: running sequence with the same prompt, whose keys and values this one copies once they are there.
        pending_logprobs: log-probabilities of the last tokens, which were not handed out yet.
        draft: tokens that the next forward pass verifies.
        old_tokens: prompt and response under older weights. Drafts come from it as long as the response repeats it;
            then it is emptied.
        routes: routes of the consumed tokens, with router replay.
        features: images of prompt and response.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: list[int]
    sampling: SamplingParams
    limit: int
    stop_token_ids: frozenset[int]
    uniforms: UniformStream
    state: State = State.WAITING
    kv_epoch: int = -1
    prefix_owner: Sequence | None = None
    pending_logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    draft: list[int] = field(default_factory=list)
    old_tokens: list[int] = field(default_factory=list)
    routes: SequenceRoutes | None = None
    features: tuple[Feature, ...] = ()

    @classmethod
    def of(cls, sample: Sample, tokens: list[int], limit: int, stop_token_ids: frozenset[int]) -> Sequence:
        return cls(
            sample.id,
            sample.prompt_ids,
            tokens,
            sample.sampling,
            limit,
            stop_token_ids,
            UniformStream(sample.seed, len(tokens) - len(sample.prompt_ids)),
            old_tokens=[*sample.prompt_ids, *sample.draft] if sample.follows_draft else [],
            features=sample.features,
        )

    @property
    def prefix(self) -> tuple[Any, ...]:
        """What keys and values of the prompt depend on: equal ids may stand for different images."""
        images = tuple(feature.digest for feature in self.features if feature.end <= len(self.prompt))
        return (self.prompt, *images) if images else self.prompt

    def common_prefix(self, other: Sequence, longest: int) -> int:
        """Return how many tokens, with their images, both sequences begin with, at most `longest`."""
        if self.tokens != other.tokens:
            longest = next((i for i in range(longest) if self.tokens[i] != other.tokens[i]), longest)
        return alike(self.features, other.features, longest)

    def lose_cache(self) -> None:
        """Forget keys and values, and the row, of a cache that is given up as a whole."""
        self.kv_length, self.bucket, self.row = 0, None, -1
        self.prefix_owner, self.draft = None, []

    @property
    def row_length(self) -> int:
        """Tokens that a row must hold for the next passes."""
        # A draft ends where the row ends, so a sequence with old tokens gets a row for all of them at once.
        return max(len(self.tokens), min(len(self.old_tokens), self.limit - 1))

    @property
    def missing(self) -> int:
        """Tokens whose keys and values are not in the cache; the forward pass that computes the last one samples."""
        return len(self.tokens) - self.kv_length

    @property
    def room(self) -> int:
        """Tokens behind the next one that the row has room for; negative if the next one does not fit."""
        assert self.bucket is not None
        return self.bucket.length - self.kv_length - 1

    @property
    def budget_left(self) -> int:
        """Tokens behind the next one that the limit allows."""
        return self.limit - len(self.tokens) - 1

    def propose_draft(self, most: int) -> int:
        """Draft at most `most` tokens of the response under older weights; return their number."""
        begin = len(self.tokens)
        self.draft = self.old_tokens[begin : begin + min(self.room, self.budget_left, most)]
        return len(self.draft)

    def append(self, token: int, logprob: float) -> None:
        """Append the token drawn at the next position, and finish if it ends the response."""
        # The pass that drew this token has computed keys and values of all tokens before it.
        length = self.kv_length = len(self.tokens)
        self.tokens.append(token)
        self.pending_logprobs.append(logprob)
        self.uniforms.skip(1)
        if token in self.stop_token_ids:
            self.finish = FinishReason.STOP
        elif length + 1 == self.limit:
            self.finish = FinishReason.LENGTH

    def accept(self, tokens: list[int], logprobs: list[float]) -> None:
        """Append the tokens drawn at the next position and behind each drafted one, up to the first that differs from
        the draft or ends the response."""
        begin, draft, self.draft = len(self.tokens), self.draft, []
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            self.append(token, logprob)
            # Keys and values behind a rejected token stay in the row until later passes overwrite them.
            if self.finish is not None or draft[place : place + 1] != [token]:
                break
        end = len(self.tokens)
        if end >= len(self.old_tokens) or self.tokens[begin:] != self.old_tokens[begin:end]:
            self.old_tokens = []

    def take_chunk(self, version: int) -> Chunk:
        """Return the tokens sampled since the last call."""
        logprobs, self.pending_logprobs = self.pending_logprobs, []
        chunk = Chunk(self.id, self.tokens[-len(logprobs) :], logprobs, version, self.finish)
        return chunk if self.routes is None else chunk._replace(routes=self.routes.take())
