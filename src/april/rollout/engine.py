"""The engine protocol: the core's interface to inference engines.

An engine is a multiplexed stream: `submit` adds samples, and `poll` returns the tokens sampled for any of them as a
batch of chunks. The scheduler owns each token as it arrives, so an abort, a dead server or a cut connection loses no
sampled token.

Invariants every engine keeps:
- every sampled token is returned exactly once, by `poll` or by `interrupt`, in order within its sample;
- after `interrupt` returns, nothing runs for the named samples, and every other sample is unaffected;
- a cancelled `poll` loses nothing: the next `poll` returns its chunks;
- a cancelled `interrupt` loses no token. It may have stopped some of its samples, so the caller has to repeat it: until
  then, nothing may be returned for them;
- a `poll` that waits while samples are interrupted continues to wait for the other samples, and returns once there are
  none;
- an engine only reads a sample, and only inside `submit`: the scheduler appends the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from april.rollout.sampling import FinishReason
from april.rollout.trajectory.routes import RouteRows
from april.rollout.trajectory.sample import Sample

KVPolicy = Literal["recompute", "keep", "redraft"]
"""Treatment of an unfinished sample at a weight update; the values of the setting `engine.on_update`.

recompute: drop its KV cache, and prefill prompt and response so far under the new weights. keep: continue on the old KV
cache. redraft: as recompute, and the scheduler submits the response so far as a draft for the new weights to verify.
"""


class Fault(Enum):
    """Kinds of failed requests, by the evidence about the sample that they give."""

    UNKNOWN = "unknown"
    """Either the sample or the engine is the cause."""
    REFUSED = "refused"
    """The engine answered and refused the request: its content, the key or the path."""
    UNAVAILABLE = "unavailable"
    """The request did not reach the model: no connection, an overloaded server, a gateway without a server."""
    LOST = "lost"
    """The replica that held the sample died."""
    INPUT = "input"
    """A part of the prompt outside of its token ids, an image, cannot be read any more: no engine can continue."""


class Chunk(NamedTuple):
    """Tokens sampled by one policy version for one sample.

    `finish` is set on the last chunk of a sample that ended. `error` is the reason why a request failed; the sample
    stays unfinished, with every token returned so far. It is no longer in flight and may be submitted again. `fault` is
    the kind of the failure. `routes` are the experts of tokens that the engine has consumed, with router replay; a
    chunk may have routes and no tokens, and its version is then that of the routes.
    """

    sample_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int
    finish: FinishReason | None = None
    error: str | None = None
    fault: Fault = Fault.UNKNOWN
    routes: RouteRows | None = None


make_chunk: Callable[[tuple[Any, ...]], Chunk] = partial(tuple.__new__, Chunk)
"""`Chunk._make` at half its cost, for engines that make millions: it gets every field, as it knows no defaults."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of an engine.

    Args:
        slots: samples that decode together; further samples wait inside the engine.
        context_length: prompt and response tokens of one sample together.
        kv_tokens: tokens whose KV cache fits, over all samples; None if unknown.
    """

    slots: int
    context_length: int
    kv_tokens: int | None = None

    @classmethod
    def together(cls, each: Sequence[Capacity]) -> Capacity:
        """Return the capacity of several engines as one."""
        kv_tokens = [capacity.kv_tokens for capacity in each if capacity.kv_tokens is not None]
        return cls(
            slots=sum(capacity.slots for capacity in each),
            # A sample may be placed on any of the engines, so it has to fit the smallest context.
            context_length=min(capacity.context_length for capacity in each),
            kv_tokens=sum(kv_tokens) if len(kv_tokens) == len(each) else None,
        )


class EngineError(Exception):
    """An engine failed as a whole. Its samples keep every token returned before."""


class ChunkError(EngineError):
    """An engine returned a chunk that breaks a rule. Nothing of the chunk was kept."""

    def __init__(self, chunk: Chunk, rule: str) -> None:
        tokens, version = len(chunk.token_ids), chunk.version
        finish = "" if chunk.finish is None else f", finish {chunk.finish}"
        super().__init__(
            f"sample {chunk.sample_id}: the engine returned a chunk of {tokens} tokens (policy version {version}"
            f"{finish}) that breaks a rule: {rule}"
        )
        self.chunk = chunk


class Engine(Protocol):
    @property
    def capacity(self) -> Capacity: ...

    @property
    def running(self) -> int:
        """Samples that are decoding now, at most `capacity.slots`; other samples in flight wait inside the engine."""
        ...

    def submit(self, sample: Sample) -> None:
        """Start or resume a sample: the engine continues prompt and response so far up to the sample's budget.

        Samples are served in the order of submission. An interrupted sample may be resumed on its KV cache, as far as
        the engine still has the keys and values of its tokens: behind a stop string a sample continues with other
        tokens than those that the engine drew.

        Raises:
            ValueError: the sample does not fit this engine (context length, vocabulary, sampling settings); the
                message names the sample and the limit.
        """
        ...

    async def poll(self) -> list[Chunk]:
        """Wait until tokens were sampled and return all of them; return nothing at once if no sample is in flight.

        Raises:
            EngineError: the engine as a whole has failed.
        """
        ...

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Stop the named samples, all if none are named, and return the tokens sampled for them and not returned yet.

        Samples that are not in flight may be named: tokens that are queued for them are returned too.
        """
        ...

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Switch to policy `version`. Called only while nothing is in flight.

        `weights` has a form that the engine documents: None for an engine that shares the trainer's parameters, a
        directory of safetensors for a server.
        """
        ...

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Drop the KV caches and undelivered tokens of interrupted samples, of all of them if none are named. A sample
        that is submitted under one of these ids later starts from its own tokens."""
        ...

    async def close(self) -> None: ...
