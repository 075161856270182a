"""What the core asks of whatever generates.

An engine is a multiplexed stream: samples go in with `submit`, everything sampled for any of them comes out of `poll`
as a batch of chunks. The scheduler owns each token as it arrives, so an abort, a dead server or a cut connection loses
nothing that was sampled.

Invariants every engine keeps:
- every sampled token is handed out exactly once, by `poll` or by `interrupt`, in order within its sample;
- after `interrupt` returns, nothing runs for the samples it named, and the others go on as if nothing had happened;
- a cancelled `poll` loses nothing: what it would have returned comes from the next one;
- a `poll` that waits while samples are interrupted goes on waiting for the others, and returns once there are none;
- an engine only reads a sample, and only inside `submit`: the scheduler appends the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from april.rollout.sampling import FinishReason
from april.rollout.trajectory import Sample

KVPolicy = Literal["recompute", "keep"]
"""What happens to the KV cache of an unfinished sample when the weights change. `recompute`: it is dropped, and prompt
and response so far are prefilled again under the new weights. `keep`: the sample goes on with the old KV cache."""


class Fault(Enum):
    """Kinds of failed requests, by what the failure tells about the sample."""

    UNKNOWN = "unknown"
    """Either the sample or the engine is the cause."""
    REFUSED = "refused"
    """The engine answered and refused the request: its content, the key or the path."""
    UNAVAILABLE = "unavailable"
    """The request did not reach the model: no connection, an overloaded server, a gateway without a server."""
    LOST = "lost"
    """The replica that held the sample died."""


class Chunk(NamedTuple):
    """Tokens that one policy version sampled for one sample.

    `finish` is set on the last chunk of a sample that ended. `error` says why a request failed; the sample stays
    unfinished, with every token already handed out. It is no longer in flight and may be submitted again. `fault` names
    the kind of the failure.
    """

    sample_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int
    finish: FinishReason | None = None
    error: str | None = None
    fault: Fault = Fault.UNKNOWN


make_chunk: Callable[[tuple[Any, ...]], Chunk] = partial(tuple.__new__, Chunk)
"""`Chunk._make` at half its cost, for engines that make millions."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold.

    Args:
        slots: samples that decode together; more may be submitted, they wait inside the engine.
        context_length: prompt and response tokens of one sample together.
        kv_tokens: tokens whose KV cache fits, over all samples; None if not known.
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
            context_length=min(capacity.context_length for capacity in each),
            kv_tokens=sum(kv_tokens) if len(kv_tokens) == len(each) else None,
        )


class EngineError(Exception):
    """An engine that cannot go on. The samples it held keep every token handed out before."""


class ChunkError(EngineError):
    """An engine handed out a chunk that breaks a rule. Nothing of the chunk was kept."""

    def __init__(self, chunk: Chunk, rule: str) -> None:
        tokens, version = len(chunk.token_ids), chunk.version
        finish = "" if chunk.finish is None else f", finish {chunk.finish}"
        super().__init__(
            f"sample {chunk.sample_id}: the engine handed out a chunk of {tokens} tokens (policy version {version}"
            f"{finish}) that breaks a rule: {rule}"
        )
        self.chunk = chunk


class Engine(Protocol):
    @property
    def capacity(self) -> Capacity: ...

    @property
    def running(self) -> int:
        """Samples that are decoding now, at most `capacity.slots`; the others in flight wait inside the engine."""
        ...

    def submit(self, sample: Sample) -> None:
        """Start or resume a sample: the engine continues prompt and response so far up to the sample's budget.

        Samples are served in the order of submission. A sample that was interrupted may be resumed on its KV cache,
        if the engine still holds it.

        Raises:
            ValueError: the sample does not fit this engine (context length, vocabulary, sampling settings); the
                message names the sample and the limit.
        """
        ...

    async def poll(self) -> list[Chunk]:
        """Wait until something was sampled and return all of it; at once with nothing if no sample is in flight.

        Raises:
            EngineError: the engine as a whole has failed.
        """
        ...

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        """Stop the named samples, all if none are named, and return what was sampled for them but not handed out yet.

        Names of samples that are not in flight are allowed: what is queued for them is returned too.
        """
        ...

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Go over to policy `version`. Called only while nothing is in flight.

        `weights` says where they are, in a form the engine documents: nothing for an engine that shares the trainer's
        parameters, a directory of safetensors for a server.
        """
        ...

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """Give up what is held (KV caches, tokens not handed out) for interrupted samples, for all of them if none are
        named. What is submitted under their ids from then on starts from its own tokens."""
        ...

    async def close(self) -> None: ...
