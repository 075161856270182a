"""An engine whose every token follows from (seed, index), with a ledger of every token that it has returned.

It serves samples in order, a few random tokens at a time, fails requests at random with `failure_rate`, and returns
undelivered tokens on an interrupt, as real servers do. With `ends_apart`, a chunk without tokens ends a response.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

from april import Capacity, Chunk, EngineError, FinishReason, Sample


def response(seed: int, longest: int, heavy: bool = True) -> list[int]:
    """The whole response that a sample of this seed has, however it is interrupted."""
    rng = random.Random(seed)
    length = min(longest, max(1, int(rng.paretovariate(0.8) * 2) if heavy else rng.randint(1, longest)))
    return [rng.randrange(1000) for _ in range(length)]


def logprob(token: int, version: int) -> float:
    return -(token % 7) - version / 8


class ScriptedEngine:
    def __init__(self, slots: int = 8, seed: int = 0, failure_rate: float = 0.0, broken: bool = False) -> None:
        self.capacity = Capacity(slots, 1 << 20)
        self.version = 0
        self.ledger: dict[str, list[int]] = {}
        self.submissions: list[str] = []
        self.dead = False
        self.broken = broken
        self.ends_apart = False
        self.rng = random.Random(seed)
        self.failure_rate = failure_rate
        self.flight: dict[str, tuple[list[int], int, int]] = {}

    @property
    def running(self) -> int:
        return min(len(self.flight), self.capacity.slots)

    def submit(self, sample: Sample) -> None:
        assert sample.id not in self.flight, "submitted twice"
        assert sample.finish is None, "submitted after it had finished"
        assert self.ledger.get(sample.id, []) == sample.response_ids, "the scheduler lost or invented a token"
        self.submissions.append(sample.id)
        whole = response(sample.seed, sample.sampling.max_tokens)
        self.flight[sample.id] = (whole, sample.length, sample.sampling.max_tokens)

    def serve(self, id: str, count: int) -> Chunk:
        whole, position, budget = self.flight[id]
        tokens = whole[position : position + count]
        self.ledger.setdefault(id, []).extend(tokens)
        position += len(tokens)
        self.flight[id] = (whole, position, budget)
        finish = None
        if position == len(whole) and not (self.ends_apart and tokens):
            finish = FinishReason.LENGTH if position == budget else FinishReason.STOP
            del self.flight[id]
        return Chunk(id, tokens, [logprob(t, self.version) for t in tokens], self.version, finish)

    async def poll(self) -> list[Chunk]:
        await asyncio.sleep(0)
        if self.dead:
            raise EngineError("the scripted engine was killed")
        chunks = []
        for id in list(self.flight)[: self.capacity.slots]:
            if self.broken or self.rng.random() < self.failure_rate:
                del self.flight[id]
                chunks.append(Chunk(id, (), (), self.version, error="scripted failure"))
            else:
                chunks.append(self.serve(id, self.rng.randint(1, 3)))
        return chunks

    async def interrupt(self, sample_ids: Iterable[str] | None = None) -> list[Chunk]:
        if self.dead:
            raise EngineError("the scripted engine was killed")
        named = set(self.flight if sample_ids is None else sample_ids)
        late = [id for id in list(self.flight)[: self.capacity.slots] if id in named and self.rng.random() < 0.3]
        chunks = [self.serve(id, 1) for id in late]
        for id in named:
            self.flight.pop(id, None)
        return chunks

    async def update_weights(self, version: int, weights: Any = None) -> None:
        assert not self.flight, "weights changed while samples were in flight"
        self.version = version

    def forget(self, sample_ids: Iterable[str] | None = None) -> None:
        """The names of an evaluation come again, from their beginning; tokens of control requests count nowhere."""
        for id in [id for id in sample_ids or () if id.startswith(("evaluation", "control"))]:
            self.ledger.pop(id, None)

    async def close(self) -> None: ...
